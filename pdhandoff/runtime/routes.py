"""The ways of one shard's chunks: source pages -> ring -> landing extents, or straight from the pages.

The ring holds a chunk as it will lie in the landing extents, step by step. So whole pages of all entries and layers are
one write, and only rows at the ends of a chunk, which share their pages with its neighbours, are written one by one.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, final

from pdhandoff.layouts.descriptor import Component
from pdhandoff.native.base import GatherPart, Native
from pdhandoff.planner import (
    CopyPlan,
    LandingRun,
    Placement,
    WriteColumns,
    entry_component,
    pair_components,
    plan_pair,
    stepped_component,
)
from pdhandoff.protocol.manifest import Entry, Group, landing_groups
from pdhandoff.protocol.spans import Span
from pdhandoff.runtime.chunks import Chunk

__all__ = ["Routes", "chunk_spans"]


@final
class Routes:
    """Plans. Pure arithmetic over the manifest's entries, made once per link and layout."""

    def __init__(
        self, components: Mapping[str, Component], source_at: Mapping[str, Placement], entries: tuple[Entry, ...]
    ) -> None:
        self.entries = entries
        self.row_bytes: Final = sum(entry.row_bytes * len(entry.layers) for entry in entries)
        "bytes of one token of this shard"
        self._source = [components[entry.component] for entry in entries]
        self._source_at = [source_at[entry.component] for entry in entries]
        destinations = sorted({entry.destination for entry in entries})
        self._groups: Final = [group for each in destinations for group in landing_groups(entries, each)]
        "in the order in which a stretch of the ring holds them"
        steps = {index: group.step for group in self._groups for index in group.entries}
        self._landing: Final = [
            stepped_component(entry_component(component, entry), steps[index])
            for index, (component, entry) in enumerate(zip(self._source, entries, strict=True))
        ]
        self._gathers: Final = [
            pair_components(source, landing) for source, landing in zip(self._source, self._landing, strict=True)
        ]
        "source pages -> landing form: into the ring, or straight into landing extents"
        self._moves: Final = [pair_components(landing, landing) for landing in self._landing]
        "ring -> landing extents"
        self._bases: dict[int, Mapping[str, Sequence[int]]] = {}

    @property
    def page_tokens(self) -> int:
        """Tokens of the largest landing page."""
        return max((group.page_tokens for group in self._groups), default=1)

    def ring_bytes(self, tokens: range) -> int:
        """Bytes that a chunk takes in the ring."""
        return sum(len(_pages(tokens, group)) * group.step for group in self._groups)

    def ring(self, tokens: range, address: int) -> list[LandingRun]:
        """Where a chunk's steps lie in a stretch of the ring: one run for each group."""
        runs: list[LandingRun] = []
        for group in self._groups:
            runs.append(LandingRun(group, _pages(tokens, group), address))
            address += len(runs[-1].pages) * group.step
        return runs

    def pads(self, tokens: range, address: int) -> list[tuple[int, int]]:
        """What a gather of rows `tokens` leaves as it was in the last page of each entry and layer: the whole step.

        Addresses and lengths; empty where all last pages are full.
        """
        return [
            (run.address_of(run.pages.stop - 1), run.group.step)
            for run in self.ring(tokens, address)
            if tokens.stop % run.group.page_tokens
        ]

    def gather(self, chunk: Chunk, address: int) -> CopyPlan:
        """Source pages -> ring."""
        return CopyPlan.join(
            [
                self._from_pages(index, chunk, chunk.tokens, run)
                for run in self.ring(chunk.tokens, address)
                for index in run.group.entries
            ]
        )

    def gather_parts(self, chunk: Chunk, address: int) -> list[GatherPart]:
        """The same for `Native.gather`."""
        return [
            self._gather_part(index, chunk, run)
            for run in self.ring(chunk.tokens, address)
            for index in run.group.entries
        ]

    def _gather_part(self, index: int, chunk: Chunk, run: LandingRun) -> GatherPart:
        entry = self.entries[index]
        placement, pages = run.at(index)
        return GatherPart(
            source=self._source[index],
            source_bases=self._chosen_bases(index),
            source_pages=chunk.tables[entry.component],
            destination=self._landing[index],
            destination_bases=placement.bases[""],
            destination_pages=pages,
            layers=entry.layers,
            heads=range(entry.head_start, entry.head_start + entry.heads),
        )

    def writes(self, chunk: Chunk, tokens: range, landing: Sequence[LandingRun], most: int) -> list[WriteColumns]:
        """Rows `tokens` -> one consumer rank: from the ring or, of a chunk that is not there, from the source pages.

        Args:
            chunk: which.
            tokens: what of it moves.
            landing: where it lands, on that rank.
            most: writes in one batch.
        """
        plans: list[CopyPlan] = []
        whole = WriteColumns(array("q"), array("q"), array("q"))
        staged = {} if chunk.stretch is None else self._by_entries(self.ring(chunk.tokens, chunk.stretch.address))
        for run in landing:
            moved = run.tokens(tokens)
            if not moved:
                continue
            ring = staged.get(run.group.entries)
            if ring is None:
                plans += [self._from_pages(index, chunk, moved, run) for index in run.group.entries]
                continue
            pages = _whole_pages(moved, run.group.page_tokens, padded=chunk.padded)
            if pages:
                whole.source.append(ring.address_of(pages.start))
                whole.destination.append(run.address_of(pages.start))
                whole.length.append(len(pages) * run.group.step)
            plans += [
                self._from_ring(index, part, ring, run)
                for part in _rest(moved, pages, run)
                for index in run.group.entries
            ]
        return [*_batches(whole, CopyPlan.join(plans), most)]

    def digest(self, native: Native, chunk: Chunk, tokens: range) -> int:
        """Sum of the digests of rows `tokens`, from the ring or the source pages."""
        total = 0
        staged = [] if chunk.stretch is None else self.ring(chunk.tokens, chunk.stretch.address)
        ring = {index: run for run in staged for index in run.group.entries}
        for index, entry in enumerate(self.entries):
            if index in ring:
                component = self._landing[index]
                at, pages = ring[index].at(index)
            else:
                component, at, pages = self._source[index], self._source_at[index], chunk.tables[entry.component]
            bases = at.bases if index in ring else self._chosen_bases(index)
            heads = range(entry.head_start, entry.head_start + entry.heads)
            total += native.digest(component, layers=entry.layers, bases=bases, pages=pages, tokens=tokens, heads=heads)
        return int(total % (1 << 64))

    def _chosen_bases(self, index: int) -> Mapping[str, Sequence[int]]:
        """Of an entry's layers, in the source. The placement never changes, so neither do they."""
        bases = self._bases.get(index)
        if bases is None:
            component = self._source[index]
            chosen = [component.layers.index(layer) for layer in self.entries[index].layers]
            at = self._source_at[index].bases
            bases = {region: [addresses[i] for i in chosen] for region, addresses in at.items()}
            self._bases[index] = bases
        return bases

    def _from_pages(self, index: int, chunk: Chunk, tokens: range, to: LandingRun) -> CopyPlan:
        placement, pages = to.at(index)
        return plan_pair(
            self._gathers[index],
            source_at=self._source_at[index],
            source_pages=chunk.tables[self.entries[index].component],
            destination_at=placement,
            destination_pages=pages,
            tokens=tokens,
        )

    def _from_ring(self, index: int, tokens: range, ring: LandingRun, to: LandingRun) -> CopyPlan:
        source, source_pages = ring.at(index)
        placement, pages = to.at(index)
        return plan_pair(
            self._moves[index],
            source_at=source,
            source_pages=source_pages,
            destination_at=placement,
            destination_pages=pages,
            tokens=tokens,
        )

    @staticmethod
    def _by_entries(runs: Sequence[LandingRun]) -> dict[tuple[int, ...], LandingRun]:
        return {run.group.entries: run for run in runs}


