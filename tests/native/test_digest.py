from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdhandoff.errors import LocalError
from pdhandoff.layouts.descriptor import Component
from pdhandoff.native import Native, load
from pdhandoff.native.digest import DIGEST_MASK, head_key
from pdhandoff.planner.pages import PageTable
from support.caches import Cache, page_table
from support.digest_oracle import digest_oracle, row_digest
from support.native_components import index_planar, key_value, latent_rows, moved

REFERENCE = load("reference")


def digest(native: Native, cache: Cache, table: PageTable, tokens: range, heads: range | None = None) -> int:
    layers = cache.component.layers
    return native.digest(cache.component, layers=layers, bases=cache.bases(), pages=table, tokens=tokens, heads=heads)


@pytest.mark.parametrize(
    "component",
    [
        latent_rows(page_tokens=4, layers=(0, 3)),
        latent_rows(page_tokens=4, row=700, layers=(2,)),
        index_planar(page_tokens=4),
        key_value("transposed", page_tokens=4, heads=range(2, 4)),
        key_value("regions", page_tokens=4, elements=7),
    ],
    ids=["rows", "rows with gaps", "planar", "transposed", "regions"],
)
def test_it_is_what_the_specification_says(native: Native, component: Component) -> None:
    cache, table = Cache(component, 5, seed=21), page_table(component, [4, 0, 2])
    assert digest(native, cache, table, range(1, 11)) == digest_oracle(cache, table, range(1, 11))


def test_known_values(native: Native) -> None:
    """Pinned: peers of other versions compute these too. Change them only with the digest's version."""
    component = latent_rows(page_tokens=4, layers=(0, 1))
    cache, table = Cache(component, 2), page_table(component, [1, 0])
    for number, layer in enumerate(component.layers):
        for token in range(8):
            row = bytes((number + token + i * i) % 251 for i in range(656))
            for plane in component.planes:
                part = row[plane.offset : plane.offset + plane.row_bytes]
                cache.put(plane, layer, table, token, data=part)
    assert head_key("mla_latent", 0, 0) == 0x55BC0301366A4EDC
    assert row_digest("mla_latent", 0, 0, 0, bytes(i * i % 251 for i in range(656))) == 0x8CF56B95EA79E79A
    assert row_digest("index_key", 3, 1, 77, bytes(range(132))) == 0xF83BA990F8672970
    assert digest(native, cache, table, range(8)) == 0x20855F5BF2FC8705
    assert digest(native, cache, table, range(3, 4)) == 0xEB9E2F19BF461337


def test_no_rows_give_zero(native: Native) -> None:
    component = latent_rows(page_tokens=4)
    assert digest(native, Cache(component, 1), page_table(component, []), range(9, 9)) == 0
    assert native.digest(component, layers=(), bases={"": []}, pages=page_table(component, [0]), tokens=range(4)) == 0


@given(cuts=st.sets(st.integers(1, 30)), seed=st.integers(0, 1000))
@settings(max_examples=25, deadline=None)
def test_chunks_add_up(cuts: set[int], seed: int) -> None:
    component = index_planar(page_tokens=4)
    table = page_table(component, random.Random(seed).sample(range(10), 8))
    cache = Cache(component, 10, seed=seed)
    edges = [0, *sorted(cuts), 31]
    parts = [digest(REFERENCE, cache, table, range(a, b)) for a, b in pairwise(edges)]
    assert sum(parts) & DIGEST_MASK == digest(REFERENCE, cache, table, range(31))


def test_layers_and_heads_add_up(native: Native) -> None:
    component = key_value("hnd", page_tokens=4, heads=range(1, 4))
    cache, table = Cache(component, 3, seed=8), page_table(component, [2, 1])
    whole = digest(native, cache, table, range(7))
    by_head = [digest(native, cache, table, range(7), heads=range(head, head + 1)) for head in range(1, 4)]
    by_layer = [
        native.digest(component, layers=[layer], bases=cache.bases([layer]), pages=table, tokens=range(7))
        for layer in component.layers
    ]
    assert sum(by_head) & DIGEST_MASK == whole == sum(by_layer) & DIGEST_MASK


