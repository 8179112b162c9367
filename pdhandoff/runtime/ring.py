"""The staging memory through which chunks pass: taken in stretches, given back in any order."""

from __future__ import annotations

import threading
from bisect import bisect_left
from typing import Final, NamedTuple, final

from pdhandoff.errors import ErrorCode, LocalError

__all__ = ["RING_ALIGNMENT", "Ring", "Stretch"]

RING_ALIGNMENT: Final = 64


class Stretch(NamedTuple):
    """A contiguous part of the ring."""

    address: int
    length: int
    number: int
    "of this allocation"


class _Run(NamedTuple):
    """Free bytes `[start, stop)`, counted from the ring's first byte."""

    start: int
    stop: int


@final
class Ring:
    """One chunk is one stretch, all or nothing.

    What has no grant yet is kept in the lower half. The upper half holds only what the consumer has given room to, so
    it empties whoever waits for whom, and a chunk of at most half the ring always gets its turn. Any thread may use it:
    its lock is held for a few list operations.
    """

    def __init__(self, address: int, length: int) -> None:
        self._address = address
        self._length = length // RING_ALIGNMENT * RING_ALIGNMENT
        self._half = self._length // 2 // RING_ALIGNMENT * RING_ALIGNMENT
        self._free = [_Run(0, self._length)] if self._length else []
        self._live: dict[int, _Run] = {}
        self._used = 0
        self._numbers = 0
        self._lock = threading.Lock()

    @property
    def capacity(self) -> int:
        """Bytes in all."""
        return self._length

    @property
    def largest(self) -> int:
        """Bytes of the largest stretch that is certain to get its turn."""
        return self._half

    @property
    def used(self) -> int:
        """Bytes that are not free, alignment included."""
        return self._used

    def take(self, nbytes: int, *, granted: bool) -> Stretch | None:
        """A stretch of at least `nbytes`; None when there is no room now.

        Args:
            nbytes: how much.
            granted: the consumer has room for it, so that it is certain to move on.

        Raises:
            LocalError: RING_FULL, when it exceeds `largest`.
        """
        need = max(-(-nbytes // RING_ALIGNMENT) * RING_ALIGNMENT, RING_ALIGNMENT)
        if need > self._half:
            raise LocalError(
                ErrorCode.RING_FULL,
                f"a chunk of {nbytes} bytes exceeds half of the staging ring, {self._half} bytes: push less at once, "
                "or stage more",
            )
        with self._lock:
            start = self._highest(need) if granted else self._lowest(need)
            if start is None:
                return None
            self._cut(start, start + need)
            self._numbers += 1
            self._live[self._numbers] = _Run(start, start + need)
            self._used += need
            return Stretch(self._address + start, need, self._numbers)

    def free(self, stretch: Stretch) -> None:
        """Give a stretch back. Idempotent."""
        with self._lock:
            run = self._live.pop(stretch.number, None)
            if run is not None:
                self._used -= run.stop - run.start
                self._join(run)

    def _join(self, run: _Run) -> None:
        """Put a run back in order, merged with its neighbours."""
        at = bisect_left(self._free, run)
        start, stop = run
        if at < len(self._free) and self._free[at].start == stop:
            stop = self._free.pop(at).stop
        if at > 0 and self._free[at - 1].stop == start:
            at -= 1
            start = self._free.pop(at).start
        self._free.insert(at, _Run(start, stop))

    def _highest(self, need: int) -> int | None:
        return next((run.stop - need for run in reversed(self._free) if run.stop - run.start >= need), None)

    def _lowest(self, need: int) -> int | None:
        return next((run.start for run in self._free if min(run.stop, self._half) - run.start >= need), None)

    def _cut(self, start: int, stop: int) -> None:
        """Take `[start, stop)`, one end of which is an end of a free run."""
        at = next(index for index, run in enumerate(self._free) if run.start <= start and stop <= run.stop)
        run = self._free.pop(at)
        rest = [part for part in (_Run(run.start, start), _Run(stop, run.stop)) if part.start < part.stop]
        self._free[at:at] = rest
