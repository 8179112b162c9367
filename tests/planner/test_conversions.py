from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from pdhandoff.errors import LayoutError, PlanError
from pdhandoff.layouts.descriptor import (
    Component,
    ComponentKind,
    Element,
    Plane,
    Quantisation,
    RopeOrder,
    Rotation,
)
from pdhandoff.planner import COPY, derive_conversion
from support.components import index_pages, key_value, latent_rows


def plain(name: str, elements: int, **fields: object) -> Plane:
    plane = Plane(name=name, element=Element.BF16, elements=elements, page_stride=1 << 20, token_stride=elements * 2)
    return msgspec.structs.replace(plane, region=name, **fields)


def index(*planes: Plane, layers: Sequence[int] = (0, 1)) -> Component:
    return Component(
        name="index_key", kind=ComponentKind.INDEX_KEY, layers=tuple(layers), page_tokens=64, planes=planes
    )


FP8 = {"element": Element.E4M3, "quantisation": Quantisation(scale_plane="index_key.scale", group=128)}
SCALE = plain("index_key.scale", 1, element=Element.F32)


def test_fp8_rows_become_rotated_bf16_planes() -> None:
    source = index(plain("index_key", 128, **FP8), SCALE)
    destination = index(plain("index_key", 128, rotation=Rotation.HADAMARD128))
    (part,) = derive_conversion(source, destination).parts
    assert part.kernel == "e4m3.f32x128>bf16+hadamard128"
    assert part.steps == ("hadamard128",)
    assert (part.source, part.source_scale) == source.planes
    assert (part.destination, part.destination_scale) == (destination.planes[0], None)


def test_equal_encodings_are_copied_whatever_their_place() -> None:
    conversion = derive_conversion(latent_rows(page_tokens=64), latent_rows(page_tokens=16))
    assert [(part.name, part.kernel, part.steps) for part in conversion.parts] == [
        ("latent", COPY, ()),
        ("rope", COPY, ()),
    ]
    assert conversion.parts[0].source_scale == latent_rows().planes[1]
    assert conversion.layers == (0, 1)


@pytest.mark.parametrize(
    ("source", "destination", "kernel"),
    [
        ({}, {}, "copy"),
        ({}, {"element": Element.F16}, "bf16>f16"),
        ({"rotation": Rotation.HADAMARD128}, {}, "bf16>bf16+hadamard128"),
        ({"rotation": Rotation.HADAMARD128}, {"rotation": Rotation.HADAMARD128}, "copy"),
        (
            {"rope_order": RopeOrder.INTERLEAVED},
            {"rope_order": RopeOrder.HALF_SPLIT},
            "bf16>bf16+half_split64",
        ),
        (
            {"rope_order": RopeOrder.HALF_SPLIT},
            {"rope_order": RopeOrder.INTERLEAVED, "rotation": Rotation.HADAMARD128},
            "bf16>bf16+interleaved64+hadamard128",
        ),
        (
            {"rope_order": RopeOrder.HALF_SPLIT, "rotation": Rotation.HADAMARD128},
            {"rope_order": RopeOrder.INTERLEAVED},
            "bf16>bf16+hadamard128+interleaved64",
        ),
        (
            {"rope_order": RopeOrder.HALF_SPLIT, "rotation": Rotation.HADAMARD128},
            {"rope_order": RopeOrder.INTERLEAVED, "rotation": Rotation.HADAMARD128},
            "bf16>bf16+hadamard128+interleaved64+hadamard128",
        ),
    ],
)
def test_only_the_steps_that_change_something_are_taken(
    source: dict[str, object], destination: dict[str, object], kernel: str
) -> None:
    def component(fields: dict[str, object]) -> Component:
        return index(plain("index_key", 128, **fields, rope_elements=64 if "rope_order" in fields else 0))

    (part,) = derive_conversion(component(source), component(destination)).parts
    assert part.kernel == kernel


def test_another_type_of_scale_is_another_encoding() -> None:
    packed = msgspec.structs.replace(SCALE, element=Element.UE8M0X4)
    values = plain("index_key", 128, **FP8)
    (part,) = derive_conversion(index(values, SCALE), index(values, packed)).parts
    assert part.kernel == "e4m3.f32x128>e4m3.ue8m0x4x128"
    assert (part.source_scale, part.destination_scale) == (SCALE, packed)


def test_layers_are_those_that_both_sides_hold_unless_named() -> None:
    source, destination = latent_rows(layers=(1, 2, 5)), latent_rows(layers=(0, 2, 5))
    assert derive_conversion(source, destination).layers == (2, 5)
    assert derive_conversion(source, destination, [5, 0]).layers == (5, 0)
    with pytest.raises(PlanError, match="has no layer 1"):
        derive_conversion(source, destination, [1])


def test_heads_are_those_that_both_sides_hold() -> None:
    source = key_value(heads=2, head_start=2, heads_total=4)
    assert derive_conversion(source, key_value(heads=4, heads_total=4)).heads == range(2, 4)


@pytest.mark.parametrize(
    ("source", "destination", "field"),
    [
        (latent_rows(), index_pages(), "index_key.kind"),
        (index(plain("a", 4)), index(plain("a", 4), plain("b", 4)), "index_key.b"),
        (index(plain("a", 4), plain("b", 4)), index(plain("a", 4)), "index_key.b"),
        (index(plain("a", 4)), index(plain("a", 8)), "index_key.a.elements"),
        (
            index(plain("a", 4, rope_order=RopeOrder.INTERLEAVED, rope_elements=2)),
            index(plain("a", 4, rope_order=RopeOrder.INTERLEAVED, rope_elements=4)),
            "index_key.a.rope_elements",
        ),
        (
            index(plain("a", 4, rope_elements=4)),
            index(plain("a", 4, rope_order=RopeOrder.INTERLEAVED, rope_elements=4)),
            "index_key.a.rope_order",
        ),
        (key_value(), key_value(heads_total=4), "key_value.heads_total"),
    ],
)
def test_what_no_conversion_bridges_is_refused_by_field(source: Component, destination: Component, field: str) -> None:
    with pytest.raises(LayoutError) as error:
        derive_conversion(source, destination)
    assert error.value.field == field
    assert field in str(error.value)
