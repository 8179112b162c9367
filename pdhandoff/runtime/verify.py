"""The payload digest of landed rows, to compare with what the producer sent."""

from __future__ import annotations

from collections.abc import Mapping

from pdhandoff.layouts import Layout
from pdhandoff.native import Native
from pdhandoff.planner import entry_component, landing_pages, landing_placement
from pdhandoff.protocol.book import Landing, Slot
from pdhandoff.protocol.manifest import Manifest

__all__ = ["shard_digest"]


def shard_digest(
    native: Native, layout: Layout, manifest: Manifest, shard: int, extents: Mapping[Slot, tuple[Landing, ...]]
) -> bytes:
    """Digest of everything that one shard has landed: 8 bytes, little-endian."""
    total = 0
    tokens = range(manifest.start_token, manifest.prompt_tokens)
    for destination in manifest.destinations:
        placements = landing_placement(manifest, destination, extents.get(Slot(shard, destination), ()))
        for index, placement in placements.items():
            entry = manifest.entries[index]
            component = entry_component(layout.component(entry.component), entry)
            total += native.digest(
                component,
                layers=entry.layers,
                bases=placement.bases,
                pages=landing_pages(manifest, entry),
                tokens=tokens,
                heads=range(entry.head_start, entry.head_start + entry.heads),
            )
    return (total % (1 << 64)).to_bytes(8, "little")
