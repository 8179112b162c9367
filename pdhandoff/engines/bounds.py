"""Range checks over columns of writes, shared by the movers and the wrappers that must not trust their caller."""

from __future__ import annotations

import bisect
from array import array
from collections.abc import Iterable
from operator import add
from typing import final

from pdhandoff.engines.base import Writes
from pdhandoff.errors import ErrorCode, MoverError

__all__ = ["Runs", "check_columns"]


@final
class Runs:
    """A set of addresses kept as sorted, merged runs. Immutable, so threads share it without a lock."""

    __slots__ = ("_ends", "_starts")

    def __init__(self, runs: Iterable[tuple[int, int]] = ()) -> None:
        """From (address, length) pairs in any order; runs that touch or overlap become one."""
        starts: list[int] = []
        ends: list[int] = []
        for start, length in sorted(runs):
            if length <= 0:
                continue
            if ends and start <= ends[-1]:
                ends[-1] = max(ends[-1], start + length)
            else:
                starts.append(start)
                ends.append(start + length)
        self._starts = starts
        self._ends = ends

    def covers(self, address: int, length: int) -> bool:
        """Whether `[address, address + length)` lies inside one run. An empty range lies anywhere."""
        if length == 0:
            return True
        index = bisect.bisect_right(self._starts, address) - 1
        return index >= 0 and length > 0 and address + length <= self._ends[index]

    def first_outside(self, addresses: array[int], lengths: array[int]) -> int | None:
        """Index of the first write that is not inside one run, None when all are.

        Two passes at C speed decide the usual case, in which one run covers everything. The other cases cost one
        comparison a write as long as neighbours stay in one run.
        """
        if not addresses or self.covers(low := min(addresses), max(map(add, addresses, lengths)) - low):
            return None
        low = high = 0
        for index, (address, length) in enumerate(zip(addresses, lengths, strict=True)):
            if (low <= address and address + length <= high) or length == 0:
                continue
            run = bisect.bisect_right(self._starts, address) - 1
            if run < 0 or address + length > self._ends[run]:
                return index
            low, high = self._starts[run], self._ends[run]
        return None


def check_columns(writes: Writes, *, max_writes: int) -> None:
    """Refuse columns of different lengths, too many writes, and lengths below zero.

    Raises:
        MoverError: MISUSE, or OVERSIZED above `max_writes`.
    """
    count = len(writes.length)
    if len(writes.source) != count or len(writes.destination) != count:
        raise MoverError(
            ErrorCode.MISUSE,
            f"the columns of a batch differ in length: {len(writes.source)} sources, {len(writes.destination)} "
            f"destinations, {count} lengths",
        )
    if count > max_writes:
        raise MoverError(
            ErrorCode.OVERSIZED, f"a batch of {count} writes exceeds this mover's {max_writes}: submit it in parts"
        )
    if count and min(writes.length) < 0:
        raise MoverError(ErrorCode.MISUSE, f"a write has length {min(writes.length)}: lengths are never below zero")
