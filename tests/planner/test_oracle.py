"""Random shapes against a brute-force oracle: every row written exactly once, none outside, none twice."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest

from pdhandoff.layouts.descriptor import Component
from pdhandoff.planner import (
    PageTable,
    check_cover,
    entry_component,
    landing_component,
    landing_parts,
    plan_shards,
    stepped_component,
)
from pdhandoff.protocol.manifest import Manifest
from support.components import ORDERS, index_pages, key_value, latent_rows, layout
from support.held import Held, plan
from support.memory import Memory, row_cells

DRAWS = 1000
BATCH = 50


def hold(rng: random.Random, memory: Memory, component: Component, tokens: int, lookahead: int) -> Held:
    """Memory for a component, and a shuffled page table with look-ahead pages."""
    need = -(-tokens // component.page_tokens)
    pages = need + lookahead + rng.randrange(3)
    ids = rng.sample(range(pages), need + lookahead)
    if rng.random() < 0.3:
        ids.sort()
    return Held(component, memory.place(component, pages), PageTable(ids, component.page_tokens))


def draw_component(rng: random.Random, family: str, heads: range, heads_total: int, layers: Sequence[int]) -> Component:
    page_tokens = rng.choice((1, 2, 3, 4, 6, 8, 16, 300))
    if family == "mla":
        return latent_rows(layers, page_tokens, rng.choice((26, 26, 32)))
    if family == "index":
        return index_pages(layers, page_tokens)
    return key_value(
        rng.choice(ORDERS),
        layers=layers,
        page_tokens=page_tokens,
        heads=len(heads),
        head_start=heads.start,
        heads_total=heads_total,
    )


def draw_ranks(rng: random.Random, family: str, heads_total: int, layers: Sequence[int]) -> list[Component]:
    """What the ranks of one side hold: heads divided or replicated (tensor parallel), or layers divided (pipeline)."""
    ranks = rng.choice((1, 2, 4))
    if family == "kv" and rng.random() < 0.2:
        return [
            draw_component(rng, family, range(heads_total), heads_total, layers[rank::ranks]) for rank in range(ranks)
        ]
    each = max(1, heads_total // ranks)
    return [
        draw_component(rng, family, range(first, first + each), heads_total, layers)
        for first in (rank * heads_total // ranks for rank in range(ranks))
    ]


def chunks(rng: random.Random, first: int, last: int) -> list[range]:
    cuts = sorted({first, last, *(rng.randint(first, last) for _ in range(rng.randrange(4)))})
    return [range(a, b) for a, b in pairwise(cuts)]


def grant(rng: random.Random, memory: Memory, manifest: Manifest, destination: int) -> list[tuple[int, int]]:
    """Extents that just hold the pieces: one for all, or one for each."""
    sizes = [piece.nbytes for piece in manifest.pieces(destination)]
    if rng.random() < 0.5:
        sizes = [sum(sizes)] if sizes else []
    return [(memory.allocate(size), size) for size in sizes if size]


def run_draw(seed: int) -> None:
    rng = random.Random(seed)
    memory = Memory()
    family = rng.choice(("mla", "index", "kv", "kv", "kv"))
    heads_total = rng.choice((1, 2, 4)) if family == "kv" else 1
    layers = tuple(sorted(rng.sample(range(8), rng.randint(1, 3))))
    prompt = rng.randint(1, 24)
    hit = rng.choice((0, 0, rng.randint(0, prompt), prompt))
    producers = draw_ranks(rng, family, heads_total, layers)
    consumers = draw_ranks(rng, family, heads_total, layers)
    held = [hold(rng, memory, component, prompt, rng.randrange(3)) for component in producers]
    wanted = [hold(rng, memory, component, prompt, rng.randrange(3)) for component in consumers]
    for side in held:
        everything = (
            range(len(side.pages.ids) * side.pages.page_tokens) if side.pages.page_tokens < 300 else range(prompt)
        )
        memory.fill(row_cells(*side, everything))

    destinations = [layout(component) for component in consumers]
    manifests = plan_shards([layout(c) for c in producers], destinations, prompt_tokens=prompt, start_token=hit)
    check_cover(manifests, destinations)
    for manifest in manifests:
        move_shard(rng, memory, manifest, held[manifest.shard], wanted)
    for side in wanted:
        assert memory.written(side.at) == dict(row_cells(*side, range(hit, prompt)))


def move_shard(rng: random.Random, memory: Memory, manifest: Manifest, source: Held, wanted: list[Held]) -> None:
    """Chunk by chunk to the landing extents, directly or through a staging ring, then into the consumer's pages."""
    for destination, target in enumerate(wanted):
        for part in landing_parts(manifest, destination, grant(rng, memory, manifest, destination)):
            landing = entry_component(source.component, manifest.entries[part.entry])
            landed = Held(stepped_component(landing, part.step), part.placement, part.pages)
            for tokens in chunks(rng, part.tokens.start, part.tokens.stop):
                sender = stage(memory, source, landing, tokens) if rng.random() < 0.5 else source
                copy(memory, sender, landed, tokens)
            copy(memory, landed, target, part.tokens)


def stage(memory: Memory, source: Held, landing: Component, tokens: range) -> Held:
    pages = PageTable.packed(tokens, landing.page_tokens)
    ring = Held(landing, memory.place(landing, len(pages.ids)), pages)
    copy(memory, source, ring, tokens)
    return ring


def copy(memory: Memory, source: Held, destination: Held, tokens: range) -> None:
    layers = [layer for layer in destination.component.layers if layer in source.component.layers]
    memory.execute(plan(source, destination, tokens, layers))


@pytest.mark.slow
@pytest.mark.parametrize("batch", range(DRAWS // BATCH))
def test_T025_random_shapes_write_every_row_exactly_once(batch: int) -> None:
    for seed in range(batch * BATCH, (batch + 1) * BATCH):
        run_draw(seed)


@pytest.mark.parametrize("order", ORDERS)
def test_landing_pages_hold_the_rows_of_every_arrangement(order: str) -> None:
    memory = Memory()
    source = hold(random.Random(7), memory, key_value(order, page_tokens=4), 11, 1)
    memory.fill(row_cells(*source, range(12)))
    landing = landing_component(source.component)
    target = Held(landing, memory.place(landing, 3), PageTable.packed(range(11), 4))
    copy(memory, source, target, range(11))
    assert memory.written(target.at) == dict(row_cells(*target, range(11)))
