"""The landing space: the packed form in which a shard's rows arrive, between source pages and decode planes.

A landing component is derived from the source component alone, so both sides compute the same one. Its pages hold rows
in the source's own order, so that whole source pages stay single runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from pdhandoff.errors import ErrorCode, PlanError
from pdhandoff.layouts.descriptor import Component, Plane
from pdhandoff.planner.pages import PageTable
from pdhandoff.planner.placement import Placement
from pdhandoff.protocol.manifest import Entry, Group, Manifest, landing_groups, place_pieces

__all__ = [
    "LandingPart",
    "LandingRun",
    "entry_component",
    "landing_component",
    "landing_entry",
    "landing_parts",
    "landing_runs",
    "stepped_component",
]

_KEPT_PAGE_TOKENS = 256
"pages up to this size stay as they are; larger ones would make a short prompt land in one huge page"
_PACKED_PAGE_TOKENS = 64


class LandingRun(NamedTuple):
    """Steps of one group that follow each other in memory, on a consumer rank or in a staging ring."""

    group: Group
    pages: range
    "step p holds tokens [p * page_tokens, (p + 1) * page_tokens) of the prompt"
    address: int
    "of the first step"

    def address_of(self, page: int) -> int:
        """Of one of its steps."""
        return self.address + (page - self.pages.start) * self.group.step

    def tokens(self, moved: range) -> range:
        """Those of `moved` that lie in it."""
        size = self.group.page_tokens
        start = max(moved.start, self.pages.start * size)
        return range(start, max(start, min(moved.stop, self.pages.stop * size)))

    def at(self, entry: int) -> tuple[Placement, PageTable]:
        """Where the pages of one entry of the group are, and its page table."""
        offsets = self.group.offsets[self.group.entries.index(entry)]
        count, size = len(self.pages), self.group.page_tokens
        placement = Placement(count, {"": [self.address + offset for offset in offsets]})
        return placement, PageTable(range(count), size, self.pages.start * size)


class LandingPart(NamedTuple):
    """Rows of one manifest entry whose pages follow each other at one step."""

    entry: int
    "index into the manifest's entries"
    tokens: range
    "of the prompt"
    placement: Placement
    "bases in the order of the entry's layers"
    pages: PageTable
    step: int
    "bytes from page to page: the landing component's, stepped"


def landing_component(component: Component, heads: range | None = None) -> Component:
    """How rows of a source component land: one region "", pages packed one after the other.

    A page of at most 256 tokens of which all heads move, with (nearly) no gaps, keeps its byte layout; its regions
    follow each other. Anything else is packed: tokens, heads and elements nested as in the source, without gaps, in
    pages of the source's size or, where that exceeds 256, of 64 tokens.

    Args:
        component: as the source holds it.
        heads: the heads that move, counted over the whole model. Default: all that the source holds.

    Raises PlanError when the source does not hold all of `heads`.
    """
    held = range(component.head_start, component.head_start + component.heads)
    chosen = held if heads is None else heads
    if not chosen or chosen.step != 1 or chosen.start < held.start or chosen.stop > held.stop:
        raise PlanError(
            ErrorCode.OUT_OF_RANGE,
            f"component {component.name} holds heads {held.start}..{held.stop - 1},"
            f" not {chosen.start}..{chosen.stop - 1}",
        )
    kept = chosen == held and component.page_tokens <= _KEPT_PAGE_TOKENS and _is_compact(component)
    planes, page_tokens = _kept_planes(component) if kept else _packed_planes(component, len(chosen))
    return msgspec.structs.replace(
        component,
        page_tokens=page_tokens,
        planes=planes,
        heads=len(chosen),
        head_start=chosen.start,
        shared_layers=(),
    )


def landing_entry(
    component: Component, layers: Sequence[int], heads: range | None = None, destination: int = 0
) -> Entry:
    """The manifest entry for these layers and heads of a source component, sent to one consumer rank."""
    landing = landing_component(component, heads)
    return Entry(
        component=landing.name,
        layers=tuple(layers),
        row_bytes=landing.row_bytes,
        page_tokens=landing.page_tokens,
        page_bytes=landing.planes[0].page_stride,
        head_start=landing.head_start,
        heads=landing.heads,
        destination=destination,
    )


def entry_component(component: Component, entry: Entry) -> Component:
    """The landing component of one manifest entry: the entry's layers and heads of the source component it names.

    Raises PlanError when the entry is not what this source component gives: the two sides would place rows differently.
    """
    missing = next((layer for layer in entry.layers if layer not in component.layers), None)
    if missing is not None:
        raise _mismatch(entry, f"the source component has no layer {missing}")
    heads = range(entry.head_start, entry.head_start + entry.heads)
    expected = landing_entry(component, entry.layers, heads, entry.destination)
    for field in ("component", "row_bytes", "page_tokens", "page_bytes"):
        have, want = getattr(entry, field), getattr(expected, field)
        if have != want:
            raise _mismatch(entry, f"{field} is {have}, the source layout gives {want}")
    return msgspec.structs.replace(landing_component(component, heads), layers=entry.layers)


def stepped_component(landing: Component, step: int) -> Component:
    """A landing component whose pages follow each other at `step` bytes: those of other layers lie in between."""
    planes = tuple(msgspec.structs.replace(plane, page_stride=step) for plane in landing.planes)
    return msgspec.structs.replace(landing, planes=planes)


def landing_runs(manifest: Manifest, destination: int, extents: Sequence[tuple[int, int]]) -> list[LandingRun]:
    """Where the steps of each group lie on one consumer rank, in landing order: one run per group and extent.

    Args:
        manifest: of one shard, as granted.
        destination: consumer rank that the extents belong to.
        extents: granted `(address, length)` runs, in grant order.

    Raises PlanError when the pieces do not fit into the extents.
    """
    groups = landing_groups(manifest.entries, destination)
    pieces = list(manifest.pieces(destination))
    runs: list[LandingRun] = []
    for piece, address in zip(pieces, place_pieces((piece.nbytes for piece in pieces), extents), strict=True):
        group = groups[piece.group]
        last = runs[-1] if runs else None
        if last is not None and last.group is group:
            stop = last.pages.stop
            if address == last.address + len(last.pages) * group.step:
                runs[-1] = last._replace(pages=range(last.pages.start, stop + piece.pages))
                continue
        else:
            stop = manifest.start_token // group.page_tokens
        runs.append(LandingRun(group, range(stop, stop + piece.pages), address))
    return runs


def landing_parts(manifest: Manifest, destination: int, extents: Sequence[tuple[int, int]]) -> list[LandingPart]:
    """Where the rows of each manifest entry lie on one consumer rank, in token order for each entry.

    A manifest that moves nothing has a part without tokens for each. Arguments and errors are `landing_runs`'.
    """
    parts: list[LandingPart] = []
    runs = landing_runs(manifest, destination, extents)
    if not manifest.tokens:
        first = manifest.start_token
        groups = landing_groups(manifest.entries, destination)
        runs = [LandingRun(group, range(first // group.page_tokens, first // group.page_tokens), 0) for group in groups]
    for run in runs:
        tokens = run.tokens(range(manifest.start_token, manifest.prompt_tokens))
        parts += [LandingPart(index, tokens, *run.at(index), run.group.step) for index in run.group.entries]
    return parts


def _is_compact(component: Component) -> bool:
    """Whether gaps are at most an eighth of the rows: what is kept is also allocated and, page by page, written."""
    used = component.row_bytes * component.page_tokens
    span = sum(component.region_page_bytes(region) - _region_start(component, region) for region in component.regions)
    return span <= used + used // 8


def _region_start(component: Component, region: str) -> int:
    return min(plane.offset for plane in component.planes if plane.region == region)


def _kept_planes(component: Component) -> tuple[tuple[Plane, ...], int]:
    shift: dict[str, int] = {}
    page_bytes = 0
    for region in component.regions:
        start = _region_start(component, region)
        shift[region] = page_bytes - start
        page_bytes += component.region_page_bytes(region) - start
    planes = tuple(
        msgspec.structs.replace(plane, region="", offset=plane.offset + shift[plane.region], page_stride=page_bytes)
        for plane in component.planes
    )
    return planes, component.page_tokens


def _packed_planes(component: Component, heads: int) -> tuple[tuple[Plane, ...], int]:
    page_tokens = component.page_tokens if component.page_tokens <= _KEPT_PAGE_TOKENS else _PACKED_PAGE_TOKENS
    offset = 0
    packed: dict[str, Plane] = {}
    for row in _rows(component):
        row_bytes = sum(plane.row_bytes for plane in row)
        strides = _nested_strides(row[0], row_bytes, page_tokens, heads)
        at = offset
        for plane in row:
            packed[plane.name] = msgspec.structs.replace(plane, region="", offset=at, **strides)
            at += plane.row_bytes
        offset += row_bytes * page_tokens * heads
    planes = tuple(msgspec.structs.replace(packed[plane.name], page_stride=offset) for plane in component.planes)
    return planes, page_tokens


def _rows(component: Component) -> list[list[Plane]]:
    """Planes that lie side by side in one row (of one token and head) together, in the order of the source page."""
    order = {region: index for index, region in enumerate(component.regions)}
    rows: list[list[Plane]] = []
    for plane in sorted(component.planes, key=lambda plane: (order[plane.region], plane.offset)):
        if rows and _same_row(rows[-1][0], plane):
            rows[-1].append(plane)
        else:
            rows.append([plane])
    return rows


def _same_row(first: Plane, plane: Plane) -> bool:
    steps = [stride for stride in (first.token_stride, first.head_stride) if stride]
    return (
        first.row_is_dense
        and plane.row_is_dense
        and (first.region, first.token_stride, first.head_stride)
        == (plane.region, plane.token_stride, plane.head_stride)
        and plane.offset + plane.row_bytes <= first.offset + min(steps, default=0)
    )


def _nested_strides(plane: Plane, row_bytes: int, page_tokens: int, heads: int) -> dict[str, int]:
    """Strides without gaps, nested as in the source: the axis with the largest step there stays outermost."""
    axes = [(plane.token_stride, "token_stride", page_tokens)]
    step = row_bytes
    if heads > 1:
        axes.append((plane.head_stride, "head_stride", heads))
    if not plane.row_is_dense:
        axes.append((plane.element_stride, "element_stride", plane.elements))
        step = plane.element.nbytes
    strides = {"head_stride": 0}
    for _, name, count in sorted(axes):
        strides[name] = step
        step *= count
    return strides


def _mismatch(entry: Entry, reason: str) -> PlanError:
    return PlanError(ErrorCode.MANIFEST_MISMATCH, f"manifest entry {entry.component}: {reason}")