def test_long_ranges_are_hashed_in_parts_that_add_up(native: Native) -> None:
    component = key_value("nhd", page_tokens=64, heads=range(4), elements=64, layers=(0,))
    table, cache = page_table(component, range(20)), Cache(component, 20, seed=2)
    halves = digest(native, cache, table, range(640)) + digest(native, cache, table, range(640, 1280))
    assert digest(native, cache, table, range(1280)) == halves & DIGEST_MASK


@given(bit=st.integers(0, 656 * 8 - 1), token=st.integers(0, 7))
@settings(deadline=None)
def test_any_flipped_bit_changes_it(bit: int, token: int) -> None:
    component = latent_rows(page_tokens=4, layers=(1,))
    cache, table = Cache(component, 2, seed=1), page_table(component, [1, 0])
    before = digest(REFERENCE, cache, table, range(8))
    page = table.ids[token // 4]
    offset = 64 + page * component.planes[0].page_stride + token % 4 * 656 + bit // 8
    cache.memory[offset] ^= 1 << bit % 8
    assert digest(REFERENCE, cache, table, range(8)) != before


@pytest.mark.parametrize("pair", [(0, 8), (0, 648), (504, 512), (520, 528)])
@pytest.mark.parametrize("bit", [0, 31, 32, 63])
def test_the_same_bit_flipped_in_two_words_does_not_cancel(native: Native, pair: tuple[int, int], bit: int) -> None:
    component = latent_rows(page_tokens=4, layers=(1,))
    cache, table = Cache(component, 1), page_table(component, [0])
    before = digest(native, cache, table, range(4))
    for word in pair:
        cache.memory[64 + word + bit // 8] ^= 1 << bit % 8
    assert digest(native, cache, table, range(4)) != before


def test_swapped_rows_and_words_change_it(native: Native) -> None:
    component = latent_rows(page_tokens=4, layers=(0, 1))
    table = page_table(component, [0, 1])
    cache = Cache(component, 2, seed=33)
    before = digest(native, cache, table, range(8))
    layer = 2 * component.planes[0].page_stride + 64
    for a, b, size in ((64, 64 + 656, 656), (64, 72, 8), (64, 64 + layer, 656), (64, 64 + 4 * 656, 4 * 656)):
        original = bytes(cache.memory)
        first, second = original[a : a + size], original[b : b + size]
        cache.memory[a : a + size], cache.memory[b : b + size] = second, first
        assert digest(native, cache, table, range(8)) != before
        cache.memory[:] = original
    assert digest(native, cache, table, range(8)) == before


def test_every_number_of_a_row_is_in_its_key() -> None:
    rows = [
        row_digest(name, layer, head, token, b"same")
        for name in ("k", "v")
        for layer in (0, 1)
        for head in (0, 1)
        for token in (0, 1)
    ]
    assert len(set(rows)) == len(rows)


def test_where_rows_lie_does_not_matter(native: Native) -> None:
    digests = set()
    for component in (
        key_value("nhd", page_tokens=4),
        key_value("hnd", page_tokens=8),
        key_value("transposed", page_tokens=3),
        key_value("regions", page_tokens=64),
        moved(key_value("nhd", page_tokens=1), page_gap=5),
    ):
        cache = Cache(component, 30)
        table = page_table(component, random.Random(1).sample(range(30), -(-19 // component.page_tokens)))
        for layer in component.layers:
            for plane in component.planes:
                for token in range(19):
                    for head in range(component.heads):
                        seed = f"{layer} {plane.name} {token} {head}"
                        data = random.Random(seed).randbytes(plane.row_bytes)
                        cache.put(plane, layer, table, token, data=data, head=head)
        digests.add(digest(native, cache, table, range(2, 19)))
    assert len(digests) == 1


def test_what_does_not_fit_is_refused(native: Native) -> None:
    component = key_value("regions", page_tokens=4)
    cache, table = Cache(component, 1, seed=1), page_table(component, [0])
    with pytest.raises(LocalError, match="region 'value' of key_value needs 2 bases"):
        native.digest(component, layers=(0, 1), bases={"key": [1, 2]}, pages=table, tokens=range(4))
    with pytest.raises(LocalError, match="local heads"):
        digest(native, cache, table, range(4), heads=range(1, 3))
    with pytest.raises(LocalError, match="page table"):
        digest(native, cache, table, range(5))
