"""Raw copies between two placements of one component, joined into the longest runs.

Both sides hold the same planes in the same encoding; pages, strides, regions and the heads that a rank holds may
differ. The offsets of a copy are the same in every layer, so a plan stores them once, and it stores strided repetitions
as a count and two steps: the size of a plan grows with pages, not with tokens or layers.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Self

from pdhandoff.errors import ErrorCode, LayoutError, PlanError
from pdhandoff.layouts.descriptor import Component, Plane
from pdhandoff.limits import DEFAULT_LIMITS, Limits
from pdhandoff.planner.heads import common_heads
from pdhandoff.planner.pages import PageTable
from pdhandoff.planner.placement import Placement, layer_bases
from pdhandoff.planner.shapes import Columns, Pair, Stream

__all__ = ["CopyBlock", "CopyPlan", "Pair", "WriteColumns", "pair_components", "plan_copies", "plan_pair"]


class WriteColumns(NamedTuple):
    """Copies as absolute addresses: columns of 64-bit integers of one length."""

    source: array[int]
    destination: array[int]
    length: array[int]
    "bytes"


class CopyBlock(NamedTuple):
    """Copies with the same offsets in many layers.

    Copy i of layer l moves `length[i]` bytes, `count` times, from `source_bases[l] + source[i] + k * source_step` to
    `destination_bases[l] + destination[i] + k * destination_step`, k = 0 .. count - 1.
    """

    component: str
    layers: tuple[int, ...]
    source_bases: array[int]
    "[layer], absolute addresses"
    destination_bases: array[int]
    "[layer], absolute addresses"
    source: array[int]
    "[copy], bytes from the layer's base"
    destination: array[int]
    "[copy], bytes from the layer's base"
    length: array[int]
    "[copy], bytes"
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody needs of a block
    "repetitions of every copy; 1 for plain ones"
    source_step: int
    destination_step: int

    @property
    def copies(self) -> int:
        """Plain copies that it stands for, in all layers."""
        return len(self.layers) * len(self.length) * self.count


class CopyPlan(NamedTuple):
    """What to copy. The blocks are independent of each other and may run in any order."""

    blocks: tuple[CopyBlock, ...]
    nbytes: int
    "bytes moved, in all layers"
    copies: int
    "plain copies that the blocks stand for"

    @classmethod
    def join(cls, plans: Sequence[CopyPlan]) -> Self:
        """One plan that does all of them."""
        blocks = tuple(block for plan in plans for block in plan.blocks)
        return cls(blocks, sum(plan.nbytes for plan in plans), sum(plan.copies for plan in plans))

    def writes(self, max_writes: int = 1 << 16) -> Iterator[WriteColumns]:
        """Plain copies with absolute addresses, at most `max_writes` at a time, made as they are asked for."""
        if max_writes < 1:
            raise PlanError(ErrorCode.MISUSE, f"max_writes must be at least 1, got {max_writes}")
        pending = WriteColumns(array("q"), array("q"), array("q"))
        for part in _plain(self.blocks, max_writes):
            for column, more in zip(pending, part, strict=True):
                column.extend(more)
            while len(pending.length) >= max_writes:
                yield WriteColumns(*(column[:max_writes] for column in pending))
                pending = WriteColumns(*(column[max_writes:] for column in pending))
        if pending.length:
            yield pending


def pair_components(source: Component, destination: Component) -> Pair:
    """What `plan_pair` needs of two components; worth keeping where many plans are made for them.

    Args:
        source: the component as the source holds it.
        destination: the component as the destination holds it: same planes, any other strides, pages and regions.

    Raises:
        LayoutError: the planes differ in more than their place (`field` says in what).
        PlanError: the two sides have no head in common.
    """
    return Pair(source, destination, _paired_planes(source, destination), common_heads(source, destination))


def plan_copies(
    *,
    source: Component,
    source_at: Placement,
    source_pages: PageTable,
    destination: Component,
    destination_at: Placement,
    destination_pages: PageTable,
    tokens: range,
    layers: Sequence[int] | None = None,
    limits: Limits = DEFAULT_LIMITS,
) -> CopyPlan:
    """`plan_pair` of `pair_components(source, destination)`: arguments and errors are theirs."""
    return plan_pair(
        pair_components(source, destination),
        source_at=source_at,
        source_pages=source_pages,
        destination_at=destination_at,
        destination_pages=destination_pages,
        tokens=tokens,
        layers=layers,
        limits=limits,
    )


def plan_pair(
    pair: Pair,
    *,
    source_at: Placement,
    source_pages: PageTable,
    destination_at: Placement,
    destination_pages: PageTable,
    tokens: range,
    layers: Sequence[int] | None = None,
    limits: Limits = DEFAULT_LIMITS,
) -> CopyPlan:
    """Copies that bring rows `tokens` of one component from one placement to another, byte for byte.

    The heads that both sides hold move. Tokens whose page is missing (`PageTable.null`) on either side are skipped.

    Args:
        pair: from `pair_components`.
        source_at: where the source's component lies.
        source_pages: the pages that hold the tokens there.
        destination_at: where it lies.
        destination_pages: the pages that hold the tokens there.
        tokens: positions in the prompt.
        layers: global layer ids. Default: every layer of the destination.
        limits: bounds the number of copies.

    Raises:
        PlanError: a page, layer, region or token lies outside a placement or table, or the plan exceeds
            `limits.max_copies`.
    """
    source, destination = pair.source, pair.destination
    chosen = tuple(destination.layers if layers is None else layers)
    _check_pages(source, source_pages, "source")
    _check_pages(destination, destination_pages, "destination")
    needed = -(-len(tokens) // max(source.page_tokens, destination.page_tokens))
    if needed > limits.max_copies:
        raise _too_many(source, needed, limits)
    runs, streams = pair.columns(tokens, source_pages, destination_pages)
    _check_range(source, runs.source_page, source_at, "source")
    _check_range(destination, runs.destination_page, destination_at, "destination")
    blocks: list[CopyBlock] = []
    for stream, columns in streams.items():
        source_bases = layer_bases(source, source_at, stream.source.region, chosen)
        destination_bases = layer_bases(destination, destination_at, stream.destination.region, chosen)
        blocks.extend(_blocks(destination.name, chosen, (source_bases, destination_bases), stream, columns))
    copies = sum(block.copies for block in blocks)
    if copies > limits.max_copies:
        raise _too_many(source, copies, limits)
    return CopyPlan(tuple(blocks), runs.tokens * pair.row_bytes * len(chosen), copies)


def _blocks(
    name: str, layers: tuple[int, ...], bases: tuple[list[int], list[int]], stream: Stream, columns: Columns
) -> Iterator[CopyBlock]:
    """One block for each shift: the blocks share their columns, and only the bases move."""
    axis = stream.axis
    source, destination, length = (array("q", column) for column in columns)
    for source_shift, destination_shift in stream.shifts:
        yield CopyBlock(
            name,
            layers,
            array("q", [base + source_shift for base in bases[0]]),
            array("q", [base + destination_shift for base in bases[1]]),
            source,
            destination,
            length,
            axis.times,
            axis.source_step,
            axis.destination_step,
        )


def _plain(blocks: Sequence[CopyBlock], most: int) -> Iterator[WriteColumns]:
    """Plain copies, in parts of at most `most` or of the repetitions of one copy."""
    for block in blocks:
        entries = max(1, most // block.count)
        for first in range(0, len(block.length), entries):
            columns = WriteColumns(
                *(column[first : first + entries] for column in (block.source, block.destination, block.length))
            )
            if block.count > 1:
                columns = _repeated(block, columns)
            for source_base, destination_base in zip(block.source_bases, block.destination_bases, strict=True):
                yield WriteColumns(
                    array("q", map(source_base.__add__, columns.source)),
                    array("q", map(destination_base.__add__, columns.destination)),
                    columns.length,
                )


def _repeated(block: CopyBlock, columns: WriteColumns) -> WriteColumns:
    source_steps = range(0, block.count * block.source_step, block.source_step)
    destination_steps = range(0, block.count * block.destination_step, block.destination_step)
    return WriteColumns(
        array("q", [offset + step for offset in columns.source for step in source_steps]),
        array("q", [offset + step for offset in columns.destination for step in destination_steps]),
        array("q", [length for length in columns.length for _ in range(block.count)]),
    )


def _check_pages(component: Component, table: PageTable, side: str) -> None:
    if table.page_tokens != component.page_tokens:
        raise PlanError(
            ErrorCode.MISUSE,
            f"component {component.name}: the {side} keeps {component.page_tokens} tokens a page, its page table"
            f" {table.page_tokens}: the ids belong to another group",
        )


def _check_range(component: Component, pages: Sequence[int], placement: Placement, side: str) -> None:
    if not pages or 0 <= min(pages) <= max(pages) < placement.pages:
        return
    page = next(page for page in pages if not 0 <= page < placement.pages)
    raise PlanError(
        ErrorCode.OUT_OF_RANGE,
        f"component {component.name}: {side} page {page} lies outside the {placement.pages} pages of its placement",
    )


def _paired_planes(source: Component, destination: Component) -> tuple[tuple[Plane, Plane], ...]:
    """Each source plane with the destination plane of the same name, which must hold the same bytes a row."""
    at = destination.name
    if (source.name, source.kind) != (destination.name, destination.kind):
        raise _bad(
            f"the source is {source.name} ({source.kind.value}), the destination {at} ({destination.kind.value})", at
        )
    names = {plane.name for plane in source.planes} ^ {plane.name for plane in destination.planes}
    if names:
        raise _bad(f"only one side has plane {min(names)!r}: rows would arrive in part", f"{at}.{min(names)}")
    pairs = tuple((plane, destination.plane(plane.name)) for plane in source.planes)
    for a, b in pairs:
        for field in ("element", "elements", "quantisation", "rotation", "rope_order", "rope_elements"):
            have, want = getattr(a, field), getattr(b, field)
            if have != want:
                raise _bad(
                    f"the source has {have}, the destination {want}: copied bytes would be misread",
                    f"{at}.{a.name}.{field}",
                )
    return pairs


def _too_many(component: Component, copies: int, limits: Limits) -> PlanError:
    return PlanError(
        ErrorCode.TOO_LARGE,
        f"component {component.name}: the plan has {copies} copies, more than max_copies {limits.max_copies}:"
        " move fewer tokens at a time, or land the rows in the source's own page layout and convert them there",
    )


def _bad(reason: str, field: str) -> LayoutError:
    return LayoutError(ErrorCode.LAYOUT_MISMATCH, f"{field}: {reason}", field=field)
