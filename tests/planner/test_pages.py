from __future__ import annotations

import pytest

from pdhandoff.errors import ErrorCode, PlanError
from pdhandoff.planner import PageTable, TokenRuns, admit_length, token_runs


def test_runs_end_where_either_side_ends_a_page() -> None:
    runs = token_runs(range(20), PageTable((7, 3, 5), 8), PageTable((1, 0), 12))
    assert list(zip(*runs, strict=True)) == [(7, 0, 1, 0, 8), (3, 0, 1, 8, 4), (3, 4, 0, 0, 4), (5, 0, 0, 4, 4)]
    assert runs.tokens == 20


def test_equal_pages_give_one_run_a_page() -> None:
    runs = token_runs(range(3, 18), PageTable((7, 3, 5), 8), PageTable((1, 0, 2), 8))
    assert list(zip(*runs, strict=True)) == [(7, 3, 1, 3, 5), (3, 0, 0, 0, 8), (5, 0, 2, 0, 2)]


def test_a_large_destination_page_takes_many_small_source_pages() -> None:
    runs = token_runs(range(2, 9), PageTable((4, 1, 0), 4), PageTable((6,), 100))
    assert list(zip(*runs, strict=True)) == [(4, 2, 6, 2, 2), (1, 0, 6, 4, 4), (0, 0, 6, 8, 1)]


def test_a_table_may_start_late_on_either_side() -> None:
    runs = token_runs(range(9, 12), PageTable((4,), 4, first_token=8), PageTable((2, 5), 8, first_token=8))
    assert list(zip(*runs, strict=True)) == [(4, 1, 2, 1, 3)]


def test_lookahead_pages_are_not_looked_at() -> None:
    exact = token_runs(range(8), PageTable((4, 1), 4), PageTable((2,), 8))
    assert token_runs(range(8), PageTable((4, 1, 99, 99), 4), PageTable((2, 2), 8)) == exact


def test_null_pages_are_left_out_on_both_sides() -> None:
    runs = token_runs(range(16), PageTable((4, 0, 1, 3), 4, null=0), PageTable((7, 6, 0, 5), 4, null=0))
    assert list(zip(*runs, strict=True)) == [(4, 0, 7, 0, 4), (3, 0, 5, 0, 4)]
    assert runs.tokens == 8


def test_the_same_id_is_a_page_where_nothing_is_null() -> None:
    assert token_runs(range(4), PageTable((0,), 4), PageTable((0,), 4)).tokens == 4


def test_no_tokens_need_no_pages() -> None:
    assert token_runs(range(5, 5), PageTable((), 4), PageTable((), 8)) == TokenRuns([], [], [], [], [])


@pytest.mark.parametrize(
    ("source", "destination", "reason"),
    [
        (PageTable((1,), 4), PageTable((1, 2), 4), "source page table has 1 pages of 4 tokens: .* token 4"),
        (PageTable((1, 2), 4), PageTable((1,), 4), "destination page table has 1 pages of 4 tokens: .* token 4"),
        (PageTable((), 4, first_token=0), PageTable((1, 2), 4), "no page for token 1"),
        (PageTable((1, 2), 4, first_token=4), PageTable((1, 2), 4), "source page table starts at token 4"),
        (PageTable((1, 2), 4, first_token=2), PageTable((1, 2), 4), "first token 2 is no multiple of 4"),
        (PageTable((1, 2), 4, first_token=-4), PageTable((1, 2), 4), "first token -4"),
        (PageTable((1, 2), 0), PageTable((1, 2), 4), "0 tokens a page"),
        (PageTable((1, 2), 4), PageTable((3, 3), 4), "names page 3 twice"),
    ],
)
def test_tables_that_do_not_fit_are_refused(source: PageTable, destination: PageTable, reason: str) -> None:
    with pytest.raises(PlanError, match=reason) as error:
        token_runs(range(1, 8), source, destination)
    assert error.value.code == ErrorCode.OUT_OF_RANGE


@pytest.mark.parametrize("tokens", [range(0, 8, 2), range(8, 0, -1), range(-1, 3)])
def test_token_ranges_ascend_without_gaps(tokens: range) -> None:
    with pytest.raises(PlanError, match="ascending"):
        token_runs(tokens, PageTable((1, 2), 4), PageTable((1, 2), 4))


def test_several_null_pages_are_no_repetition() -> None:
    holes = PageTable((0, 0, 2), 4, null=0)
    assert token_runs(range(12), PageTable((1, 2, 3), 4), holes).tokens == 4
    with pytest.raises(PlanError, match="names page 2 twice"):
        token_runs(range(16), PageTable((1, 2, 3, 4), 4), PageTable((0, 0, 2, 2), 4, null=0))


@pytest.mark.parametrize(
    ("tokens", "pages", "first"),
    [(range(10), 3, 0), (range(6, 10), 2, 4), (range(4, 8), 1, 4), (range(5, 5), 0, 4), (range(8, 9), 1, 8)],
)
def test_packed_tables_start_with_the_page_of_the_first_token(tokens: range, pages: int, first: int) -> None:
    table = PageTable.packed(tokens, 4)
    assert (list(table.ids), table.first_token, table.null) == (list(range(pages)), first, None)
    assert table.stop_token == first + 4 * pages


def test_admission_names_both_lengths() -> None:
    assert admit_length(9, 10) == 9
    with pytest.raises(PlanError, match=r"prompt of 10 tokens .* holds 10: shorten it to 9"):
        admit_length(10, 10)
    with pytest.raises(PlanError, match="at least one token, got 0"):
        admit_length(0, 10)


def test_a_table_says_whether_a_page_of_some_tokens_is_missing() -> None:
    table = PageTable((5, 0, 6), 16, null=0)
    assert table.has_null(range(10, 20))
    assert not table.has_null(range(16))
    assert not table.has_null(range(32, 48))
    assert not table.has_null(range(16, 16))
    assert not PageTable((5, 0, 6), 16).has_null(range(48))
