"""Small components of every shape that conversions have to cope with, with the real row widths."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pdhandoff.layouts.descriptor import Component, ComponentKind, Element, Plane, Quantisation, RopeOrder, Rotation

__all__ = ["index_contiguous", "index_planar", "index_rows", "key_value", "latent_contiguous", "latent_rows", "moved"]


def latent_rows(*, page_tokens: int = 64, row: int = 656, layers: Sequence[int] = (0, 1)) -> Component:
    """512 e4m3 | 4 f32 | 64 bf16, in rows of `row` bytes."""
    stride = page_tokens * row

    def plane(name: str, element: Element, elements: int, offset: int) -> Plane:
        return Plane(name=name, element=element, elements=elements, offset=offset, page_stride=stride, token_stride=row)

    values = plane("latent", Element.E4M3, 512, 0)
    rope = plane("rope", Element.BF16, 64, 528)
    return Component(
        name="mla_latent",
        kind=ComponentKind.MLA_LATENT,
        layers=tuple(layers),
        page_tokens=page_tokens,
        planes=(
            msgspec.structs.replace(values, quantisation=Quantisation(scale_plane="latent.scale", group=128)),
            plane("latent.scale", Element.F32, 4, 512),
            msgspec.structs.replace(rope, rope_order=RopeOrder.INTERLEAVED, rope_elements=64),
        ),
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
    row = 128 + scales.nbytes
    stride = page_tokens * row
    return Component(
        name="index_key",
        kind=ComponentKind.INDEX_KEY,
        layers=tuple(layers),
        page_tokens=page_tokens,
        planes=(
            Plane(
                name="index_key",
                element=Element.E4M3,
                elements=128,
                page_stride=stride,
                token_stride=row if interleaved else 128,
                quantisation=Quantisation(scale_plane="index_key.scale", group=128),
                rope_order=RopeOrder.HALF_SPLIT,
                rope_elements=64,
            ),
            Plane(
                name="index_key.scale",
                element=scales,
                elements=1,
                offset=128 if interleaved else page_tokens * 128,
                page_stride=stride,
                token_stride=row if interleaved else scales.nbytes,
            ),
        ),
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
    half, count = elements * element.nbytes, len(heads)
    page = 2 * half * page_tokens * count
    key: dict[str, int] = {"page_stride": page, "token_stride": 2 * half * count, "head_stride": 2 * half}
    value = {**key, "offset": half}
    if order == "hnd":
        key |= {"token_stride": 2 * half, "head_stride": 2 * half * page_tokens}
        value = {**key, "offset": half}
    elif order == "transposed":
        block, size = half * page_tokens, element.nbytes
        key |= {"token_stride": size, "element_stride": size * page_tokens, "head_stride": 2 * block}
        value |= {"token_stride": half, "head_stride": 2 * block, "offset": block}
    elif order == "regions":
        key = {"page_stride": page // 2, "token_stride": half * count, "head_stride": half}
        value = dict(key)
    regions = ("key", "value") if order == "regions" else ("", "")
    plane = Plane(name="", element=element, elements=elements, page_stride=page, token_stride=0)
    return Component(
        name="key_value",
        kind=ComponentKind.KEY_VALUE,
        layers=tuple(layers),
        page_tokens=page_tokens,
        heads=count,
        head_start=heads.start,
        heads_total=heads_total,
        planes=(
            msgspec.structs.replace(plane, name="key", region=regions[0], **key),
            msgspec.structs.replace(plane, name="value", region=regions[1], **value),
        ),
    )


def moved(component: Component, *, page_gap: int) -> Component:
    """The same component with `page_gap` bytes more from one page to the next, as block-outermost caches have."""
    planes = tuple(
        msgspec.structs.replace(plane, page_stride=plane.page_stride + page_gap) for plane in component.planes
    )
    return msgspec.structs.replace(component, planes=planes)
