"""The real runtime under Hypothesis: offers, cancels, held and late writes, cut links and closes in any order."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pdhandoff import Consumer, HandoffFailed, HandoffId, Limits, LocalError, Outgoing, Producer, Staging, Ticket
from pdhandoff.engines.faults import Fault, Faulty, Rule
from pdhandoff.engines.loopback import create
from pdhandoff.runtime.chunks import Chunk
from support.engines import DEADLINE_S, LAYOUT, Prefill, Request, check_rows, counts, until

_LIMITS = Limits(drain_s=0.02, announce_s=0.3, unannounced_s=0.1, assemble_s=1.0)
_TAGS = itertools.count(1)
_FAULTS = (Fault.HOLD, Fault.LATE, Fault.FAIL, Fault.DROP, Fault.PARTIAL, Fault.DUPLICATE, Fault.REFUSE, Fault.DELAY)


class _Item(NamedTuple):
    """One handoff as both engines know it."""

    ticket: Ticket
    outgoing: Outgoing
    request: Request
    pushed: list[Chunk]


class Machine(RuleBasedStateMachine):
    """Whatever happens, a reader sees what this handoff's producer pushed, and at the end everything is free."""

    def __init__(self) -> None:
        super().__init__()
        self.items: list[_Item] = []
        self.retired: list[_Item] = []

    @initialize(
        staging=st.sampled_from(list(Staging)),
        faults=st.lists(st.tuples(st.sampled_from(_FAULTS), st.integers(0, 20)), max_size=4),
    )
    def start(self, staging: Staging, faults: list[tuple[Fault, int]]) -> None:
        self.before = counts()
        self.engine = Prefill(pages=96)
        self.landing = create()
        self.mover = Faulty(create(), [Rule(fault=fault, call=call, polls=2) for fault, call in faults])
        self.consumer = Consumer(mover=self.landing, layout=LAYOUT, arena_bytes=4096 * 6, limits=_LIMITS)
        self.total = self.consumer.statistics().book.total_bytes
        self.producer = Producer(
            mover=self.mover,
            layout=LAYOUT,
            placements=self.engine.placements,
            memory=self.engine.memory,
            staging=staging,
            staging_bytes=1 << 14,
            limits=_LIMITS,
        )
        self.closed = False

    def pick(self, number: int) -> _Item | None:
        return self.items[number % len(self.items)] if self.items else None

    @rule(tokens=st.integers(1, 40), patient=st.booleans(), known=st.integers(0, 3))
    def offer(self, tokens: int, *, patient: bool, known: int) -> None:
        if self.closed or len(self.items) >= 4:
            return
        handoff = HandoffId.mint()
        ticket = self.consumer.announce(handoff, start_token=min(known, tokens))
        request = self.engine.request(next(_TAGS), tokens)
        outgoing = self.producer.offer(
            self.consumer.address, handoff, prompt_tokens=tokens, queue_s=DEADLINE_S if patient else 0
        )
        self.items.append(_Item(ticket, outgoing, request, []))

    @rule(number=st.integers(0, 7), tokens=st.integers(1, 40))
    def push(self, number: int, tokens: int) -> None:
        item = self.pick(number)
        if item is not None:
            start = max((chunk.tokens.stop for chunk in item.pushed), default=0)
            stop = min(start + tokens, item.request.tokens)
            item.pushed.append(item.outgoing.push(item.request.tables, tokens=range(start, stop)))

    @rule(number=st.integers(0, 7))
    def commit(self, number: int) -> None:
        item = self.pick(number)
        if item is not None:
            item.outgoing.commit()

    @rule(number=st.integers(0, 7))
    def finish(self, number: int) -> None:
        """Push the rest, commit, and read what comes."""
        item = self.pick(number)
        if item is None:
            return
        self.push(number, 40)
        item.outgoing.commit()
        self.read(item, patience_s=0.1)

    @rule(tokens=st.integers(1, 40), chunk=st.integers(3, 40), known=st.integers(0, 3))
    def hand_over(self, tokens: int, chunk: int, known: int) -> None:
        """One from start to end, whatever else is under way."""
        before = len(self.items)
        self.offer(tokens, patient=True, known=known)
        if len(self.items) > before:
            item = self.items[-1]
            for _ in range(0, tokens, chunk):
                self.push(before, chunk)
            item.outgoing.commit()
            self.read(item, patience_s=0.1)

    @rule(number=st.integers(0, 7))
    def restart(self, number: int) -> None:
        item = self.pick(number)
        if item is not None:
            item.outgoing.restart()
            item.pushed.clear()

    @rule(number=st.integers(0, 7), by_consumer=st.booleans())
    def cancel(self, number: int, *, by_consumer: bool) -> None:
        item = self.pick(number)
        if item is not None:
            (item.ticket if by_consumer else item.outgoing).cancel()

    @rule(number=st.integers(0, 7))
    def look(self, number: int) -> None:
        item = self.pick(number)
        if item is not None:
            self.read(item, patience_s=0.005)

    @rule()
    def release_hold(self) -> None:
        self.mover.release_hold()

    @rule()
    def land_late(self) -> None:
        self.mover.land_late()

    @rule(by_consumer=st.booleans())
    def cut_links(self, *, by_consumer: bool) -> None:
        """Without a word: as when a cable is pulled."""
        end = self.consumer if by_consumer else self.producer
        if self.closed and not by_consumer:
            return

        def cut() -> None:
            for connection in list(end._connections._all.values()):
                end._connections._broken(connection, "cut by the test")

        end._loop.call(cut)

    @rule()
    def close_producer(self) -> None:
        if not self.closed and len(self.items) > 2:
            self.closed = True
            self.producer.close(drain_s=0.05)

    @invariant()
    def the_books_balance(self) -> None:
        if hasattr(self, "consumer"):
            book = self.consumer.statistics().book
            assert book.free_bytes + book.granted_bytes + book.ending_bytes == book.total_bytes

    def read(self, item: _Item, patience_s: float = 0.05) -> None:
        """Take an arrival, if it comes, and hold every row against what its producer pushed."""
        try:
            with item.ticket.wait(patience_s) as arrival:
                if arrival.start_token < arrival.prompt_tokens:
                    check_rows(arrival, item.request.tag)
        except TimeoutError:
            return
        except (HandoffFailed, LocalError):
            pass
        self.items.remove(item)
        self.retired.append(item)

    def teardown(self) -> None:
        if not hasattr(self, "consumer"):
            return
        for item in self.items:
            item.outgoing.cancel()
            item.ticket.cancel()
        self.mover.release_hold()
        consumer = self.consumer
        until(lambda: consumer.statistics().book.free_bytes == self.total, "all landing memory is free")
        until(lambda: not consumer.statistics().states, "no handoff is under way")
        until(lambda: not consumer._tickets and not consumer._layouts_of, "nothing is remembered")
        self.check_producer()
        self.producer.close(drain_s=0.05)
        consumer.close()
        self.mover.close()
        self.landing.close()
        until(lambda: all(now <= then for now, then in zip(counts(), self.before, strict=True)), "nothing is left")

    def check_producer(self) -> None:
        """Source pages are free but for those that a mover may still read."""
        late = self.mover.statistics().late > 0 or Fault.LATE in self.mover.statistics().fired
        if self.closed or late:
            return
        until(lambda: not self.producer._outgoing, "every handoff has ended")
        assert self.producer._sender._ring.used == 0
        for item in self.items + self.retired:
            assert item.outgoing.source_free.wait(DEADLINE_S)
            assert all(chunk.source_free.wait(DEADLINE_S) for chunk in item.pushed)


Machine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


TestMachine = pytest.mark.slow(Machine.TestCase)
