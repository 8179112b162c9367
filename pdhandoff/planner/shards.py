"""Who sends what: the rows that consumer ranks need, divided over the producer ranks that hold them.

Heads that one rank holds go from that rank. What several ranks hold alike (all heads of an MLA latent, key/value heads
that are fewer than ranks) is divided by layer, so that every rank and its network card works. Pipeline ranks own their
layers; layers are paired by global id.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from pdhandoff.errors import ErrorCode, PlanError
from pdhandoff.layouts.descriptor import Component, Layout
from pdhandoff.limits import DEFAULT_LIMITS, Limits
from pdhandoff.planner.landing import landing_entry
from pdhandoff.protocol.manifest import Entry, Manifest

__all__ = ["Shard", "check_cover", "plan_shards", "shard_manifest"]


class Shard(NamedTuple):
    """One producer rank's part of a handoff."""

    rank: int
    of: int
    "producer ranks"


class _Need(NamedTuple):
    """Heads of one source layer that one consumer rank needs."""

    destination: int
    component: str
    layer: int
    heads: range
    heads_total: int


def plan_shards(
    layouts: Sequence[Layout],
    destinations: Sequence[Layout],
    *,
    prompt_tokens: int,
    start_token: int = 0,
    limits: Limits = DEFAULT_LIMITS,
) -> tuple[Manifest, ...]:
    """The manifest of every producer rank.

    Args:
        layouts: what each producer rank holds, by rank.
        destinations: what each consumer rank needs, by rank. Where layers share rows (indexers of some models), this
            names the layers that own them: `Bridge.landing`.
        prompt_tokens: tokens of the prompt.
        start_token: rows before it are at the consumer already; equal to `prompt_tokens` for a full prefix hit.
        limits: bounds of a manifest.

    Returns:
        One manifest a rank. That of a rank which holds nothing the consumer needs has no entries and is done at once.
        The entries depend on the layouts alone: for another prompt, replace the token counts of a manifest.

    Raises PlanError when a consumer rank needs rows that no producer rank holds; the sentence names them.
    """
    entries = _divide(layouts, _needs(destinations))
    return tuple(
        Manifest(
            prompt_tokens=prompt_tokens,
            start_token=start_token,
            shard=rank,
            shards=len(layouts),
            entries=entries[rank],
        ).validate(limits)
        for rank in range(len(layouts))
    )


def shard_manifest(
    layout: Layout,
    shard: Shard,
    destinations: Sequence[Layout],
    *,
    prompt_tokens: int,
    start_token: int = 0,
    replicas: Shard | None = None,
    limits: Limits = DEFAULT_LIMITS,
) -> Manifest:
    """The manifest of one rank, computed without the other ranks' layouts.

    Args:
        layout: what this rank holds.
        shard: this rank among all producer ranks.
        destinations: as for `plan_shards`.
        prompt_tokens: tokens of the prompt.
        start_token: rows before it are at the consumer already.
        replicas: this rank among those that hold the same rows. `Shard(0, 1)` for a pipeline stage of one rank, or for
            heads that no other rank holds; rows that the rank does not hold are then left to others, and only
            `check_cover` sees whether somebody brings them. Default: all ranks hold the same, and all that is needed.
        limits: bounds of a manifest.

    Raises PlanError when all ranks should hold the same, but heads are sharded or needed rows are missing.
    """
    group = shard if replicas is None else replicas
    for each in (shard, group):
        if not 0 <= each.rank < each.of <= limits.max_shards:
            raise PlanError(ErrorCode.OUT_OF_RANGE, f"there is no rank {each.rank} of {each.of}")
    needs = _needs(destinations)
    if replicas is not None:
        needs = _held_part(layout, needs)
    elif shard.of > 1:
        _check_replicated(layout, shard)
    return Manifest(
        prompt_tokens=prompt_tokens,
        start_token=start_token,
        shard=shard.rank,
        shards=shard.of,
        entries=_divide([layout] * group.of, needs)[group.rank],
    ).validate(limits)


def check_cover(manifests: Sequence[Manifest], destinations: Sequence[Layout]) -> None:
    """Check that all shards of a handoff together bring every (component, layer, head) that is needed, exactly once.

    A consumer runs it when every shard has offered. Raises PlanError that names the first hole, overlap or surplus.
    """
    _check_family(manifests)
    brought: dict[tuple[int, str, int], list[range]] = {}
    for manifest in manifests:
        for entry in manifest.entries:
            heads = range(entry.head_start, entry.head_start + entry.heads)
            for layer in entry.layers:
                brought.setdefault((entry.destination, entry.component, layer), []).append(heads)
    for need in _needs(destinations):
        _check_need(need, sorted(brought.pop((need.destination, need.component, need.layer), []), key=_start))
    if brought:
        destination, component, layer = min(brought)
        raise _bad(f"component {component}, layer {layer} is offered to rank {destination}, which has no place for it")


def _needs(destinations: Sequence[Layout]) -> list[_Need]:
    needs: list[_Need] = []
    for rank, layout in enumerate(destinations):
        for component in layout.components:
            heads, total = _heads(component), component.heads_total
            needs.extend(_Need(rank, component.name, layer, heads, total) for layer in component.layers)
    return needs


