"""Staging from the engine's own thread: what is in the ring at once, what is held, and who waits for a device."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import pytest

from pdhandoff import ErrorCode, HandoffFailed, HandoffId, LocalError, Outgoing, Staging
from pdhandoff.engines.faults import Fault, Rule
from pdhandoff.native import load
from pdhandoff.native.base import Gathered, GatherPart
from pdhandoff.runtime.chunks import Chunk
from support.engines import DEADLINE_S, Pair, Request, check_rows, until

TOKENS = 60
HALVES = (range(35), range(35, TOKENS))


class _Launched:
    """A gather that a device has not run yet."""

    def __init__(self, device: Device, parts: Sequence[GatherPart], tokens: range, *, digest: bool) -> None:
        self._device = device
        self._job = parts, tokens, digest
        self._result: Gathered | None = None

    def run(self) -> None:
        parts, tokens, digest = self._job
        self._result = self._device.inner.gather(parts, tokens, digest=digest)

    def query(self) -> bool:
        if self._device.broken:
            raise LocalError(ErrorCode.INTERNAL, "an illegal memory access was encountered")
        return self._result is not None

    def wait(self, timeout_s: float = 60.0) -> None:
        raise AssertionError(f"the library never waits for a device, not even {timeout_s} s")

    @property
    def digest(self) -> int:
        assert self._result is not None, "asked before it is known"
        return self._result.digest


class Device:
    """`Native` whose gathers run in the order of their launch, when the test says so."""

    name = "device"

    def __init__(self) -> None:
        self.inner: Any = load("reference")
        self.streams: list[int] = []
        self.launched: list[_Launched] = []
        self.broken = False

    def gather(self, parts: Sequence[GatherPart], tokens: range, *, digest: bool, stream: int = 0) -> Gathered:
        self.streams.append(stream)
        self.launched.append(_Launched(self, parts, tokens, digest=digest))
        return self.launched[-1]

    def run(self) -> None:
        """Everything that was launched happens."""
        while self.launched:
            self.launched.pop(0).run()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def begin(pair: Pair, tag: int, **options: Any) -> tuple[Any, Outgoing, Request]:
    """An offer whose consumer has answered."""
    handoff = HandoffId.mint()
    ticket = pair.consumer.announce(handoff)
    outgoing = pair.offer(handoff, TOKENS, **options)
    until(lambda: outgoing.routes is not None, "the link is open")
    return ticket, outgoing, pair.engine.request(tag, TOKENS)


def finish(pair: Pair, ticket: Any, outgoing: Outgoing, tag: int) -> None:
    outgoing.commit(first_token=tag)
    with ticket.wait(DEADLINE_S) as arrival:
        assert check_rows(arrival, tag) > 0
    outgoing.wait(DEADLINE_S)
    assert outgoing.source_free.wait(DEADLINE_S)
    pair.check_clean()


@pytest.mark.parametrize("digest", [False, True])
def test_in_cpu_memory_pages_are_free_when_stage_returns(digest: bool) -> None:
    with Pair(producer={"digest": digest}) as pair:
        ticket, outgoing, request = begin(pair, 1)
        for tokens in HALVES:
            chunk = outgoing.stage(request.tables, tokens=tokens)
            assert chunk.staged
            assert chunk.source_free.is_set()
        pair.engine.free(request)  # others overwrite them
        finish(pair, ticket, outgoing, 1)


def test_before_the_consumer_has_answered_the_pages_are_held() -> None:
    with Pair() as pair:
        handoff = HandoffId.mint()
        ticket = pair.consumer.announce(handoff)
        request = pair.engine.request(2, TOKENS)
        outgoing = chunk = None

        def offer_and_stage() -> None:
            nonlocal outgoing, chunk
            outgoing = pair.offer(handoff, TOKENS)
            chunk = outgoing.stage(request.tables, tokens=range(TOKENS))

        pair.producer._loop.call(offer_and_stage)  # the loop is busy until the chunk is there
        assert outgoing is not None
        assert isinstance(chunk, Chunk)
        assert not chunk.staged
        assert chunk.source_free.wait(DEADLINE_S), "the loop stages it when it can"
        finish(pair, ticket, outgoing, 2)


@pytest.mark.parametrize("staging", [Staging.STAGED, Staging.AUTO])
def test_without_room_a_chunk_is_held_and_none_overtakes_it(staging: Staging) -> None:
    hold = Rule(fault=Fault.HOLD)
    with Pair(staging_bytes=20480, rules=[hold], producer={"staging": staging}) as pair:
        first, big, request = begin(pair, 1)
        assert big.stage(request.tables, tokens=range(50)).staged
        until(lambda: pair.fault.statistics().held == 1)
        second, other, rows = begin(pair, 2)
        until(lambda: other.granted)

        def stage() -> list[Chunk]:
            return [other.stage(rows.tables, tokens=range(start, start + 20)) for start in (0, 20, 40)]

        chunks = pair.producer._loop.call(stage)  # so that the loop makes no room meanwhile
        assert [chunk.staged for chunk in chunks] == [True, True, False]
        pair.fault.release_hold()
        big.stage(request.tables, tokens=range(50, TOKENS))
        big.commit()
        other.commit()
        for tag, ticket in ((1, first), (2, second)):
            with ticket.wait(DEADLINE_S) as arrival:
                check_rows(arrival, tag)
        pair.check_clean()


def test_directly_nothing_is_staged() -> None:
    with Pair(producer={"staging": Staging.DIRECT}) as pair:
        ticket, outgoing, request = begin(pair, 3)
        assert not outgoing.stage(request.tables, tokens=range(TOKENS)).staged
        finish(pair, ticket, outgoing, 3)


@pytest.mark.parametrize("digest", [False, True])
def test_a_devices_gather_is_launched_on_the_engines_stream_and_polled(digest: bool) -> None:
    device = Device()
    with Pair(producer={"native": device, "digest": digest}) as pair:
        ticket, outgoing, request = begin(pair, 4)
        chunks = [outgoing.stage(request.tables, tokens=tokens, stream=77) for tokens in HALVES]
        assert device.streams == [77, 77]
        assert all(chunk.staged and not chunk.source_free.is_set() for chunk in chunks)
        device.run()
        for chunk in chunks:
            assert chunk.source_free.wait(DEADLINE_S)
        finish(pair, ticket, outgoing, 4)


@pytest.mark.parametrize("how", ["cancel", "restart", "lost"])
def test_a_gather_under_way_keeps_its_part_of_the_ring_whatever_becomes_of_its_handoff(how: str) -> None:
    device = Device()
    with Pair(producer={"native": device}) as pair:
        ticket, outgoing, request = begin(pair, 5)
        until(lambda: outgoing.granted)
        chunk = outgoing.stage(request.tables, tokens=range(TOKENS))
        used = pair.producer._sender._ring.used
        if how == "restart":
            outgoing.restart()
        elif how == "cancel":
            outgoing.cancel()
        else:
            ticket.cancel()
        if how != "restart":
            with pytest.raises(HandoffFailed):
                outgoing.wait(DEADLINE_S)
        pair.producer.statistics()  # the loop has done what was asked for
        assert pair.producer._sender._ring.used == used > 0
        assert not chunk.source_free.is_set()
        assert not outgoing.source_free.is_set()
        device.run()
        assert chunk.source_free.wait(DEADLINE_S)
        if how == "restart":
            again = pair.engine.request(6, TOKENS)
            assert outgoing.stage(again.tables, tokens=range(TOKENS)).staged
            device.run()
            finish(pair, ticket, outgoing, 6)
        assert outgoing.source_free.wait(DEADLINE_S)
        pair.check_clean()


def test_a_device_that_fails_ends_the_handoff() -> None:
    device = Device()
    with Pair(producer={"native": device}) as pair:
        ticket, outgoing, request = begin(pair, 7)
        chunk = outgoing.stage(request.tables, tokens=range(TOKENS))
        device.broken = True
        with pytest.raises(HandoffFailed, match="illegal memory access"):
            outgoing.wait(DEADLINE_S)
        with pytest.raises(HandoffFailed, match="illegal memory access"):
            ticket.wait(DEADLINE_S)
        assert chunk.source_free.wait(DEADLINE_S)
        pair.check_clean()


def test_a_gather_that_cannot_be_made_gives_its_room_back_and_ends_the_handoff(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise LocalError(ErrorCode.OUT_OF_RANGE, "the plan leaves its bounds")

    with Pair() as pair:
        ticket, outgoing, request = begin(pair, 8)
        monkeypatch.setattr("pdhandoff.runtime.gathering.Gatherer.gather", fail)
        chunk = outgoing.stage(request.tables, tokens=range(TOKENS))
        assert not chunk.staged
        with pytest.raises(HandoffFailed, match="leaves its bounds"):
            ticket.wait(DEADLINE_S)
        assert chunk.source_free.wait(DEADLINE_S)
        pair.check_clean()


def test_staged_and_pushed_chunks_mix_and_rows_staged_twice_are_refused() -> None:
    with Pair(producer={"digest": True}) as pair:
        ticket, outgoing, request = begin(pair, 9)
        outgoing.push(request.tables, tokens=HALVES[1])
        assert outgoing.stage(request.tables, tokens=HALVES[0]).staged
        finish(pair, ticket, outgoing, 9)
        ticket, outgoing, request = begin(pair, 10)
        for _ in range(2):
            outgoing.stage(request.tables, tokens=HALVES[0])
        with pytest.raises(HandoffFailed, match="were pushed before"):
            outgoing.wait(DEADLINE_S)
        pair.check_clean()


def test_wrong_calls_are_refused_as_push_does() -> None:
    with Pair() as pair:
        _, outgoing, request = begin(pair, 11)
        with pytest.raises(LocalError, match="lie outside the prompt"):
            outgoing.stage(request.tables, tokens=range(TOKENS + 1))
        with pytest.raises(LocalError, match=r"must have a query\(\)"):
            outgoing.stage(request.tables, tokens=range(4), after=3)  # type: ignore[arg-type]
        outgoing.cancel()
        pair.check_clean()


def test_the_rest_of_the_last_page_is_sent_as_zeros() -> None:
    """The last page goes out whole: what an earlier handoff left in the ring must not go with it."""
    with Pair() as pair:
        ring = pair.producer._ring
        ctypes.memset(ring.address, 0xEE, ring.length)
        ticket, outgoing, request = begin(pair, 12)
        outgoing.stage(request.tables, tokens=range(TOKENS))
        outgoing.commit()
        with ticket.wait(DEADLINE_S) as arrival:
            check_rows(arrival, 12)
            for landed in arrival.rows():
                size = landed.component.planes[0].page_stride
                for base in landed.placement.bases[""]:
                    last = ctypes.string_at(base + (len(landed.pages.ids) - 1) * size, landed.entry.page_bytes)
                    assert b"\xee\xee\xee\xee" not in last
        pair.check_clean()


def test_a_closed_producer_stages_nothing() -> None:
    with Pair() as pair:
        _, outgoing, request = begin(pair, 13)
        pair.producer.close()
        chunk = outgoing.stage(request.tables, tokens=range(TOKENS))
        assert not chunk.staged
        assert chunk.source_free.is_set()
        pair.replace_producer()
