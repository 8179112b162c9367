"""Where two descriptions of the same memory part, for the places where nothing may be bridged."""

from __future__ import annotations

from typing import NamedTuple

from pdhandoff.errors import ErrorCode, LayoutError
from pdhandoff.layouts.descriptor import Layout
from pdhandoff.layouts.digest import layout_fields

__all__ = ["Difference", "first_difference", "require_same"]


class Difference(NamedTuple):
    """The first field in which two layouts differ, in the order of the canonical form."""

    field: str
    expected: str
    announced: str


def first_difference(expected: Layout, announced: Layout) -> Difference | None:
    """The first field that changes bytes and differs, or None when both describe the same bytes (equal digests).

    A field that one side does not have, or has at its default, is shown as `default`.
    """
    ours, theirs = dict(layout_fields(expected)), dict(layout_fields(announced))
    for field in (*ours, *theirs):
        pair = Difference(field, ours.get(field, "default"), theirs.get(field, "default"))
        if pair.expected != pair.announced:
            return pair
    return None


def require_same(expected: Layout, announced: Layout) -> None:
    """Raises LayoutError that names the first difference, when the two describe other bytes.

    For memory that is written without a conversion, such as an engine that checks a peer of its own kind.
    """
    found = first_difference(expected, announced)
    if found is not None:
        raise LayoutError(
            ErrorCode.LAYOUT_MISMATCH,
            f"{found.field}: {found.expected} expected, {found.announced} announced: bytes would be read from the "
            "wrong places or with the wrong meaning; describe the memory as it is on both sides",
            field=found.field,
        )
