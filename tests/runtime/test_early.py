"""Early conversion: what is in the caches before the handoff is complete, and who hears of an end when."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import pytest

from pdhandoff import ErrorCode, HandoffFailed, HandoffId, LocalError, Outgoing, Ticket
from pdhandoff.engines.faults import Fault, Rule
from pdhandoff.native import load
from support.decode_side import check_converted, decode_caches, decode_pages
from support.engines import DEADLINE_S, LAYOUT, Pair, Request, index_component, kv_component, make_layout, until

TOKENS = 70
PAGES = decode_pages(LAYOUT)
CHUNKS = (range(20), range(20, 37), range(37, TOKENS))


class Gate:
    """`Native` that says what it converts, and waits in it while the gate is shut."""

    name = "gate"

    def __init__(self) -> None:
        self.inner: Any = load("reference")
        self.open = threading.Event()
        self.open.set()
        self.calls: list[range] = []
        self.broken = False

    def convert(self, *args: Any, tokens: range, **options: Any) -> int:
        self.calls.append(tokens)
        assert self.open.wait(DEADLINE_S)
        if self.broken:
            raise LocalError(ErrorCode.MISUSE, "no such cache")
        return int(self.inner.convert(*args, tokens=tokens, **options))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class Scene:
    """One handoff whose rows are converted early."""

    def __init__(self, pair: Pair, tag: int, *, begin: bool = True) -> None:
        self.pair = pair
        self.tag = tag
        self.gate = Gate()
        self.caches, self.buffers = decode_caches(LAYOUT, 96)
        handoff = HandoffId.mint()
        self.ticket: Ticket = pair.consumer.announce(handoff)
        if begin:
            self.begin()
        self.outgoing: Outgoing = pair.offer(handoff, TOKENS)
        self.request: Request = pair.engine.request(tag, TOKENS)

    def begin(self) -> None:
        self.ticket.convert_early(self.caches, pages=PAGES, native=self.gate)

    def push(self, *chunks: range) -> None:
        for tokens in chunks:
            self.outgoing.push(self.request.tables, tokens=tokens)

    def converted(self, tokens: int) -> None:
        """Wait until as many rows of each component have been converted, and no conversion runs."""
        early = self.pair.consumer._early

        def all_there() -> bool:
            done = early.done(self.ticket.handoff)
            return done is not None and not early.busy(self.ticket.handoff) and sum(map(len, self.gate.calls)) == tokens

        until(all_there, f"{self.gate.calls}")

    def finish(self) -> None:
        """Commit, take the arrival, convert what is left, and look at every row."""
        self.outgoing.commit(first_token=self.tag)
        with self.ticket.wait(DEADLINE_S) as arrival:
            self.gate.calls.clear()
            arrival.convert_into(self.caches, pages=PAGES, native=self.gate)
        check_converted(LAYOUT, self.caches, self.tag, TOKENS)
        self.pair.check_clean()


COMPONENTS = len(LAYOUT.components)


@pytest.mark.parametrize("digest", [False, True])
def test_rows_are_converted_as_they_land_and_nothing_is_left_at_the_end(digest: bool) -> None:
    with Pair(producer={"digest": digest}) as pair:
        scene = Scene(pair, 1)
        rows = 0
        for tokens in CHUNKS:
            scene.push(tokens)
            rows += COMPONENTS * len(tokens)
            scene.converted(rows)
        scene.finish()
        assert scene.gate.calls == []


def test_begun_late_it_converts_what_has_landed_already() -> None:
    with Pair() as pair:
        scene = Scene(pair, 2, begin=False)
        scene.push(*CHUNKS[:2])
        until(lambda: pair.producer._core.statistics().writes_in_flight == 0 and scene.outgoing.granted)
        scene.begin()
        scene.converted(COMPONENTS * 37)
        scene.push(CHUNKS[2])
        scene.finish()


def test_rows_that_land_while_others_are_converted_follow_in_one_go() -> None:
    with Pair() as pair:
        scene = Scene(pair, 3)
        scene.gate.open.clear()
        scene.push(CHUNKS[0])
        until(lambda: scene.gate.calls)
        scene.push(*CHUNKS[1:])
        until(lambda: pair.consumer._core.landed(scene.ticket.handoff).rows[0][0] == [range(TOKENS)])  # type: ignore[union-attr]
        scene.gate.open.set()
        scene.converted(COMPONENTS * TOKENS)
        assert range(20, TOKENS) in scene.gate.calls
        scene.finish()


def test_the_arrival_waits_for_a_conversion_that_runs() -> None:
    with Pair() as pair:
        scene = Scene(pair, 4)
        scene.gate.open.clear()
        scene.push(range(TOKENS))
        scene.outgoing.commit()
        scene.outgoing.wait(DEADLINE_S)  # READY: the source is free
        until(lambda: scene.gate.calls)
        with pytest.raises(TimeoutError):
            scene.ticket.wait(0.01)
        scene.gate.open.set()
        with scene.ticket.wait(DEADLINE_S) as arrival:
            arrival.convert_into(scene.caches, pages=PAGES)
        check_converted(LAYOUT, scene.caches, 4, TOKENS)
        pair.check_clean()


@pytest.mark.parametrize("moment", ["between conversions", "during a conversion"])
def test_a_producer_that_starts_over_has_its_rows_converted_anew(moment: str) -> None:
    with Pair(producer={"digest": True}) as pair:
        scene = Scene(pair, 5)
        if moment == "during a conversion":
            scene.gate.open.clear()
        scene.push(range(30))
        if moment == "during a conversion":
            until(lambda: scene.gate.calls)
        else:
            scene.converted(COMPONENTS * 30)
        scene.outgoing.restart()
        until(lambda: pair.consumer._early._handoffs[scene.ticket.handoff].restarts == {0: 1})
        scene.gate.open.set()
        scene.request = pair.engine.request(6, TOKENS)  # other pages, and other rows
        scene.tag = 6
        scene.push(*CHUNKS)
        scene.finish()


@pytest.mark.parametrize("end", ["cancel", "producer", "digest", "close"])
def test_an_end_is_told_when_no_row_is_on_its_way_into_the_caches(end: str) -> None:
    flip = [Rule(fault=Fault.FLIP)] if end == "digest" else []
    with Pair(rules=flip, producer={"digest": True}) as pair:
        scene = Scene(pair, 7)
        scene.gate.open.clear()
        scene.push(range(TOKENS))
        until(lambda: scene.gate.calls)
        closing = threading.Thread(target=pair.consumer.close, kwargs={"drain_s": 0.01})
        if end == "cancel":
            scene.ticket.cancel()
        elif end == "producer":
            scene.outgoing.cancel()
        elif end == "digest":
            scene.outgoing.commit()
        else:
            closing.start()
        until(lambda: pair.consumer._core.state(scene.ticket.handoff) is None or end == "digest")
        with pytest.raises(TimeoutError):
            scene.ticket.wait(0.02)
        scene.gate.open.set()
        with pytest.raises(HandoffFailed) as caught:
            scene.ticket.wait(DEADLINE_S)
        assert caught.value.code == (ErrorCode.DIGEST_MISMATCH if end == "digest" else ErrorCode.CANCELLED)
        before = [bytes(buffer) for buffer in scene.buffers]  # type: ignore[call-overload]
        if end == "close":
            closing.join(DEADLINE_S)
        else:
            pair.hand_off(8, 40)
            pair.check_clean()
        assert [bytes(buffer) for buffer in scene.buffers] == before  # type: ignore[call-overload]


def test_what_is_verified_is_what_was_converted() -> None:
    """A byte that changes in the landing memory after its row was converted is not what decides."""
    with Pair(producer={"digest": True}) as pair:
        scene = Scene(pair, 9)
        scene.push(range(TOKENS))
        scene.converted(COMPONENTS * TOKENS)
        arena = pair.consumer._core.book._arenas[0]
        ctypes.memset(arena.address, 0x5A, 4096)
        scene.finish()


def test_a_conversion_that_fails_early_is_left_to_the_engines_own_call() -> None:
    with Pair() as pair:
        scene = Scene(pair, 10)
        scene.gate.broken = True
        scene.push(CHUNKS[0])
        until(lambda: scene.gate.calls and pair.consumer._early.done(scene.ticket.handoff) is None)
        scene.push(*CHUNKS[1:])
        scene.outgoing.commit()
        with scene.ticket.wait(DEADLINE_S) as arrival:
            with pytest.raises(LocalError, match="no such cache"):
                arrival.convert_into(scene.caches, pages=PAGES, native=scene.gate)
            arrival.convert_into(scene.caches, pages=PAGES)
        check_converted(LAYOUT, scene.caches, 10, TOKENS)
        pair.check_clean()


def test_into_other_caches_everything_is_converted() -> None:
    with Pair() as pair:
        scene = Scene(pair, 11)
        scene.push(range(TOKENS))
        scene.converted(COMPONENTS * TOKENS)
        scene.outgoing.commit()
        others, buffers = decode_caches(LAYOUT, 96)
        with scene.ticket.wait(DEADLINE_S) as arrival:
            arrival.convert_into(others, pages=PAGES)
        check_converted(LAYOUT, others, 11, TOKENS)
        del buffers
        pair.check_clean()


def test_it_is_asked_for_once_and_before_the_arrival_is_taken() -> None:
    with Pair() as pair:
        scene = Scene(pair, 12)
        with pytest.raises(LocalError, match="into one place"):
            scene.begin()
        scene.push(range(TOKENS))
        scene.finish()
        late = Scene(pair, 13, begin=False)
        late.push(range(TOKENS))
        late.outgoing.commit()
        with late.ticket.wait(DEADLINE_S), pytest.raises(LocalError, match="before they are taken"):
            late.begin()
        ended = Scene(pair, 14, begin=False)
        ended.ticket.cancel()
        with pytest.raises(HandoffFailed):
            ended.ticket.wait(DEADLINE_S)
        ended.begin()  # nothing is converted any more
        pair.check_clean()
        assert ended.gate.calls == []


@pytest.mark.slow
def test_two_producers_rows_are_converted_each_at_their_own_pace() -> None:
    first = make_layout(kv_component(layers=(0,)), index_component(layers=(0, 1)))
    second = make_layout(kv_component(layers=(1, 2)), index_component(layers=(2,)))
    with Pair(layout=LAYOUT, shards=[first, second], producer={"digest": True}) as pair:
        caches, buffers = decode_caches(LAYOUT, 96)
        handoff = HandoffId.mint()
        ticket = pair.consumer.announce(handoff)
        ticket.convert_early(caches, pages=PAGES)
        outgoings = [producer.offer(pair.address, handoff, prompt_tokens=TOKENS) for producer in pair.producers]
        requests = [engine.request(15, TOKENS) for engine in pair.engines]
        outgoings[0].push(requests[0].tables, tokens=range(TOKENS))
        outgoings[0].commit()
        for tokens in CHUNKS:
            outgoings[1].push(requests[1].tables, tokens=tokens)
        outgoings[1].restart()
        again = pair.engines[1].request(15, TOKENS)
        outgoings[1].push(again.tables, tokens=range(TOKENS))
        outgoings[1].commit()
        with ticket.wait(DEADLINE_S) as arrival:
            arrival.convert_into(caches, pages=PAGES)
        check_converted(LAYOUT, caches, 15, TOKENS)
        del buffers
        pair.check_clean()
