from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest

from pdhandoff.errors import ErrorCode, PlanError
from pdhandoff.layouts.descriptor import Component, Layout
from pdhandoff.planner import Shard, check_cover, plan_shards, shard_manifest
from pdhandoff.protocol.manifest import Manifest
from support.components import index_pages, key_value, latent_rows, layout

GLM = [latent_rows(layers=range(79)), index_pages(layers=range(79))]


def glm() -> Layout:
    return layout(*GLM, layers=79)


def plan(producers: list[Layout], consumers: list[Layout], prompt: int = 100) -> tuple[Manifest, ...]:
    manifests = plan_shards(producers, consumers, prompt_tokens=prompt)
    check_cover(manifests, consumers)
    return manifests


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_replicated_state_is_divided_so_that_every_rank_sends_alike(ranks: int) -> None:
    manifests = plan([glm()] * ranks, [glm()])
    sizes = [manifest.nbytes for manifest in manifests]
    assert sum(sizes) == 100 * 79 * (26 + 12)
    assert max(sizes) - min(sizes) <= 100 * 26
    layers = sorted(layer for manifest in manifests for layer in manifest.entries[0].layers)
    assert layers == list(range(79))


def test_a_rank_works_even_where_layers_are_fewer_than_ranks() -> None:
    both = layout(latent_rows(layers=(0, 1)), index_pages(layers=(0, 1)))
    manifests = plan([both] * 4, [both])
    assert all(manifest.entries for manifest in manifests)


def test_every_consumer_rank_gets_its_own_copy_of_replicated_state() -> None:
    manifests = plan([glm()] * 2, [glm()] * 3)
    assert manifests[0].destinations == manifests[1].destinations == (0, 1, 2)
    assert sum(manifest.nbytes for manifest in manifests) == 3 * 100 * 79 * (26 + 12)


def test_device_roles_get_only_what_they_hold() -> None:
    roles = [layout(GLM[1], layers=79), layout(GLM[0], layers=79)]
    (manifest,) = plan([glm()], roles)
    assert [(entry.component, entry.destination) for entry in manifest.entries] == [("index_key", 0), ("mla_latent", 1)]


@pytest.mark.parametrize(
    ("producer", "reason"),
    [
        (layout(latent_rows()), "rank 0 needs component index_key, layer 0, heads 0..0: no producer rank holds them"),
        (layout(latent_rows(), index_pages(layers=(0,))), "index_key, layer 1"),
    ],
)
def test_rows_that_nobody_holds_are_named(producer: Layout, reason: str) -> None:
    with pytest.raises(PlanError, match=reason) as error:
        plan_shards([producer], [layout(latent_rows(), index_pages())], prompt_tokens=10)
    assert error.value.code == ErrorCode.UNKNOWN_COMPONENT


def test_heads_that_nobody_holds_are_named() -> None:
    producers = [layout(key_value(heads=2, head_start=first, heads_total=8)) for first in (0, 4, 6)]
    with pytest.raises(PlanError, match=r"heads 2\.\.3: no producer rank") as error:
        plan_shards(producers, [layout(key_value(heads=8, heads_total=8))], prompt_tokens=10)
    assert error.value.code == ErrorCode.LAYOUT_MISMATCH
    with pytest.raises(PlanError, match="count 4 heads in the model, consumer rank 0 counts 2"):
        plan_shards([layout(key_value(heads_total=4))], [layout(key_value())], prompt_tokens=10)


def test_one_rank_computes_its_manifest_alone_where_all_hold_the_same() -> None:
    together = plan_shards([glm()] * 8, [glm()] * 2, prompt_tokens=500, start_token=64)
    alone = [shard_manifest(glm(), Shard(rank, 8), [glm()] * 2, prompt_tokens=500, start_token=64) for rank in range(8)]
    assert tuple(alone) == together


def test_sharded_heads_are_not_taken_for_replicas() -> None:
    half = layout(key_value(heads=2, heads_total=4))
    with pytest.raises(PlanError, match=r"sharded by heads: say which of the 2 ranks hold the same rows \(replicas\)"):
        shard_manifest(half, Shard(0, 2), [half], prompt_tokens=10)
    assert shard_manifest(half, Shard(0, 1), [half], prompt_tokens=10).shards == 1


