"""Contiguous per-head caches, as Hugging Face transformers keeps them."""

from __future__ import annotations

from collections.abc import Sequence

from pdhandoff.layouts.catalogue.options import Options, head_range, model_layers, need_gqa, need_length
from pdhandoff.layouts.catalogue.vllm_gqa import need_plain
from pdhandoff.layouts.descriptor import Component, ComponentKind, Element, Layout, Plane, RopeOrder
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

    return Component(
        name="key_value",
        kind=ComponentKind.KEY_VALUE,
        layers=tuple(layers),
        page_tokens=length,
        heads=len(heads),
        head_start=heads.start,
        heads_total=heads_total,
        planes=(plane("key", rope_order, rope), plane("value", RopeOrder.NONE, 0)),
    )


def dynamic_cache(profile: Profile, options: Options) -> Layout:
    """A transformers cache of `options.length` tokens."""
    shape = need_gqa(profile, "huggingface.dynamic")
    length = need_length(options, "huggingface.dynamic")
    model, layers = model_layers(profile, options)
    component = key_value_tensors(
        layers=layers,
        heads=head_range(shape.heads, tp_rank=options.tp_rank, tp_size=options.tp_size),
        heads_total=shape.heads,
        head_elements=shape.head_elements,
        length=length,
        element=options.element,
        rope_order=shape.rope_order,
        rope=shape.rope,
    )
    return Layout(name=f"huggingface.dynamic/{profile.name}", model=model, components=(component,)).validate()
