"""Components in every arrangement that real caches use: small ones for planner tests, and what builds others."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pdhandoff.layouts.descriptor import (
    Component,
    ComponentKind,
    Element,
    Layout,
    Model,
    Plane,
    Quantisation,
    RopeOrder,
)

ORDERS = ("nhd", "hnd", "planar", "regions", "transposed", "padded", "sparse")
"arrangements that `key_value` knows"


def fp8_latent(
    *,
    layers: Sequence[int],
    page_tokens: int,
    row: int,
    latent: int,
    group: int,
    rope: int,
    rope_order: RopeOrder = RopeOrder.NONE,
) -> Component:
    """Rows as in fp8_ds_mla, `row` bytes apart: fp8 values, an f32 scale per `group` of them, bf16 rotary elements."""
    rope_at = latent + latent // group * Element.F32.nbytes

    def plane(name: str, element: Element, elements: int, offset: int) -> Plane:
        stride = page_tokens * row
        return Plane(name=name, element=element, elements=elements, offset=offset, page_stride=stride, token_stride=row)

    values = plane("latent", Element.E4M3, latent, 0)
    rotary = plane("rope", Element.BF16, rope, rope_at)
    return Component(
        name="mla_latent",
        kind=ComponentKind.MLA_LATENT,
        layers=tuple(layers),
        page_tokens=page_tokens,
        planes=(
            msgspec.structs.replace(values, quantisation=Quantisation(scale_plane="latent.scale", group=group)),
            plane("latent.scale", Element.F32, latent // group, latent),
            msgspec.structs.replace(
                rotary, rope_order=rope_order, rope_elements=0 if rope_order is RopeOrder.NONE else rope
            ),
        ),
    )


def fp8_index(
    *,
    layers: Sequence[int],
    page_tokens: int,
    elements: int,
    scales: Element = Element.F32,
    interleaved: bool = False,
    rope_order: RopeOrder = RopeOrder.NONE,
    rope: int = 0,
    name: str = "index_key",
) -> Component:
    """Pages of `elements` fp8 values and one scale a token: all values, then all scales, or each beside its scale."""
    row = elements + scales.nbytes
    stride = page_tokens * row
    return Component(
        name=name,
        kind=ComponentKind.INDEX_KEY,
        layers=tuple(layers),
        page_tokens=page_tokens,
        planes=(
            Plane(
                name="index_key",
                element=Element.E4M3,
                elements=elements,
                page_stride=stride,
                token_stride=row if interleaved else elements,
                quantisation=Quantisation(scale_plane="index_key.scale", group=elements),
                rope_order=rope_order,
                rope_elements=rope,
            ),
            Plane(
                name="index_key.scale",
                element=scales,
                elements=1,
                offset=elements if interleaved else page_tokens * elements,
                page_stride=stride,
                token_stride=row if interleaved else scales.nbytes,
            ),
        ),
    )


def latent_rows(layers: Sequence[int] = (0, 1), page_tokens: int = 64, row_stride: int = 26) -> Component:
    """Rows of 26 bytes, arranged as in fp8_ds_mla: 16 fp8 values, two f32 scales, one bf16 rotary element."""
    return fp8_latent(layers=layers, page_tokens=page_tokens, row=row_stride, latent=16, group=8, rope=1)


def index_pages(layers: Sequence[int] = (0, 1), page_tokens: int = 64) -> Component:
    """Planar pages: 8 fp8 values a token for all tokens, then one f32 scale a token."""
    return fp8_index(layers=layers, page_tokens=page_tokens, elements=8)


def key_value(
    order: str = "nhd",
    *,
    layers: Sequence[int] = (0, 1),
    page_tokens: int = 16,
    heads: int = 2,
    head_start: int = 0,
    heads_total: int = 2,
    elements: int = 2,
    element: Element = Element.BF16,
) -> Component:
    """Keys and values in one of `ORDERS`."""
    size = element.nbytes
    row = elements * size
    tokens = page_tokens
    block = row * tokens * heads  # one plane of a page
    arranged: dict[str, tuple[dict[str, int | str], dict[str, int | str]]] = {
        # each token: each head: its key, then its value
        "nhd": _alike(row, token_stride=2 * row * heads, head_stride=2 * row, page_stride=2 * block),
        # each head: each token: its key, then its value
        "hnd": _alike(row, token_stride=2 * row, head_stride=2 * row * tokens, page_stride=2 * block),
        # all keys, token by token, then all values
        "planar": _alike(block, token_stride=row * heads, head_stride=row, page_stride=2 * block),
        # keys and values in allocations of their own, token by token
        "regions": (
            {"region": "key", "token_stride": row * heads, "head_stride": row, "page_stride": block},
            {"region": "value", "token_stride": row * heads, "head_stride": row, "page_stride": block},
        ),
        # each head: keys, element by element, then values, token by token
        "transposed": (
            {
                "token_stride": size,
                "element_stride": size * tokens,
                "head_stride": 2 * row * tokens,
                "page_stride": 2 * block,
            },
            {"token_stride": row, "offset": row * tokens, "head_stride": 2 * row * tokens, "page_stride": 2 * block},
        ),
        # as nhd, with a gap after each token and each page
        "padded": _alike(
            row, token_stride=2 * row * heads + 2, head_stride=2 * row, page_stride=(2 * row * heads + 2) * tokens + 6
        ),
        # as nhd, each page followed by three pages of other layers
        "sparse": _alike(row, token_stride=2 * row * heads, head_stride=2 * row, page_stride=8 * block),
    }
    keys, values = arranged[order]
    return Component(
        name="key_value",
        kind=ComponentKind.KEY_VALUE,
        layers=tuple(layers),
        page_tokens=page_tokens,
        heads=heads,
        head_start=head_start,
        heads_total=heads_total,
        planes=(_plane("key", element, elements, keys), _plane("value", element, elements, values)),
    )


def layout(*components: Component, layers: int = 8) -> Layout:
    """A layout of these components."""
    return Layout(name="test", model=Model(name="test", layers=layers), components=components).validate()


def _alike(second: int, **strides: int) -> tuple[dict[str, int | str], dict[str, int | str]]:
    return {**strides}, {**strides, "offset": second}


def _plane(name: str, element: Element, elements: int, where: dict[str, int | str]) -> Plane:
    return Plane(name=name, element=element, elements=elements, **where)  # type: ignore[arg-type]
