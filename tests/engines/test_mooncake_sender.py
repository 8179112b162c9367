"""How a Mooncake mover joins writes and awaits them, on an engine that does as the test says. Needs no Mooncake."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdhandoff.engines.base import Memory, TransferState, Writes
from pdhandoff.engines.mooncake.engine import Engine, Outcome
from pdhandoff.engines.mooncake.sender import MAX_QUEUED, Sender
from pdhandoff.engines.mooncake.transfer import MooncakeTransfer, merged
from pdhandoff.errors import ErrorCode, MoverError
from support.movers import soon

_STEP = st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3))


@given(st.lists(_STEP, max_size=20))
def test_joined_writes_move_the_same_bytes_in_the_same_order(steps: list[tuple[int, int, int]]) -> None:
    triples, source, destination = [], 100, 500
    for skip_source, skip_destination, length in steps:
        source, destination = source + skip_source, destination + skip_destination
        triples.append((source, destination, length))
        source, destination = source + length, destination + length

    def moves(parts: Iterable[tuple[int, int, int]]) -> list[tuple[int, int]]:
        return [(start + i, into + i) for start, into, length in parts for i in range(length)]

    pieces = list(merged(Writes.of(*triples)))
    assert moves(pieces) == moves(triples)
    assert all(piece.length for piece in pieces)
    for one, two in pairwise(pieces):
        assert (one.source + one.length, one.destination + one.length) != (two.source, two.destination)


class FakeEngine:
    """An engine whose writes end when the test says so."""

    def __init__(self) -> None:
        self.written: list[tuple[int, int, int]] = []
        self.outcomes: dict[int, Outcome] = {}
        self.refuse = False
        self.closed = threading.Event()
        self.asked = threading.Semaphore(0)

    def write(self, segment: str, source: int, destination: int, length: int) -> int | None:
        assert segment
        if self.refuse:
            return None
        self.written.append((source, destination, length))
        return len(self.written)

    def check(self, handle: int) -> Outcome:
        self.asked.release()
        return self.outcomes.get(handle, Outcome.PENDING)

    def wait_until_asked(self, times: int = 3) -> None:
        """Until the sender has asked again, and has drawn its conclusions."""
        for _ in range(1000):
            if not self.asked.acquire(blocking=False):
                break
        for _ in range(times):
            assert self.asked.acquire(timeout=30)

    def close(self) -> None:
        self.closed.set()


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def _sender(engine: FakeEngine, clock: Clock, segment: str = "h:1", *, registers_sources: bool = False) -> Sender:
    return Sender(
        segment,
        lambda: cast("Engine", engine),
        registers_sources=registers_sources,
        clock=clock,
        stall_s=5.0,
        idle_s=60.0,
    )


@pytest.fixture
def fake() -> Iterator[tuple[FakeEngine, Sender, Clock]]:
    """A sender on a fake engine; port 1 of this host refuses connections."""
    engine, clock = FakeEngine(), Clock()
    sender = _sender(engine, clock, segment="127.0.0.1:1")
    yield engine, sender, clock
    sender.close()
    assert engine.closed.is_set() or not engine.written


def _transfer(*triples: tuple[int, int, int]) -> MooncakeTransfer:
    return MooncakeTransfer(Writes.of(*(triples or ((1, 2, 3),))), ())


def _wait(condition: Callable[[], object]) -> None:
    deadline = soon()
    while not condition():
        assert soon() - deadline < 30
        threading.Event().wait(0.0005)


def _wait_until_done(transfer: MooncakeTransfer) -> None:
    _wait(lambda: transfer.status.state is TransferState.DONE)


def test_a_transfer_is_done_when_each_of_its_writes_is(fake: tuple[FakeEngine, Sender, Clock]) -> None:
    engine, sender, _ = fake
    transfer = _transfer((1, 10, 1), (3, 20, 1), (5, 30, 1))
    sender.put(transfer)
    _wait(lambda: len(engine.written) == 3)
    engine.outcomes.update({3: Outcome.DONE, 1: Outcome.DONE})
    engine.wait_until_asked()
    assert transfer.status.state is TransferState.PENDING
    engine.outcomes[2] = Outcome.DONE
    _wait(lambda: transfer.status.state is TransferState.DONE)


def test_a_failed_write_fails_its_transfer_at_once_and_no_other(fake: tuple[FakeEngine, Sender, Clock]) -> None:
    engine, sender, _ = fake
    one, two = _transfer((1, 10, 1), (3, 20, 1)), _transfer((5, 30, 1))
    sender.put(one)
    sender.put(two)
    _wait(lambda: len(engine.written) == 3)
    engine.outcomes[1] = Outcome.FAILED
    _wait(lambda: one.status.state is TransferState.FAILED)
    assert not one.status.quiet
    assert two.status.state is TransferState.PENDING
    engine.outcomes.update({2: Outcome.DONE, 3: Outcome.DONE})
    _wait(lambda: one.status.quiet and two.status.state is TransferState.DONE)


def test_a_stall_is_a_failure_and_no_stop(fake: tuple[FakeEngine, Sender, Clock]) -> None:
    engine, sender, clock = fake
    transfer = _transfer()
    sender.put(transfer)
    engine.wait_until_asked()
    clock.now = 16.0
    _wait(lambda: transfer.status.state is TransferState.FAILED)
    engine.wait_until_asked()
    assert not transfer.status.quiet
    engine.outcomes[1] = Outcome.DONE
    _wait(lambda: transfer.status.quiet)
    assert transfer.status.state is TransferState.FAILED


def test_a_write_that_cannot_be_started_fails_and_is_quiet(fake: tuple[FakeEngine, Sender, Clock]) -> None:
    engine, sender, _ = fake
    engine.refuse = True
    transfer = _transfer((1, 10, 1), (3, 20, 1))
    sender.put(transfer)
    _wait(lambda: transfer.status.state is TransferState.FAILED)
    assert transfer.status.quiet
    assert not engine.written


def test_an_engine_that_cannot_be_started_fails_the_transfer_with_its_reason() -> None:
    def start() -> Engine:
        raise MoverError(ErrorCode.MOVER_FAILED, "no port is free")

    sender = Sender("h:1", start, registers_sources=False, clock=Clock(), stall_s=5.0, idle_s=60.0)
    transfer = _transfer()
    sender.put(transfer)
    _wait(lambda: transfer.status.state is TransferState.FAILED)
    assert (transfer.status.reason, transfer.status.quiet) == ("no port is free", True)
    sender.close()


def test_close_fails_what_is_not_final(fake: tuple[FakeEngine, Sender, Clock]) -> None:
    engine, sender, _ = fake
    under_way, waiting = _transfer(), _transfer(*((i * 10, i * 20, 1) for i in range(1, 300)))
    sender.put(under_way)
    sender.put(waiting)
    _wait(lambda: len(engine.written) == 128)
    sender.close()
    assert engine.closed.is_set()
    for transfer in (under_way, waiting):
        assert transfer.status.state is TransferState.FAILED
        assert transfer.status.quiet is sender.gone
    with pytest.raises(MoverError) as caught:
        sender.put(_transfer())
    assert caught.value.code is ErrorCode.MISUSE


def test_a_fault_in_the_thread_hangs_nobody(
    fake: tuple[FakeEngine, Sender, Clock], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, sender, _ = fake

    def fault(_: int) -> Outcome:
        raise RuntimeError("from inside the engine")

    faults: list[threading.ExceptHookArgs] = []
    with monkeypatch.context() as patch:
        patch.setattr(threading, "excepthook", faults.append)
        patch.setattr(engine, "check", fault)
        broken = _transfer()
        sender.put(broken)
        _wait(lambda: broken.status.state is TransferState.FAILED)
        assert "ended by a fault" in broken.status.reason
        _wait(lambda: sender.retired and broken.status.quiet and faults)
    # port 1 refused the probe, so this peer is gone for good
    after = _transfer()
    sender.put(after)
    _wait(lambda: after.status.state is TransferState.FAILED)


def test_too_many_queued_transfers_are_refused(fake: tuple[FakeEngine, Sender, Clock]) -> None:
    _, sender, _ = fake
    with sender._wake:
        sender._queue.extend(_transfer() for _ in range(MAX_QUEUED))
        with pytest.raises(MoverError) as caught:
            sender.put(_transfer())
        sender._queue.clear()
    assert caught.value.code is ErrorCode.BUSY


def test_what_serves_an_idle_peer_ends_and_starts_again() -> None:
    engines: list[FakeEngine] = []

    def start() -> Engine:
        engines.append(FakeEngine())
        engines[-1].outcomes[1] = Outcome.DONE
        return cast("Engine", engines[-1])

    sender = Sender("h:1", start, registers_sources=False, clock=Clock(), stall_s=5.0, idle_s=0.001)
    for count in (1, 2):
        transfer = _transfer()
        sender.put(transfer)
        _wait_until_done(transfer)
        _wait(lambda: sender.retired)
        assert len(engines) == count
        assert engines[-1].closed.is_set()
    sender.close()


def test_sources_are_registered_for_engines_that_need_it() -> None:
    calls: list[tuple[str, int]] = []

    class Registering(FakeEngine):
        def register(self, memory: Memory) -> None:
            calls.append(("register", memory.address))

        def unregister(self, address: int) -> None:
            calls.append(("unregister", address))

    engine = Registering()
    engine.outcomes.update({1: Outcome.DONE, 2: Outcome.DONE})
    sender = _sender(engine, Clock(), registers_sources=True)
    for sources in ((Memory(1, 8), Memory(100, 8)), (Memory(100, 8), Memory(200, 8))):
        transfer = MooncakeTransfer(Writes.of((1, 2, 3)), sources)
        sender.put(transfer)
        _wait_until_done(transfer)
    sender.close()
    assert calls == [("register", 1), ("register", 100), ("unregister", 1), ("register", 200)] or set(calls) == {
        ("register", 1),
        ("register", 100),
        ("unregister", 1),
        ("register", 200),
    }