def test_ranks_that_know_their_replicas_plan_alone_what_they_would_plan_together() -> None:
    heads = [layout(key_value(heads=1, head_start=rank // 2, heads_total=4, layers=range(6))) for rank in range(8)]
    stages = [layout(latent_rows(layers=range(first, first + 4))) for first in (0, 0, 4, 4)]
    wide = [layout(key_value(heads=2, head_start=first, heads_total=4, layers=range(6))) for first in (0, 2)]
    for producers, consumers in ((heads, wide), (stages, [layout(latent_rows(layers=range(8)))] * 2)):
        alone = tuple(
            shard_manifest(
                producer, Shard(rank, len(producers)), consumers, prompt_tokens=99, replicas=Shard(rank % 2, 2)
            )
            for rank, producer in enumerate(producers)
        )
        assert alone == plan_shards(producers, consumers, prompt_tokens=99)
        check_cover(alone, consumers)


def test_what_a_rank_does_not_hold_is_left_to_others_and_missed_by_the_cover() -> None:
    stage = layout(latent_rows(layers=(0, 1)))
    needs = [layout(latent_rows(layers=(0, 1, 2)), index_pages())]
    manifest = shard_manifest(stage, Shard(0, 1), needs, prompt_tokens=10, replicas=Shard(0, 1))
    assert [entry.layers for entry in manifest.entries] == [(0, 1)]
    with pytest.raises(PlanError, match="layer 2 for consumer rank 0: no shard brings head 0"):
        check_cover([manifest], needs)


@pytest.mark.parametrize("shard", [Shard(2, 2), Shard(-1, 2), Shard(0, 0), Shard(0, 5000)])
def test_a_rank_that_cannot_exist_is_refused(shard: Shard) -> None:
    with pytest.raises(PlanError, match="there is no rank"):
        shard_manifest(glm(), shard, [glm()], prompt_tokens=10)
    with pytest.raises(PlanError, match="there is no rank"):
        shard_manifest(glm(), Shard(0, 1), [glm()], prompt_tokens=10, replicas=shard)


@pytest.mark.parametrize(("prompt", "start"), [(0, 0), (10, 11), (10, -1)])
def test_token_counts_outside_the_prompt_are_refused(prompt: int, start: int) -> None:
    with pytest.raises(PlanError, match="manifest"):
        plan_shards([glm()], [glm()], prompt_tokens=prompt, start_token=start)


def test_a_manifest_for_another_prompt_has_the_same_entries() -> None:
    first, second = (plan_shards([glm()], [glm()], prompt_tokens=prompt)[0] for prompt in (10, 99))
    assert msgspec.structs.replace(first, prompt_tokens=99) == second


def kv(first: int, heads: int) -> Component:
    return key_value(heads=heads, head_start=first, heads_total=8)


@pytest.mark.parametrize(
    ("offered", "reason"),
    [
        ([(0, 4), (5, 3)], "no shard brings head 4"),
        ([(0, 4), (4, 3)], "no shard brings head 7"),
        ([(1, 7)], "no shard brings head 0"),
        ([(0, 5), (4, 4)], "head 4 is offered twice"),
        ([(0, 8), (0, 8)], "head 0 is offered twice"),
        ([], "no shard brings head 0"),
    ],
)
def test_holes_and_overlaps_of_heads_are_named(offered: list[tuple[int, int]], reason: str) -> None:
    shards = [
        plan_shards([layout(kv(*heads))], [layout(kv(*heads))], prompt_tokens=10)[0].entries for heads in offered
    ] or [()]
    manifests = [
        Manifest(prompt_tokens=10, shard=rank, shards=len(shards), entries=entries)
        for rank, entries in enumerate(shards)
    ]
    with pytest.raises(PlanError, match=reason) as error:
        check_cover(manifests, [layout(kv(0, 8))])
    assert error.value.code == ErrorCode.MANIFEST_MISMATCH


def test_heads_beyond_those_needed_are_named() -> None:
    manifests = plan_shards([layout(kv(0, 4))], [layout(kv(0, 4))], prompt_tokens=10)
    with pytest.raises(PlanError, match="head 2 is offered twice, or is not needed there"):
        check_cover(manifests, [layout(kv(0, 2))])


def test_rows_for_a_rank_that_has_no_place_are_named() -> None:
    manifests = plan_shards([glm()], [glm()] * 2, prompt_tokens=10)
    with pytest.raises(PlanError, match="component index_key, layer 0 is offered to rank 1, which has no place for it"):
        check_cover(manifests, [glm()])


def test_a_missing_layer_is_named() -> None:
    short = layout(latent_rows(layers=(0, 2)))
    manifests = plan_shards([short], [short], prompt_tokens=10)
    with pytest.raises(PlanError, match="component mla_latent, layer 1 for consumer rank 0: no shard brings head 0"):
        check_cover(manifests, [layout(latent_rows(layers=(0, 1, 2)))])


@pytest.mark.parametrize("field", ["shards", "prompt_tokens", "start_token"])
def test_shards_that_disagree_are_named(field: str) -> None:
    first, second = plan_shards([glm()] * 2, [glm()], prompt_tokens=10)
    changed = msgspec.structs.replace(second, **{field: getattr(second, field) + 1})
    with pytest.raises(PlanError, match=f"shard 1 says {field}"):
        check_cover([first, changed], [glm()])


def test_a_missing_or_repeated_shard_is_named() -> None:
    first, second = plan_shards([glm()] * 2, [glm()], prompt_tokens=10)
    for manifests in ([first], [first, first], [second]):
        with pytest.raises(PlanError, match=r"were offered, not 0\.\.1"):
            check_cover(manifests, [glm()])
    with pytest.raises(PlanError, match="no shard was offered"):
        check_cover([], [glm()])


def test_layers_of_an_entry_ascend() -> None:
    for manifest in plan([glm()] * 5, [glm()] * 2):
        for entry in manifest.entries:
            assert all(a < b for a, b in pairwise(entry.layers))