def _held_part(layout: Layout, needs: Sequence[_Need]) -> list[_Need]:
    """What of the needed rows this layout holds."""
    held = {component.name: component for component in layout.components}
    parts: list[_Need] = []
    for need in needs:
        component = held.get(need.component)
        if component is not None and need.layer in component.layers:
            mine = _heads(component)
            heads = range(max(mine.start, need.heads.start), min(mine.stop, need.heads.stop))
            if heads:
                parts.append(need._replace(heads=heads))
    return parts


def _check_replicated(layout: Layout, shard: Shard) -> None:
    for component in layout.components:
        if component.heads != component.heads_total:
            raise PlanError(
                ErrorCode.MISUSE,
                f"component {component.name} is sharded by heads: say which of the {shard.of} ranks hold the same rows"
                " (replicas), or plan with the layouts of all ranks",
            )


def _divide(layouts: Sequence[Layout], needs: Sequence[_Need]) -> list[tuple[Entry, ...]]:
    """Entries of each rank: every needed row once, from the rank that has sent least of those that hold it."""
    sent = [0] * len(layouts)
    units: dict[tuple[int, int, str, int, int], list[int]] = {}
    holders = _Holders(layouts)
    row_bytes = {c.name: c.row_bytes // c.heads for layout in layouts for c in layout.components}
    for need in needs:
        for heads, ranks in holders.of(need):
            rank = min(ranks, key=sent.__getitem__)  # the first of them, where several have sent alike
            sent[rank] += row_bytes[need.component] * len(heads)
            units.setdefault((rank, need.destination, need.component, heads.start, heads.stop), []).append(need.layer)
    entries: list[list[Entry]] = [[] for _ in layouts]
    for (rank, destination, name, first, last), layers in units.items():
        component = layouts[rank].component(name)
        entries[rank].append(landing_entry(component, sorted(layers), range(first, last), destination))
    return [tuple(mine) for mine in entries]


class _Holders:
    """Which ranks hold which heads of a layer."""

    def __init__(self, layouts: Sequence[Layout]) -> None:
        self._held: dict[tuple[str, int], dict[int, range]] = {}
        self._totals: dict[str, int] = {}
        for rank, layout in enumerate(layouts):
            for component in layout.components:
                self._totals[component.name] = component.heads_total
                heads = _heads(component)
                for layer in component.layers:
                    self._held.setdefault((component.name, layer), {})[rank] = heads

    def of(self, need: _Need) -> list[tuple[range, list[int]]]:
        """The needed heads, cut where the set of ranks that hold them changes, each with those ranks."""
        total = self._totals.get(need.component, need.heads_total)
        if total != need.heads_total:
            raise PlanError(
                ErrorCode.LAYOUT_MISMATCH,
                f"component {need.component}: producer ranks count {total} heads in the model, consumer rank"
                f" {need.destination} counts {need.heads_total}",
            )
        held = self._held.get((need.component, need.layer), {})
        inside = {edge for heads in held.values() for edge in (heads.start, heads.stop) if edge in need.heads}
        cuts = sorted({need.heads.start, need.heads.stop, *inside})
        parts: list[tuple[range, list[int]]] = []
        for first, last in pairwise(cuts):
            ranks = [rank for rank, heads in held.items() if first in heads]
            if not ranks:
                raise PlanError(
                    ErrorCode.LAYOUT_MISMATCH if held else ErrorCode.UNKNOWN_COMPONENT,
                    f"consumer rank {need.destination} needs component {need.component}, layer {need.layer},"
                    f" heads {first}..{last - 1}: no producer rank holds them",
                )
            parts.append((range(first, last), ranks))
        return parts


def _heads(component: Component) -> range:
    return range(component.head_start, component.head_start + component.heads)


def _check_family(manifests: Sequence[Manifest]) -> None:
    """Check that the manifests are those of one handoff: every shard once, the same tokens."""
    if not manifests:
        raise _bad("no shard was offered")
    first = manifests[0]
    shards = sorted(manifest.shard for manifest in manifests)
    if shards != list(range(first.shards)):
        raise _bad(f"shards {shards} were offered, not 0..{first.shards - 1}")
    for manifest in manifests:
        for field in ("shards", "prompt_tokens", "start_token"):
            have, want = getattr(manifest, field), getattr(first, field)
            if have != want:
                raise _bad(f"shard {manifest.shard} says {field} {have}, shard {first.shard} says {want}")


def _start(heads: range) -> int:
    return heads.start


def _check_need(need: _Need, brought: Sequence[range]) -> None:
    what = f"component {need.component}, layer {need.layer} for consumer rank {need.destination}"
    head = need.heads.start
    for heads in brought:
        if heads.start > head:
            raise _bad(f"{what}: no shard brings head {head}")
        if heads.start < head or heads.stop > need.heads.stop:
            extra = heads.start if heads.start < head else need.heads.stop
            raise _bad(f"{what}: head {extra} is offered twice, or is not needed there")
        head = heads.stop
    if head < need.heads.stop:
        raise _bad(f"{what}: no shard brings head {head}")


def _bad(reason: str) -> PlanError:
    return PlanError(ErrorCode.MANIFEST_MISMATCH, reason)
