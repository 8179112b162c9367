from __future__ import annotations

import ctypes

import pytest

from pdhandoff.native import Native
from pdhandoff.native.memmove import copy_plan, copy_writes
from pdhandoff.planner.copies import CopyPlan, plan_copies
from support.caches import Cache, page_table
from support.native_components import key_value, latent_rows


def test_columns_are_copied_in_order() -> None:
    memory = bytearray(b"abcdefgh--------")
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert copy_writes([start, start + 2, start], [start + 8, start + 12, start + 15], [3, 0, 1]) == 4
    assert memory == b"abcdefghabc----a"


def test_columns_of_different_length_are_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        copy_writes([], [], [1])


def test_a_plan_moves_its_rows_and_nothing_else(native: Native) -> None:
    source, target = key_value("nhd", page_tokens=4), key_value("transposed", page_tokens=8)
    here, there = Cache(source, 6, seed=5), Cache(target, 4)
    here_pages, there_pages = page_table(source, [5, 2, 0, 4]), page_table(target, [3, 1])
    plan = plan_copies(
        source=source,
        source_at=here.placement,
        source_pages=here_pages,
        destination=target,
        destination_at=there.placement,
        destination_pages=there_pages,
        tokens=range(2, 15),
    )
    before = bytes(there.memory)
    native.copy(plan)
    for layer in (0, 1):
        for a, b in zip(source.planes, target.planes, strict=True):
            for token in range(2, 15):
                for head in (0, 1):
                    row = here.row(a, layer, here_pages, token, head)
                    assert there.row(b, layer, there_pages, token, head) == row
    assert there.changed(before) <= there.row_offsets(there_pages, range(2, 15))


def test_bytes_copied_are_counted() -> None:
    component = latent_rows(page_tokens=4)
    here, there = Cache(component, 2, seed=5), Cache(component, 2)
    table = page_table(component, [1, 0])
    plan = plan_copies(
        source=component,
        source_at=here.placement,
        source_pages=table,
        destination=component,
        destination_at=there.placement,
        destination_pages=table,
        tokens=range(7),
    )
    assert copy_plan(plan) == plan.nbytes == 2 * 7 * 656
    assert copy_plan(CopyPlan((), 0, 0)) == 0
