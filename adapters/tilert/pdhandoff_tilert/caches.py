"""The live caches of a TileRT engine, found by looking at its tensors, and described as a layout.

`_get_device_result(device)` gives `(intermediates, caches, params, profile_logs)`; `caches[3 * layer + part]` is one
tensor `[1, length, elements]`, the draft (MTP) layer after the target layers. A device that does not serve a part holds
a tensor of length 1 there: in GLM-5's engine device 0 holds index keys and the others latents and rotary keys; in
DeepSeek-V3.2's every device holds all of them. The length includes the engine's padding.

Source: TileRT 0.1.6.post3, tilert/models/glm_5/modules/mla_v2.py and tilert/models/deepseek_v3_2/modules/mla_v2.py
(`get_cache_vars`), modules/end2end.py (`_get_device_result`), generator.py (`inject_cache`).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, Protocol, final

import torch
from torch import Tensor

from pdhandoff.errors import ErrorCode, LayoutError, LocalError
from pdhandoff.layouts import Layout
from pdhandoff.layouts.catalogue.tilert import index_plane, latent_planes, latent_planes_fp8
from pdhandoff.layouts.descriptor import Model
from pdhandoff.layouts.profiles import IndexerShape, MlaShape, Profile
from pdhandoff.planner import Placement

__all__ = [
    "PARTS",
    "CacheShape",
    "DeviceCaches",
    "LiveCaches",
    "Part",
    "describe",
    "discover",
    "shape_for_calls",
]

PARTS: Final = 3
"tensors per layer"


@final
class Part(enum.IntEnum):
    """A tensor's place among the three of its layer."""

    INDEX = 0
    LATENT = 1
    ROPE = 2


class DeviceCaches(Protocol):
    """What this module asks of `generator.decode_layer`."""

    num_devices: int

    def _get_device_result(self, device_id: int) -> tuple[Sequence[Tensor], Sequence[Tensor], object, object]: ...


class CacheShape(NamedTuple):
    """What the caches hold, whoever holds them."""

    layers: int
    "target layers, then the draft layer where the engine keeps one"
    index_length: int
    "tokens that the index-key tensors hold, padding included"
    rows_length: int
    "the same of latents and rotary keys"
    fp8: bool
    "latents are uint8 rows: e4m3 values, then one f32 scale per 128 of them"
    row_bytes: tuple[int, int, int]
    "bytes of one token, by part"


@final
class LiveCaches(NamedTuple):
    """The tensors that an injection writes."""

    shape: CacheShape
    holders: Mapping[Part, tuple[tuple[int, tuple[Tensor, ...]], ...]]
    "part -> (device, its tensors [1, length, elements] by layer) for every device that holds the part in full"

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """Devices whose memory an injection writes, each once."""
        return tuple(
            dict.fromkeys(tensors[0].device for holders in self.holders.values() for _, tensors in holders).keys()
        )

    def placements(self) -> dict[str, Placement]:
        """Component -> the first device's tensors of each part. Valid as long as the tensors are."""
        first = {part: [tensor.data_ptr() for tensor in self.holders[part][0][1]] for part in Part}
        return {
            "mla_latent": Placement(1, {"latent": first[Part.LATENT], "rope": first[Part.ROPE]}),
            "index_key": Placement(1, {"": first[Part.INDEX]}),
        }


