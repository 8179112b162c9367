"""vLLM's key/value pages on GPUs: FlashAttention and FlashInfer, tokens or heads outermost in a page."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from functools import partial
from typing import Final, final

from pdhandoff.layouts.catalogue.key_value import gqa_layout, key_value_component
from pdhandoff.layouts.catalogue.options import Options, page_size, refused
from pdhandoff.layouts.descriptor import Component, Element, Layout, Plane, RopeOrder
from pdhandoff.layouts.profiles import Profile

__all__ = ["PLAIN_ELEMENTS", "PageOrder", "flash_attn", "flashinfer", "key_value_pages", "need_plain"]

PLAIN_ELEMENTS: Final = frozenset({Element.BF16, Element.F16, Element.F32})
"elements that need no scale"
_PAGE_TOKENS: Final = 16


@final
class PageOrder(enum.Enum):
    """Which axis is outermost in a key/value page."""

    NHD = "nhd"  # [token][head][key | value], vLLM's LBNHC and BLNHC
    HND = "hnd"  # [head][token][key | value], vLLM's LBHNC and BLHNC


def need_plain(element: Element) -> None:
    """Raises LayoutError for an element that cannot be decoded without a scale."""
    if element not in PLAIN_ELEMENTS:
        raise refused(
            "key_value.element",
            f"{element.value} keys and values have one static scale per layer in vLLM, which lies in the "
            "model's weights and in no cache plane: they would decode to other numbers; use kv_cache_dtype auto",
        )


def key_value_pages(
    *,
    layers: Sequence[int],
    heads: range,
    heads_total: int,
    head_elements: int,
    order: PageOrder,
    page_tokens: int = _PAGE_TOKENS,
    element: Element = Element.BF16,
    rope_order: RopeOrder = RopeOrder.NONE,
    rope: int = 0,
    page_stride: int | None = None,
) -> Component:
    """Pages with logical shape (blocks, heads, tokens, 2 x head_elements): a key, then its value.

    Bytes are `[token][head][key | value]` (NHD) or `[head][token][key | value]` (HND). Source: vLLM 0.33,
    vllm/v1/attention/backends/flash_attn.py and flashinfer.py (shape and halves; FlashInfer takes only HND on SM10x),
    vllm/v1/core/kv_cache_layout.py (orders).

    Args:
        layers: global layer ids, ascending.
        heads: the key/value heads that this rank holds, counted over the model (`options.head_range`).
        heads_total: key/value heads of the model.
        head_elements: elements of one key of one head, and of one value.
        order: outermost axis in a page.
        page_tokens: tokens in a page.
        element: BF16, F16 or F32.
        rope_order: order of a key's rotary elements.
        rope: how many leading elements of a key are rotary.
        page_stride: bytes from one page to the next; None: packed pages.

    Raises:
        LayoutError: an element that needs a scale.
    """
    need_plain(element)
    half = head_elements * element.nbytes
    if order is PageOrder.NHD:
        head_stride, token_stride = 2 * half, 2 * half * len(heads)
    else:
        head_stride, token_stride = 2 * half * page_tokens, 2 * half
    stride = 2 * half * page_tokens * len(heads) if page_stride is None else page_stride
    return key_value_component(
        Plane(
            name="key",
            element=element,
            elements=head_elements,
            page_stride=stride,
            token_stride=token_stride,
            head_stride=head_stride,
            rope_order=rope_order,
            rope_elements=rope,
        ),
        Plane(
            name="value",
            element=element,
            elements=head_elements,
            offset=half,
            page_stride=stride,
            token_stride=token_stride,
            head_stride=head_stride,
        ),
        layers=layers,
        page_tokens=page_tokens,
        heads=heads,
        heads_total=heads_total,
    )


def flash_attn(profile: Profile, options: Options) -> Layout:
    """The layout of vLLM with FlashAttention in its default order, tokens outermost."""
    return _layout("vllm.flash_attn", profile, options, PageOrder.NHD)


def flashinfer(profile: Profile, options: Options) -> Layout:
    """The layout of vLLM with FlashInfer in the order that SM10x needs, heads outermost."""
    return _layout("vllm.flashinfer", profile, options, PageOrder.HND)


def _layout(name: str, profile: Profile, options: Options, order: PageOrder) -> Layout:
    build = partial(key_value_pages, order=order, page_tokens=page_size(options, _PAGE_TOKENS))
    return gqa_layout(name, profile, options, build)
