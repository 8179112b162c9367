"""Memory that holds a component, with guards around it, and slow readers that follow the address formula."""

from __future__ import annotations

import contextlib
import ctypes
import random
from collections.abc import Iterator, Sequence
from typing import Any

from pdhandoff.layouts.descriptor import Component, Plane
from pdhandoff.planner.pages import PageTable
from pdhandoff.planner.placement import Placement

__all__ = ["Cache", "page_table", "reachable"]

_GUARD = 64
_PINNED = [False]


@contextlib.contextmanager
def reachable(*, by_devices: bool) -> Iterator[None]:
    """Inside, new caches lie in memory that CUDA devices reach, if `by_devices`."""
    _PINNED.append(by_devices)
    try:
        yield
    finally:
        _PINNED.pop()


def _allocated(content: bytes) -> bytearray | memoryview:
    if not _PINNED[-1]:
        return bytearray(content)
    import torch

    pinned: Any = torch.frombuffer(bytearray(content), dtype=torch.uint8).pin_memory().numpy()
    return memoryview(pinned)


class Cache:
    """One component in memory of its own: pages of every layer and region, guard bytes between them.

    Attributes:
        memory: all of it, guards included; compare copies of it to see what was written.
        placement: where the component lives in it.

    """

    def __init__(self, component: Component, pages: int, *, seed: int | None = None, skew: int = 0) -> None:
        self.component = component
        offsets: dict[str, list[int]] = {}
        at = _GUARD + skew
        for region in component.regions:
            stride = max(plane.page_stride for plane in component.planes if plane.region == region)
            for _ in component.layers:
                offsets.setdefault(region, []).append(at)
                at += (pages - 1) * stride + component.region_page_bytes(region) + _GUARD
        self.memory = _allocated(b"\xa5" * at if seed is None else random.Random(seed).randbytes(at))
        self._start = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.placement = Placement(
            pages, {region: [self._start + offset for offset in column] for region, column in offsets.items()}
        )

    def bases(self, layers: Sequence[int] | None = None) -> dict[str, list[int]]:
        """Region -> base addresses of these layers."""
        chosen = self.component.layers if layers is None else layers
        index = [self.component.layers.index(layer) for layer in chosen]
        return {region: [column[i] for i in index] for region, column in self.placement.bases.items()}

    def offsets(self, plane: Plane, layer: int, table: PageTable, token: int, head: int = 0) -> list[int]:
        """Positions in `memory` of all bytes of one row of a plane, in order. `head` is local."""
        page = table.ids[(token - table.first_token) // table.page_tokens]
        base = self.placement.bases[plane.region][self.component.layers.index(layer)] - self._start
        start = (
            base
            + page * plane.page_stride
            + plane.offset
            + token % table.page_tokens * plane.token_stride
            + head * plane.head_stride
        )
        step, size = plane.element_step, plane.element.nbytes
        return [start + element * step + byte for element in range(plane.elements) for byte in range(size)]

    def row(self, plane: Plane, layer: int, table: PageTable, token: int, head: int = 0) -> bytes:
        """The bytes of one row of a plane."""
        return bytes(self.memory[offset] for offset in self.offsets(plane, layer, table, token, head))

    def put(self, plane: Plane, layer: int, table: PageTable, token: int, *, data: bytes, head: int = 0) -> None:
        """Overwrite one row of a plane."""
        for offset, byte in zip(self.offsets(plane, layer, table, token, head), data, strict=True):
            self.memory[offset] = byte

    def row_offsets(self, table: PageTable, tokens: Sequence[int], heads: range | None = None) -> set[int]:
        """Positions in `memory` of every byte of these rows, all layers and planes. `heads` are local."""
        local = range(self.component.heads) if heads is None else heads
        return {
            offset
            for layer in self.component.layers
            for plane in self.component.planes
            for token in tokens
            for head in local
            for offset in self.offsets(plane, layer, table, token, head)
        }

    def changed(self, before: bytes) -> set[int]:
        """Positions whose byte differs from a copy taken before."""
        return {i for i, (a, b) in enumerate(zip(before, self.memory, strict=True)) if a != b}


def page_table(component: Component, ids: Sequence[int], *, first_token: int = 0, null: int | None = None) -> PageTable:
    """A page table with the component's own page size."""
    return PageTable(ids, component.page_tokens, first_token, null)
