from __future__ import annotations

import msgspec
import pytest

from pdhandoff.errors import PlanError
from pdhandoff.planner import (
    LandingPart,
    LandingRun,
    PageTable,
    Placement,
    entry_component,
    landing_component,
    landing_entry,
    landing_parts,
    landing_runs,
    stepped_component,
)
from pdhandoff.protocol.manifest import Entry, Group, Manifest, Piece, landing_groups
from support.components import ORDERS, index_pages, key_value, latent_rows, layout


@pytest.mark.parametrize("component", [latent_rows(), index_pages(), key_value("nhd"), key_value("transposed")])
def test_compact_pages_land_as_they_are(component: object) -> None:
    assert landing_component(component) == component  # type: ignore[arg-type]


def test_regions_follow_each_other_inside_a_landing_page() -> None:
    landing = landing_component(key_value("regions"))
    keys, values = landing.planes
    assert landing.regions == ("",)
    assert (keys.offset, values.offset) == (0, 16 * keys.token_stride)
    assert keys.page_stride == values.page_stride == 16 * landing.row_bytes


def test_pages_of_other_layers_between_two_pages_do_not_land() -> None:
    landing = landing_component(key_value("sparse"))
    assert landing.planes == key_value("nhd").planes


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("page_tokens", [4, 256, 257, 1000])
def test_landing_pages_are_packed(order: str, page_tokens: int) -> None:
    source = key_value(order, page_tokens=page_tokens, heads=3, heads_total=3)
    for heads in (None, range(3), range(1, 3), range(1)):
        landing = landing_component(source, heads)
        layout(landing)
        waste = landing.planes[0].page_stride - landing.row_bytes * landing.page_tokens
        assert landing.page_tokens == (page_tokens if page_tokens <= 256 else 64)
        assert 0 <= waste <= (landing.row_bytes * landing.page_tokens // 8 if order == "padded" else 0)
        assert landing.region_page_bytes("") <= landing.planes[0].page_stride


def test_rows_with_wide_gaps_are_packed() -> None:
    landing = landing_component(latent_rows(row_stride=64))
    assert landing.planes == latent_rows().planes


def test_large_pages_keep_their_nesting() -> None:
    landing = landing_component(index_pages(page_tokens=1000))
    assert landing.planes == index_pages(page_tokens=64).planes
    landing = landing_component(key_value("hnd", page_tokens=1000))
    assert landing.planes == key_value("hnd", page_tokens=64).planes


def test_offsets_before_the_first_plane_do_not_land() -> None:
    source = latent_rows()
    shifted = tuple(msgspec.structs.replace(plane, offset=plane.offset + 4096) for plane in source.planes)
    assert landing_component(msgspec.structs.replace(source, planes=shifted)) == source


def test_heads_are_counted_over_the_whole_model() -> None:
    source = key_value(heads=2, head_start=4, heads_total=8)
    landing = landing_component(source, range(5, 6))
    assert (landing.head_start, landing.heads, landing.heads_total) == (5, 1, 8)
    for heads in (range(1), range(3, 5), range(5, 7), range(5, 5), range(4, 6, 2)):
        with pytest.raises(PlanError, match=r"key_value holds heads 4\.\.5"):
            landing_component(source, heads)


def test_an_entry_gives_back_the_landing_component() -> None:
    source = key_value(layers=(0, 1, 2), heads=4, heads_total=4)
    entry = landing_entry(source, (0, 2), range(1, 3), destination=3)
    assert (entry.layers, entry.head_start, entry.heads, entry.destination) == ((0, 2), 1, 2, 3)
    landing = entry_component(source, entry)
    assert landing == msgspec.structs.replace(landing_component(source, range(1, 3)), layers=(0, 2))
    assert (entry.row_bytes, entry.page_bytes) == (landing.row_bytes, landing.planes[0].page_stride)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"layers": (0, 5)}, "has no layer 5"),
        ({"component": "other"}, "component is other, the source layout gives key_value"),
        ({"row_bytes": 4}, "row_bytes is 4"),
        ({"page_tokens": 8}, "page_tokens is 8"),
        ({"page_bytes": 4096}, "page_bytes is 4096"),
        ({"heads": 9}, "holds heads"),
    ],
)
def test_an_entry_that_the_source_layout_does_not_give_is_refused(change: dict[str, object], reason: str) -> None:
    source = key_value()
    entry = msgspec.structs.replace(landing_entry(source, (0, 1)), **change)
    with pytest.raises(PlanError, match=reason):
        entry_component(source, entry)


def manifest(*entries: Entry, start: int = 0, prompt: int = 100) -> Manifest:
    return Manifest(prompt_tokens=prompt, start_token=start, shard=0, shards=1, entries=entries).validate()


