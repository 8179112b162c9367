"""Strided boxes of bytes, and how they join into longer runs.

One run of tokens in one plane is a box: a contiguous length, repeated over some of the axes [token, head, element].
Boxes of several planes join where the end of one is the start of the next on both sides, and an axis joins the length
where its step equals the length on both sides. Whole pages, token rows and single runs all come out of these two rules.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

from pdhandoff.layouts.descriptor import Plane

__all__ = ["Axis", "Box", "join_boxes", "plane_box"]


class Axis(NamedTuple):
    """A repetition, with a step in bytes on each side."""

    times: int
    source_step: int
    destination_step: int


class Box(NamedTuple):
    """`length` bytes at an offset on each side, repeated over the axes."""

    source: int
    destination: int
    length: int
    axes: tuple[Axis, ...] = ()
    "in ascending order; none of them repeats only once"

    def split(self) -> tuple[Axis, list[tuple[int, int]]]:
        """The axis with most repetitions, and the (source, destination) shifts that the other axes make."""
        if not self.axes:
            return Axis(1, 0, 0), [(0, 0)]
        inner = self.axes[-1]
        return inner, list(_shifts(self.axes[:-1]))


def plane_box(
    source: Plane, destination: Plane, *, tokens: int, heads: int, source_head: int, destination_head: int
) -> Box:
    """The box of `tokens` rows of `heads` heads of one plane. Offsets are those of slot 0 of a page.

    `source_head` and `destination_head` are the first head's position in each side's page.
    """
    return _collapse(
        Box(
            source.offset + source_head * source.head_stride,
            destination.offset + destination_head * destination.head_stride,
            source.element.nbytes,
            (
                Axis(tokens, source.token_stride, destination.token_stride),
                Axis(heads, source.head_stride, destination.head_stride),
                Axis(source.elements, source.element_step, destination.element_step),
            ),
        )
    )


def join_boxes(boxes: Sequence[Box]) -> list[Box]:
    """The same bytes in as few and as long boxes as the two rules give."""
    joined = sorted(boxes)
    while True:
        before = len(joined)
        joined = [_collapse(box) for box in _join_neighbours(joined)]
        if len(joined) == before:
            return joined


def _join_neighbours(boxes: Sequence[Box]) -> Iterator[Box]:
    last: Box | None = None
    for box in sorted(boxes):
        if last is not None and _follows(last, box):
            last = last._replace(length=last.length + box.length)
            continue
        if last is not None:
            yield last
        last = box
    if last is not None:
        yield last


def _follows(a: Box, b: Box) -> bool:
    return a.axes == b.axes and a.source + a.length == b.source and a.destination + a.length == b.destination


def _collapse(box: Box) -> Box:
    length = box.length
    axes = [axis for axis in box.axes if axis.times > 1]
    while True:
        dense = next((axis for axis in axes if axis.source_step == axis.destination_step == length), None)
        if dense is None:
            return box._replace(length=length, axes=tuple(sorted(axes)))
        axes.remove(dense)
        length *= dense.times


def _shifts(axes: Sequence[Axis]) -> Iterator[tuple[int, int]]:
    for index in product(*(range(axis.times) for axis in axes)):
        pairs = list(zip(index, axes, strict=True))
        yield sum(i * axis.source_step for i, axis in pairs), sum(i * axis.destination_step for i, axis in pairs)
