"""A chunk of one handoff on its way: source pages -> ring -> landing extents, or straight from the pages."""

from __future__ import annotations

import enum
import threading
from collections.abc import Mapping
from typing import Any, Final, Protocol, final

from pdhandoff.layouts.descriptor import Component
from pdhandoff.planner import CopyPlan, PageTable, Placement, entry_component, pair_components, plan_pair
from pdhandoff.protocol.manifest import PIECE_ALIGNMENT, Entry, Manifest
from pdhandoff.protocol.spans import Span
from pdhandoff.runtime.ring import Stretch

__all__ = ["Chunk", "ChunkState", "Event", "Routes", "chunk_spans"]


class Event(Protocol):
    """Something on a device that must have happened before pages may be read; `torch.cuda.Event` is one."""

    def query(self) -> bool:
        """Whether it has happened."""


@final
class ChunkState(enum.Enum):
    """Where a chunk is. The order is the order of its life."""

    WAITING = "waiting"  # for its event, for room in the ring, or for a grant
    GATHERING = "gathering"
    STAGED = "staged"  # in the ring; waits for a grant
    DIGESTING = "digesting"
    WRITING = "writing"
    LANDED = "landed"
    DROPPED = "dropped"


@final
class Chunk:
    """Rows `tokens` of every entry, as the engine pushed them."""

    def __init__(self, tokens: range, tables: Mapping[str, PageTable], after: Event | None, epoch: int) -> None:
        self.tokens = tokens
        self.tables = tables
        "component -> its pages at the time of the push"
        self.after = after
        self.epoch = epoch
        "how often the handoff had restarted when it was pushed"
        self.state = ChunkState.WAITING
        self.stretch: Stretch | None = None
        self.source_free = threading.Event()
        "set when the source pages are not read any more"

    @property
    def over(self) -> bool:
        """Whether nothing will happen to it any more."""
        return self.state in {ChunkState.LANDED, ChunkState.DROPPED}

    @property
    def done(self) -> bool:
        """Whether it is over, and its pages are not read any more."""
        return self.over and self.source_free.is_set()


@final
class Routes:
    """Plans the ways of one shard's chunks. Pure arithmetic over the manifest, made once per link and layout."""

    def __init__(
        self, components: Mapping[str, Component], source_at: Mapping[str, Placement], entries: tuple[Entry, ...]
    ) -> None:
        self.entries = entries
        self._source = components
        self._source_at = source_at
        self._landing: Final = [entry_component(components[entry.component], entry) for entry in entries]
        self._gathers: Final = [
            pair_components(components[entry.component], landing)
            for entry, landing in zip(entries, self._landing, strict=True)
        ]
        "source pages -> landing form: into the ring, or straight into landing extents"
        self._moves: Final = [pair_components(landing, landing) for landing in self._landing]
        "ring -> landing extents"

    def ring_bytes(self, tokens: range) -> int:
        """Bytes that a chunk takes in the ring."""
        manifest = self._part(tokens)
        return sum(
            _round_up(piece.nbytes) for destination in manifest.destinations for piece in manifest.pieces(destination)
        )

    def gather(self, chunk: Chunk, address: int) -> CopyPlan:
        """Source pages -> ring."""
        placements = self._ring(chunk.tokens, address)
        plans = [
            plan_pair(
                self._gathers[index],
                source_at=self._source_at[entry.component],
                source_pages=chunk.tables[entry.component],
                destination_at=placements[index],
                destination_pages=PageTable.packed(chunk.tokens, entry.page_tokens),
                tokens=chunk.tokens,
            )
            for index, entry in enumerate(self.entries)
        ]
        return CopyPlan.join(plans)

    def write(
        self, chunk: Chunk, tokens: range, manifest: Manifest, landing: Mapping[int, Placement], destination: int
    ) -> CopyPlan:
        """Ring, or source pages of a chunk that was not staged -> one consumer rank's extents, rows `tokens` only."""
        plans: list[CopyPlan] = []
        ring = None if chunk.stretch is None else self._ring(chunk.tokens, chunk.stretch.address)
        for index, entry in enumerate(self.entries):
            if entry.destination != destination:
                continue
            staged = ring is not None
            plans.append(
                plan_pair(
                    self._moves[index] if staged else self._gathers[index],
                    source_at=ring[index] if ring is not None else self._source_at[entry.component],
                    source_pages=(
                        PageTable.packed(chunk.tokens, entry.page_tokens) if staged else chunk.tables[entry.component]
                    ),
                    destination_at=landing[index],
                    destination_pages=PageTable.packed(
                        range(manifest.start_token, manifest.prompt_tokens), entry.page_tokens
                    ),
                    tokens=tokens,
                    layers=entry.layers,
                )
            )
        return CopyPlan.join(plans)

    def digest(self, native: Any, chunk: Chunk, tokens: range) -> int:
        """Sum of the digests of rows `tokens`, from the ring or the source pages."""
        total = 0
        ring = None if chunk.stretch is None else self._ring(chunk.tokens, chunk.stretch.address)
        for index, entry in enumerate(self.entries):
            if ring is not None:
                bases, component = ring[index].bases, self._landing[index]
                pages = PageTable.packed(chunk.tokens, entry.page_tokens)
            else:
                component = self._source[entry.component]
                at = self._source_at[entry.component]
                chosen = [component.layers.index(layer) for layer in entry.layers]
                bases = {region: [addresses[i] for i in chosen] for region, addresses in at.bases.items()}
                pages = chunk.tables[entry.component]
            heads = range(entry.head_start, entry.head_start + entry.heads)
            total += native.digest(component, layers=entry.layers, bases=bases, pages=pages, tokens=tokens, heads=heads)
        return int(total % (1 << 64))

    def _ring(self, tokens: range, address: int) -> list[Placement]:
        manifest = self._part(tokens)
        placements: list[Placement] = []
        for entry in self.entries:
            pages = manifest.pages(entry)
            step = _round_up(pages * entry.page_bytes)
            bases = [address + index * step for index in range(len(entry.layers))]
            placements.append(Placement(pages, {"": bases}))
            address += step * len(entry.layers)
        return placements

    def _part(self, tokens: range) -> Manifest:
        return Manifest(prompt_tokens=tokens.stop, start_token=tokens.start, shard=0, shards=1, entries=self.entries)


def chunk_spans(entries: tuple[Entry, ...], tokens: range) -> list[Span]:
    """What has landed when a chunk has: every layer of every entry."""
    if not tokens:
        return []
    return [Span(index, 0, len(entry.layers), tokens.start, tokens.stop) for index, entry in enumerate(entries)]


def _round_up(nbytes: int) -> int:
    return -(-nbytes // PIECE_ALIGNMENT) * PIECE_ALIGNMENT
