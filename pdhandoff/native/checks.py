"""What every implementation checks before it touches memory. No tensors here: compiled ones work without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pdhandoff.errors import ErrorCode, LocalError
from pdhandoff.planner.placement import layer_bases

if TYPE_CHECKING:
    from pdhandoff.layouts.descriptor import Component, Plane
    from pdhandoff.native.base import GatherPart
    from pdhandoff.planner.conversions import Conversion
    from pdhandoff.planner.pages import PageTable
    from pdhandoff.planner.placement import Placement

__all__ = ["check_bases", "check_convert", "check_gather", "check_table", "check_unique", "local_heads"]

_COPIED = ("element", "elements", "quantisation", "rotation", "rope_order", "rope_elements")
"fields of a plane that two sides must share where bytes are copied"


def check_table(component: Component, pages: PageTable, tokens: range, page_count: int | None = None) -> range:
    """Refuse a page table that does not hold these tokens.

    Args:
        component: whose pages they are.
        pages: the page table of one request.
        tokens: absolute token numbers, step 1.
        page_count: pages that one layer has; None where that is not known.

    Returns:
        Positions in the table that hold the tokens.

    Raises:
        LocalError: the table has another page size, starts inside a page, is too short, or names a page out of range.

    """
    size = pages.page_tokens
    if size != component.page_tokens:
        raise LocalError(
            ErrorCode.MISUSE,
            f"a table of {size}-token pages cannot index {component.name}, whose pages hold {component.page_tokens}",
        )
    if pages.first_token % size:
        raise LocalError(
            ErrorCode.MISUSE, f"the page table of {component.name} starts at token {pages.first_token}, inside a page"
        )
    if not tokens:
        return range(0)
    first = (tokens.start - pages.first_token) // size
    stop = -(-(tokens.stop - pages.first_token) // size)
    if first < 0 or stop > len(pages.ids):
        raise LocalError(
            ErrorCode.OUT_OF_RANGE,
            f"tokens {tokens.start}..{tokens.stop} of {component.name} leave its page table, "
            f"which covers {pages.first_token}..{pages.stop_token}",
        )
    _check_ids(component, pages, range(first, stop), page_count)
    return range(first, stop)


def _check_ids(component: Component, pages: PageTable, used: range, page_count: int | None) -> None:
    ids = pages.ids[used.start : used.stop]
    if min(ids) >= 0 and (page_count is None or max(ids) < page_count):
        return
    for page in ids:
        if page != pages.null and not (0 <= page and (page_count is None or page < page_count)):
            have = "no page has a negative id" if page_count is None else f"it has {page_count} pages"
            raise LocalError(ErrorCode.OUT_OF_RANGE, f"page {page} is none of {component.name}'s: {have}")


def check_unique(component: Component, pages: PageTable, used: range) -> None:
    """Refuse a destination's table that names a page twice among the positions `used`."""
    ids = pages.ids[used.start : used.stop]
    if isinstance(ids, range) or len(set(ids)) == len(ids):
        return
    real = [page for page in ids if page != pages.null]
    if len(set(real)) != len(real):
        raise LocalError(
            ErrorCode.OUT_OF_RANGE,
            f"the page table of {component.name} names a page twice: its rows would overwrite each other",
        )


def check_bases(component: Component, layers: Sequence[int], bases: Mapping[str, Sequence[int]]) -> None:
    """Refuse bases that are not one for each region and layer."""
    for region in component.regions:
        got = len(bases.get(region, ()))
        if got != len(layers):
            raise LocalError(
                ErrorCode.MISUSE,
                f"region {region!r} of {component.name} needs {len(layers)} bases, one per layer; got {got}",
            )


def local_heads(component: Component, heads: range) -> range:
    """Heads of the whole model as this rank counts them. Raises LocalError when it does not hold all of them."""
    local = range(heads.start - component.head_start, heads.stop - component.head_start)
    if not 0 <= local.start < local.stop <= component.heads or heads.step != 1:
        raise LocalError(
            ErrorCode.OUT_OF_RANGE,
            f"heads {local.start}..{local.stop} leave the {component.heads} local heads of {component.name}",
        )
    return local


def check_gather(part: GatherPart, tokens: range) -> tuple[range, range]:
    """Refuse a part whose two sides do not hold the same rows. Returns the used positions of both page tables."""
    source, destination = part.source, part.destination
    check_bases(source, part.layers, part.source_bases)
    if len(destination.regions) != 1:
        raise LocalError(
            ErrorCode.MISUSE,
            f"{destination.name} is no landing form: it has {len(destination.regions)} regions, and takes one",
        )
    check_bases(destination, part.layers, {destination.regions[0]: part.destination_bases})
    local_heads(source, part.heads)
    local_heads(destination, part.heads)
    if {plane.name for plane in source.planes} != {plane.name for plane in destination.planes}:
        raise LocalError(
            ErrorCode.LAYOUT_MISMATCH, f"{destination.name}: the two sides do not have the same planes to copy"
        )
    for plane in source.planes:
        _check_copied(destination, plane, destination.plane(plane.name))
    here = check_table(source, part.source_pages, tokens)
    there = check_table(destination, part.destination_pages, tokens)
    check_unique(destination, part.destination_pages, there)
    return here, there


def check_convert(
    conversion: Conversion,
    *,
    source_bases: Sequence[int],
    source_pages: PageTable,
    destination_at: Placement,
    destination_pages: PageTable,
    tokens: range,
    zero_until: int,
    digest_layers: Sequence[int] | None,
) -> dict[str, list[int]]:
    """Refuse what `Native.convert` cannot do. Returns the destination's bases: region -> one per layer."""
    source, destination, layers = conversion.source, conversion.destination, conversion.layers
    if len(source_bases) != len(layers) or len(source.regions) != 1:
        raise LocalError(
            ErrorCode.MISUSE,
            f"converting {source.name} takes one landing region and one base for each of "
            f"{len(layers)} layers; got {len(source.regions)} regions and {len(source_bases)} bases",
        )
    if digest_layers is not None and len(digest_layers) != len(layers):
        raise LocalError(
            ErrorCode.MISUSE,
            f"the digest of {source.name} takes the layer of each of {len(layers)} bases; got {len(digest_layers)}",
        )
    bases = {region: layer_bases(destination, destination_at, region, layers) for region in destination.regions}
    check_table(source, source_pages, tokens)
    written = range(tokens.start, max(tokens.stop, zero_until))
    used = check_table(destination, destination_pages, written, destination_at.pages)
    check_unique(destination, destination_pages, used)
    local_heads(source, conversion.heads)
    local_heads(destination, conversion.heads)
    return bases


def _check_copied(component: Component, a: Plane, b: Plane) -> None:
    for field in _COPIED:
        have, want = getattr(a, field), getattr(b, field)
        if have != want:
            raise LocalError(
                ErrorCode.LAYOUT_MISMATCH,
                f"{component.name}.{a.name}.{field}: the source has {have}, the destination {want}: "
                "copied bytes would be misread",
            )
