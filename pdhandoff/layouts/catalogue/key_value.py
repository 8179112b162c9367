"""What all caches of keys and values per head have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pdhandoff.layouts.catalogue.options import Options, head_range, model_layers, need_gqa
from pdhandoff.layouts.descriptor import Component, ComponentKind, Layout, Plane
from pdhandoff.layouts.profiles import Profile

__all__ = ["gqa_layout", "key_value_component"]


def key_value_component(
    key: Plane, value: Plane, *, layers: Sequence[int], page_tokens: int, heads: range, heads_total: int
) -> Component:
    """Keys and values of the heads that one rank holds.

    Args:
        key: where the keys are.
        value: where the values are.
        layers: global layer ids, ascending.
        page_tokens: tokens in a page.
        heads: the key/value heads that this rank holds, counted over the model.
        heads_total: key/value heads of the model.
    """
    return Component(
        name="key_value",
        kind=ComponentKind.KEY_VALUE,
        layers=tuple(layers),
        page_tokens=page_tokens,
        heads=len(heads),
        head_start=heads.start,
        heads_total=heads_total,
        planes=(key, value),
    )


def gqa_layout(entry: str, profile: Profile, options: Options, build: Callable[..., Component]) -> Layout:
    """The layout of a cache with grouped-query attention.

    Args:
        entry: its name in the catalogue.
        profile: the model.
        options: what the operator chose.
        build: makes the component, from what the profile and the options say of layers, heads and elements.

    Raises:
        LayoutError: the profile has no keys and values per head, or the options do not fit it.
    """
    shape = need_gqa(profile, entry)
    model, layers = model_layers(profile, options)
    component = build(
        layers=layers,
        heads=head_range(shape.heads, tp_rank=options.tp_rank, tp_size=options.tp_size),
        heads_total=shape.heads,
        head_elements=shape.head_elements,
        element=options.element,
        rope_order=shape.rope_order,
        rope=shape.rope,
    )
    return Layout(name=f"{entry}/{profile.name}", model=model, components=(component,)).validate()