def chunk_spans(entries: tuple[Entry, ...], tokens: range) -> list[Span]:
    """What has landed when a chunk has: every layer of every entry."""
    if not tokens:
        return []
    return [Span(index, 0, len(entry.layers), tokens.start, tokens.stop) for index, entry in enumerate(entries)]


def _batches(whole: WriteColumns, rest: CopyPlan, most: int) -> Iterator[WriteColumns]:
    """All of these, `most` at a time: usually one batch."""
    for columns in rest.writes(most):
        if len(whole.length) + len(columns.length) > most:
            yield whole
            whole = columns
        else:
            for column, more in zip(whole, columns, strict=True):
                column.extend(more)
    if whole.length:
        yield whole


def _pages(tokens: range, group: Group) -> range:
    first = tokens.start // group.page_tokens
    return range(first, -(-tokens.stop // group.page_tokens) if tokens else first)


def _whole_pages(tokens: range, size: int, *, padded: bool) -> range:
    """Pages of which all rows move. Padded: nobody else's rows follow in the last one."""
    first = -(-tokens.start // size)
    return range(first, max(first, -(-tokens.stop // size) if padded else tokens.stop // size))


def _rest(tokens: range, pages: range, run: LandingRun) -> list[range]:
    """What of the tokens lies outside these pages."""
    if not pages:
        return [tokens]
    size = run.group.page_tokens
    parts = range(tokens.start, pages.start * size), range(pages.stop * size, tokens.stop)
    return [part for part in parts if part]
