"""Small components of every shape that conversions have to cope with, with the real row widths."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pdhandoff.layouts.descriptor import Component, ComponentKind, Element, Plane, RopeOrder, Rotation
from support import components
from support.components import fp8_index, fp8_latent

__all__ = ["index_contiguous", "index_planar", "index_rows", "key_value", "latent_contiguous", "latent_rows", "moved"]


def latent_rows(*, page_tokens: int = 64, row: int = 656, layers: Sequence[int] = (0, 1)) -> Component:
    """512 e4m3 | 4 f32 | 64 bf16, in rows of `row` bytes."""
    return fp8_latent(
        layers=layers,
        page_tokens=page_tokens,
        row=row,
        latent=512,
        group=128,
        rope=64,
        rope_order=RopeOrder.INTERLEAVED,
    )


def latent_contiguous(
    length: int, *, layers: Sequence[int] = (0, 1), rope_order: RopeOrder = RopeOrder.INTERLEAVED
) -> Component:
    """bf16 latent and rope, one tensor each."""
    return Component(
        name="mla_latent",
        kind=ComponentKind.MLA_LATENT,
        layers=tuple(layers),
        page_tokens=length,
        planes=(
            Plane(
                name="latent",
                element=Element.BF16,
                elements=512,
                page_stride=length * 1024,
                token_stride=1024,
                region="latent",
            ),
            Plane(
                name="rope",
                element=Element.BF16,
                elements=64,
                page_stride=length * 128,
                token_stride=128,
                region="rope",
                rope_order=rope_order,
                rope_elements=64,
            ),
        ),
    )


def _index(page_tokens: int, scales: Element, layers: Sequence[int], *, interleaved: bool) -> Component:
    return fp8_index(
        layers=layers,
        page_tokens=page_tokens,
        elements=128,
        scales=scales,
        interleaved=interleaved,
        rope_order=RopeOrder.HALF_SPLIT,
        rope=64,
    )


def index_planar(*, page_tokens: int = 64, scales: Element = Element.F32, layers: Sequence[int] = (0, 1)) -> Component:
    """All values of a page, then all scales."""
    return _index(page_tokens, scales, layers, interleaved=False)


def index_rows(*, page_tokens: int = 64, scales: Element = Element.F32, layers: Sequence[int] = (0, 1)) -> Component:
    """Values and scale side by side."""
    return _index(page_tokens, scales, layers, interleaved=True)


def index_contiguous(
    length: int,
    *,
    layers: Sequence[int] = (0, 1),
    rotation: Rotation = Rotation.HADAMARD128,
    rope_order: RopeOrder = RopeOrder.HALF_SPLIT,
    element: Element = Element.BF16,
) -> Component:
    """Unquantised index keys, one tensor."""
    row = 128 * element.nbytes
    plane = Plane(
        name="index_key",
        element=element,
        elements=128,
        page_stride=length * row,
        token_stride=row,
        rotation=rotation,
        rope_order=rope_order,
        rope_elements=64,
    )
    return Component(
        name="index_key", kind=ComponentKind.INDEX_KEY, layers=tuple(layers), page_tokens=length, planes=(plane,)
    )


def key_value(
    order: str,
    *,
    page_tokens: int = 16,
    heads: range = range(2),
    heads_total: int = 4,
    elements: int = 24,
    element: Element = Element.BF16,
    layers: Sequence[int] = (0, 1),
) -> Component:
    """Keys and values: "nhd", "hnd", "transposed" (keys element-major) or "regions" (a tensor each)."""
    return components.key_value(
        order,
        layers=layers,
        page_tokens=page_tokens,
        heads=len(heads),
        head_start=heads.start,
        heads_total=heads_total,
        elements=elements,
        element=element,
    )


def moved(component: Component, *, page_gap: int) -> Component:
    """The same component with `page_gap` bytes more from one page to the next, as block-outermost caches have."""
    planes = tuple(
        msgspec.structs.replace(plane, page_stride=plane.page_stride + page_gap) for plane in component.planes
    )
    return msgspec.structs.replace(component, planes=planes)
