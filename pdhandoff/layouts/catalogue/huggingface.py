"""Contiguous per-head caches, as Hugging Face transformers keeps them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from pdhandoff.layouts.catalogue.key_value import gqa_layout, key_value_component
from pdhandoff.layouts.catalogue.options import Options, need_gqa, need_length
from pdhandoff.layouts.catalogue.vllm_gqa import need_plain
from pdhandoff.layouts.descriptor import Component, Element, Layout, Plane, RopeOrder
from pdhandoff.layouts.profiles import Profile

__all__ = ["dynamic_cache", "key_value_tensors"]


def key_value_tensors(
    *,
    layers: Sequence[int],
    heads: range,
    heads_total: int,
    head_elements: int,
    length: int,
    element: Element = Element.BF16,
    rope_order: RopeOrder = RopeOrder.NONE,
    rope: int = 0,
) -> Component:
    """Keys and values, a contiguous tensor (region) each, `[1, head, token, element]`.

    Source: transformers, `DynamicCache` in src/transformers/cache_utils.py: `layers[i].keys` and `layers[i].values`. A
    dynamic cache grows by concatenation, so its length is the number of tokens in it and changes with every step.

    Args:
        layers: global layer ids, ascending.
        heads: the key/value heads held, counted over the model.
        heads_total: key/value heads of the model.
        head_elements: elements of one key of one head, and of one value.
        length: tokens that the tensors hold.
        element: BF16, F16 or F32.
        rope_order: order of a key's rotary elements (half-split in most models).
        rope: how many leading elements of a key are rotary.

    Raises:
        LayoutError: an element that needs a scale.
    """
    need_plain(element)
    row = head_elements * element.nbytes

    def plane(name: str, order: RopeOrder, rotary: int) -> Plane:
        return Plane(
            name=name,
            element=element,
            elements=head_elements,
            page_stride=len(heads) * length * row,
            token_stride=row,
            head_stride=length * row,
            region=name,
            rope_order=order,
            rope_elements=rotary,
        )

    return key_value_component(
        plane("key", rope_order, rope),
        plane("value", RopeOrder.NONE, 0),
        layers=layers,
        page_tokens=length,
        heads=heads,
        heads_total=heads_total,
    )


def dynamic_cache(profile: Profile, options: Options) -> Layout:
    """A transformers cache of `options.length` tokens."""
    need_gqa(profile, "huggingface.dynamic")  # before anything else can be found to be missing
    length = need_length(options, "huggingface.dynamic")
    return gqa_layout("huggingface.dynamic", profile, options, partial(key_value_tensors, length=length))
