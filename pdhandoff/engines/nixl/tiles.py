"""Runs of memory that are registered one by one, and writes cut so that each stays inside one of them at both ends.

NIXL looks a descriptor up in a list of registrations and takes the one that begins closest before it. So registrations
must not overlap, and no descriptor may reach from one into the next.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from typing import Any, Final, NamedTuple, final

import numpy as np

from pdhandoff.engines.base import MemoryKind, Writes
from pdhandoff.engines.bounds import outside
from pdhandoff.engines.nixl.binding import Descriptor

__all__ = ["Batch", "Tiles", "batches"]

BATCH_WRITES: Final = 1024
"posting so many takes a few milliseconds, and nothing else can be done to the agent meanwhile"
BATCH_BYTES: Final = 32 << 20
FEW_WRITES: Final = 16
"up to so many, a loop is quicker than arrays"


@final
class Tiles:
    """Disjoint runs, sorted. Immutable."""

    def __init__(self, runs: Iterable[Descriptor] = ()) -> None:
        self.runs: Final = tuple(sorted(runs))
        self.starts = np.array([run.address for run in self.runs], dtype=np.int64)
        self.ends = np.array([run.address + run.length for run in self.runs], dtype=np.int64)
        self.devices = np.array([run.device for run in self.runs], dtype=np.uint64)
        self.cuda = np.array([run.kind is MemoryKind.CUDA for run in self.runs], dtype=np.bool_)

    def overlapping(self, address: int, length: int) -> list[Descriptor]:
        """The runs that share a byte with `[address, address + length)`, in order."""
        first = int(np.searchsorted(self.ends, address, side="right"))
        last = int(np.searchsorted(self.starts, address + length, side="left"))
        return list(self.runs[first:last])

    def holding(self, address: int, length: int) -> Descriptor | None:
        """The run that holds all of `[address, address + length)`, if one does."""
        index = bisect.bisect_right(self.runs, address, key=_address) - 1
        run = self.runs[max(index, 0)] if self.runs else None
        return run if run is not None and run.address <= address <= run.address + run.length - length else None

    def room(self, addresses: Any) -> tuple[Any, Any]:
        """For each address: index of the run that holds it, and bytes from there to the run's end; 0 when none does."""
        if not self.runs:
            return np.zeros(len(addresses), dtype=np.int64), np.zeros(len(addresses), dtype=np.int64)
        index = np.searchsorted(self.starts, addresses, side="right") - 1
        left = np.where(index >= 0, self.ends[index] - addresses, 0)
        return np.maximum(index, 0), np.maximum(left, 0)


def _address(run: Descriptor) -> int:
    return run.address


class Batch(NamedTuple):
    """Writes that are posted together: between memory of one kind and memory of one kind."""

    source: Any
    "[write, (address, length, device)]: unsigned 64-bit, or a list of tuples"
    destination: Any
    kinds: tuple[MemoryKind, MemoryKind]
    nbytes: int


def batches(writes: Writes, sources: Tiles, destinations: Tiles) -> list[Batch]:
    """Cut writes at the edges of registrations, and group them.

    Raises:
        MoverError: OUT_OF_RANGE for a write that leaves `sources` or `destinations`.
    """
    if len(writes.length) <= FEW_WRITES:
        few = _few(writes, sources, destinations)
        if few is not None:
            return few
    source, destination, length = (np.frombuffer(column, dtype=np.int64) for column in writes)
    which = np.flatnonzero(length)
    source, destination, length = source[which], destination[which], length[which]
    found: list[Batch] = []
    while which.size:
        source_run, source_room = sources.room(source)
        destination_run, destination_room = destinations.room(destination)
        _check(writes, writes.source, which, source_room, "registered memory")
        _check(writes, writes.destination, which, destination_room, "the grant of this peer")
        part = np.minimum(length, np.minimum(source_room, destination_room))
        here = np.column_stack((source.astype(np.uint64), part.astype(np.uint64), sources.devices[source_run]))
        there = np.column_stack(
            (destination.astype(np.uint64), part.astype(np.uint64), destinations.devices[destination_run])
        )
        found += _grouped(here, there, sources.cuda[source_run], destinations.cuda[destination_run])
        rest = np.flatnonzero(length > part)
        which, source, destination = which[rest], source[rest] + part[rest], destination[rest] + part[rest]
        length = length[rest] - part[rest]
    return found


def _few(writes: Writes, sources: Tiles, destinations: Tiles) -> list[Batch] | None:
    """One batch, if every write stays in one registration, all are of one kind, and they are small; else None."""
    here: list[tuple[int, int, int]] = []
    there: list[tuple[int, int, int]] = []
    kinds: set[tuple[MemoryKind, MemoryKind]] = set()
    total = 0
    for source, destination, length in zip(*writes, strict=True):
        if not length:
            continue
        source_run, destination_run = sources.holding(source, length), destinations.holding(destination, length)
        if source_run is None or destination_run is None:
            return None
        here.append((source, length, source_run.device))
        there.append((destination, length, destination_run.device))
        kinds.add((source_run.kind, destination_run.kind))
        total += length
    if not here:
        return []
    return [Batch(here, there, kinds.pop(), total)] if len(kinds) == 1 and total <= BATCH_BYTES else None


def _check(writes: Writes, addresses: Any, which: Any, room: Any, what: str) -> None:
    if room.all():
        return
    index = int(which[int(np.argmin(room))])
    raise outside(index, addresses, writes.length, what)


def _grouped(here: Any, there: Any, here_cuda: Any, there_cuda: Any) -> list[Batch]:
    found: list[Batch] = []
    group = here_cuda * 2 + there_cuda
    for value in np.unique(group):
        chosen = group == value
        kinds = (
            MemoryKind.CUDA if value >= 2 else MemoryKind.CPU,
            MemoryKind.CUDA if value % 2 else MemoryKind.CPU,
        )
        found += _sliced(here[chosen], there[chosen], kinds)
    return found


def _sliced(here: Any, there: Any, kinds: tuple[MemoryKind, MemoryKind]) -> list[Batch]:
    total = np.cumsum(here[:, 1])
    found: list[Batch] = []
    start = 0
    while start < len(here):
        before = int(total[start - 1]) if start else 0
        end = int(np.searchsorted(total, before + BATCH_BYTES, side="right"))
        end = max(start + 1, min(end, start + BATCH_WRITES))
        found.append(Batch(here[start:end], there[start:end], kinds, int(total[end - 1]) - before))
        start = end
    return found
