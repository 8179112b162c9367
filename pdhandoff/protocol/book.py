"""The book of extents: who may write to landing memory, who reads it, and when it is free again (rules 1 and 2).

One record per grant. Memory becomes free only when its handoff has ended and no writer and no reader is left. A
time-out, an error or a lost link ends a handoff; it never ends a writer.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import NamedTuple, final

import msgspec

from pdhandoff.errors import ErrorCode, LocalError
from pdhandoff.ids import HandoffId, Incarnation
from pdhandoff.protocol.manifest import PIECE_ALIGNMENT

__all__ = ["Arena", "BookStatistics", "ExtentBook", "Landing", "Record", "Slot"]


class Arena(NamedTuple):
    """Registered landing memory of one consumer rank."""

    destination: int
    "rank of the consumer"
    address: int
    length: int


class Landing(NamedTuple):
    """A granted run of an arena."""

    address: int
    length: int


class Slot(NamedTuple):
    """What one shard lands on one consumer rank."""

    shard: int
    destination: int


@final
class BookStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """How the arenas stand, in bytes, and counts since the start."""

    total_bytes: int
    free_bytes: int
    granted_bytes: int
    "of handoffs that go on, or are being read"
    ending_bytes: int
    "of ended handoffs whose writers or readers are not gone yet"
    quarantined_bytes: int
    "of those, the part that only a drain, a proof or a fence can free"
    grants: int
    quarantines: int


@final
class Record:
    """One grant: (handoff, generation, active writers, readers)."""

    __slots__ = ("ended", "extents", "generation", "handoff", "quarantined", "readers", "writers")

    def __init__(
        self,
        handoff: HandoffId,
        generation: int,
        extents: Mapping[Slot, tuple[Landing, ...]],
        writers: Mapping[int, Incarnation],
    ) -> None:
        self.handoff = handoff
        self.generation = generation
        self.extents = dict(extents)
        self.writers = dict(writers)
        "shard -> who may still write it"
        self.readers = 0
        self.ended = False
        self.quarantined = False

    @property
    def nbytes(self) -> int:
        """Bytes of all its extents."""
        return sum(extent.length for extents in self.extents.values() for extent in extents)

    def of_shard(self, shard: int) -> tuple[Landing, ...]:
        """All extents that one shard may write, on all consumer ranks."""
        return tuple(extent for slot, extents in self.extents.items() if slot.shard == shard for extent in extents)


@final
class ExtentBook:
    """Allocates landing memory and keeps one record per grant. Every method is idempotent."""

    def __init__(self, arenas: Sequence[Arena], *, alignment: int = 4096, max_extents: int = 4096) -> None:
        destinations = {arena.destination for arena in arenas}
        misaligned = alignment % PIECE_ALIGNMENT or any(arena.address % alignment for arena in arenas)
        if not arenas or len(destinations) != len(arenas) or misaligned:
            raise LocalError(
                ErrorCode.CONFIG,
                f"the book needs one arena per consumer rank that starts on a multiple of {alignment}, "
                f"got {list(arenas)}",
            )
        self._alignment = alignment
        self._max_extents = max_extents
        self._arenas = {
            arena.destination: Landing(arena.address, arena.length // alignment * alignment) for arena in arenas
        }
        self._free = {destination: [run] for destination, run in self._arenas.items()}
        self._records: dict[int, Record] = {}
        self._generation = 0
        self._quarantines = 0

    @property
    def records(self) -> Mapping[int, Record]:
        """Generation -> record, of all memory that is not free."""
        return self._records

    def fits_when_empty(self, wants: Mapping[Slot, Sequence[int]]) -> bool:
        """Whether these pieces, in bytes, could be granted if nothing else were."""
        empty = {destination: [run] for destination, run in self._arenas.items()}
        return self._take(empty, wants) is not None

    def reserve(
        self, handoff: HandoffId, wants: Mapping[Slot, Sequence[int]], writers: Mapping[int, Incarnation]
    ) -> Record | None:
        """Grant all pieces of all shards, or nothing (None). Pieces, in bytes, keep their order; none is split."""
        free = {destination: list(runs) for destination, runs in self._free.items()}
        extents = self._take(free, wants)
        if extents is None:
            return None
        self._free = free
        self._generation += 1
        record = Record(handoff, self._generation, extents, writers)
        self._records[record.generation] = record
        return record

    def end(self, generation: int) -> bool:
        """The handoff has ended. Returns whether the memory is free now."""
        record = self._records.get(generation)
        if record is None:
            return True
        record.ended = True
        return self._settle(record)

    def writer_done(self, generation: int, shard: int) -> bool:
        """This writer committed, drained, died or was fenced. Returns whether the memory is free now."""
        record = self._records.get(generation)
        if record is None:
            return True
        record.writers.pop(shard, None)
        return self._settle(record)

    def add_reader(self, generation: int) -> bool:
        """Somebody reads landed rows. False when the memory is gone or its handoff has ended."""
        record = self._records.get(generation)
        if record is None or record.ended:
            return False
        record.readers += 1
        return True

    def remove_reader(self, generation: int) -> bool:
        """One reader is done. Returns whether the memory is free now."""
        record = self._records.get(generation)
        if record is None:
            return True
        if record.readers == 0:
            raise LocalError(ErrorCode.MISUSE, f"generation {generation} has no reader to remove")
        record.readers -= 1
        return self._settle(record)

    def quarantine(self, generation: int) -> None:
        """The writers of an ended handoff did not drain in time: nothing but a proof frees this memory."""
        record = self._records.get(generation)
        if record is not None and record.ended and record.writers and not record.quarantined:
            record.quarantined = True
            self._quarantines += 1

    def statistics(self) -> BookStatistics:
        """How the arenas stand."""
        records = self._records.values()
        return BookStatistics(
            total_bytes=sum(run.length for run in self._arenas.values()),
            free_bytes=sum(run.length for runs in self._free.values() for run in runs),
            granted_bytes=sum(record.nbytes for record in records if not record.ended),
            ending_bytes=sum(record.nbytes for record in records if record.ended),
            quarantined_bytes=sum(record.nbytes for record in records if record.quarantined),
            grants=self._generation,
            quarantines=self._quarantines,
        )

    def _settle(self, record: Record) -> bool:
        if not record.ended or record.writers or record.readers:
            return False
        del self._records[record.generation]
        for slot, extents in record.extents.items():
            for extent in extents:
                _give_back(self._free[slot.destination], extent)
        return True

    def _take(
        self, free: dict[int, list[Landing]], wants: Mapping[Slot, Sequence[int]]
    ) -> dict[Slot, tuple[Landing, ...]] | None:
        taken: dict[Slot, tuple[Landing, ...]] = {}
        for slot, pieces in wants.items():
            extents = _allocate(free.get(slot.destination, []), pieces, self._alignment)
            if extents is None or len(extents) > self._max_extents:
                return None
            taken[slot] = tuple(extents)
        return taken


def _allocate(runs: list[Landing], pieces: Sequence[int], alignment: int) -> list[Landing] | None:
    """Cut extents for pieces out of `runs`: one that holds them all, else as few as the order of pieces allows."""
    sizes = [-(-piece // PIECE_ALIGNMENT) * PIECE_ALIGNMENT for piece in pieces]
    total = sum(sizes)
    if total == 0:
        return []
    for index, run in enumerate(runs):
        if run.length >= total:
            return [_cut(runs, index, total, alignment)]
    return _allocate_in_parts(runs, sizes, alignment)


def _allocate_in_parts(runs: list[Landing], sizes: Sequence[int], alignment: int) -> list[Landing] | None:
    extents: list[Landing] = []
    at, index = 0, 0
    while at < len(sizes):
        if index == len(runs):
            return None
        fits, stop = 0, at
        while stop < len(sizes) and fits + sizes[stop] <= runs[index].length:
            fits += sizes[stop]
            stop += 1
        if fits == 0:
            index += 1
            continue
        before = len(runs)
        extents.append(_cut(runs, index, fits, alignment))
        at = stop
        index += len(runs) == before  # the rest of this run is too small for the next piece
    return extents


def _cut(runs: list[Landing], index: int, nbytes: int, alignment: int) -> Landing:
    """Take the start of a run; lengths stay multiples of the alignment."""
    length = -(-nbytes // alignment) * alignment
    run = runs[index]
    if run.length == length:
        del runs[index]
    else:
        runs[index] = Landing(run.address + length, run.length - length)
    return Landing(run.address, length)


def _give_back(runs: list[Landing], extent: Landing) -> None:
    """Put a run back in order of address, merged with its neighbours."""
    at = bisect_left(runs, extent)
    address, length = extent
    if at < len(runs) and address + length == runs[at].address:
        length += runs.pop(at).length
    if at > 0 and runs[at - 1].address + runs[at - 1].length == address:
        address, length = runs[at - 1].address, runs[at - 1].length + length
        at -= 1
        del runs[at]
    runs.insert(at, Landing(address, length))
