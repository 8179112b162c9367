"""The Mooncake mover between two real processes: late writers, fences, deaths and restarts."""

from __future__ import annotations

import ctypes
import signal
import threading
import time
from collections.abc import Callable

import pytest

from pdhandoff.engines.base import Mover, Transfer, TransferState, TransferStatus, Writes
from pdhandoff.errors import ErrorCode, MoverError
from support.mooncake_fixtures import MakeSide, library, make
from support.mover_child import Child
from support.movers import PAGE, Side, settle, soon

__all__ = ["library", "make"]

pytestmark = pytest.mark.slow

BIG = (128 << 20) // PAGE
"pages of a write that is stopped half-way"


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = soon()
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(what)
        threading.Event().wait(0.0005)


def settle_quietly(mover: Mover, transfer: Transfer) -> TransferStatus:
    """Wait until it is final, and then until it is quiet."""
    settle(mover, transfer)
    wait_for(lambda: mover.poll(transfer).quiet, "the transfer has not become quiet")
    return mover.poll(transfer)


def landed(side: Side, value: int) -> int:
    """How many bytes of our memory have this value."""
    return side.bytes().count(value)


def begin_and_stop_half_way(side: Side, child: Child, value: int) -> int:
    """Let the child write over all of our memory, and stop it in the middle. How many bytes have landed by then."""
    size = side.memory.length
    child.ask("begin", destination=side.address, nbytes=size, value=value)
    first = ctypes.c_ubyte.from_address(side.address)
    wait_for(lambda: first.value == value, "the write has not begun")
    child.signal(signal.SIGSTOP)
    counts = [-1, landed(side, value)]
    while counts[-1] != counts[-2]:  # what the sockets held goes on landing for a moment
        counts.append(landed(side, value))
    assert 0 < counts[-1] < size, "the write was not stopped half-way: make it larger"
    return counts[-1]


@pytest.fixture
def half_way(make: MakeSide) -> tuple[Side, Child]:
    """Our memory, and a child that may write into all of it, warmed up."""
    side = make(BIG)
    child = Child("mooncake", BIG)
    child.connect(side, side.extent(0, BIG))
    child.ask("write", destination=side.address, nbytes=1, value=1)
    return side, child


def test_after_a_fence_not_a_byte_of_a_late_writer_lands(half_way: tuple[Side, Child]) -> None:
    side, child = half_way
    with child:
        peer = side.mover.connect(child.identity)
        begin_and_stop_half_way(side, child, 0x11)
        side.mover.fence(peer, [side.extent(0, BIG)], soon())
        side.fill(0xEE)
        child.signal(signal.SIGCONT)
        answer = child.ask("finish")
        assert answer["state"] == "failed"
        again = child.ask("write", destination=side.address, nbytes=PAGE, value=0x11)
        assert again["state"] == "failed"
        assert landed(side, 0xEE) == side.memory.length


def test_a_running_writer_is_fenced_without_being_stopped(half_way: tuple[Side, Child]) -> None:
    side, child = half_way
    with child:
        peer = side.mover.connect(child.identity)
        child.ask("begin", destination=side.address, nbytes=side.memory.length, value=0x11)
        first = ctypes.c_ubyte.from_address(side.address)
        wait_for(lambda: first.value == 0x11, "the write has not begun")
        side.mover.fence(peer, [side.extent(0, BIG)], soon())
        side.fill(0xEE)
        answer = child.ask("finish")
        assert landed(side, 0xEE) == side.memory.length
        assert answer["state"] == "failed"


def test_why_deregistering_is_no_fence(half_way: tuple[Side, Child]) -> None:
    side, child = half_way
    with child:
        before = begin_and_stop_half_way(side, child, 0x11)
        side.mover.deregister(side.region)
        child.signal(signal.SIGCONT)
        assert child.ask("finish")["state"] == "done"
        assert landed(side, 0x11) == side.memory.length > before


def test_a_writer_that_was_fenced_works_again_with_a_new_grant(make: MakeSide) -> None:
    side = make()
    with Child("mooncake") as child:
        child.connect(side, side.extent(0, 4))
        assert child.ask("write", destination=side.address, nbytes=PAGE, value=1)["state"] == "done"
        side.mover.fence(side.mover.connect(child.identity), [side.extent(0)], soon())
        assert child.ask("write", destination=side.address, nbytes=PAGE, value=2)["state"] == "failed"
        child.connect(side, side.extent(0, 4))
        assert child.ask("write", destination=side.address, nbytes=PAGE, value=3)["state"] == "done"
        assert side.bytes(0, PAGE) == b"\3" * PAGE


def test_a_fence_of_a_dead_writer_spares_its_successor(make: MakeSide) -> None:
    side = make()
    with Child("mooncake") as first:
        peer = side.mover.connect(first.identity)
        first.connect(side, side.extent(0))
        assert first.ask("write", destination=side.address, nbytes=8, value=1)["state"] == "done"
    with Child("mooncake") as second:
        side.mover.connect(second.identity)
        second.connect(side, side.extent(1))
        side.mover.fence(peer, [side.extent(0)], soon())
        assert second.ask("write", destination=side.address + PAGE, nbytes=8, value=2)["state"] == "done"


