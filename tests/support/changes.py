"""Every field of a layout changed one at a time, each change still a consistent layout (or known not to be)."""

from __future__ import annotations

from typing import Final, NamedTuple

import msgspec

from pdhandoff.layouts import ComponentKind, Element, Layout, Plane, Quantisation, RopeOrder, Rotation, profiles
from support.layouts import TINY, gqa_layout, mla_layout, with_component, with_model, with_plane

__all__ = ["CHANGES", "Change"]


class Change(NamedTuple):
    """A layout, the same with one thing changed, and what a bridge from the first to the second does."""

    before: Layout
    after: Layout
    refused: str | None
    "the field that a bridge names, None where it bridges"
    other_bytes: bool = True
    "whether the two describe other bytes, so that their digests differ"


MLA: Final = mla_layout()
GQA: Final = gqa_layout()
_INDEX = MLA.component("index_key")
_ROWS = MLA.component("mla_latent")


def _index(plane: str, **changes: object) -> Layout:
    return with_plane(MLA, "index_key", plane, **changes)


def _rows(plane: str, **changes: object) -> Layout:
    return with_plane(MLA, "mla_latent", plane, **changes)


def _heads(plane: str, **changes: object) -> Layout:
    return with_plane(GQA, "key_value", plane, **changes)


def _renamed_scales() -> Layout:
    planes = (
        msgspec.structs.replace(_INDEX.planes[0], quantisation=Quantisation(scale_plane="s", group=128)),
        msgspec.structs.replace(_INDEX.planes[1], name="s"),
    )
    return with_component(MLA, "index_key", planes=planes)


def _grouped_by_64() -> Layout:
    planes = (
        msgspec.structs.replace(
            _INDEX.planes[0],
            page_stride=8704,
            quantisation=Quantisation(scale_plane="index_key.scale", group=64),
        ),
        msgspec.structs.replace(_INDEX.planes[1], page_stride=8704, elements=2, token_stride=8),
    )
    return with_component(MLA, "index_key", planes=planes)


def _unscaled() -> Layout:
    plane = Plane(
        name="index_key",
        element=Element.BF16,
        elements=128,
        page_stride=64 * 256,
        token_stride=256,
        rope_order=RopeOrder.HALF_SPLIT,
        rope_elements=64,
    )
    return with_component(MLA, "index_key", planes=(plane,))


def _without(component: str) -> Layout:
    kept = tuple(entry for entry in MLA.components if entry.name != component)
    return msgspec.structs.replace(MLA, components=kept)


_DEEPER = mla_layout(profiles.mla("tiny", layers=4, draft_layers=1, index_rope_order=RopeOrder.HALF_SPLIT))
_SHARING_OVER = with_component(MLA, "index_key", layers=(0, 1, 3), shared_layers=((2, 1),))
_SHARING_UNDER = with_component(MLA, "index_key", layers=(0, 1, 3), shared_layers=((2, 0),))