def discover(layer: DeviceCaches, profile: Profile) -> LiveCaches:
    """The caches of a loaded engine.

    Args:
        layer: `generator.decode_layer`.
        profile: the model that the engine was loaded with.

    Raises:
        LocalError: a tensor is not what the profile says; the sentence names device, layer, part and what was found.
    """
    mla, indexer = _shapes(profile)
    by_device = [list(layer._get_device_result(device)[1]) for device in range(layer.num_devices)]  # noqa: SLF001
    layers = _count_layers(by_device, profile)
    fp8 = by_device[0][Part.LATENT].dtype is torch.uint8
    wanted = {
        Part.INDEX: (torch.bfloat16, indexer.elements),
        Part.LATENT: (torch.uint8, mla.latent + mla.latent // 128 * 4) if fp8 else (torch.bfloat16, mla.latent),
        Part.ROPE: (torch.bfloat16, mla.rope),
    }
    holders, lengths = {}, {}
    for part, (dtype, elements) in wanted.items():
        tensors = [[caches[PARTS * number + part] for number in range(layers)] for caches in by_device]
        for device, column in enumerate(tensors):
            for number, tensor in enumerate(column):
                _check_tensor(tensor, f"device {device}, layer {number}, {part.name.lower()}", dtype, elements)
        lengths[part] = max(tensor.shape[1] for column in tensors for tensor in column)
        holders[part] = _holders(tensors, part, lengths[part])
    if lengths[Part.LATENT] != lengths[Part.ROPE]:
        raise _unlike(
            "latent and rope", f"{lengths[Part.LATENT]} tokens and {lengths[Part.ROPE]}", "tensors of one length"
        )
    sizes = tuple(dtype.itemsize * elements for dtype, elements in wanted.values())
    shape = CacheShape(layers, lengths[Part.INDEX], lengths[Part.LATENT], fp8, (sizes[0], sizes[1], sizes[2]))
    return LiveCaches(shape, holders)


def shape_for_calls(profile: Profile, *, length: int, draft_layer: bool) -> CacheShape:
    """The rows that the engine's own `inject_cache` takes: bf16, `length` tokens, whatever the caches look like.

    Raises:
        LocalError: the profile has no latent attention or no indexer.
    """
    mla, indexer = _shapes(profile)
    layers = profile.layers + (len(profile.draft_layers) if draft_layer else 0)
    return CacheShape(layers, length, length, fp8=False, row_bytes=(2 * indexer.elements, 2 * mla.latent, 2 * mla.rope))


def describe(
    shape: CacheShape, profile: Profile, *, revision: str = "", weight_epoch: int = 0, spec_depth: int = 1
) -> Layout:
    """The layout that landed rows are converted into: one component per kind of state, contiguous.

    Args:
        shape: of the caches.
        profile: the model.
        revision: of the weights, as the prefill side names it.
        weight_epoch: of the weights.
        spec_depth: draft tokens per step of the prefill engine; rows of a prompt do not depend on it.

    Raises:
        LocalError: the profile has no latent attention or no indexer.
        LayoutError: the description breaks a limit.
    """
    mla, indexer = _shapes(profile)
    drafts = profile.draft_layers if shape.layers > profile.layers else ()
    model = Model(
        name=profile.name,
        revision=revision,
        weight_epoch=weight_epoch,
        layers=profile.layers,
        draft_layers=drafts,
        spec_depth=spec_depth if drafts else 0,
    )
    layers = (*range(profile.layers), *drafts)
    planes = latent_planes_fp8 if shape.fp8 else latent_planes
    rows = planes(layers=layers, length=shape.rows_length, latent=mla.latent, rope=mla.rope)
    keys = index_plane(
        layers=layers,
        length=shape.index_length,
        rope_order=indexer.rope_order,
        elements=indexer.elements,
        rope=indexer.rope,
    )
    name = f"tilert.{'fp8' if shape.fp8 else 'bf16'}/{profile.name}"
    return Layout(name=name, model=model, components=(rows, keys)).validate()


def _shapes(profile: Profile) -> tuple[MlaShape, IndexerShape]:
    if profile.mla is None or profile.indexer is None:
        raise LayoutError(
            ErrorCode.LAYOUT_MISMATCH,
            f"TileRT decodes latent attention with a sparse indexer, and {profile.name} has not both: "
            "choose another model",
            field="profile",
        )
    return profile.mla, profile.indexer


def _count_layers(by_device: Sequence[Sequence[Tensor]], profile: Profile) -> int:
    counts = {len(caches) for caches in by_device}
    count = counts.pop() if counts else 0
    layers, rest = divmod(count, PARTS)
    if counts or rest or layers not in {profile.layers, len(profile.all_layers)}:
        raise _unlike(
            "the engine",
            f"{sorted({len(caches) for caches in by_device})} cache tensors a device",
            f"{PARTS} for each of {profile.name}'s {profile.layers} layers, and for its draft layer with MTP",
        )
    return layers


def _check_tensor(tensor: Tensor, name: str, dtype: torch.dtype, elements: int) -> None:
    shape = tuple(tensor.shape)
    dense = tensor.is_contiguous()
    if tensor.dtype is not dtype or len(shape) != 3 or shape[0] != 1 or shape[2] != elements or not dense:
        raise _unlike(
            name,
            f"{tensor.dtype} {shape}" + ("" if dense else f" with strides {tensor.stride()}"),
            f"contiguous {dtype} [1, length, {elements}]",
        )


def _holders(
    tensors: Sequence[Sequence[Tensor]], part: Part, length: int
) -> tuple[tuple[int, tuple[Tensor, ...]], ...]:
    if length <= 1:
        raise _unlike(part.name.lower(), "length 1 on every device", "one device that holds them in full")
    found = []
    for device, column in enumerate(tensors):
        lengths = {tensor.shape[1] for tensor in column}
        if lengths == {length}:
            found.append((device, tuple(column)))
        elif lengths != {1}:
            raise _unlike(
                f"device {device}, {part.name.lower()}",
                f"tensors of {sorted(lengths)} tokens",
                f"{length} on every layer, or 1 on every layer where the device has another role",
            )
    return tuple(found)


def _unlike(name: str, found: str, wanted: str) -> LocalError:
    return LocalError(
        ErrorCode.LAYOUT_MISMATCH,
        f"caches of {name}: found {found}, and need {wanted}; nothing can be injected into them directly (inject=calls "
        "leaves the injection to the engine)",
    )
