"""The planner over layouts that real engines use: how long its copies are, and which conversions it derives."""

from __future__ import annotations

import random

import pytest

from pdhandoff.layouts.catalogue import Options, block_outermost, build, device_layouts
from pdhandoff.layouts.compat import bridge
from pdhandoff.layouts.descriptor import Element, Layout
from pdhandoff.layouts.profiles import DSV32, GLM5, GLM5_2, Profile
from pdhandoff.planner import (
    CopyPlan,
    PageTable,
    Placement,
    check_cover,
    derive_conversion,
    landing_component,
    plan_copies,
    plan_shards,
)


def gather(layout: Layout, name: str, prompt: int) -> CopyPlan:
    """Random pages of one component into its landing pages."""
    source = layout.component(name)
    landing = landing_component(source)
    pages = -(-prompt // source.page_tokens)
    ids = random.Random(5).sample(range(1, 4 * pages), pages)
    return plan_copies(
        source=source,
        source_at=Placement(4 * pages, {"": [1 << 40] * len(source.layers)}),
        source_pages=PageTable(ids, source.page_tokens, null=0),
        destination=landing,
        destination_at=Placement(pages, {"": [1 << 41] * len(source.layers)}),
        destination_pages=PageTable.packed(range(prompt), landing.page_tokens),
        tokens=range(prompt),
    )


@pytest.mark.parametrize("outermost", [False, True])
@pytest.mark.parametrize(("name", "page_bytes"), [("mla_latent", 41_984), ("index_key", 8_448)])
def test_vllm_pages_are_gathered_whole(name: str, page_bytes: int, *, outermost: bool) -> None:
    layout = build("vllm.fp8_ds_mla", GLM5)
    plan = gather(block_outermost(layout) if outermost else layout, name, 64 * 20)
    (block,) = plan.blocks
    assert all(length % page_bytes == 0 for length in block.length)
    assert sum(block.length) == 20 * page_bytes
    assert block.count == 1
    assert plan.nbytes == 20 * page_bytes * 79


def test_a_handoff_of_glm5_moves_62252_bytes_a_token() -> None:
    layout = build("vllm.fp8_ds_mla", GLM5)
    assert sum(gather(layout, name, 100).nbytes for name in ("mla_latent", "index_key")) == 100 * 62_252


@pytest.mark.parametrize("model", [GLM5, DSV32])
def test_tilert_planes_are_decoded_and_index_keys_rotated(model: Profile) -> None:
    source = build("vllm.fp8_ds_mla", model)
    kernels = {
        part.name: part.kernel
        for component in build("tilert.bf16", model, Options(length=4096)).components
        for part in derive_conversion(landing_component(source.component(component.name)), component).parts
    }
    assert kernels == {
        "latent": "e4m3.f32x128>bf16",
        "rope": "copy",
        "index_key": "e4m3.f32x128>bf16+hadamard128",
    }


def test_fp8_latents_and_packed_index_scales_have_conversions_of_their_own() -> None:
    source = build("vllm.fp8_ds_mla", GLM5, Options(index_scales=Element.UE8M0X4))
    target = build("tilert.fp8", GLM5, Options(length=4096))
    kernels = [
        part.kernel
        for component in target.components
        for part in derive_conversion(landing_component(source.component(component.name)), component).parts
    ]
    assert kernels == ["copy", "copy", "e4m3.ue8m0x4x128>bf16+hadamard128"]


@pytest.mark.parametrize("ranks", [1, 8])
def test_tilert_devices_get_their_roles_from_every_rank(ranks: int) -> None:
    source = build("vllm.fp8_ds_mla", GLM5)
    devices = device_layouts(GLM5, Options(length=4096))
    manifests = plan_shards([source] * ranks, devices, prompt_tokens=100)
    check_cover(manifests, devices)
    for manifest in manifests:
        for entry in manifest.entries:
            assert (entry.component == "index_key") is (entry.destination == 0)
    assert max(m.nbytes for m in manifests) <= 1.02 * sum(m.nbytes for m in manifests) / ranks


def test_rows_of_a_shared_indexer_move_once() -> None:
    source = build("vllm.fp8_ds_mla", GLM5_2)
    landing = bridge(source, build("tilert.bf16", GLM5_2, Options(length=4096))).landing
    (manifest,) = plan_shards([source], [landing], prompt_tokens=100)
    check_cover([manifest], [landing])
    (index,) = [entry for entry in manifest.entries if entry.component == "index_key"]
    assert index.layers == source.component("index_key").layers
    assert landing_component(source.component("index_key")).shared_layers == ()


@pytest.mark.parametrize("name", ["vllm.fp8_ds_mla", "vllm.mla", "tilert.bf16", "tilert.fp8"])
def test_landing_pages_of_real_layouts_have_no_gaps(name: str) -> None:
    for component in build(name, GLM5, Options(length=4096)).components:
        landing = landing_component(component)
        assert landing.planes[0].page_stride == landing.row_bytes * landing.page_tokens
