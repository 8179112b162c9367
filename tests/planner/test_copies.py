from __future__ import annotations

import random
from collections.abc import Iterable

import msgspec
import pytest

from pdhandoff.errors import ErrorCode, LayoutError, PlanError
from pdhandoff.layouts.descriptor import Component, ComponentKind, Element, Quantisation, RopeOrder, Rotation
from pdhandoff.limits import Limits
from pdhandoff.planner import (
    CopyPlan,
    PageTable,
    Placement,
    WriteColumns,
    landing_component,
    pair_components,
    plan_copies,
    plan_pair,
)
from support.components import ORDERS, index_pages, key_value, latent_rows
from support.held import Held, fill, held, plan, rows
from support.memory import Memory


def shape(plan: CopyPlan) -> list[tuple[list[int], int]]:
    """Lengths and repetitions of each block."""
    return [(list(block.length), block.count) for block in plan.blocks]


def copies(batches: Iterable[WriteColumns]) -> list[tuple[int, int, int]]:
    """(source, destination, length) of every copy, in no order in particular."""
    return sorted(copy for batch in batches for copy in zip(*batch, strict=True))


def pair(
    source: Component, destination: Component, ids: tuple[int, ...] = (5, 2, 8), to: tuple[int, ...] = (0, 4, 2)
) -> tuple[Memory, Held, Held]:
    memory = Memory()
    sides = held(memory, source, ids), held(memory, destination, to)
    fill(memory, sides[0])
    return memory, *sides


@pytest.mark.parametrize("order", ["nhd", "hnd", "planar", "transposed", "sparse"])
def test_whole_pages_are_single_copies_where_both_sides_tile_them_alike(order: str) -> None:
    source = key_value(order)
    memory, a, b = pair(source, source)
    whole = plan(a, b, range(48))
    assert shape(whole) == [([16 * source.row_bytes] * 3, 1)]
    memory.execute(whole)
    assert memory.written(b.at) == rows(b, range(48))


def test_pages_that_are_neighbours_on_both_sides_join() -> None:
    source = index_pages()
    _, a, b = pair(source, source, ids=(3, 4, 5, 1, 2), to=(0, 1, 2, 3, 4))
    page = 64 * source.row_bytes
    assert shape(plan(a, b, range(320))) == [([3 * page, 2 * page], 1)]


def test_pages_that_are_neighbours_on_one_side_do_not_join() -> None:
    source = index_pages()
    _, a, b = pair(source, source, ids=(3, 4, 5), to=(2, 1, 0))
    assert shape(plan(a, b, range(192))) == [([64 * source.row_bytes] * 3, 1)]


def test_rows_of_a_partial_page_join_with_the_whole_page_after_it() -> None:
    source = latent_rows()
    _, a, b = pair(source, source, ids=(3, 4, 5), to=(0, 1, 2))
    assert shape(plan(a, b, range(60, 150))) == [([90 * 26], 1)]


def test_a_partial_planar_page_moves_values_and_scales_apart() -> None:
    source = index_pages()
    memory, a, b = pair(source, source)
    part = plan(a, b, range(10, 20))
    assert sorted(shape(part)) == [([40], 1), ([80], 1)]
    memory.execute(part)
    assert memory.written(b.at) == rows(b, range(10, 20))


def test_small_pages_that_follow_each_other_in_a_large_one_join() -> None:
    memory = Memory()
    a = held(memory, latent_rows(page_tokens=16), (4, 5, 6, 2))
    b = held(memory, latent_rows(page_tokens=300), (0,))
    fill(memory, a)
    whole = plan(a, b, range(60))
    assert shape(whole) == [([48 * 26, 12 * 26], 1)]
    memory.execute(whole)
    assert memory.written(b.at) == rows(b, range(60))


def test_some_heads_of_token_major_pages_are_steps_not_a_copy_a_token() -> None:
    source = key_value("nhd", heads=4, heads_total=4)
    target = landing_component(source, range(1, 3))
    memory, a, b = pair(source, target)
    part = plan(a, b, range(48))
    row = 2 * source.row_bytes // 4
    assert shape(part) == [([row] * 3, 16)]
    assert (part.blocks[0].source_step, part.blocks[0].destination_step) == (source.row_bytes, row)
    memory.execute(part)
    assert memory.written(b.at) == rows(b, range(48))


