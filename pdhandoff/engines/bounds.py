"""Range checks of memory, extents and columns of writes, for movers and for wrappers that must not trust callers."""

from __future__ import annotations

import bisect
from array import array
from collections.abc import Iterable, Sequence
from operator import add
from typing import final

from pdhandoff.engines.base import Extent, Memory, Writes
from pdhandoff.errors import ErrorCode, MoverError

__all__ = ["Runs", "check_columns", "check_inside", "check_memory", "disjoint", "outside"]


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


def check_inside(runs: Runs, addresses: array[int], lengths: array[int], what: str) -> None:
    """Refuse a batch with a write outside `runs`, which are called `what`. Raises MoverError (OUT_OF_RANGE)."""
    index = runs.first_outside(addresses, lengths)
    if index is not None:
        raise outside(index, addresses, lengths, what)


def outside(index: int, addresses: array[int], lengths: array[int], what: str) -> MoverError:
    """The refusal of a batch whose write at `index` leaves `what`."""
    return MoverError(
        ErrorCode.OUT_OF_RANGE,
        f"write {index}: {lengths[index]} bytes at {addresses[index]:#x} lie outside {what}; nothing was written",
    )


def check_memory(memory: Memory) -> None:
    """Refuse to register no memory. Raises MoverError (OUT_OF_RANGE)."""
    if memory.address <= 0 or memory.length <= 0:
        raise MoverError(
            ErrorCode.OUT_OF_RANGE, f"memory of {memory.length} bytes at {memory.address:#x} cannot be registered"
        )


def disjoint(extents: Sequence[Extent], page: int) -> list[Extent]:
    """The extents in address order.

    Raises:
        MoverError: OUT_OF_RANGE, unless they are whole pages of `page` bytes and do not overlap.
    """
    end = 0
    ordered = sorted(extents)
    for extent in ordered:
        if extent.address % page or extent.length % page or extent.length <= 0:
            raise MoverError(ErrorCode.OUT_OF_RANGE, f"{extent} is not made of whole pages of {page} bytes")
        if extent.address < end:
            raise MoverError(ErrorCode.OUT_OF_RANGE, f"{extent} overlaps the extent before it")
        end = extent.address + extent.length
    return ordered
