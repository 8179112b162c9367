from __future__ import annotations

import random

import pytest
import torch

from pdhandoff.errors import LocalError
from pdhandoff.layouts.descriptor import Component, Element
from pdhandoff.native.strided import from_bytes, gather_bytes, gather_rows, locate, scatter_rows, to_bytes
from pdhandoff.planner.pages import PageTable
from support.caches import Cache, page_table
from support.native_components import index_planar, index_rows, key_value, latent_contiguous, latent_rows, moved

SHAPES = {
    "latent rows": latent_rows(page_tokens=8),
    "latent rows with a gap": latent_rows(page_tokens=8, row=700),
    "latent rows of odd stride": latent_rows(page_tokens=4, row=657),
    "contiguous latent": latent_contiguous(64),
    "planar index": index_planar(page_tokens=8),
    "planar index, ue8m0x4": index_planar(page_tokens=8, scales=Element.UE8M0X4),
    "planar index, ue8m0": index_planar(page_tokens=8, scales=Element.UE8M0),
    "interleaved index": index_rows(page_tokens=8),
    "nhd": key_value("nhd", page_tokens=8),
    "hnd": key_value("hnd", page_tokens=8),
    "transposed": key_value("transposed", page_tokens=8),
    "transposed, odd width": key_value("transposed", page_tokens=5, elements=7, heads=range(3)),
    "regions": key_value("regions", page_tokens=8),
    "block outermost": moved(key_value("nhd", page_tokens=8), page_gap=24),
    "one-token pages": latent_rows(page_tokens=1),
}


def shuffled_table(component: Component, tokens: int, seed: int = 5) -> tuple[PageTable, int]:
    pages = -(-tokens // component.page_tokens)
    ids = random.Random(seed).sample(range(pages + 3), pages)
    return page_table(component, ids), pages + 3


@pytest.mark.parametrize("skew", [0, 1, 4])
@pytest.mark.parametrize("name", SHAPES)
def test_gather_reads_what_the_address_formula_names(name: str, skew: int) -> None:
    component = SHAPES[name]
    table, pages = shuffled_table(component, 21)
    cache = Cache(component, pages, seed=11, skew=skew)
    at = locate(component, table, range(3, 21))
    for layer, plane in [(layer, plane) for layer in component.layers for plane in component.planes]:
        base = cache.bases([layer])[plane.region][0]
        rows = gather_bytes(component, plane, base, at)
        assert rows.shape == (18, component.heads, plane.row_bytes)
        for token in (3, 7, 8, 20):
            for head in range(component.heads):
                expected = cache.row(plane, layer, table, token, head)
                assert bytes(rows[token - 3, head].tolist()) == expected, (plane.name, token, head)


@pytest.mark.parametrize("skew", [0, 3])
@pytest.mark.parametrize("name", SHAPES)
def test_scatter_writes_those_bytes_and_no_others(name: str, skew: int) -> None:
    component = SHAPES[name]
    table, pages = shuffled_table(component, 21)
    source, target = Cache(component, pages, seed=12), Cache(component, pages, skew=skew)
    before = bytes(target.memory)
    for layer, plane in [(layer, plane) for layer in component.layers for plane in component.planes]:
        rows = gather_rows(component, plane, source.bases([layer])[plane.region][0], table, range(2, 19))
        base = target.bases([layer])[plane.region][0]
        scatter_rows(component, plane, base, table, range(2, 19), rows=rows)
        for token in range(2, 19):
            assert target.row(plane, layer, table, token) == source.row(plane, layer, table, token)
    assert target.changed(before) <= target.row_offsets(table, range(2, 19))


def test_some_heads() -> None:
    component = key_value("transposed", page_tokens=4, heads=range(4))
    table, pages = shuffled_table(component, 9)
    cache = Cache(component, pages, seed=3)
    plane = component.plane("key")
    base = cache.placement.bases[""][0]
    every = gather_rows(component, plane, base, table, range(9))
    assert torch.equal(
        gather_rows(component, plane, base, table, range(9), heads=range(1, 3)).view(torch.int16),
        every[:, 1:3].view(torch.int16),
    )
    for wrong in (range(3, 5), range(-1, 2), range(2, 1)):
        if len(wrong):
            with pytest.raises(LocalError, match="leave the 4 local heads"):
                gather_rows(component, plane, base, table, range(9), heads=wrong)


def test_nothing_to_read_touches_nothing() -> None:
    component = latent_rows()
    plane = component.plane("rope")
    empty = page_table(component, [])
    assert gather_rows(component, plane, 0, empty, range(5, 5)).shape == (0, 1, 64)
    scatter_rows(component, plane, 0, empty, range(0), rows=torch.zeros(0, 1, 64, dtype=torch.bfloat16))


def test_null_pages_are_left_out_on_both_ways() -> None:
    component = index_planar(page_tokens=4)
    table = page_table(component, [2, 0, 1], null=0)
    cache, target = Cache(component, 3, seed=4), Cache(component, 3)
    before = bytes(target.memory)
    plane = component.plane("index_key")
    rows = gather_rows(component, plane, cache.placement.bases[""][0], table, range(12))
    assert rows.shape == (8, 1, 128)
    assert bytes(rows[4, 0].view(torch.uint8).tolist()) == cache.row(plane, 0, table, 8)
    scatter_rows(component, plane, target.placement.bases[""][0], table, range(12), rows=rows)
    assert not target.changed(before) & target.row_offsets(table, range(4, 8))


def test_a_table_that_starts_late() -> None:
    component = latent_rows(page_tokens=4)
    table = page_table(component, [1, 0], first_token=8)
    at = locate(component, table, range(9, 15))
    assert at.page.tolist() == [1, 1, 1, 0, 0, 0]
    assert at.slot.tolist() == [1, 2, 3, 0, 1, 2]
    for tokens in (range(7, 9), range(9, 17)):
        with pytest.raises(LocalError, match=r"covers 8\.\.16"):
            locate(component, table, tokens)


def test_pages_are_checked() -> None:
    component = latent_rows(page_tokens=4)
    with pytest.raises(LocalError, match=r"page 7 .* has 7 pages"):
        locate(component, page_table(component, [0, 7]), range(8), page_count=7)
    with pytest.raises(LocalError, match="page -1 "):
        locate(component, page_table(component, [0, -1]), range(8))
    with pytest.raises(LocalError, match="64-token pages cannot index"):
        locate(component, PageTable([0], 64), range(4))
    with pytest.raises(LocalError, match="starts at token 2, inside a page"):
        locate(component, page_table(component, [0], first_token=2), range(2, 4))
    assert locate(component, page_table(component, [0, -1], null=-1), range(8), page_count=1).real.tolist() == [
        *[True] * 4,
        *[False] * 4,
    ]


def test_every_bit_pattern_survives_the_casts() -> None:
    words = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.uint8).reshape(-1, 128)
    plane = latent_rows().plane("rope")
    assert torch.equal(to_bytes(plane, from_bytes(plane, words)), words)


def test_rows_of_another_type_are_refused() -> None:
    for plane, rows in (
        (latent_rows().plane("rope"), torch.zeros(1, 64)),
        (latent_rows().plane("rope"), torch.zeros(1, 32, dtype=torch.bfloat16)),
        (index_planar(scales=Element.UE8M0X4).plane("index_key.scale"), torch.zeros(1, 4, dtype=torch.uint8)[:, :1]),
    ):
        with pytest.raises(LocalError, match="stores"):
            to_bytes(plane, rows)
