"""NIXL between real processes: writes, late writers, fences, death at any moment, restarts."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path

import pytest

from pdhandoff.engines.base import TransferState, Writes
from pdhandoff.engines.nixl.mover import NixlMover
from pdhandoff.engines.nixl.wire import decode
from pdhandoff.errors import ErrorCode, MoverError
from support.mover_child import Child
from support.movers import PAGE, Side, settle, soon
from support.nixl_fixtures import MakeSide, library, make

__all__ = ["library", "make"]

pytestmark = pytest.mark.slow

BIG = 16384
"pages that take long enough to be stopped in the middle: 64 MiB"


def _begin(child: Child, side: Side) -> None:
    """Let the child begin to write BIG pages of 7, and wait until the first of them have landed."""
    child.tell("write", destination=side.address, nbytes=BIG * PAGE, value=7)
    deadline = soon()
    while side.bytes(0, 1) != b"\7":
        assert time.monotonic() < deadline
        threading.Event().wait(0.0002)


def _stop_in_the_middle(child: Child, side: Side) -> None:
    """Halt the child when some of a write has landed and some has not."""
    for _ in range(20):
        side.fill(0)
        _begin(child, side)
        child.stop()
        if side.bytes(BIG * PAGE - 1) == b"\0":
            return
        child.signal(signal.SIGCONT)  # it was quicker
        child.answer()
    pytest.fail("no write could be stopped in the middle")


def test_a_grant_discloses_its_own_extents_only(make: MakeSide) -> None:
    side = make(64)
    extents = [side.extent(3, 2), side.extent(40)]
    for own, other in (extents, reversed(extents)):
        description = side.mover.describe([own])
        assert [(part.address, part.length) for part in decode(description).parts] == [own]
        assert own.address.to_bytes(8, "little") in description
        for secret in (side.address, other.address):
            assert secret.to_bytes(8, "little") not in description


def test_a_late_writer_lands_nothing_after_a_fence(make: MakeSide) -> None:
    side = make(BIG)
    with Child("nixl", BIG) as child:
        child.connect(side, side.extent(0, BIG))
        peer = side.mover.connect(child.identity)
        _stop_in_the_middle(child, side)
        side.mover.fence(peer, [side.extent(0, BIG)], soon())
        side.fill(9)
        child.signal(signal.SIGCONT)
        answer = child.answer()
        assert answer["state"] == "failed"
        assert "ask it for a new grant" in answer["reason"]
        child.tell("write", destination=side.address, nbytes=BIG * PAGE, value=5)  # and it tries again
        assert child.answer()["state"] == "failed"
        assert side.bytes() == b"\x09" * BIG * PAGE


def test_without_a_fence_a_late_writer_lands_after_its_memory_was_deregistered(make: MakeSide) -> None:
    """Why `deregister` is no fence, and proof that the test above can fail."""
    side = make(BIG)
    with Child("nixl", BIG) as child:
        child.connect(side, side.extent(0, BIG))
        _stop_in_the_middle(child, side)
        side.mover.deregister(side.region)
        side.fill(9)
        child.signal(signal.SIGCONT)
        child.answer()
        assert b"\7" in side.bytes()


def test_a_fence_ends_the_grants_of_others_and_a_new_grant_mends_them(make: MakeSide) -> None:
    side = make()
    with Child("nixl") as fenced, Child("nixl") as other:
        fenced.connect(side, side.extent(0))
        other.connect(side, side.extent(4))
        assert other.ask("write", destination=side.address + 4 * PAGE, nbytes=9, value=1)["state"] == "done"
        side.mover.fence(side.mover.connect(fenced.identity), [side.extent(0)], soon())
        answer = other.ask("write", destination=side.address + 4 * PAGE, nbytes=9, value=2)
        assert answer["state"] == "failed"
        assert side.bytes(4 * PAGE, 9) == b"\1" * 9
        other.connect(side, side.extent(4))
        assert other.ask("write", destination=side.address + 4 * PAGE, nbytes=9, value=3)["state"] == "done"
        assert side.bytes(4 * PAGE, 9) == b"\3" * 9


def test_our_own_writes_go_on_while_we_fence(make: MakeSide) -> None:
    side = make(BIG)
    side.fill(6)
    with Child("nixl", BIG) as child:
        peer = side.mover.connect(child.describe((0, BIG)))
        side.mover.describe([side.extent(0)])
        transfer = side.mover.submit(peer, Writes.of((side.address, child.address, BIG * PAGE)))
        side.mover.fence(peer, [side.extent(0)], soon())
        assert settle(side.mover, transfer).state is TransferState.DONE
        assert child.ask("read", start=BIG * PAGE - 2, nbytes=2)["bytes"] == "0606"


def test_a_failed_write_is_quiet_once_the_new_life_of_its_peer_is_known(make: MakeSide) -> None:
    side = make()
    with Child("nixl") as child:
        peer = side.mover.connect(child.describe((0, 8)))
        child.ask("fence", extents=[[0, 8]])
        transfer = side.mover.submit(peer, Writes.of((side.address, child.address, PAGE)))
        status = settle(side.mover, transfer)
        assert (status.state, status.quiet) == (TransferState.FAILED, False)
        side.mover.connect(child.describe((0, 8)))
        assert side.mover.poll(transfer).quiet


def test_direct_writes_cannot_be_fenced_while_the_writer_lives(make: MakeSide) -> None:
    side = make(transports="all")
    with Child("nixl", transports="all") as child:
        child.connect(side, side.extent(0))
        peer = side.mover.connect(child.identity)
        with pytest.raises(MoverError, match=r"transports='\^cma,knem,xpmem'") as caught:
            side.mover.fence(peer, [side.extent(0)], time.monotonic())
        assert caught.value.code is ErrorCode.TRANSFER_TIMEOUT
        assert child.ask("write", destination=side.address, nbytes=9, value=3)["state"] == "done"
        child.kill()
        side.mover.fence(peer, [side.extent(0)], soon())


def test_a_writer_that_is_killed_in_mid_write_can_be_fenced(make: MakeSide) -> None:
    side = make(BIG)
    with Child("nixl", BIG) as child, Child("nixl") as other:
        child.connect(side, side.extent(0, BIG))
        peer = side.mover.connect(child.identity)
        _begin(child, side)
        child.kill()
        assert not side.mover.quiesce(peer, soon())
        side.mover.fence(peer, [side.extent(0, BIG)], soon())
        side.fill(9)
        other.connect(side, side.extent(0))
        assert other.ask("write", destination=side.address, nbytes=PAGE, value=2)["state"] == "done"
        assert side.bytes() == b"\2" * PAGE + b"\x09" * (BIG - 1) * PAGE


def test_a_writer_that_is_stopped_keeps_nobody_else_waiting(make: MakeSide) -> None:
    side = make(BIG)
    side.fill(4)
    with Child("nixl", BIG) as stopped, Child("nixl") as other:
        slow = side.mover.connect(stopped.describe((0, BIG)))
        quick = side.mover.connect(other.describe((0, 8)))
        stopped.stop()
        hung = side.mover.submit(slow, Writes.of((side.address, stopped.address, BIG * PAGE)))
        for _ in range(20):
            assert side.write(quick, (side.address, other.address, PAGE)).state is TransferState.DONE
        assert side.mover.poll(hung).state is TransferState.PENDING
        stopped.signal(signal.SIGCONT)
        assert settle(side.mover, hung).state is TransferState.DONE


def test_a_process_with_a_mover_ends_cleanly(make: MakeSide) -> None:
    side = make()
    with Child("nixl") as child:
        child.connect(side, side.extent(0))
        assert child.ask("write", destination=side.address, nbytes=9, value=3)["state"] == "done"
        assert child.leave() == 0


def test_the_transport_that_ucx_chose_is_reported(make: MakeSide) -> None:
    side = make()
    assert isinstance(side.mover, NixlMover)
    with Child("nixl") as child:
        peer = side.mover.connect(child.describe((0, 1)))
        assert side.mover.transports(peer) == ("tcp/lo",)
        assert side.mover.transports(side.mover.connect(child.identity)) == ()


def test_many_lives_leave_no_thread_behind(make: MakeSide) -> None:
    side = make()
    with Child("nixl") as child:
        peer = side.mover.connect(child.identity)
        counts = []
        for value in range(1, 8):
            child.connect(side, side.extent(0))
            assert child.ask("write", destination=side.address, nbytes=9, value=value)["state"] == "done"
            side.mover.fence(peer, [side.extent(0)], soon())
            counts.append([len(list(Path(f"/proc/{pid}/task").iterdir())) for pid in ("self", child.pid)])
        assert counts[-1] == counts[1]
