"""What the demo's engines hold, described for the handoff: layouts from the catalogue, and where the bytes are."""

from __future__ import annotations

from typing import Final

from torch import Tensor

from pdhandoff.demo.model.config import ModelConfig
from pdhandoff.demo.model.decode import DecodeEngine
from pdhandoff.demo.model.planes import INDEX_PLANE, LATENT_PLANE, PLANES, ROPE_PLANE, PlaneCache
from pdhandoff.demo.model.prefill import PrefillEngine
from pdhandoff.layouts.catalogue.options import Options
from pdhandoff.layouts.catalogue.tilert import DeviceRole, tilert_layout
from pdhandoff.layouts.catalogue.vllm_mla import fp8_ds_mla
from pdhandoff.layouts.descriptor import Layout, Model, RopeOrder
from pdhandoff.layouts.profiles import Profile, mla
from pdhandoff.planner import Placement

__all__ = [
    "MODEL_NAME",
    "decode_layout",
    "decode_placements",
    "plane_placements",
    "prefill_layout",
    "prefill_placements",
]

MODEL_NAME: Final = "pdhandoff-demo"

_ROLES: Final = {(1, 0): DeviceRole.ALL, (2, 0): DeviceRole.INDEX, (2, 1): DeviceRole.ROWS}
"(devices, device) -> what it holds at full length"


def prefill_layout(config: ModelConfig, *, revision: str = "") -> Layout:
    """The paged caches of a `PrefillEngine`: `mla_latent` rows and planar `index_key` pages.

    Args:
        config: the model's.
        revision: of the weights (`weights.fingerprint`), so that two processes with other weights refuse each other.
    """
    profile = _profile(config)
    return fp8_ds_mla(profile, Options(model=_model(config, profile, revision), page_tokens=config.page_tokens))


def decode_layout(config: ModelConfig, *, revision: str = "", devices: int = 1, device: int = 0) -> Layout:
    """The planes that one device of a `DecodeEngine` holds at full length.

    Args:
        config: the model's.
        revision: of the weights, as for `prefill_layout`.
        devices: of the engine.
        device: which of them.

    Raises:
        KeyError: the engine has no such device.
    """
    profile = _profile(config)
    options = Options(model=_model(config, profile, revision), length=config.max_seq_len)
    return tilert_layout(profile, options, role=_ROLES[devices, device])


def prefill_placements(engine: PrefillEngine) -> dict[str, Placement]:
    """Component -> where its pages are. Valid as long as the engine is."""
    pages = engine.tensors.pages
    return {
        "mla_latent": Placement(pages, {"": _addresses(engine.tensors.latent)}),
        "index_key": Placement(pages, {"": _addresses(engine.tensors.index)}),
    }


def decode_placements(engine: DecodeEngine, *, device: int = 0) -> dict[str, Placement]:
    """Component -> where its planes are, for what this device holds at full length. Valid as long as the engine is.

    Raises:
        KeyError: the engine has no such device.
    """
    return plane_placements(engine.decode_layer.planes, devices=engine.decode_layer.num_devices, device=device)


def plane_placements(planes: PlaneCache, *, devices: int, device: int) -> dict[str, Placement]:
    """Component -> where the planes are that one of the devices holds at full length.

    Raises:
        KeyError: there is no such device.
    """
    role = _ROLES[devices, device]
    caches = planes.by_device[device]
    held = {}
    if role is not DeviceRole.INDEX:
        latent, rope = _addresses(caches[LATENT_PLANE::PLANES]), _addresses(caches[ROPE_PLANE::PLANES])
        held["mla_latent"] = Placement(1, {"latent": latent, "rope": rope})
    if role is not DeviceRole.ROWS:
        held["index_key"] = Placement(1, {"": _addresses(caches[INDEX_PLANE::PLANES])})
    return held


def _profile(config: ModelConfig) -> Profile:
    return mla(
        MODEL_NAME,
        layers=config.layers,
        draft_layers=1,
        latent=config.latent,
        rope=config.rope,
        index_rope_order=RopeOrder.HALF_SPLIT,
        index_elements=config.index_key,
        index_rope=config.index_rope,
    )


def _model(config: ModelConfig, profile: Profile, revision: str) -> Model:
    return profile.model(revision=revision, spec_depth=config.draft_depth)


def _addresses(tensors: list[Tensor]) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]
