"""Sixteen bytes that stand for everything in a layout that changes a byte, and for nothing else."""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Iterator
from typing import Final

import msgspec

from pdhandoff.layouts.descriptor import Component, Layout, Model, Plane

__all__ = ["DIGEST_BYTES", "layout_digest", "layout_fields"]

DIGEST_BYTES: Final = 16
_PERSONALISATION: Final = b"pdhandoff.lay.1"
"changes when the canonical form below changes, so that old and new digests never agree by chance"


def layout_digest(layout: Layout) -> bytes:
    """BLAKE2b, 16 bytes, over the canonical form of a layout: stable across processes, versions and machines.

    The canonical form is `layout_fields`, each as `path=value` in UTF-8 and a newline. It leaves out `Layout.name`, the
    order of components, the names of regions, strides along axes of one step and every field at its default (so that a
    field added later changes no digest of today); it writes a dense element stride out. Plane order and component names
    count: both fix the bytes that travel.
    """
    text = "".join(f"{path}={value}\n" for path, value in layout_fields(layout))
    return hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES, person=_PERSONALISATION).digest()


def layout_fields(layout: Layout) -> Iterator[tuple[str, str]]:
    """The canonical form: `(path, value)` of every field that changes bytes, in a fixed order."""
    yield from _struct_fields("model", layout.model)
    for component in sorted(layout.components, key=lambda component: component.name):
        yield from _component_fields(component)


def _component_fields(component: Component) -> Iterator[tuple[str, str]]:
    at = repr(component.name)
    for path, value in _struct_fields(at, component):
        if path not in {f"{at}.name", f"{at}.planes"}:
            yield path, value
    for index, plane in enumerate(component.planes):
        # plane by plane in order: the index keeps two orders of the same planes apart
        yield from _struct_fields(f"{at}[{index}]", _canonical_plane(component, plane))


def _canonical_plane(component: Component, plane: Plane) -> Plane:
    return msgspec.structs.replace(
        plane,
        element_stride=plane.element_step if plane.elements > 1 else 0,
        token_stride=plane.token_stride if component.page_tokens > 1 else 0,
        head_stride=plane.head_stride if component.heads > 1 else 0,
        region=str(component.regions.index(plane.region)),
    )


def _struct_fields(at: str, struct: Model | Component | Plane) -> Iterator[tuple[str, str]]:
    for field in msgspec.structs.fields(struct):
        value = getattr(struct, field.name)
        if value != field.default:
            yield f"{at}.{field.name}", _value(value)


def _value(value: object) -> str:
    """One spelling for each value. Strings are quoted, so that no name can imitate another field."""
    if isinstance(value, enum.Enum):
        return str(value.value)
    if isinstance(value, msgspec.Struct):
        return ";".join(f"{name}={_value(getattr(value, name))}" for name in value.__struct_fields__)
    return ascii(value)
