"""vLLM's caches on CPU: keys transposed inside a page, and plain latent rows in small pages."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from pdhandoff.layouts.catalogue.key_value import gqa_layout, key_value_component
from pdhandoff.layouts.catalogue.options import (
    Options,
    model_layers,
    need_mla,
    page_size,
    refused,
)
from pdhandoff.layouts.catalogue.vllm_gqa import need_plain
from pdhandoff.layouts.catalogue.vllm_mla import mla_rows
from pdhandoff.layouts.descriptor import Component, Element, Layout, Plane, RopeOrder
from pdhandoff.layouts.profiles import Profile

__all__ = ["cpu_attention_pages", "cpu_attn", "cpu_mla"]

_PAGE_TOKENS = 128
_MLA_PAGE_TOKENS = 16


def cpu_attention_pages(
    *,
    layers: Sequence[int],
    heads: range,
    heads_total: int,
    head_elements: int,
    page_tokens: int = _PAGE_TOKENS,
    element: Element = Element.BF16,
    rope_order: RopeOrder = RopeOrder.NONE,
    rope: int = 0,
    page_stride: int | None = None,
) -> Component:
    """Pages `[head][key: element x token | value: token x element]`: keys are transposed, values are not.

    Source: vLLM 0.33, vllm/v1/attention/backends/cpu_attn.py (the page of a head, viewed as 2 x tokens rows, is cut in
    two); the transposition checked by running vLLM 0.32 on CPU.

    Args:
        layers: global layer ids, ascending.
        heads: the key/value heads that this rank holds, counted over the model.
        heads_total: key/value heads of the model.
        head_elements: elements of one key of one head, and of one value.
        page_tokens: tokens in a page (128 by default on CPU).
        element: BF16, F16 or F32.
        rope_order: order of a key's rotary elements.
        rope: how many leading elements of a key are rotary.
        page_stride: bytes from one page to the next; None: packed pages.

    Raises:
        LayoutError: an element that needs a scale.
    """
    need_plain(element)
    half = page_tokens * head_elements * element.nbytes
    stride = 2 * half * len(heads) if page_stride is None else page_stride
    return key_value_component(
        Plane(
            name="key",
            element=element,
            elements=head_elements,
            page_stride=stride,
            token_stride=element.nbytes,
            head_stride=2 * half,
            element_stride=page_tokens * element.nbytes,
            rope_order=rope_order,
            rope_elements=rope,
        ),
        Plane(
            name="value",
            element=element,
            elements=head_elements,
            offset=half,
            page_stride=stride,
            token_stride=head_elements * element.nbytes,
            head_stride=2 * half,
        ),
        layers=layers,
        page_tokens=page_tokens,
        heads=heads,
        heads_total=heads_total,
    )


def cpu_attn(profile: Profile, options: Options) -> Layout:
    """The layout of vLLM on CPU with grouped-query attention."""
    build = partial(cpu_attention_pages, page_tokens=page_size(options, _PAGE_TOKENS))
    return gqa_layout("vllm.cpu_attn", profile, options, build)


def cpu_mla(profile: Profile, options: Options) -> Layout:
    """The layout of vLLM on CPU with latent attention: rows `[layer, page, token, latent | rope]`, 16 tokens a page.

    Source: vLLM 0.33, backend CPU_MLA, shape (blocks, 1, 16, 576); checked by running vLLM 0.32 on CPU. Sparse
    attention does not run on CPU, so a profile with an indexer is refused.
    """
    shape = need_mla(profile, "vllm.cpu_mla")
    if profile.indexer is not None:
        raise refused("profile.indexer", f"vLLM has no sparse attention on CPU, and {profile.name} needs it")
    model, layers = model_layers(profile, options)
    rows = mla_rows(
        layers=layers,
        page_tokens=page_size(options, _MLA_PAGE_TOKENS),
        latent=shape.latent,
        rope=shape.rope,
        element=options.element,
    )
    return Layout(name=f"vllm.cpu_mla/{profile.name}", model=model, components=(rows,)).validate()
