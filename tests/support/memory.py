"""Pretend memory in which every byte is a number that says which row it belongs to, and an executor of copy plans.

A byte cell holds an identity instead of eight bits, so a row that arrives in the wrong place is seen with certainty,
and every cell counts how often it was written. Addresses that belong to no allocation cannot be touched.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from pdhandoff.layouts.descriptor import Component, Plane
from pdhandoff.planner import CopyPlan, PageTable, Placement

UNTOUCHED = -1
"what a cell holds before anything was written to it"
_GAP = 4096
"bytes between allocations that belong to nobody"


class Segment(NamedTuple):
    """One allocation: a region of one layer of a component."""

    base: int
    cells: list[int]
    writes: bytearray
    "how often each cell was written"


class Memory:
    """An address space of several allocations."""

    def __init__(self) -> None:
        self._bases: list[int] = []
        self._segments: list[Segment] = []

    def allocate(self, nbytes: int) -> int:
        """The address of `nbytes` untouched cells."""
        last = self._segments[-1] if self._segments else None
        base = _GAP if last is None else last.base + len(last.cells) + _GAP
        self._bases.append(base)
        self._segments.append(Segment(base, [UNTOUCHED] * nbytes, bytearray(nbytes)))
        return base

    def place(self, component: Component, pages: int) -> Placement:
        """One allocation for each region and layer, with room for `pages` pages and not a byte more."""
        bases: dict[str, list[int]] = {}
        for region in component.regions:
            stride = max(plane.page_stride for plane in component.planes if plane.region == region)
            nbytes = max(pages - 1, 0) * stride + component.region_page_bytes(region)
            bases[region] = [self.allocate(nbytes) for _ in component.layers]
        return Placement(pages, bases)

    def locate(self, address: int, length: int) -> tuple[Segment, int]:
        """The allocation that holds a run of bytes, and the run's offset in it."""
        index = bisect_right(self._bases, address) - 1
        segment = self._segments[index]
        offset = address - segment.base
        assert index >= 0, f"address {address} lies before all memory"
        assert 0 < length, f"a copy of {length} bytes"
        assert 0 <= offset <= offset + length <= len(segment.cells), f"{address}+{length} leaves its allocation"
        return segment, offset

    def fill(self, rows: Iterable[tuple[int, int]]) -> None:
        """Set cells, given as (address, identity)."""
        for address, identity in rows:
            segment, offset = self.locate(address, 1)
            segment.cells[offset] = identity

    def copy(self, source: int, destination: int, length: int) -> None:
        """One copy, counted."""
        a, i = self.locate(source, length)
        b, j = self.locate(destination, length)
        b.cells[j : j + length] = a.cells[i : i + length]
        for cell in range(j, j + length):
            b.writes[cell] += 1

    def execute(self, plan: CopyPlan, max_writes: int = 1000) -> None:
        """Run a plan, and hold it to what it says about itself."""
        nbytes = copies = 0
        for writes in plan.writes(max_writes):
            assert 0 < len(writes.length) <= max_writes
            for source, destination, length in zip(*writes, strict=True):
                self.copy(source, destination, length)
            nbytes += sum(writes.length)
            copies += len(writes.length)
        assert (nbytes, copies) == (plan.nbytes, plan.copies)

    def written(self, placement: Placement) -> dict[int, int]:
        """Address -> identity of every cell of a placement that was written, each of them exactly once."""
        cells: dict[int, int] = {}
        for bases in placement.bases.values():
            for base in bases:
                segment, _ = self.locate(base, 1)
                for offset, times in enumerate(segment.writes):
                    assert times <= 1, f"byte {offset} of the allocation at {base} was written {times} times"
                    if times:
                        cells[base + offset] = segment.cells[offset]
        return cells


def row_cells(
    component: Component,
    placement: Placement,
    pages: PageTable,
    tokens: Iterable[int],
    *,
    layers: Sequence[int] | None = None,
    heads: range | None = None,
) -> Iterator[tuple[int, int]]:
    """(address, identity) of every byte of these rows, by the address formula of the descriptor, one byte at a time.

    The identity depends on layer, token, head, plane and byte alone, never on where the row lies.
    """
    names = sorted(plane.name for plane in component.planes)
    row_bytes = {plane.name: list(_row_bytes(plane)) for plane in component.planes}
    for token in tokens:
        page, slot = divmod(token - pages.first_token, pages.page_tokens)
        if pages.ids[page] == pages.null:
            continue
        for layer in component.layers if layers is None else layers:
            for head in range(component.head_start, component.head_start + component.heads) if heads is None else heads:
                for plane in component.planes:
                    row = (
                        placement.bases[plane.region][component.layers.index(layer)]
                        + pages.ids[page] * plane.page_stride
                        + plane.offset
                        + slot * plane.token_stride
                        + (head - component.head_start) * plane.head_stride
                    )
                    who = (((layer * 10000 + token) * 100 + head) * 10 + names.index(plane.name)) * 1000
                    for index, offset in row_bytes[plane.name]:
                        yield row + offset, who + index


def _row_bytes(plane: Plane) -> Iterator[tuple[int, int]]:
    """(position in the row, bytes from the row's address) of every byte of one row of a plane."""
    size = plane.element.nbytes
    for element in range(plane.elements):
        for byte in range(size):
            yield element * size + byte, element * plane.element_step + byte