CHANGES: Final = {
    "Layout.name": Change(MLA, msgspec.structs.replace(MLA, name="other"), None, other_bytes=False),
    "Layout.model": Change(MLA, with_model(MLA, name="other"), "model.name"),
    "Layout.components": Change(_without("index_key"), MLA, "components.index_key"),
    "Layout.components order": Change(
        MLA, msgspec.structs.replace(MLA, components=MLA.components[::-1]), None, other_bytes=False
    ),
    "Layout.components fewer": Change(MLA, _without("index_key"), None),
    "Model.name": Change(MLA, with_model(MLA, name="tiny2"), "model.name"),
    "Model.revision": Change(MLA, with_model(MLA, revision="b"), "model.revision"),
    "Model.weight_epoch": Change(MLA, with_model(MLA, weight_epoch=1), "model.weight_epoch"),
    "Model.layers": Change(MLA, _DEEPER, "model.layers"),
    "Model.draft_layers": Change(MLA, mla_layout(model=TINY.model(draft_layers=())), "model.draft_layers"),
    "Model.spec_depth": Change(MLA, with_model(MLA, spec_depth=3), "model.spec_depth"),
    "Component.name": Change(MLA, with_component(MLA, "index_key", name="keys"), "components.keys"),
    "Component.kind": Change(MLA, with_component(MLA, "index_key", kind=ComponentKind.KEY_VALUE), "index_key.kind"),
    "Component.layers": Change(with_component(MLA, "index_key", layers=(0, 1)), MLA, "index_key.layers"),
    "Component.layers fewer": Change(MLA, with_component(MLA, "index_key", layers=(0, 1)), None),
    "Component.page_tokens": Change(MLA, mla_layout(page_tokens=32), None),
    "Component.planes": Change(MLA, with_component(MLA, "mla_latent", planes=_ROWS.planes[:2]), "mla_latent.planes"),
    "Component.planes order": Change(
        MLA, with_component(MLA, "mla_latent", planes=(_ROWS.planes[2], *_ROWS.planes[:2])), None
    ),
    "Component.heads": Change(GQA, with_component(GQA, "key_value", heads=3), None),
    "Component.heads more": Change(with_component(GQA, "key_value", heads=3), GQA, "key_value.heads"),
    "Component.head_start": Change(
        with_component(GQA, "key_value", heads=3),
        with_component(GQA, "key_value", heads=3, head_start=1),
        "key_value.heads",
    ),
    "Component.head_start lower": Change(
        with_component(GQA, "key_value", heads=3, head_start=1),
        with_component(GQA, "key_value", heads=3),
        "key_value.heads",
    ),
    "Component.heads_total": Change(GQA, with_component(GQA, "key_value", heads_total=8), "key_value.heads_total"),
    "Component.shared_layers": Change(_SHARING_OVER, _SHARING_UNDER, None),
    "Plane.name": Change(MLA, _rows("rope", name="rotary"), "mla_latent.planes"),
    "Plane.element": Change(MLA, _rows("rope", element=Element.F16), None),
    "Plane.element of a scale": Change(MLA, _index("index_key.scale", element=Element.UE8M0X4), None),
    "Plane.element of a key": Change(GQA, _heads("key", element=Element.F16), "key_value.key.element"),
    "Plane.elements": Change(MLA, _rows("rope", elements=62, rope_elements=62), "mla_latent.rope.elements"),
    "Plane.page_stride": Change(MLA, _rows("rope", page_stride=50000), None),
    "Plane.token_stride": Change(MLA, _rows("rope", token_stride=660, page_stride=42240), None),
    "Plane.offset": Change(MLA, _rows("rope", offset=544, page_stride=42000), None),
    "Plane.head_stride": Change(GQA, _heads("key", head_stride=36, token_stride=144, page_stride=2304), None),
    "Plane.head_stride of one head": Change(MLA, _rows("rope", head_stride=4096), None, other_bytes=False),
    "Plane.element_stride": Change(MLA, _rows("rope", element_stride=4, token_stride=1024, page_stride=65536), None),
    "Plane.element_stride spelled out": Change(MLA, _rows("rope", element_stride=2), None, other_bytes=False),
    "Plane.region": Change(MLA, _rows("rope", region="rope"), None),
    "Plane.region renamed": Change(
        MLA,
        with_component(
            MLA,
            "index_key",
            planes=tuple(msgspec.structs.replace(plane, region="keys") for plane in _INDEX.planes),
        ),
        None,
        other_bytes=False,
    ),
    "Plane.quantisation": Change(MLA, _unscaled(), None),
    "Plane.quantisation left out": Change(
        MLA, _index("index_key", quantisation=None), "index_key.index_key.quantisation"
    ),
    "Plane.rotation": Change(MLA, _index("index_key", rotation=Rotation.HADAMARD128), None),
    "Plane.rope_order": Change(MLA, _index("index_key", rope_order=RopeOrder.INTERLEAVED), None),
    "Plane.rope_order left out": Change(
        MLA, _index("index_key", rope_order=RopeOrder.NONE, rope_elements=0), "index_key.index_key.rope_order"
    ),
    "Plane.rope_elements": Change(MLA, _index("index_key", rope_elements=32), "index_key.index_key.rope_elements"),
    "Quantisation.scale_plane": Change(MLA, _renamed_scales(), None),
    "Quantisation.group": Change(MLA, _grouped_by_64(), None),
}
"""changes by `Struct.field`, a few fields in several ways"""
