from __future__ import annotations

import pytest

from pdhandoff.layouts.descriptor import Element, Plane
from pdhandoff.planner.boxes import Axis, Box, join_boxes, plane_box

ROW = Plane(name="key", element=Element.BF16, elements=4, page_stride=64, token_stride=16, head_stride=8)


def box(source: Plane, destination: Plane, tokens: int = 4, heads: int = 2) -> Box:
    return plane_box(source, destination, tokens=tokens, heads=heads, source_head=0, destination_head=0)


def test_axes_that_are_dense_on_both_sides_join_the_length() -> None:
    assert box(ROW, ROW) == Box(0, 0, 64)


def test_an_axis_that_is_dense_on_one_side_only_stays_a_step() -> None:
    other = Plane(name="key", element=Element.BF16, elements=4, page_stride=64, token_stride=8, head_stride=32)
    assert box(ROW, other) == Box(0, 0, 8, (Axis(2, 8, 32), Axis(4, 16, 8)))


def test_heads_start_at_their_own_position_on_each_side() -> None:
    assert plane_box(ROW, ROW, tokens=1, heads=1, source_head=1, destination_head=0) == Box(8, 0, 8)


@pytest.mark.parametrize(
    ("boxes", "joined"),
    [
        ([Box(0, 0, 4), Box(4, 4, 8)], [Box(0, 0, 12)]),
        ([Box(4, 4, 8), Box(0, 0, 4)], [Box(0, 0, 12)]),
        ([Box(0, 0, 4), Box(4, 5, 8)], [Box(0, 0, 4), Box(4, 5, 8)]),
        ([Box(0, 0, 4), Box(5, 4, 8)], [Box(0, 0, 4), Box(5, 4, 8)]),
        ([Box(0, 0, 4, (Axis(2, 8, 8),)), Box(4, 4, 4, (Axis(2, 8, 8),))], [Box(0, 0, 16)]),
        ([Box(0, 0, 4, (Axis(2, 8, 8),)), Box(4, 4, 4)], [Box(0, 0, 4, (Axis(2, 8, 8),)), Box(4, 4, 4)]),
        ([], []),
    ],
)
def test_boxes_join_only_where_one_ends_and_the_next_starts(boxes: list[Box], joined: list[Box]) -> None:
    assert join_boxes(boxes) == joined


def test_the_longest_axis_is_a_step_and_the_others_are_shifts() -> None:
    axis, shifts = Box(0, 0, 2, (Axis(2, 100, 7), Axis(3, 10, 30))).split()
    assert axis == Axis(3, 10, 30)
    assert shifts == [(0, 0), (100, 7)]
    assert Box(0, 0, 2).split() == (Axis(1, 0, 0), [(0, 0)])
