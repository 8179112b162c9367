"""Caches of a decode engine into which rows are converted, and what must be in them afterwards."""

from __future__ import annotations

import ctypes

from pdhandoff import Layout, PageTable, Placement
from support.engines import right_rows

__all__ = ["check_converted", "decode_caches", "decode_pages"]


def decode_pages(layout: Layout, pages: int = 20) -> dict[str, PageTable]:
    return {component.name: PageTable(range(pages), component.page_tokens) for component in layout.components}


def decode_caches(layout: Layout, tokens: int) -> tuple[dict[str, Placement], list[object]]:
    """Memory of a decode engine, filled with what must not survive, and what keeps it alive."""
    placements: dict[str, Placement] = {}
    buffers: list[object] = []
    for component in layout.components:
        pages = -(-tokens // component.page_tokens) + 1
        stride = component.planes[0].page_stride
        bases = []
        for _ in component.layers:
            buffer = (ctypes.c_ubyte * (pages * stride))(*([0xEE] * (pages * stride)))
            buffers.append(buffer)
            bases.append(ctypes.addressof(buffer))
        placements[component.name] = Placement(pages, {"": bases})
    return placements, buffers


def check_converted(layout: Layout, caches: dict[str, Placement], tag: int, tokens: int) -> None:
    """Every row is there, and the rest of the last page is zero."""
    for component in layout.components:
        table = decode_pages(layout)[component.name]
        at = caches[component.name]
        for address, data in right_rows(
            component, at, layers=component.layers, table=table, tokens=range(tokens), tag=tag
        ):
            assert ctypes.string_at(address, len(data)) == data
        end = -(-tokens // component.page_tokens) * component.page_tokens
        for address, data in right_rows(
            component, at, layers=component.layers, table=table, tokens=range(tokens, end), tag=tag
        ):
            assert ctypes.string_at(address, len(data)) == bytes(len(data))