def test_a_fence_at_the_peer_makes_what_failed_quiet(make: MakeSide) -> None:
    side = make()
    with Child("mooncake") as child:
        peer = side.mover.connect(child.describe((0, 8)))
        assert side.write(peer, (side.address, child.address, PAGE)).state is TransferState.DONE
        child.ask("deregister")
        transfer = side.mover.submit(peer, Writes.of((side.address, child.address, PAGE)))
        refused = settle(side.mover, transfer)
        assert refused.state is TransferState.FAILED
        assert not refused.quiet
        child.ask("close")
        assert settle_quietly(side.mover, transfer).state is TransferState.FAILED


def test_a_peer_killed_before_the_first_write_is_reported(make: MakeSide) -> None:
    side = make()
    with Child("mooncake") as child:
        peer = side.mover.connect(child.describe((0, 8)))
        child.kill()
        status = side.write(peer, (side.address, child.address, PAGE))
        assert status.state is TransferState.FAILED
        assert status.quiet


def test_a_peer_killed_between_writes_is_reported(make: MakeSide) -> None:
    side = make()
    with Child("mooncake") as child:
        peer = side.mover.connect(child.describe((0, 8)))
        assert side.write(peer, (side.address, child.address, PAGE)).state is TransferState.DONE
        child.kill()
        transfer = side.mover.submit(peer, Writes.of((side.address, child.address, PAGE)))
        assert settle_quietly(side.mover, transfer).state is TransferState.FAILED


def test_a_peer_killed_in_the_middle_of_writes_fails_all_of_them(make: MakeSide) -> None:
    side = make(4096)
    with Child("mooncake", 4096) as child:
        peer = side.mover.connect(child.describe((0, 4096)))
        assert side.write(peer, (side.address, child.address, 1)).state is TransferState.DONE
        batch = Writes.of((side.address, child.address, 4096 * PAGE))
        transfers = [side.mover.submit(peer, batch) for _ in range(32)]
        settle(side.mover, transfers[0])
        child.kill()
        assert settle_quietly(side.mover, transfers[-1]).state is TransferState.FAILED
        for transfer in transfers:
            settle_quietly(side.mover, transfer)


def test_a_writer_killed_in_the_middle_leaves_memory_that_a_fence_makes_safe(
    half_way: tuple[Side, Child],
) -> None:
    side, child = half_way
    with child:
        peer = side.mover.connect(child.identity)
        begin_and_stop_half_way(side, child, 0x11)
        child.kill()
        assert not side.mover.quiesce(peer, soon())
        side.mover.fence(peer, [side.extent(0, BIG)], soon())
        side.fill(0xEE)
        with Child("mooncake") as other:
            other.connect(side, side.extent(0))
            assert other.ask("write", destination=side.address, nbytes=8, value=1)["state"] == "done"
        assert landed(side, 0xEE) == side.memory.length - 8


def test_a_stopped_peer_fails_in_time_and_is_not_called_quiet(make: MakeSide) -> None:
    side = make(BIG)
    with Child("mooncake", BIG) as child:
        peer = side.mover.connect(child.describe((0, BIG)))
        assert side.write(peer, (side.address, child.address, 1)).state is TransferState.DONE
        child.signal(signal.SIGSTOP)
        transfer = side.mover.submit(peer, Writes.of((side.address, child.address, BIG * PAGE)))
        status = settle(side.mover, transfer)
        assert status.state is TransferState.FAILED
        assert not status.quiet
        child.kill()
        assert settle_quietly(side.mover, transfer).state is TransferState.FAILED


def test_a_stopped_peer_delays_neither_others_nor_close(make: MakeSide) -> None:
    side = make(BIG)
    with Child("mooncake", BIG) as stopped, Child("mooncake") as other:
        peer = side.mover.connect(stopped.describe((0, BIG)))
        assert side.write(peer, (side.address, stopped.address, 1)).state is TransferState.DONE
        stopped.signal(signal.SIGSTOP)
        held = side.mover.submit(peer, Writes.of((side.address, stopped.address, BIG * PAGE)))
        free = side.mover.connect(other.describe((0, 8)))
        for _ in range(5):
            assert side.write(free, (side.address, other.address, PAGE)).state is TransferState.DONE
        assert side.mover.poll(held).state is TransferState.PENDING
        side.mover.close()
        status = side.mover.poll(held)
        assert status.state is TransferState.FAILED
        assert not status.quiet


def test_writers_in_several_processes_do_not_disturb_each_other(make: MakeSide) -> None:
    share = 2048
    side = make(3 * share)
    children = [Child("mooncake", share) for _ in range(3)]
    try:
        for index, child in enumerate(children):
            extent = side.extent(index * share, share)
            child.connect(side, extent)
        for index, child in enumerate(children):
            destination = side.address + index * share * PAGE
            child.tell("write", destination=destination, nbytes=share * PAGE, value=index + 1)
        assert [child.answer()["state"] for child in children] == ["done"] * 3
    finally:
        for child in children:
            child.__exit__(None, None, None)
    assert side.bytes() == b"".join(bytes((value,)) * share * PAGE for value in (1, 2, 3))


def test_a_host_that_is_not_allowed_is_never_connected_to(make: MakeSide) -> None:
    side = make()
    with Child("mooncake") as child:
        description = child.describe((0, 1)).replace(b"127.0.0.1:", b"127.0.0.9:")
    with pytest.raises(MoverError) as caught:
        side.mover.connect(description)
    assert caught.value.code is ErrorCode.NOT_ALLOWED
