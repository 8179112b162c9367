"""Small components in every arrangement that real caches use, for planner tests."""

from __future__ import annotations

from collections.abc import Sequence

from pdhandoff.layouts.descriptor import (
    Component,
    ComponentKind,
    Element,
    Layout,
    Model,
    Plane,
    Quantisation,
)

ORDERS = ("nhd", "hnd", "planar", "regions", "transposed", "padded", "sparse")
"arrangements that `key_value` knows"


def latent_rows(layers: Sequence[int] = (0, 1), page_tokens: int = 64, row_stride: int = 26) -> Component:
    """Rows of 26 bytes, arranged as in fp8_ds_mla: 16 fp8 values, two f32 scales, one bf16 rotary element."""
    stride = row_stride * page_tokens
    return Component(
        name="mla_latent",
        kind=ComponentKind.MLA_LATENT,
        layers=tuple(layers),
        page_tokens=page_tokens,
        planes=(
            Plane(
                name="latent",
                element=Element.E4M3,
                elements=16,
                page_stride=stride,
                token_stride=row_stride,
                quantisation=Quantisation(scale_plane="latent.scale", group=8),
            ),
            Plane(
                name="latent.scale",
                element=Element.F32,
                elements=2,
                page_stride=stride,
                token_stride=row_stride,
                offset=16,
            ),
            Plane(
                name="rope", element=Element.BF16, elements=1, page_stride=stride, token_stride=row_stride, offset=24
            ),
        ),
    )


def index_pages(layers: Sequence[int] = (0, 1), page_tokens: int = 64) -> Component:
    """Planar pages: 8 fp8 values a token for all tokens, then one f32 scale a token."""
    stride = 12 * page_tokens
    return Component(
        name="index_key",
        kind=ComponentKind.INDEX_KEY,
        layers=tuple(layers),
        page_tokens=page_tokens,
        planes=(
            Plane(
                name="index_key",
                element=Element.E4M3,
                elements=8,
                page_stride=stride,
                token_stride=8,
                quantisation=Quantisation(scale_plane="index_key.scale", group=8),
            ),
            Plane(
                name="index_key.scale",
                element=Element.F32,
                elements=1,
                page_stride=stride,
                token_stride=4,
                offset=8 * page_tokens,
            ),
        ),
    )


def key_value(
    order: str = "nhd",
    *,
    layers: Sequence[int] = (0, 1),
    page_tokens: int = 16,
    heads: int = 2,
    head_start: int = 0,
    heads_total: int = 2,
    elements: int = 2,
) -> Component:
    """Keys and values, bf16, in one of `ORDERS`."""
    row = elements * 2
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
            {"region": "k", "token_stride": row * heads, "head_stride": row, "page_stride": block},
            {"region": "v", "token_stride": row * heads, "head_stride": row, "page_stride": block},
        ),
        # each head: keys, element by element, then values, token by token
        "transposed": (
            {
                "token_stride": 2,
                "element_stride": 2 * tokens,
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
        planes=(_plane("key", elements, keys), _plane("value", elements, values)),
    )


def layout(*components: Component, layers: int = 8) -> Layout:
    """A layout of these components."""
    return Layout(name="test", model=Model(name="test", layers=layers), components=components).validate()


def _alike(second: int, **strides: int) -> tuple[dict[str, int | str], dict[str, int | str]]:
    return {**strides}, {**strides, "offset": second}


def _plane(name: str, elements: int, where: dict[str, int | str]) -> Plane:
    return Plane(name=name, element=Element.BF16, elements=elements, **where)  # type: ignore[arg-type]
