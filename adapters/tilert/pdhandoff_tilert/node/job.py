"""One request on its way through the node: who holds it, what comes out of it, and how it ended."""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable
from typing import final

import msgspec

from pdhandoff.runtime.arrival import Ticket
from pdhandoff_tilert.node.refusals import Refusal
from pdhandoff_tilert.node.schema import Wanted

__all__ = ["Ending", "Event", "Job", "Sink", "Stage", "Tokens"]


@final
class Stage(enum.Enum):
    """Where a request is."""

    WAITING = "waiting"  # for its handoff
    LANDED = "landed"  # complete; waits for a parking place
    PARKED = "parked"  # its landing memory is free again; waits for the engine
    DECODING = "decoding"
    OVER = "over"


@final
class Tokens(msgspec.Struct, frozen=True, kw_only=True):
    """New output tokens."""

    tokens: tuple[int, ...]
    drafted: int = 0
    "drafts that the step behind them verified"
    accepted: int = 0


@final
class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """The end: a finish reason, or a refusal. There is exactly one, and nothing after it."""

    finish_reason: str = ""
    "stop, length or abort"
    refusal: Refusal | None = None


Event = Tokens | Ending
Sink = Callable[[tuple[Event, ...]], None]


@final
class Job:
    """See the module. `end` and `emit` from any thread; the stage is the line's to change.

    Args:
        number: in order of admission.
        wanted: the request.
        now: monotonic seconds.
        sink: takes events, from any thread, in order, without blocking; those of one call belong together.
    """

    def __init__(self, number: int, wanted: Wanted, now: float, sink: Sink) -> None:
        self.number = number
        self.wanted = wanted
        self.decode = wanted.decode
        self.stage = Stage.WAITING
        self.admitted_s = now
        self.stage_s = now
        "when the present stage began"
        self.position = 0
        "requests ahead of it when it was admitted"
        self.output_tokens = 0
        self.parked: tuple[object] | None = None
        "what the engine's `park` returned, until the engine takes it"
        self.ticket: Ticket | None = None
        self.ending: Ending | None = None
        self._sink = sink
        self._lock = threading.Lock()

    @property
    def over(self) -> bool:
        """Whether its end has been said. Who holds something of it then lets go."""
        return self.ending is not None

    def emit(self, tokens: Tokens) -> None:
        """Hand tokens out; after the end they go nowhere."""
        with self._lock:
            if self.ending is None:
                self.output_tokens += len(tokens.tokens)
                self._sink((tokens,))

    def end(self, ending: Ending, last: Tokens | None = None) -> bool:
        """End it, with its last tokens. False: it had ended; the first word stands."""
        with self._lock:
            if self.ending is not None:
                return False
            self.ending = ending
            if last is not None:
                self.output_tokens += len(last.tokens)
            self._sink((ending,) if last is None else (last, ending))
        return True
