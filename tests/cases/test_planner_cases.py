"""Page and token arithmetic that users of similar systems got hurt by, case by case."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from pdhandoff.errors import ErrorCode, PlanError
from pdhandoff.layouts.descriptor import Component
from pdhandoff.planner import (
    CopyPlan,
    PageTable,
    admit_length,
    check_cover,
    entry_component,
    landing_parts,
    plan_shards,
    stepped_component,
)
from pdhandoff.protocol.manifest import Manifest
from support.components import index_pages, key_value, latent_rows, layout
from support.held import Held, fill, held, plan, rows
from support.memory import UNTOUCHED, Memory

COMPONENTS: Sequence[Callable[[], Component]] = [latent_rows, index_pages]


def moved(source: Component, prompt: int, *chunks: int) -> tuple[Memory, Held, Held, list[CopyPlan]]:
    """A prompt handed off in chunks, from pages 9, 7, 5, ... with two look-ahead pages, to pages 0, 1, 2, ..."""
    memory = Memory()
    pages = -(-prompt // source.page_tokens)
    producer = held(memory, source, range(2 * pages + 5, 2, -2))
    consumer = held(memory, source, range(pages))
    fill(memory, producer)
    plans: list[CopyPlan] = []
    first = 0
    for chunk in chunks or (prompt,):
        plans.append(plan(producer, consumer, range(first, first + chunk)))
        memory.execute(plans[-1])
        first += chunk
    return memory, producer, consumer, plans


@pytest.mark.parametrize("build", COMPONENTS)
def test_T001_a_last_page_with_one_token_moves_one_row_of_it(build: Callable[[], Component]) -> None:
    source = build()
    memory, _, consumer, (whole,) = moved(source, 129)
    assert whole.nbytes == 129 * source.row_bytes * len(source.layers)
    assert memory.written(consumer.at) == rows(consumer, range(129))


@pytest.mark.parametrize("build", COMPONENTS)
def test_T002_partial_prefix_hit_moves_only_the_missing_tokens(build: Callable[[], Component]) -> None:
    memory = Memory()
    source = build()
    producer, consumer = held(memory, source, (5, 2, 7)), held(memory, source, (0, 1, 2))
    fill(memory, producer)
    for tokens in (range(64, 100), range(100, 129)):
        memory.execute(plan(producer, consumer, tokens))
    assert memory.written(consumer.at) == rows(consumer, range(64, 129))


def test_T002_a_hit_inside_a_page_leaves_the_rows_before_it_alone() -> None:
    memory = Memory()
    producer, consumer = held(memory, latent_rows(), (5, 2, 7)), held(memory, latent_rows(), (0, 1, 2))
    fill(memory, producer)
    memory.execute(plan(producer, consumer, range(70, 129)))
    assert memory.written(consumer.at) == rows(consumer, range(70, 129))


def test_T003_lists_of_different_length_are_paired_by_token_not_by_position() -> None:
    memory = Memory()
    producer = held(memory, latent_rows(), (5, 2, 7))
    late = held(memory, latent_rows(), (4, 1))
    consumer = late._replace(pages=PageTable((4, 1), 64, first_token=64))
    fill(memory, producer)
    memory.execute(plan(producer, consumer, range(64, 129)))
    assert memory.written(consumer.at) == rows(consumer, range(64, 129))
    with pytest.raises(PlanError, match="no page for token 63"):
        plan(producer, consumer, range(63, 129))
    with pytest.raises(PlanError, match="no page for token 128"):
        plan(producer, late, range(129))


def test_T004_a_prompt_that_fills_its_pages_has_no_empty_page_after_it() -> None:
    source = latent_rows()
    memory, _, consumer, (whole,) = moved(source, 128)
    manifest = plan_shards([layout(source)], [layout(source)], prompt_tokens=128)[0]
    assert manifest.pages(manifest.entries[0]) == 2
    assert sum(len(block.length) for block in whole.blocks) == 2
    assert memory.written(consumer.at) == rows(consumer, range(128))


def test_T006_a_chunk_that_brings_no_new_page_sends_its_rows() -> None:
    source = latent_rows(page_tokens=16)
    memory, _, consumer, plans = moved(source, 20, 17, 3)
    assert [part.nbytes for part in plans] == [tokens * source.row_bytes * 2 for tokens in (17, 3)]
    assert memory.written(consumer.at) == rows(consumer, range(20))


def test_T007_the_last_chunk_is_the_one_that_ends_at_the_last_token() -> None:
    memory, producer, consumer, plans = moved(latent_rows(page_tokens=1), 10, 4, 4, 2)
    assert len(producer.pages.ids) == 12
    assert [part.nbytes // (26 * 2) for part in plans] == [4, 4, 2]
    assert memory.written(consumer.at) == rows(consumer, range(10))


@pytest.mark.slow
def test_T008_lookahead_pages_beyond_the_prompt_are_ignored() -> None:
    memory = Memory()
    source = index_pages(layers=(0,), page_tokens=1)
    producer = held(memory, source, range(8002, -1, -1))
    consumer = held(memory, source, range(8000))
    fill(memory, producer)
    whole = plan(producer, consumer, range(8000))
    memory.execute(whole)
    assert whole.nbytes == 8000 * source.row_bytes
    assert memory.written(consumer.at) == rows(consumer, range(8000))


def test_T009_a_second_chunk_of_one_token_is_sent() -> None:
    source = latent_rows(layers=(0,))
    memory, _, consumer, plans = moved(source, 2049, 2048, 1)
    assert plans[1].nbytes == source.row_bytes
    assert memory.written(consumer.at) == rows(consumer, range(2049))


@pytest.mark.parametrize("build", COMPONENTS)
def test_T010_a_prompt_of_one_token_moves_one_row(build: Callable[[], Component]) -> None:
    memory, _, consumer, (whole,) = moved(build(), 1)
    assert whole.nbytes == build().row_bytes * 2
    assert memory.written(consumer.at) == rows(consumer, range(1))
    assert admit_length(1, 2) == 1


def test_T011_a_prompt_without_tokens_is_refused() -> None:
    with pytest.raises(PlanError, match="at least one token"):
        admit_length(0, 10)
    with pytest.raises(PlanError, match="prompt_tokens"):
        plan_shards([layout(latent_rows())], [layout(latent_rows())], prompt_tokens=0)


def test_T011_an_empty_id_list_is_refused() -> None:
    memory = Memory()
    empty = held(memory, latent_rows(), (), pages=1)
    with pytest.raises(PlanError, match="source page table has 0 pages of 64 tokens: it has no page for token 0"):
        plan(empty, held(memory, latent_rows(), (0,)), range(1))


def test_T012_a_full_prefix_hit_is_a_manifest_of_zero_bytes() -> None:
    source = latent_rows()
    manifests = plan_shards([layout(source)], [layout(source)], prompt_tokens=128, start_token=128)
    check_cover(manifests, [layout(source)])
    (manifest,) = manifests
    assert (manifest.nbytes, manifest.tokens, len(manifest.entries)) == (0, 0, 1)
    (part,) = landing_parts(manifest, 0, [])
    assert (part.tokens, part.placement.pages, part.pages.ids) == (range(128, 128), 0, range(0))
    memory = Memory()
    nothing = held(memory, source, ())
    assert plan(nothing, nothing, range(128, 128)) == CopyPlan((), 0, 0)


@pytest.mark.parametrize("side", ["producer", "consumer", "both"])
def test_T014_null_pages_are_skipped_and_their_neighbours_unchanged(side: str) -> None:
    memory = Memory()
    hole, whole = (5, 0, 3), (5, 1, 3)
    producer = held(memory, index_pages(), whole if side == "consumer" else hole, null=0)
    consumer = held(memory, index_pages(), whole if side == "producer" else hole, null=0)
    fill(memory, producer)
    part = plan(producer, consumer, range(150))
    memory.execute(part)
    live = [*range(64), *range(128, 150)]
    want: dict[int, int] = {}
    for token in live:
        want |= rows(consumer, range(token, token + 1))
    assert part.nbytes == len(live) * index_pages().row_bytes * 2
    assert memory.written(consumer.at) == want


def test_T015_a_window_moves_its_live_rows_only_however_the_list_was_cut() -> None:
    prompt, window = 129, 64
    live = range(prompt - window, prompt)
    results = []
    for table in (PageTable((0, 5, 3), 64, null=0), PageTable((5, 3), 64, first_token=64, null=0)):
        memory = Memory()
        producer = held(memory, latent_rows(), (0, 5, 3), null=0)
        fill(memory, producer)
        producer = producer._replace(pages=table)
        consumer = held(memory, latent_rows(), (0, 1, 2))
        memory.execute(plan(producer, consumer, live))
        assert memory.written(consumer.at) == rows(consumer, live)
        results.append(memory.written(consumer.at))
    assert results[0] == results[1]


def test_T016_page_ids_of_two_groups_are_never_mixed() -> None:
    memory = Memory()
    wide, narrow = latent_rows(page_tokens=64), index_pages(page_tokens=16)
    producers = held(memory, wide, (5, 1)), held(memory, narrow, (5, 1, 4, 0, 2))
    consumers = held(memory, wide, (0, 1)), held(memory, narrow, range(5))
    for producer, consumer in zip(producers, consumers, strict=True):
        fill(memory, producer)
        memory.execute(plan(producer, consumer, range(70)))
        assert memory.written(consumer.at) == rows(consumer, range(70))
    mixed = producers[0]._replace(pages=producers[1].pages)
    with pytest.raises(PlanError, match="keeps 64 tokens a page, its page table 16: the ids belong to another group"):
        plan(mixed, consumers[0], range(70))


def tensor_parallel(heads_total: int, ranks: int, order: str) -> list[Component]:
    """What each rank of a tensor-parallel engine holds: heads divided, or replicated where ranks are more."""
    each = max(1, heads_total // ranks)
    return [
        key_value(order, heads=each, head_start=rank * heads_total // ranks, heads_total=heads_total)
        for rank in range(ranks)
    ]


def hand_off(producers: list[Component], consumers: list[Component], prompt: int) -> tuple[Manifest, ...]:
    """All shards through the landing space into every consumer rank, which must then hold exactly its rows."""
    memory = Memory()
    pages = range(-(-prompt // 16) + 1)
    sources = [held(memory, component, pages[::-1]) for component in producers]
    targets = [held(memory, component, pages) for component in consumers]
    needs = [layout(component) for component in consumers]
    manifests = plan_shards([layout(component) for component in producers], needs, prompt_tokens=prompt)
    check_cover(manifests, needs)
    for source, manifest in zip(sources, manifests, strict=True):
        fill(memory, source)
        for rank, target in enumerate(targets):
            size = sum(piece.nbytes for piece in manifest.pieces(rank))
            extents = [(memory.allocate(size), size)] if size else []
            for part in landing_parts(manifest, rank, extents):
                entry = manifest.entries[part.entry]
                component = stepped_component(entry_component(source.component, entry), part.step)
                landed = Held(component, part.placement, part.pages)
                memory.execute(plan(source, landed, range(prompt)))
                memory.execute(plan(landed, target, range(prompt), entry.layers))
    for target in targets:
        assert memory.written(target.at) == rows(target, range(prompt))
        assert UNTOUCHED not in memory.written(target.at).values()
    return manifests


@pytest.mark.parametrize("order", ["nhd", "hnd"])
def test_T019_each_of_four_ranks_gets_its_own_of_two_replicated_heads(order: str) -> None:
    (manifest,) = hand_off(tensor_parallel(2, 1, order), tensor_parallel(2, 4, order), 33)
    assert [(entry.destination, entry.head_start, entry.heads) for entry in manifest.entries] == [
        (0, 0, 1),
        (1, 0, 1),
        (2, 1, 1),
        (3, 1, 1),
    ]


@pytest.mark.parametrize("order", ["nhd", "hnd", "transposed"])
@pytest.mark.parametrize(("producers", "consumers"), [(2, 1), (1, 2), (4, 2), (2, 4)])
def test_T020_heads_keep_their_order_when_tensor_parallelism_differs(
    order: str, producers: int, consumers: int
) -> None:
    hand_off(tensor_parallel(4, producers, order), tensor_parallel(4, consumers, order), 33)


def test_T020_producer_ranks_that_hold_the_same_head_share_its_layers() -> None:
    manifests = hand_off(tensor_parallel(2, 4, "nhd"), tensor_parallel(2, 1, "nhd"), 33)
    assert [manifest.nbytes for manifest in manifests] == [manifests[0].nbytes] * 4


def test_T022_pipeline_stages_are_paired_by_global_layer_id() -> None:
    stages = [latent_rows(layers=(0, 1, 2), page_tokens=16), latent_rows(layers=(3, 4, 5), page_tokens=16)]
    manifests = hand_off(stages, [latent_rows(layers=range(6), page_tokens=16)], 20)
    assert [manifest.entries[0].layers for manifest in manifests] == [(0, 1, 2), (3, 4, 5)]


def test_T022_a_stage_without_attention_layers_has_nothing_to_send() -> None:
    stages = [latent_rows(layers=(0, 1), page_tokens=16), latent_rows(layers=(), page_tokens=16)]
    manifests = hand_off(stages, [latent_rows(layers=(0, 1), page_tokens=16)], 20)
    assert (manifests[1].entries, manifests[1].nbytes) == ((), 0)


@pytest.mark.parametrize(("prompt", "fits"), [(4095, True), (4096, False), (4097, False)])
def test_T024_a_prompt_that_leaves_no_room_for_an_output_token_is_refused(prompt: int, *, fits: bool) -> None:
    if fits:
        assert admit_length(prompt, 4096) == prompt
        return
    with pytest.raises(PlanError, match="no room for an output token") as error:
        admit_length(prompt, 4096)
    assert error.value.code == ErrorCode.TOO_LARGE
    assert "4096" in str(error.value)
    assert "4095" in str(error.value)
