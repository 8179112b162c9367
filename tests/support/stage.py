"""A handoff between two watched endpoints whose second chunk meets a fault, on any mover."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final, final

import pytest

from pdhandoff import ErrorCode, HandoffFailed, HandoffId, Outgoing, Staging, Ticket
from pdhandoff.observe.steps import HANDOFF
from support.engines import DEADLINE_S, Pair, Request, check_rows, until

__all__ = ["CHUNK", "TOKENS", "Stage", "Watch"]

TOKENS: Final = 100
CHUNK: Final = 50


@final
class Watch:
    """An observer: what has happened to each handoff, in order, without times."""

    def __init__(self) -> None:
        self._events: dict[str, list[str]] = defaultdict(list)
        self._lock = threading.Lock()

    def add(self, name: str, track: str, start_ns: int, end_ns: int, **args: Any) -> None:
        """A span of the runtime's."""
        assert track
        assert start_ns <= end_ns
        self.note(args[HANDOFF], f"{name} {args['tokens']}")

    def instant(self, name: str, track: str, **args: Any) -> None:
        """An instant of the runtime's."""
        assert track
        self.note(args[HANDOFF], name)

    def note(self, label: str, event: str) -> None:
        """An event, from whatever thread."""
        with self._lock:
            self._events[label].append(event)

    def of(self, handoff: HandoffId) -> tuple[str, ...]:
        """Everything so far."""
        with self._lock:
            return tuple(self._events[str(handoff)[:8]])


def outcome(future: Future[Any], success: str) -> str:
    """How it ended, in one word or two."""
    error = future.exception()
    if error is None:
        return success
    assert isinstance(error, HandoffFailed)
    assert isinstance(error.code, ErrorCode)
    return f"{error.code.name} retryable" if error.retryable else error.code.name


class Stage:
    """One handoff of two chunks. The first one lands; the second one is up to the pair's rules."""

    def __init__(self, pair: Pair, sending: Watch, taking: Watch, *, staging: Staging) -> None:
        self.pair = pair
        self._sending = sending
        self._taking = taking
        self._staging = staging
        self.handoff = HandoffId.mint()
        self.ticket: Ticket = pair.consumer.announce(self.handoff)
        label = str(self.handoff)[:8]
        self.ticket.outcome.add_done_callback(lambda future: taking.note(label, outcome(future, "taken")))
        self._request: Request = pair.engine.request(1, TOKENS)
        self.outgoing: Outgoing = pair.offer(self.handoff, TOKENS)
        self.outgoing.settled.add_done_callback(lambda future: sending.note(label, outcome(future, "READY")))

    @property
    def sent(self) -> tuple[str, ...]:
        """What has happened to it at the producer."""
        return self._sending.of(self.handoff)

    @property
    def taken(self) -> tuple[str, ...]:
        """What has happened to it at the consumer."""
        return self._taking.of(self.handoff)

    def push(self) -> None:
        """Push both chunks, each when all that came before has been seen at both ends, and commit."""
        until(lambda: "grant" in self.sent)
        self.outgoing.push(self._request.tables, tokens=range(CHUNK))
        until(lambda: "write 0..50" in self.sent)
        until(lambda: "landed" in self.taken)
        self.outgoing.push(self._request.tables, tokens=range(CHUNK, TOKENS))
        until(lambda: self._staging is Staging.DIRECT or "gather 50..100" in self.sent)
        self.outgoing.commit()

    def push_until_kept(self) -> None:
        """Push, and wait until the wrapper keeps the second batch."""
        self.push()
        until(lambda: self.pair.fault.statistics().held == 1, "the second batch is held")

    def take(self) -> None:
        """Wait for the arrival as a decode engine does, and check every row of it."""
        with self.ticket.wait(DEADLINE_S) as arrival:
            assert check_rows(arrival, 1) > 0

    def fails(self, *, at_producer: bool = True) -> None:
        """Wait until both ends know that it has failed."""
        with pytest.raises(HandoffFailed):
            self.ticket.wait(DEADLINE_S)
        if at_producer:
            with pytest.raises(HandoffFailed):
                self.outgoing.wait(DEADLINE_S)

    def both_ends_hold(self) -> None:
        """A batch is on its way: neither its source nor what it is written to is anybody else's."""
        assert not self.outgoing.source_free.is_set()
        assert self.pair.statistics().book.ending_bytes > 0

    def wait_for_fence(self) -> None:
        """Wait until the landing memory is free again though the batch is still on its way."""
        until(lambda: self.pair.statistics().book.free_bytes == self.pair.total_bytes, "it is fenced")
        assert not self.outgoing.source_free.is_set()

    def others_rows(self, then: Callable[[], object]) -> None:
        """Another handoff gets the same memory; what happens while its rows lie there must not change them."""
        handoff = HandoffId.mint()
        ticket = self.pair.consumer.announce(handoff)
        request = self.pair.engine.request(2, TOKENS)
        outgoing = self.pair.send(handoff, request)
        with ticket.wait(DEADLINE_S) as arrival:
            then()
            assert self.outgoing.source_free.wait(DEADLINE_S)
            assert check_rows(arrival, 2) > 0
        outgoing.wait(DEADLINE_S)
        assert outgoing.source_free.wait(DEADLINE_S)
        self.pair.engine.free(request)
