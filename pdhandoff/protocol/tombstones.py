"""Ended handoffs, remembered long enough to tell a late or repeated message from a new one."""

from __future__ import annotations

from typing import Final, final

from pdhandoff.ids import HandoffId

__all__ = ["REMEMBERED", "Tombstones"]

REMEMBERED: Final = 65536
"handoffs; the oldest is forgotten first"


@final
class Tombstones:
    """A bounded set of ids with the code each ended with, 0 for success."""

    __slots__ = ("_codes", "_limit")

    def __init__(self, limit: int = REMEMBERED) -> None:
        self._codes: dict[HandoffId, int] = {}
        self._limit = limit

    def __contains__(self, handoff: HandoffId) -> bool:
        return handoff in self._codes

    def bury(self, handoff: HandoffId, code: int) -> None:
        """Remember how a handoff ended; the first word stands."""
        if handoff in self._codes:
            return
        if len(self._codes) >= self._limit:
            del self._codes[next(iter(self._codes))]
        self._codes[handoff] = code

    def code(self, handoff: HandoffId) -> int | None:
        """How it ended, None when it is not remembered."""
        return self._codes.get(handoff)