def test_pages_of_all_entries_and_layers_land_step_by_step() -> None:
    rows, index = latent_rows(), index_pages()
    whole = manifest(
        landing_entry(rows, (0, 1)),
        landing_entry(rows, (0,), destination=1),
        landing_entry(index, (1,)),
    )
    page, index_page = 64 * 26, 64 * 12
    step = 2 * page + index_page
    assert step % 64 == 0
    group = Group((0, 2), 64, ((0, page), (2 * page,)), step)
    assert landing_runs(whole, 0, [(4096, 2 * step)]) == [LandingRun(group, range(2), 4096)]
    assert landing_parts(whole, 0, [(4096, 2 * step)]) == [
        LandingPart(0, range(100), Placement(2, {"": [4096, 4096 + page]}), PageTable(range(2), 64), step),
        LandingPart(2, range(100), Placement(2, {"": [4096 + 2 * page]}), PageTable(range(2), 64), step),
    ]
    (alone,) = landing_parts(whole, 1, [(64, 2 * page)])
    assert (alone.placement, alone.step) == (Placement(2, {"": [64]}), page)
    assert landing_parts(whole, 2, []) == []
    with pytest.raises(PlanError, match="extents are smaller"):
        landing_runs(whole, 0, [(4096, step)])


def test_a_step_never_spans_two_extents() -> None:
    whole = manifest(landing_entry(latent_rows(), (0, 1)), prompt=200)
    step = 2 * 64 * 26
    extents = [(4096, 2 * step + 64), (1 << 20, step), (1 << 21, step)]
    parts = landing_parts(whole, 0, extents)
    assert [(part.tokens, part.placement.bases[""][0], part.pages) for part in parts] == [
        (range(128), 4096, PageTable(range(2), 64)),
        (range(128, 192), 1 << 20, PageTable(range(1), 64, 128)),
        (range(192, 200), 1 << 21, PageTable(range(1), 64, 192)),
    ]


def test_entries_of_other_page_sizes_are_groups_of_their_own_and_small_pages_share_a_piece() -> None:
    rows, small = latent_rows(), index_pages(page_tokens=16)
    whole = manifest(landing_entry(rows, (0,)), landing_entry(small, (0, 1)))
    groups = landing_groups(whole.entries, 0)
    assert [(group.entries, group.page_tokens, group.step) for group in groups] == [
        ((0,), 64, 64 * 26),
        ((1,), 16, 2 * 16 * 12),
    ]
    pieces = list(whole.pieces(0))
    assert pieces == [Piece(0, 1, 64 * 26)] * 2 + [Piece(1, 4, 4 * 384), Piece(1, 3, 3 * 384)]
    size = sum(piece.nbytes for piece in pieces)
    assert [part.pages for part in landing_parts(whole, 0, [(4096, size)])] == [
        PageTable(range(2), 64),
        PageTable(range(7), 16),
    ]


def test_pages_and_steps_are_aligned_whatever_their_sizes() -> None:
    entry = msgspec.structs.replace(landing_entry(latent_rows(), (0, 1)), row_bytes=3, page_tokens=3, page_bytes=9)
    (group,) = landing_groups((entry,), 0)
    assert (group.offsets, group.step) == (((0, 16),), 64)


@pytest.mark.parametrize(("start", "pages", "first"), [(0, 2, 0), (63, 2, 0), (64, 1, 64), (70, 1, 64), (100, 0, 64)])
def test_landing_starts_with_the_page_of_the_start_token(start: int, pages: int, first: int) -> None:
    entry = landing_entry(latent_rows(), (0,))
    whole = manifest(entry, start=start)
    (part,) = landing_parts(whole, 0, [(4096, 1 << 20)])
    assert part.pages == PageTable(range(pages), 64, first)
    assert part.tokens == range(start, 100)
    assert whole.pages(entry) == pages


def test_a_stepped_component_leaves_room_between_its_pages() -> None:
    landing = landing_component(latent_rows())
    stepped = stepped_component(landing, 4096)
    assert {plane.page_stride for plane in stepped.planes} == {4096}
    assert stepped.page_tokens == landing.page_tokens


def test_where_the_rows_of_a_run_lie() -> None:
    group = Group((4, 7), 64, ((0,), (128,)), 256)
    run = LandingRun(group, range(3, 5), 1 << 20)
    assert run.address_of(4) == (1 << 20) + 256
    assert run.tokens(range(1000)) == range(192, 320)
    assert run.tokens(range(200, 210)) == range(200, 210)
    assert not run.tokens(range(100))
    assert run.at(7) == (Placement(2, {"": [(1 << 20) + 128]}), PageTable(range(2), 64, 192))
