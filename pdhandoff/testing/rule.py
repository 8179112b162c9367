"""What a rule is, and how a check says that a mover broke it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, final

import msgspec

from pdhandoff.engines.base import MoverCapabilities, TransferState, TransferStatus
from pdhandoff.errors import MoverError

__all__ = ["Need", "Rule", "Sizes", "Violation", "not_done", "refuses", "require"]


@final
class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """How much a run moves, and how patient it is."""

    large_bytes: int = 64 << 20
    "of the one large write"
    descriptors: int = 100_000
    "writes of the one large batch"
    storm_bytes: int = 4 << 20
    "of each write of a writer that does not stop by itself"
    threads: int = 8
    "that write at the same time"
    settle_s: float = 30.0
    "within which a write between living processes is final"
    death_s: float = 10.0
    "within which a write to a dead process has failed, and a dead writer is known to be quiet"
    at_once_s: float = 1.0
    "that a call may take which MUST return at once, on a busy machine"
    fence_s: float = 10.0
    "deadline that fences are given"
    late_s: float = 1.0
    "how long a late writer is watched, at most"
    leaked_threads: int = 0
    "threads that each closed mover may leave behind"
    leaked_descriptors: int = 0
    "open descriptors that each closed mover may leave behind"
    rule_s: float = 120.0
    "after which a rule that has not ended has failed: a call hangs"


@final
class Need(msgspec.Struct, frozen=True, kw_only=True):
    """A capability without which a rule says nothing."""

    capability: str
    "field of `MoverCapabilities`"
    instead: str
    "what the runtime does for a mover that does not claim it"

    def met_by(self, capabilities: MoverCapabilities) -> bool:
        """Whether a mover claims it."""
        return bool(getattr(capabilities, self.capability))


@final
class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """One numbered promise of movers (M-01, ...) or of consumers (P-01, ...), and its check."""

    number: str
    "never given to another rule"
    title: str
    must: str
    "the promise, in one sentence"
    check: Callable[[Any], None]
    "takes a `Bench`, or a `Visit` of a consumer; raises `Violation` where the promise is broken"
    need: Need | None = None
    "of a mover"
    asks: str = ""
    "what a run against a consumer has to be given, or the rule is skipped"


class Violation(Exception):
    """A promise was broken: the sentence says how."""


def require(holds: object, sentence: str) -> None:
    """Raises Violation with the sentence unless something holds."""
    if not holds:
        raise Violation(sentence)


@contextlib.contextmanager
def refuses(what: str) -> Iterator[None]:
    """The block must raise MoverError with a sentence. Anything else is a Violation."""
    try:
        yield
    except MoverError as error:
        require(error.reason, f"{what} was refused without a reason: MoverError must carry a sentence")
    except Exception as error:  # the rule is about the type of what a mover raises
        raise Violation(f"{what} raised {type(error).__name__} ({error}), not MoverError") from error
    else:
        raise Violation(f"{what} was not refused")


def not_done(status: TransferStatus, what: str) -> None:
    """Raises Violation when a write counts as done that cannot be."""
    require(status.state is not TransferState.DONE, f"{what} is reported as done")
    if status.state is TransferState.FAILED:
        require(status.reason, f"{what} failed without a reason")
