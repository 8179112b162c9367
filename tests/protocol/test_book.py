from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdhandoff.errors import LocalError
from pdhandoff.ids import Incarnation
from pdhandoff.protocol.book import Arena, ExtentBook, Landing, Record, Slot
from pdhandoff.protocol.manifest import PIECE_ALIGNMENT, place_pieces
from support.peers import handoff_id

WRITER = Incarnation(b"w" * 16)
PAGE = 4096


def book(pages: int = 4, **more: int) -> ExtentBook:
    return ExtentBook([Arena(0, PAGE, pages * PAGE + 100)], **more)


def reserve(of: ExtentBook, number: int, *pieces: int) -> Record | None:
    return of.reserve(handoff_id(number), {Slot(0, 0): pieces}, {0: WRITER})


def must(record: Record | None) -> Record:
    assert record is not None
    return record


def finish(of: ExtentBook, record: Record) -> bool:
    of.end(record.generation)
    return of.writer_done(record.generation, 0)


@pytest.mark.parametrize(
    "arenas", [[], [Arena(0, 1, PAGE)], [Arena(0, 0, PAGE), Arena(0, PAGE, PAGE)]], ids=["none", "misaligned", "twice"]
)
def test_arenas_are_one_per_rank_and_aligned(arenas: list[Arena]) -> None:
    with pytest.raises(LocalError, match="one arena per consumer rank"):
        ExtentBook(arenas)


def test_memory_is_free_when_its_handoff_its_writers_and_its_readers_are_gone() -> None:
    it = book()
    record = must(reserve(it, 1, PAGE))
    assert it.add_reader(record.generation)
    assert not it.writer_done(record.generation, 0)
    assert not it.end(record.generation)
    assert not it.add_reader(record.generation)
    assert it.statistics().ending_bytes == PAGE
    assert it.remove_reader(record.generation)
    for again in (it.end, it.remove_reader):
        assert again(record.generation)
    assert it.writer_done(record.generation, 0)
    assert it.statistics().free_bytes == 4 * PAGE


def test_a_reader_that_never_was_cannot_be_removed() -> None:
    it = book()
    record = must(reserve(it, 1, PAGE))
    with pytest.raises(LocalError, match="no reader"):
        it.remove_reader(record.generation)


def test_quarantine_is_for_ended_handoffs_with_writers_and_counted_once() -> None:
    it = book()
    record = must(reserve(it, 1, PAGE))
    it.quarantine(record.generation)
    assert it.statistics().quarantines == 0
    it.end(record.generation)
    it.quarantine(record.generation)
    it.quarantine(record.generation)
    it.quarantine(99)
    assert (it.statistics().quarantines, it.statistics().quarantined_bytes) == (1, PAGE)
    assert it.writer_done(record.generation, 0)
    assert it.statistics().quarantined_bytes == 0


def test_all_shards_get_memory_or_none_does() -> None:
    it = ExtentBook([Arena(0, PAGE, PAGE), Arena(1, 0, PAGE)])
    wants = {Slot(0, 0): [PAGE], Slot(1, 1): [PAGE + 1]}
    assert not it.fits_when_empty(wants)
    assert it.reserve(handoff_id(1), wants, {}) is None
    assert it.statistics().free_bytes == 2 * PAGE
    assert not it.fits_when_empty({Slot(0, 7): [1]})


def test_a_fragmented_arena_is_used_in_parts_and_no_piece_is_split() -> None:
    it = book(5)
    records = [must(reserve(it, number, PAGE)) for number in range(5)]
    for record in records[::2]:
        finish(it, record)
    half = PAGE // 2
    record = must(reserve(it, 9, half, half, PAGE))
    assert [extent.length for extent in record.of_shard(0)] == [PAGE, PAGE]
    assert reserve(it, 10, PAGE, PAGE) is None
    finish(it, record)
    record = must(reserve(it, 11, half + 64, half, half))
    assert len(record.of_shard(0)) == 2
    finish(it, record)
    assert reserve(it, 12, 2 * PAGE) is None


def test_a_grant_has_no_more_extents_than_a_message_can_name() -> None:
    it = book(5, max_extents=1)
    records = [must(reserve(it, number, PAGE)) for number in range(5)]
    for record in records[::2]:
        finish(it, record)
    assert reserve(it, 9, PAGE, PAGE) is None


def test_freed_neighbours_become_one_run() -> None:
    it = book(3)
    records = [must(reserve(it, number, PAGE)) for number in range(3)]
    for number in (0, 2, 1):
        finish(it, records[number])
    assert len(must(reserve(it, 9, 3 * PAGE)).of_shard(0)) == 1


def test_nothing_needs_no_memory() -> None:
    it = book(1)
    must(reserve(it, 1, PAGE))
    assert must(reserve(it, 2)).nbytes == 0
    assert must(reserve(it, 3, 0, 0)).of_shard(0) == ()


@given(st.lists(st.tuples(st.booleans(), st.lists(st.integers(1, 3 * PAGE), min_size=1, max_size=4)), max_size=20))
def test_extents_never_overlap_and_hold_their_pieces(steps: list[tuple[bool, list[int]]]) -> None:
    it = book(8)
    live: list[Record] = []
    for number, (free, pieces) in enumerate(steps):
        if free and live:
            assert finish(it, live.pop(number % len(live)))
            continue
        record = reserve(it, number, *pieces)
        if record is None:
            continue
        live.append(record)
        at = place_pieces(pieces, [(run.address, run.length) for run in record.of_shard(0)])
        assert all(address % PIECE_ALIGNMENT == 0 for address in at)
    runs = sorted(run for record in live for run in record.of_shard(0))
    for before, after in itertools.pairwise(runs):
        assert before.address + before.length <= after.address
    for record in live:
        finish(it, record)
    assert it._free == {0: [Landing(PAGE, 8 * PAGE)]}