def test_some_heads_of_head_major_pages_are_one_run_a_page() -> None:
    source = key_value("hnd", heads=4, heads_total=4)
    _, a, b = pair(source, landing_component(source, range(1, 3)))
    assert shape(plan(a, b, range(48))) == [([16 * source.row_bytes // 2] * 3, 1)]


def test_only_the_heads_that_both_sides_hold_move() -> None:
    memory, a, b = pair(
        key_value(heads=2, head_start=1, heads_total=4), key_value("hnd", heads=2, head_start=2, heads_total=4)
    )
    memory.execute(plan(a, b, range(40)))
    assert memory.written(b.at) == rows(b, range(40), heads=range(2, 3))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("other", ORDERS)
def test_every_arrangement_reaches_every_other(order: str, other: str) -> None:
    memory, a, b = pair(key_value(order, page_tokens=4), key_value(other, page_tokens=6))
    memory.execute(plan(a, b, range(1, 10)), max_writes=7)
    assert memory.written(b.at) == rows(b, range(1, 10))


def test_plans_grow_with_pages_not_with_tokens_layers_or_elements() -> None:
    rng = random.Random(3)
    source = key_value("transposed", layers=range(8), page_tokens=128, heads=2, elements=8)
    other = key_value("nhd", layers=range(8), page_tokens=128, heads=2, elements=8)
    ids = rng.sample(range(64), 64)
    a, b = (Held(c, Placement(64, {"": [1 << 30] * 8}), PageTable(ids, 128)) for c in (source, other))
    whole = plan(a, b, range(64 * 128))
    assert all(len(block.length) <= 64 for block in whole.blocks)
    assert len({id(block.length) for block in whole.blocks}) <= 2
    assert whole.copies == sum(block.copies for block in whole.blocks)


def test_layers_may_be_named() -> None:
    memory, a, b = pair(latent_rows(layers=(1, 4, 7)), latent_rows(layers=(4, 5, 7)))
    part = plan(a, b, range(70), layers=(7, 4))
    memory.execute(part)
    assert part.blocks[0].layers == (7, 4)
    only = b._replace(component=msgspec.structs.replace(b.component, layers=(4, 7)))
    at = Placement(5, {"": [b.at.bases[""][0], b.at.bases[""][2]]})
    assert memory.written(b.at) == rows(only._replace(at=at), range(70))


@pytest.mark.parametrize("layers", [(0, 5), None])
def test_a_layer_that_one_side_lacks_is_refused(layers: tuple[int, ...] | None) -> None:
    _, a, b = pair(latent_rows(layers=(0, 1)), latent_rows(layers=(0, 5)))
    with pytest.raises(PlanError, match="component mla_latent has no layer 5 on this side"):
        plan(a, b, range(70), layers=layers)


def test_no_layers_are_no_copies() -> None:
    _, a, b = pair(latent_rows(), latent_rows())
    assert (plan(a, b, range(70), layers=()).nbytes, plan(a, b, range(70), layers=()).copies) == (0, 0)


@pytest.mark.parametrize("page", [-1, 9])
@pytest.mark.parametrize("side", ["source", "destination"])
def test_a_page_outside_its_placement_is_refused(side: str, page: int) -> None:
    _, a, b = pair(latent_rows(), latent_rows(), ids=(5, 2, 8), to=(5, 2, 8))
    bad = PageTable((5, page, 8), 64)
    sides = (a._replace(pages=bad), b) if side == "source" else (a, b._replace(pages=bad))
    with pytest.raises(PlanError, match=f"mla_latent: {side} page {page} lies outside the 9 pages") as error:
        plan(*sides, range(150))
    assert error.value.code == ErrorCode.OUT_OF_RANGE
    assert plan(*sides, range(64)).copies == 2


@pytest.mark.parametrize(
    ("bases", "reason"),
    [
        ({"other": [0, 0]}, "no region ''"),
        ({"": [1 << 20]}, "1 base addresses for 2 layers"),
        ({"": [1 << 20, -1]}, "is no address"),
        ({"": [1 << 20, 1 << 63]}, "is no address"),
    ],
)
def test_a_placement_that_does_not_fit_is_refused(bases: dict[str, list[int]], reason: str) -> None:
    _, a, b = pair(latent_rows(), latent_rows())
    with pytest.raises(PlanError, match=reason):
        plan(a, b._replace(at=Placement(9, bases)), range(70))


@pytest.mark.parametrize("most", [1, 5])
def test_plans_are_refused_above_their_limit(most: int) -> None:
    _, a, b = pair(latent_rows(), latent_rows())
    with pytest.raises(PlanError, match=f"more than max_copies {most}") as error:
        plan_copies(
            source=a.component,
            source_at=a.at,
            source_pages=a.pages,
            destination=b.component,
            destination_at=b.at,
            destination_pages=b.pages,
            tokens=range(150),
            limits=Limits(max_copies=most),
        )
    assert error.value.code == ErrorCode.TOO_LARGE
    assert plan(a, b, range(150)).copies == 6


@pytest.mark.parametrize(
    ("plane", "field", "value"),
    [
        ("rope", "element", Element.F16),
        ("rope", "elements", 2),
        ("latent", "quantisation", Quantisation(scale_plane="latent.scale", group=4)),
        ("rope", "rotation", Rotation.HADAMARD128),
        ("rope", "rope_order", RopeOrder.INTERLEAVED),
        ("rope", "rope_elements", 2),
    ],
)
def test_planes_that_would_be_misread_are_refused_by_field(plane: str, field: str, value: object) -> None:
    planes = tuple(msgspec.structs.replace(p, **{field: value}) if p.name == plane else p for p in latent_rows().planes)
    _, a, b = pair(latent_rows(), msgspec.structs.replace(latent_rows(), planes=planes))
    with pytest.raises(LayoutError, match="copied bytes would be misread") as error:
        plan(a, b, range(70))
    assert error.value.field == f"mla_latent.{plane}.{field}"


def test_components_that_are_not_the_same_are_refused() -> None:
    source = latent_rows()
    for other in (
        msgspec.structs.replace(source, name="other"),
        msgspec.structs.replace(source, kind=ComponentKind.INDEX_KEY),
        msgspec.structs.replace(source, planes=source.planes[:2]),
        msgspec.structs.replace(source, heads_total=2),
    ):
        _, a, b = pair(source, other)
        with pytest.raises(LayoutError):
            plan(a, b, range(70))
        _, a, b = pair(other, source)
        with pytest.raises(LayoutError):
            plan(a, b, range(70))


def test_no_head_in_common_is_refused() -> None:
    _, a, b = pair(key_value(heads_total=4), key_value(head_start=2, heads_total=4))
    with pytest.raises(PlanError, match=r"source holds heads 0\.\.1, the destination needs 2\.\.3: none in common"):
        plan(a, b, range(10))


def test_a_page_table_of_another_page_size_is_refused() -> None:
    _, a, b = pair(latent_rows(), latent_rows())
    with pytest.raises(PlanError, match="destination keeps 64 tokens a page, its page table 32"):
        plan(a, b._replace(pages=PageTable((0, 1, 2), 32)), range(10))


@pytest.mark.parametrize("most", [1, 2, 3, 7, 1000])
def test_writes_come_in_batches_of_the_size_asked_for(most: int) -> None:
    _, a, b = pair(key_value("nhd"), key_value("hnd"))
    whole = plan(a, b, range(40))
    batches = list(whole.writes(most))
    sizes = [len(batch.length) for batch in batches]
    assert sum(sizes) == whole.copies
    assert all(size == most for size in sizes[:-1])
    assert 0 < sizes[-1] <= most
    assert copies(batches) == copies(whole.writes())


def test_writes_need_room_for_one() -> None:
    _, a, b = pair(latent_rows(), latent_rows())
    with pytest.raises(PlanError, match="max_writes must be at least 1, got 0"):
        next(plan(a, b, range(10)).writes(0))


def test_an_empty_plan_writes_nothing() -> None:
    assert list(CopyPlan((), 0, 0).writes()) == []


def test_plans_add_up() -> None:
    memory, a, b = pair(latent_rows(), latent_rows())
    _, c, d = memory, held(memory, index_pages(), (1, 0)), held(memory, index_pages(), (0, 1))
    fill(memory, c)
    both = CopyPlan.join([plan(a, b, range(70)), plan(c, d, range(70))])
    memory.execute(both)
    assert both.nbytes == 70 * 2 * (26 + 12)
    assert memory.written(b.at) == rows(b, range(70))
    assert memory.written(d.at) == rows(d, range(70))


def test_plans_between_packed_tables_are_remembered_and_stay_right(monkeypatch: pytest.MonkeyPatch) -> None:
    component = latent_rows(page_tokens=16)
    kept = pair_components(component, component)
    monkeypatch.setattr("pdhandoff.planner.shapes._KEPT_PLANS", 2)
    for first in (0, 1, 0, 2, 0):  # more shapes than are kept, one of them again and again
        tokens = range(first * 16, 40)
        at = Placement(8, {"": (1 << 20, 2 << 20)})
        to = Placement(8, {"": (3 << 20, (4 << 20) + first)})
        table = PageTable.packed(tokens, component.page_tokens)
        plans = [
            plan_pair(
                each,
                source_at=at,
                source_pages=table,
                destination_at=to,
                destination_pages=table,
                tokens=tokens,
            )
            for each in (kept, pair_components(component, component))
        ]
        assert list(plans[0].writes()) == list(plans[1].writes())
