"""Live caches: found, described, and refused where they are not what the profile says."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pdhandoff.errors import ErrorCode, LocalError
from pdhandoff.layouts import layout_digest
from pdhandoff.layouts.catalogue.options import Options
from pdhandoff.layouts.catalogue.tilert import DeviceRole, tilert_layout
from pdhandoff.layouts.profiles import DSV32, GLM5, Profile, gqa
from pdhandoff_tilert.caches import Part, describe, discover, shape_for_calls

LENGTH = 24
ROLES = ("index", *["rows"] * 7)
Devices = list[list[Tensor]]


class Layer:
    """A decode layer that only holds caches."""

    def __init__(self, caches: Devices) -> None:
        self.caches = caches
        self.num_devices = len(caches)

    def _get_device_result(self, device_id: int) -> tuple[list[Tensor], list[Tensor], object, object]:
        return [], self.caches[device_id], None, None


def tensors(
    profile: Profile, *, roles: tuple[str, ...] = ROLES, fp8: bool = False, mtp: bool = True, index_length: int = LENGTH
) -> Layer:
    """The caches of a loaded engine, `[device][3 * layer + part]`."""
    layers = profile.layers + (1 if mtp else 0)

    def of(role: str) -> list[Tensor]:
        keys = index_length if role in {"index", "all"} else 1
        rows = LENGTH if role in {"rows", "all"} else 1
        latent = torch.empty(1, rows, 528 if fp8 else 512, dtype=torch.uint8 if fp8 else torch.bfloat16)
        return [
            part
            for _ in range(layers)
            for part in (
                torch.empty(1, keys, 128, dtype=torch.bfloat16),
                latent.clone(),
                torch.empty(1, rows, 64, dtype=torch.bfloat16),
            )
        ]

    return Layer([of(role) for role in roles])


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("profile", [GLM5, DSV32], ids=lambda profile: profile.name)
def test_roles_are_read_from_the_tensors(profile: Profile, fp8: bool) -> None:
    layer = tensors(profile, fp8=fp8)
    live = discover(layer, profile)
    layers = profile.layers + 1
    assert live.shape == (layers, LENGTH, LENGTH, fp8, (256, 528 if fp8 else 1024, 128))
    assert {part: [device for device, _ in holders] for part, holders in live.holders.items()} == {
        Part.INDEX: [0],
        Part.LATENT: list(range(1, 8)),
        Part.ROPE: list(range(1, 8)),
    }
    placements = live.placements()
    assert placements["index_key"].bases[""] == [layer.caches[0][3 * number].data_ptr() for number in range(layers)]
    assert placements["mla_latent"].bases["latent"][5] == layer.caches[1][16].data_ptr()
    assert placements["mla_latent"].bases["rope"][5] == layer.caches[1][17].data_ptr()
    assert live.devices == (torch.device("cpu"),)


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("mtp", [False, True], ids=["plain", "mtp"])
def test_the_description_is_the_catalogues(mtp: bool, fp8: bool) -> None:
    live = discover(tensors(GLM5, fp8=fp8, mtp=mtp, roles=("all",)), GLM5)
    layout = describe(live.shape, GLM5, revision="r1", weight_epoch=4, spec_depth=1)
    model = GLM5.model(revision="r1", weight_epoch=4, spec_depth=1 if mtp else 0, draft_layers=None if mtp else ())
    expected = tilert_layout(GLM5, Options(model=model, length=LENGTH), role=DeviceRole.ALL, fp8=fp8)
    assert layout_digest(layout) == layout_digest(expected)
    assert [component.name for component in layout.components] == ["mla_latent", "index_key"]


def test_index_keys_may_be_longer_than_rows() -> None:
    live = discover(tensors(GLM5, index_length=LENGTH + 8), GLM5)
    assert (live.shape.index_length, live.shape.rows_length) == (LENGTH + 8, LENGTH)
    layout = describe(live.shape, GLM5)
    assert layout.component("index_key").page_tokens == LENGTH + 8
    assert layout.component("mla_latent").page_tokens == LENGTH


def _cut(device: int, at: int, length: int) -> Callable[[Devices], None]:
    def change(caches: Devices) -> None:
        caches[device][at] = caches[device][at][:, :1].repeat(1, length, 1)

    return change


def _drop_last(caches: Devices) -> None:
    caches[3].pop()


def _drop_layer(caches: Devices) -> None:
    for column in caches:
        del column[-6:]


def _retype(caches: Devices) -> None:
    caches[2][4] = caches[2][4].to(torch.float16)


def _widen(caches: Devices) -> None:
    caches[2][5] = torch.empty(1, LENGTH, 128, dtype=torch.bfloat16)


def _stride(caches: Devices) -> None:
    caches[1][1] = torch.empty(1, LENGTH, 576, dtype=torch.bfloat16)[:, :, :512]


def _batch(caches: Devices) -> None:
    caches[0][0] = torch.empty(2, LENGTH, 128, dtype=torch.bfloat16)


def _nobody(caches: Devices) -> None:
    for at in range(0, len(caches[0]), 3):
        caches[0][at] = torch.empty(1, 1, 128, dtype=torch.bfloat16)


def _longer_rope(caches: Devices) -> None:
    for column in caches[1:]:
        for at in range(2, len(column), 3):
            column[at] = torch.empty(1, LENGTH + 1, 64, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_drop_last, r"caches of the engine: found \[236, 237\] cache tensors a device"),
        (_drop_layer, r"found \[231\] cache tensors a device, and need 3 for each of glm5's 78 layers"),
        (_retype, r"device 2, layer 1, latent: found torch.float16 \(1, 24, 512\)"),
        (_widen, r"device 2, layer 1, rope: found torch.bfloat16 \(1, 24, 128\)"),
        (_stride, r"device 1, layer 0, latent: found .* with strides \(13824, 576, 1\)"),
        (_batch, r"device 0, layer 0, index: found torch.bfloat16 \(2, 24, 128\)"),
        (_cut(4, 7, 12), r"device 4, latent: found tensors of \[12, 24\] tokens"),
        (_cut(4, 7, 1), r"device 4, latent: found tensors of \[1, 24\] tokens"),
        (_nobody, r"index: found length 1 on every device"),
        (_longer_rope, r"latent and rope: found 24 tokens and 25"),
    ],
)
def test_what_cannot_be_injected_into_is_named(change: Callable[[Devices], None], said: str) -> None:
    layer = tensors(GLM5)
    change(layer.caches)
    with pytest.raises(LocalError, match=said) as caught:
        discover(layer, GLM5)
    assert caught.value.code is ErrorCode.LAYOUT_MISMATCH
    assert "inject=calls" in str(caught.value)


def test_an_engine_without_devices_is_refused() -> None:
    with pytest.raises(LocalError, match=r"found \[\] cache tensors a device"):
        discover(Layer([]), GLM5)


def test_a_model_without_latent_attention_is_refused() -> None:
    dense = gqa("dense", layers=2, heads=2, head_elements=64)
    with pytest.raises(LocalError, match="dense has not both"):
        shape_for_calls(dense, length=LENGTH, draft_layer=False)


@pytest.mark.parametrize("draft_layer", [False, True])
def test_rows_for_the_engines_own_injection_are_bf16(draft_layer: bool) -> None:
    shape = shape_for_calls(DSV32, length=LENGTH, draft_layer=draft_layer)
    assert shape == (61 + draft_layer, LENGTH, LENGTH, False, (256, 1024, 128))
