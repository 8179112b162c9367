"""Rows as they have landed, and their way into a decode engine's caches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from pdhandoff.errors import ErrorCode, LocalError
from pdhandoff.layouts import Bridge, Component
from pdhandoff.native import Native
from pdhandoff.planner import (
    PageTable,
    Placement,
    derive_conversion,
    entry_component,
    landing_parts,
    stepped_component,
)
from pdhandoff.protocol.book import Landing, Slot
from pdhandoff.protocol.manifest import Entry, Manifest

__all__ = ["LandedRows", "Target", "convert_rows", "landed_rows"]


class LandedRows(NamedTuple):
    """Rows of one manifest entry as they have landed in one extent; an entry has one of these for each extent."""

    component: Component
    "landing component: the entry's layers and heads; pages of other layers and entries lie between its own"
    placement: Placement
    pages: PageTable
    tokens: range
    "of the prompt"
    entry: Entry
    shard: int
    position: int
    "of the entry, in its shard's manifest"


class Target(NamedTuple):
    """Where a decode engine wants the rows of one request."""

    caches: Mapping[str, Placement]
    "component name -> where it lives, as the consumer's layout describes it"
    pages: Mapping[str, PageTable] | None
    "component name -> the pages that hold this request; None: a contiguous cache, one page"
    zero_until: int
    "rows from the end of the prompt to this token are zeroed, and those of the last page anyway"
    destination: int
    "rank of the consumer"


def landed_rows(
    manifests: Mapping[int, Manifest],
    extents: Mapping[Slot, tuple[Landing, ...]],
    sources: Mapping[int, Mapping[str, Component]],
    destination: int,
) -> list[LandedRows]:
    """Where each entry of each shard lies on one rank."""
    rows: list[LandedRows] = []
    for shard, manifest in manifests.items():
        for part in landing_parts(manifest, destination, extents.get(Slot(shard, destination), ())):
            entry = manifest.entries[part.entry]
            component = stepped_component(entry_component(sources[shard][entry.component], entry), part.step)
            rows.append(LandedRows(component, part.placement, part.pages, part.tokens, entry, shard, part.entry))
    return rows


def convert_rows(
    native: Native,
    bridge: Bridge,
    landed: LandedRows,
    target: Target,
    *,
    tokens: range,
    prompt_tokens: int,
    sum_up: bool,
) -> int | None:
    """Convert some of the landed rows, and zero what follows the prompt if its last row is among them.

    Args:
        native: what converts.
        bridge: between the two layouts.
        landed: the rows.
        target: where they go.
        tokens: which of them.
        prompt_tokens: length of the prompt.
        sum_up: whether to compute the payload digest of what was read.

    Returns:
        The digest; None where it was not asked for, or would miss layers that the target does not want.

    Raises:
        LocalError: caches and pages do not fit the layout.
    """
    name = landed.component.name
    to = bridge.destination.component(name)
    pairs = next(each for each in bridge.components if each.destination.name == name).layers
    source_of = {pair.destination: pair.source for pair in pairs if pair.source in landed.entry.layers}
    layers = tuple(layer for layer in to.layers if layer in source_of)
    base_of = dict(zip(landed.entry.layers, landed.placement.bases[""], strict=True))
    if name not in target.caches or (target.pages is not None and name not in target.pages):
        raise LocalError(ErrorCode.MISUSE, f"component {name} has landed and no cache, or no pages, were given for it")
    table = PageTable((0,), to.page_tokens) if target.pages is None else target.pages[name]
    last_page = tokens.stop if target.pages is None else -(-tokens.stop // to.page_tokens) * to.page_tokens
    sources = [source_of[layer] for layer in layers]
    sum_up = sum_up and sorted(sources) == sorted(landed.entry.layers)
    digest = native.convert(
        derive_conversion(landed.component, to, layers),
        source_bases=[base_of[layer] for layer in sources],
        source_pages=landed.pages,
        destination_at=target.caches[name],
        destination_pages=table,
        tokens=tokens,
        zero_until=max(target.zero_until, last_page) if tokens.stop == prompt_tokens else tokens.stop,
        digest_layers=sources if sum_up else None,
    )
    return digest if sum_up else None
