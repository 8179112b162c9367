"""Many deadlines, one question: when is the next? Renewing a deadline costs no search."""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from typing import Final, Generic, TypeVar, final

__all__ = ["Deadlines"]

_SLACK: Final = 64
"entries that the heap may have beyond twice the deadlines"

K = TypeVar("K", bound=Hashable)


@final
class Deadlines(Generic[K]):
    """A key's deadline may move either way; the heap is put right only when it comes up."""

    __slots__ = ("_at", "_heap", "_number")

    def __init__(self) -> None:
        self._at: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._number = 0

    def set(self, key: K, at: float) -> None:
        """Set or move the deadline of a key, in monotonic seconds."""
        before = self._at.get(key)
        self._at[key] = at
        if before is None or at < before:
            self._push(at, key)

    def clear(self, key: K) -> None:
        """The key has no deadline any more."""
        self._at.pop(key, None)
        if len(self._heap) > 2 * len(self._at) + _SLACK:  # far-off deadlines that were cleared would stay for long
            self._heap = [(at, number, other) for number, (other, at) in enumerate(self._at.items())]
            heapq.heapify(self._heap)
            self._number = len(self._heap)

    def next(self) -> float | None:
        """The earliest deadline, None when there is none."""
        self._settle()
        return self._heap[0][0] if self._heap else None

    def due(self, now: float) -> list[K]:
        """The keys whose deadline has come, earliest first; they have none afterwards."""
        keys: list[K] = []
        self._settle()
        while self._heap and self._heap[0][0] <= now:
            _, _, key = heapq.heappop(self._heap)
            del self._at[key]
            keys.append(key)
            self._settle()
        return keys

    def _push(self, at: float, key: K) -> None:
        self._number += 1
        heapq.heappush(self._heap, (at, self._number, key))

    def _settle(self) -> None:
        """Bring a true deadline to the top of the heap."""
        while self._heap:
            at, _, key = self._heap[0]
            true = self._at.get(key)
            if true == at:
                return
            heapq.heappop(self._heap)
            if true is not None and true > at:
                self._push(true, key)
