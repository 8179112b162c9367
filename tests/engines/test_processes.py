"""Loopback between real processes: writes, death at any moment, restarts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable

import msgspec
import pytest

from pdhandoff.engines.base import TransferState, Writes
from pdhandoff.engines.loopback import wire
from pdhandoff.errors import ErrorCode, MoverError
from support.mover_child import ROOT, Child
from support.movers import PAGE, Side, settle, soon

MakeSide = Callable[..., Side]

pytestmark = pytest.mark.slow


def test_a_child_writes_into_our_memory_and_we_into_its(loopback: MakeSide) -> None:
    side = loopback(512)
    with Child(512) as child:
        child.ask(do="connect", description=side.mover.describe([side.extent(0, 400)]).hex())
        for nbytes, value in ((100, 1), (300 * PAGE + 5, 2)):
            answer = child.ask(do="write", destination=side.address + 9, nbytes=nbytes, value=value)
            assert answer["state"] == "done"
            assert side.bytes(9, nbytes) == bytes((value,)) * nbytes
        side.fill(8)
        peer = side.mover.connect(child.describe((0, 512)))
        assert side.write(peer, (side.address, child.address + 3, 500 * PAGE)).state is TransferState.DONE
        assert child.ask(do="read", start=0, nbytes=16)["bytes"] == (b"\2\2\2" + b"\10" * 13).hex()


def test_a_child_cannot_write_outside_its_grant(loopback: MakeSide) -> None:
    side = loopback()
    with Child() as child:
        child.ask(do="connect", description=side.mover.describe([side.extent(1)]).hex())
        answer = child.ask(do="write", destination=side.address + 2 * PAGE - 1, nbytes=2, value=1)
        assert answer["error"] == ErrorCode.OUT_OF_RANGE
        assert not any(side.bytes())


@pytest.mark.parametrize("pages", [1, 200])
def test_a_write_to_a_killed_process_fails(loopback: MakeSide, pages: int) -> None:
    side = loopback(200)
    with Child(200) as child:
        peer = side.mover.connect(child.describe((0, 200)))
        child.kill()
        status = side.write(peer, (side.address, child.address, pages * PAGE))
        assert status.state is TransferState.FAILED
        assert status.quiet
        assert str(child.pid) in status.reason


def test_a_stopped_process_is_not_quiet_and_a_killed_one_is(loopback: MakeSide) -> None:
    side = loopback()
    with Child() as child:
        peer = side.mover.connect(child.identity)
        child.stop(signal.SIGSTOP)
        assert not side.mover.quiesce(peer, 0.0)
        child.kill()
        assert side.mover.quiesce(peer, soon())


def test_a_closed_mover_is_quiet_though_its_process_lives(loopback: MakeSide) -> None:
    side = loopback()
    with Child() as child:
        peer = side.mover.connect(child.identity)
        child.ask(do="close")
        assert side.mover.quiesce(peer, soon())


def test_after_quiesce_a_writer_killed_in_mid_write_changes_nothing_more(loopback: MakeSide) -> None:
    side = loopback(4096)
    with Child(4096) as child:
        child.ask(do="connect", description=side.mover.describe([side.extent(0, 4096)]).hex())
        peer = side.mover.connect(child.identity)
        assert child.ask(do="storm", destination=side.address, nbytes=4096 * PAGE)["storm"] == "on"
        child.stop(signal.SIGKILL)
        assert side.mover.quiesce(peer, soon())
        first = side.bytes()
        assert any(first)
        assert side.bytes() == first


def test_a_fence_ends_a_storm_of_writes(loopback: MakeSide) -> None:
    side = loopback(2048)
    with Child(2048) as child:
        child.ask(do="connect", description=side.mover.describe([side.extent(0, 2048)]).hex())
        peer = side.mover.connect(child.identity)
        assert child.ask(do="storm", destination=side.address, nbytes=2048 * PAGE)["storm"] == "on"
        side.mover.fence(peer, [side.extent(0, 2048)], soon())
        assert not any(side.bytes())
        answer = child.ask(do="read", start=0, nbytes=1)  # the storm's own answer comes first
        assert answer["state"] == "failed"
        assert "fenced" in answer["reason"]
        assert not any(side.bytes())


def test_a_write_that_was_running_when_the_fence_came_lands_nowhere(loopback: MakeSide) -> None:
    side = loopback()
    with Child() as child:
        child.ask(do="connect", description=side.mover.describe([side.extent(1, 4)]).hex())
        peer = side.mover.connect(child.identity)
        child.ask(do="late", destination=side.address + PAGE, nbytes=4 * PAGE, value=1)
        assert side.bytes(PAGE, 4 * PAGE) == b"\1" * 4 * PAGE
        side.mover.fence(peer, [side.extent(2, 2)], soon())
        child.ask(do="late", destination=side.address + PAGE, nbytes=4 * PAGE, value=2)
        assert side.bytes(PAGE, 4 * PAGE) == b"\2" * PAGE + bytes(2 * PAGE) + b"\2" * PAGE


def test_memory_that_a_child_fenced_refuses_our_old_grant(loopback: MakeSide) -> None:
    side = loopback()
    side.fill(4)
    with Child() as child:
        peer = side.mover.connect(child.describe((0, 8)))
        child.ask(do="fence", extents=[[3, 2]])
        status = side.write(peer, (side.address, child.address, 8 * PAGE))
        assert status.state is TransferState.FAILED
        assert not any(bytes.fromhex(child.ask(do="read", start=3 * PAGE, nbytes=2 * PAGE)["bytes"]))


def test_a_process_that_is_gone_cannot_be_connected_to(loopback: MakeSide) -> None:
    side = loopback()
    with Child() as child:
        description = child.describe((0, 1))
    with pytest.raises(MoverError) as caught:
        side.mover.connect(description)
    assert caught.value.code is ErrorCode.STALE_INCARNATION


def test_T080_a_restarted_peer_is_another_incarnation(loopback: MakeSide) -> None:
    side = loopback()
    side.fill(1)
    with Child() as first:
        old = side.mover.connect(first.describe((0, 4)))
        stale = first.describe((0, 4))
    with Child() as second:
        new = side.mover.connect(second.describe((0, 4)))
        assert new.key != old.key
        assert side.write(old, (side.address, first.address, PAGE)).state is TransferState.FAILED
        with pytest.raises(MoverError):
            side.mover.connect(stale)
        assert not any(bytes.fromhex(second.ask(do="read", start=0, nbytes=PAGE)["bytes"]))
        assert side.write(new, (side.address, second.address, PAGE)).state is TransferState.DONE


def test_a_reused_process_number_is_noticed(loopback: MakeSide) -> None:
    side = loopback()
    with Child() as child:
        description = wire.decode(child.describe((0, 1)))
    # the same numbers as before, but another process has them now: this one
    for pid in (os.getpid(), os.getppid()):
        reused = msgspec.structs.replace(description, pid=pid)
        with pytest.raises(MoverError) as caught:
            side.mover.connect(wire.encode(reused))
        assert caught.value.code is ErrorCode.STALE_INCARNATION


def test_a_process_that_dies_while_a_write_to_it_runs_is_reported(loopback: MakeSide) -> None:
    side = loopback(4096)
    with Child(4096) as child:
        peer = side.mover.connect(child.describe((0, 4096)))
        transfers = [side.mover.submit(peer, Writes.of((side.address, child.address, 4096 * PAGE))) for _ in range(16)]
        child.kill()
        assert settle(side.mover, transfers[-1]).state is TransferState.FAILED
        for transfer in transfers:
            settle(side.mover, transfer)


def test_importing_the_mover_loads_no_tensor_library() -> None:
    program = "import sys, pdhandoff.engines.loopback; sys.exit(bool({'torch', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", program], check=False, cwd=ROOT).returncode == 0
