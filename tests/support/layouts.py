"""Small layouts for tests, and ways to change one field of one."""

from __future__ import annotations

from typing import Any

import msgspec

from pdhandoff.layouts import Component, Layout, Plane, RopeOrder, catalogue, profiles

__all__ = ["TINY", "TINY_GQA", "gqa_layout", "mla_layout", "with_component", "with_model", "with_plane"]

TINY = profiles.mla("tiny", layers=3, draft_layers=1, index_rope_order=RopeOrder.HALF_SPLIT)
TINY_GQA = profiles.gqa("tiny_gqa", layers=2, heads=4, head_elements=8)


def mla_layout(profile: profiles.Profile = TINY, **options: Any) -> Layout:
    """fp8 latent rows and index pages of a small model."""
    return catalogue.build("vllm.fp8_ds_mla", profile, catalogue.Options(**options))


def gqa_layout(**options: Any) -> Layout:
    """Key/value pages of a small model, tokens outermost."""
    return catalogue.build("vllm.flash_attn", TINY_GQA, catalogue.Options(**options))


def with_model(layout: Layout, **changes: Any) -> Layout:
    """The layout with fields of its model changed."""
    return msgspec.structs.replace(layout, model=msgspec.structs.replace(layout.model, **changes))


def with_component(layout: Layout, component: str, **changes: Any) -> Layout:
    """The layout with fields of one component changed."""

    def changed(entry: Component) -> Component:
        return msgspec.structs.replace(entry, **changes) if entry.name == component else entry

    return msgspec.structs.replace(layout, components=tuple(changed(entry) for entry in layout.components))


def with_plane(layout: Layout, component: str, plane: str, **changes: Any) -> Layout:
    """The layout with fields of one plane changed."""

    def changed(entry: Plane) -> Plane:
        return msgspec.structs.replace(entry, **changes) if entry.name == plane else entry

    planes = tuple(changed(entry) for entry in layout.component(component).planes)
    return with_component(layout, component, planes=planes)
