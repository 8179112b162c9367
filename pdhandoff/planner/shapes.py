"""Offsets of many runs at once: runs of one shape share their boxes, so only page ids and slots vary.

Inside one plane, the offset of a run is `page * page_stride + slot * token_stride + box offset`. Planes that move alike
(same region and strides on both sides) form one group, whose boxes are joined once for all runs of one token count.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, compress, groupby, islice
from operator import add, and_, eq, not_, sub
from typing import NamedTuple, final

from pdhandoff.layouts.descriptor import Component, Plane
from pdhandoff.planner.boxes import Axis, Box, join_boxes, plane_box
from pdhandoff.planner.pages import PageTable, TokenRuns, token_runs

__all__ = ["Columns", "Pair", "Side", "Stream", "copy_columns"]

_KEPT_PLANS = 256


@final
class Pair:
    """The same planes on both sides, and the heads that move. Remembers the boxes of each token count that it met."""

    def __init__(
        self, source: Component, destination: Component, planes: tuple[tuple[Plane, Plane], ...], heads: range
    ) -> None:
        self.source = source
        self.destination = destination
        self.planes = planes
        self.heads = heads
        "counted over the whole model"
        self.row_bytes = sum(plane.row_bytes for plane, _ in planes) * len(heads)
        "bytes of one token in one layer"
        self._groups: dict[int, list[_Group]] = {}
        self._planned: dict[tuple[range, PageTable, PageTable], tuple[TokenRuns, dict[Stream, Columns]]] = {}

    def columns(
        self, tokens: range, source: PageTable, destination: PageTable
    ) -> tuple[TokenRuns, dict[Stream, Columns]]:
        """Runs and copies of one layer. Those between packed tables (a ring, a landing piece) recur: they are kept."""
        recurs = isinstance(source.ids, range) and isinstance(destination.ids, range)
        key = (tokens, source, destination)
        if recurs and key in self._planned:
            return self._planned[key]
        runs = token_runs(tokens, source, destination)
        planned = runs, copy_columns(self, runs)
        if recurs:
            if len(self._planned) >= _KEPT_PLANS:
                self._planned.clear()
            self._planned[key] = planned
        return planned

    def groups(self, tokens: int) -> list[_Group]:
        """The boxes of runs of so many tokens."""
        groups = self._groups.get(tokens)
        if groups is None:
            whole = tokens == self.source.page_tokens == self.destination.page_tokens
            groups = self._groups[tokens] = list(_groups(self, tokens, whole_page=whole))
        return groups


class Side(NamedTuple):
    """How offsets on one side follow from pages and slots."""

    region: str
    page_stride: int
    token_stride: int
    "0 where planes differ in it and only whole pages are meant"

    def offsets(self, pages: Sequence[int], slots: Sequence[int], offset: int) -> list[int]:
        """Bytes from the layer's base to each run."""
        page_stride, token_stride = self.page_stride, self.token_stride
        if token_stride == 0 or not any(slots):
            return [page * page_stride + offset for page in pages]
        return [page * page_stride + slot * token_stride + offset for page, slot in zip(pages, slots, strict=True)]


class Stream(NamedTuple):
    """Copies that can share columns: same regions and strides, same repetition."""

    source: Side
    destination: Side
    axis: Axis
    shifts: tuple[tuple[int, int], ...]
    "(source, destination) bytes, one repetition of all copies for each"


class Columns(NamedTuple):
    """Offsets from the layer's base and lengths of the copies of one stream, in bytes, in token order."""

    source: list[int]
    destination: list[int]
    length: list[int]

    def merged(self) -> Columns:
        """The same bytes, with every copy that starts where the one before it ends (on both sides) joined to it."""
        ends = map(add, self.source, self.length), map(add, self.destination, self.length)
        starts = islice(self.source, 1, None), islice(self.destination, 1, None)
        joins = list(map(and_, map(eq, starts[0], ends[0]), map(eq, starts[1], ends[1])))
        if True not in joins:
            return self
        first = [True, *map(not_, joins)]
        before = [*compress(accumulate(self.length, initial=0), first), sum(self.length)]
        return Columns(
            list(compress(self.source, first)),
            list(compress(self.destination, first)),
            list(map(sub, before[1:], before)),
        )


def copy_columns(pair: Pair, runs: TokenRuns) -> dict[Stream, Columns]:
    """All copies of one layer. Nothing is made per token, and nothing per head or element where a step can say it."""
    streams: dict[Stream, Columns] = {}
    first = 0
    for count, members in groupby(runs.length):
        last = first + len(list(members))
        part = TokenRuns(*(column[first:last] for column in runs))
        for group in pair.groups(count):
            group.emit(part, streams)
        first = last
    return {stream: columns if stream.axis.times > 1 else columns.merged() for stream, columns in streams.items()}


class _Group(NamedTuple):
    """Boxes whose offsets move alike from run to run."""

    source: Side
    destination: Side
    boxes: list[Box]

    def emit(self, runs: TokenRuns, streams: dict[Stream, Columns]) -> None:
        for box in self.boxes:
            axis, shifts = box.split()
            stream = Stream(self.source, self.destination, axis, tuple(shifts))
            columns = streams.setdefault(stream, Columns([], [], []))
            columns.source.extend(self.source.offsets(runs.source_page, runs.source_slot, box.source))
            columns.destination.extend(
                self.destination.offsets(runs.destination_page, runs.destination_slot, box.destination)
            )
            columns.length.extend([box.length] * len(runs.length))


def _groups(pair: Pair, tokens: int, *, whole_page: bool) -> Iterator[_Group]:
    """The boxes of runs of `tokens` tokens. Planes of different token strides join only when the page is whole."""
    sites: dict[tuple[object, ...], list[tuple[Plane, Plane]]] = {}
    for a, b in pair.planes:
        site = (a.region, b.region, a.page_stride, b.page_stride)
        strides = () if whole_page else (a.token_stride, b.token_stride)
        sites.setdefault((*site, *strides), []).append((a, b))
    for planes in sites.values():
        boxes = [
            plane_box(
                a,
                b,
                tokens=tokens,
                heads=len(pair.heads),
                source_head=pair.heads.start - pair.source.head_start,
                destination_head=pair.heads.start - pair.destination.head_start,
            )
            for a, b in planes
        ]
        yield _Group(_side([a for a, _ in planes]), _side([b for _, b in planes]), join_boxes(boxes))


def _side(planes: Sequence[Plane]) -> Side:
    strides = {plane.token_stride for plane in planes}
    return Side(planes[0].region, planes[0].page_stride, strides.pop() if len(strides) == 1 else 0)
