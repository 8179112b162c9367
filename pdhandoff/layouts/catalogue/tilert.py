"""TileRT's decode caches: one contiguous tensor per layer and part, `[1, length, dim]`; devices have roles.

Source: TileRT 0.1.6.post3, the Python files of its wheel: `caches[3 * layer + {0: index key, 1: latent, 2: rope}]` of a
device's result, and the conversion of its published prefill/decode integration (index keys are Hadamard-rotated after
dequantisation, with scale 128 ** -0.5).
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Final, final

from pdhandoff.layouts.catalogue.options import Options, model_layers, need_length, need_mla, refused
from pdhandoff.layouts.catalogue.vllm_mla import FP8_GROUP
from pdhandoff.layouts.descriptor import (
    Component,
    ComponentKind,
    Element,
    Layout,
    Plane,
    Quantisation,
    RopeOrder,
    Rotation,
)
from pdhandoff.layouts.profiles import Profile

__all__ = [
    "DEVICE_ROLES",
    "DeviceRole",
    "device_layouts",
    "index_plane",
    "latent_planes",
    "latent_planes_fp8",
    "tilert",
    "tilert_fp8",
    "tilert_layout",
]


@final
class DeviceRole(enum.Enum):
    """Which caches one decode device holds at full length. The others have length 1 there and are left out."""

    INDEX = "index"  # index keys only
    ROWS = "rows"  # latent and rope only
    ALL = "all"


DEVICE_ROLES: Final = (DeviceRole.INDEX, *[DeviceRole.ROWS] * 7)
"what the eight devices of TileRT 0.1.6 hold, by device number; read the live tensors' lengths where you can"


def latent_planes(*, layers: Sequence[int], length: int, latent: int = 512, rope: int = 64) -> Component:
    """bf16 latent `[1, length, latent]` and rope `[1, length, rope]`, a tensor (region) each; rope interleaved.

    Args:
        layers: global layer ids, ascending.
        length: tokens that the tensors hold.
        latent: elements of the latent.
        rope: elements of the rotary key.
    """
    plane = _dense("latent", "latent", latent, length)
    return _mla(layers, length, (plane, _rope(rope, length)))


def latent_planes_fp8(*, layers: Sequence[int], length: int, latent: int = 512, rope: int = 64) -> Component:
    """fp8 latent, uint8 `[1, length, 528]` = 512 e4m3 | 4 f32 scales, and bf16 rope `[1, length, rope]`.

    Args:
        layers: global layer ids, ascending.
        length: tokens that the tensors hold.
        latent: elements of the latent, a multiple of 128.
        rope: elements of the rotary key.

    Raises:
        LayoutError: latent is no multiple of 128.
    """
    if latent % FP8_GROUP:
        raise refused("mla_latent.latent", f"{latent} elements are no multiple of the {FP8_GROUP} that share a scale")
    scales = latent // FP8_GROUP
    row = latent + scales * Element.F32.nbytes
    values = Plane(
        name="latent",
        element=Element.E4M3,
        elements=latent,
        page_stride=length * row,
        token_stride=row,
        region="latent",
        quantisation=Quantisation(scale_plane="latent.scale", group=FP8_GROUP),
    )
    scale = Plane(
        name="latent.scale",
        element=Element.F32,
        elements=scales,
        offset=latent,
        page_stride=length * row,
        token_stride=row,
        region="latent",
    )
    return _mla(layers, length, (values, scale, _rope(rope, length)))


def index_plane(
    *, layers: Sequence[int], length: int, rope_order: RopeOrder, elements: int = 128, rope: int = 64
) -> Component:
    """bf16 index keys `[1, length, 128]`, Hadamard-rotated; the rope order is that of the values before the rotation.

    Args:
        layers: global layer ids, ascending.
        length: tokens that the tensors hold.
        rope_order: HALF_SPLIT for DeepSeek-V3.2, INTERLEAVED for GLM-5: TileRT keeps vLLM's order.
        elements: elements of an index key; the rotation needs 128.
        rope: how many of them, from the first on, are rotary.
    """
    row = elements * Element.BF16.nbytes
    plane = Plane(
        name="index_key",
        element=Element.BF16,
        elements=elements,
        page_stride=length * row,
        token_stride=row,
        rotation=Rotation.HADAMARD128,
        rope_order=rope_order,
        rope_elements=rope,
    )
    return Component(
        name="index_key", kind=ComponentKind.INDEX_KEY, layers=tuple(layers), page_tokens=length, planes=(plane,)
    )


def tilert_layout(profile: Profile, options: Options, *, role: DeviceRole, fp8: bool = False) -> Layout:
    """What one TileRT device holds. An index key cache exists on every layer that reads index keys.

    Raises:
        LayoutError: a model without latent attention or without an indexer, or no `options.length`.
    """
    name = "tilert.fp8" if fp8 else "tilert.bf16"
    shape = need_mla(profile, name)
    if profile.indexer is None:
        raise refused("profile.indexer", f"TileRT decodes with sparse attention, and {profile.name} has no indexer")
    length = need_length(options, name)
    model, layers = model_layers(profile, options)
    latents = latent_planes_fp8 if fp8 else latent_planes
    rows = latents(layers=layers, length=length, latent=shape.latent, rope=shape.rope)
    keys = index_plane(
        layers=layers,
        length=length,
        rope_order=profile.indexer.rope_order,
        elements=profile.indexer.elements,
        rope=profile.indexer.rope,
    )
    held = {DeviceRole.INDEX: (keys,), DeviceRole.ROWS: (rows,), DeviceRole.ALL: (rows, keys)}[role]
    return Layout(name=f"{name}/{profile.name}/{role.value}", model=model, components=held).validate()


def device_layouts(
    profile: Profile, options: Options, *, roles: Sequence[DeviceRole] = DEVICE_ROLES, fp8: bool = False
) -> tuple[Layout, ...]:
    """The layouts of all devices of one TileRT engine, by device number."""
    return tuple(tilert_layout(profile, options, role=role, fp8=fp8) for role in roles)


def tilert(profile: Profile, options: Options) -> Layout:
    """TileRT with bf16 caches, all of them on one device."""
    return tilert_layout(profile, options, role=DeviceRole.ALL)


def tilert_fp8(profile: Profile, options: Options) -> Layout:
    """TileRT with an fp8 latent cache, all caches on one device."""
    return tilert_layout(profile, options, role=DeviceRole.ALL, fp8=True)


def _dense(name: str, region: str, elements: int, length: int) -> Plane:
    row = elements * Element.BF16.nbytes
    return Plane(
        name=name, element=Element.BF16, elements=elements, page_stride=length * row, token_stride=row, region=region
    )


def _rope(elements: int, length: int) -> Plane:
    row = elements * Element.BF16.nbytes
    return Plane(
        name="rope",
        element=Element.BF16,
        elements=elements,
        page_stride=length * row,
        token_stride=row,
        region="rope",
        rope_order=RopeOrder.INTERLEAVED,
        rope_elements=elements,
    )


def _mla(layers: Sequence[int], length: int, planes: tuple[Plane, ...]) -> Component:
    return Component(
        name="mla_latent",
        kind=ComponentKind.MLA_LATENT,
        layers=tuple(layers),
        page_tokens=length,
        planes=planes,
    )
