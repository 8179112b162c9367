"""Loopback between real processes: writes, death at any moment, restarts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import msgspec
import pytest

from pdhandoff.engines.base import TransferState
from pdhandoff.engines.loopback import wire
from pdhandoff.errors import ErrorCode, MoverError
from support.child import ROOT
from support.mover_child import Child
from support.movers import PAGE, MakeSide, soon

pytestmark = pytest.mark.slow


def test_a_stopped_process_is_not_quiet_and_a_killed_one_is(loopback: MakeSide) -> None:
    side = loopback()
    with Child("loopback") as child:
        peer = side.mover.connect(child.identity)
        child.stop()
        assert not side.mover.quiesce(peer, 0.0)
        child.kill()
        assert side.mover.quiesce(peer, soon())


def test_a_closed_mover_is_quiet_though_its_process_lives(loopback: MakeSide) -> None:
    side = loopback()
    with Child("loopback") as child:
        peer = side.mover.connect(child.identity)
        child.ask("close")
        assert side.mover.quiesce(peer, soon())


def test_after_quiesce_a_writer_killed_in_mid_write_changes_nothing_more(loopback: MakeSide) -> None:
    side = loopback(4096)
    with Child("loopback", 4096) as child:
        child.connect(side, side.extent(0, 4096))
        peer = side.mover.connect(child.identity)
        assert child.ask("storm", destination=side.address, nbytes=4096 * PAGE)["storm"] == "on"
        child.signal(signal.SIGKILL)
        assert side.mover.quiesce(peer, soon())
        first = side.bytes()
        assert any(first)
        assert side.bytes() == first


def test_a_fence_ends_a_storm_of_writes(loopback: MakeSide) -> None:
    side = loopback(2048)
    with Child("loopback", 2048) as child:
        child.connect(side, side.extent(0, 2048))
        peer = side.mover.connect(child.identity)
        assert child.ask("storm", destination=side.address, nbytes=2048 * PAGE)["storm"] == "on"
        side.mover.fence(peer, [side.extent(0, 2048)], soon())
        assert not any(side.bytes())
        answer = child.ask("read", start=0, nbytes=1)  # the storm's own answer comes first
        assert answer["state"] == "failed"
        assert "fenced" in answer["reason"]
        assert not any(side.bytes())


def test_a_write_that_was_running_when_the_fence_came_lands_nowhere(loopback: MakeSide) -> None:
    side = loopback()
    with Child("loopback") as child:
        child.connect(side, side.extent(1, 4))
        peer = side.mover.connect(child.identity)
        child.ask("late", destination=side.address + PAGE, nbytes=4 * PAGE, value=1)
        assert side.bytes(PAGE, 4 * PAGE) == b"\1" * 4 * PAGE
        side.mover.fence(peer, [side.extent(2, 2)], soon())
        child.ask("late", destination=side.address + PAGE, nbytes=4 * PAGE, value=2)
        assert side.bytes(PAGE, 4 * PAGE) == b"\2" * PAGE + bytes(2 * PAGE) + b"\2" * PAGE


def test_memory_that_a_child_fenced_refuses_our_old_grant(loopback: MakeSide) -> None:
    side = loopback()
    side.fill(4)
    with Child("loopback") as child:
        peer = side.mover.connect(child.describe((0, 8)))
        child.ask("fence", extents=[[3, 2]])
        status = side.write(peer, (side.address, child.address, 8 * PAGE))
        assert status.state is TransferState.FAILED
        assert not any(child.read(3 * PAGE, 2 * PAGE))


def test_a_reused_process_number_is_noticed(loopback: MakeSide) -> None:
    side = loopback()
    with Child("loopback") as child:
        description = wire.decode(child.describe((0, 1)))
    # the same numbers as before, but another process has them now: this one
    for pid in (os.getpid(), os.getppid()):
        reused = msgspec.structs.replace(description, pid=pid)
        with pytest.raises(MoverError) as caught:
            side.mover.connect(wire.encode(reused))
        assert caught.value.code is ErrorCode.STALE_INCARNATION


def test_importing_the_mover_loads_no_tensor_library() -> None:
    program = "import sys, pdhandoff.engines.loopback; sys.exit(bool({'torch', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", program], check=False, cwd=ROOT).returncode == 0
