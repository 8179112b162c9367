"""What a worker counts of its handoffs, as plain data that vLLM carries to its metrics."""

from __future__ import annotations

from typing import Any, Final, final

from pdhandoff.errors import ErrorCode
from pdhandoff_vllm.sending import Outcome

__all__ = ["Tally"]

_MOST_TIMES: Final = 4096
"samples that one step's report carries at most"


@final
class Tally:
    """Counts and times since the last report. Its data are numbers, strings, lists and dictionaries of them.

    Args:
        data: what another tally's `data` was; None: nothing yet.
    """

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        given = data or {}
        self.ready = int(given.get("ready", 0))
        self.failed: dict[str, int] = {str(code): int(count) for code, count in dict(given.get("failed", {})).items()}
        "by the name of the error"
        self.expired = int(given.get("expired", 0))
        "handoffs that were ended because they kept their blocks for too long"
        self.stuck = int(given.get("stuck", 0))
        "of these, those whose writes did not end either"
        self.tokens = int(given.get("tokens", 0))
        self.nbytes = int(given.get("nbytes", 0))
        self.seconds: list[float] = list(given.get("seconds", ()))
        "from the offer to the end, of those that succeeded"
        self.tail_seconds: list[float] = list(given.get("tail_seconds", ()))
        "of these, what came after the first token was known"

    @property
    def empty(self) -> bool:
        """Whether there is nothing to tell."""
        return not (self.ready or self.failed or self.expired or self.stuck)

    @property
    def data(self) -> dict[str, Any]:
        """What can be sent to another process."""
        return {
            "ready": self.ready,
            "failed": self.failed,
            "expired": self.expired,
            "stuck": self.stuck,
            "tokens": self.tokens,
            "nbytes": self.nbytes,
            "seconds": self.seconds,
            "tail_seconds": self.tail_seconds,
        }

    def add(self, outcome: Outcome) -> None:
        """Count a handoff that has ended."""
        if outcome.code:
            name = ErrorCode(outcome.code).name.lower() if outcome.code in _KNOWN else "unknown"
            self.failed[name] = self.failed.get(name, 0) + 1
            return
        self.ready += 1
        self.tokens += outcome.tokens
        self.nbytes += outcome.nbytes
        if len(self.seconds) < _MOST_TIMES:
            self.seconds.append(outcome.settled_s)
            if outcome.committed_s is not None:
                self.tail_seconds.append(outcome.settled_s - outcome.committed_s)

    def merge(self, other: Tally) -> None:
        """Add what another rank, or another interval, has counted."""
        self.ready += other.ready
        for name, count in other.failed.items():
            self.failed[name] = self.failed.get(name, 0) + count
        self.expired += other.expired
        self.stuck += other.stuck
        self.tokens += other.tokens
        self.nbytes += other.nbytes
        self.seconds = (self.seconds + other.seconds)[-_MOST_TIMES:]
        self.tail_seconds = (self.tail_seconds + other.tail_seconds)[-_MOST_TIMES:]

    def summary(self) -> dict[str, int | float]:
        """A few numbers for a log line."""
        middle = sorted(self.seconds)[len(self.seconds) // 2] if self.seconds else 0.0
        return {
            "Handoffs ready": self.ready,
            "Handoffs failed": sum(self.failed.values()),
            "Blocks expired": self.expired,
            "Tokens handed off": self.tokens,
            "MiB handed off": round(self.nbytes / (1 << 20), 3),
            "Median ms from offer to ready": round(1e3 * middle, 1),
        }


_KNOWN: Final = frozenset(map(int, ErrorCode))
