"""Each entry against an array of the shape that the engine has: the planes must find every one of its numbers."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from pdhandoff.errors import LayoutError
from pdhandoff.layouts import Component, Element, Layout, RopeOrder, Rotation, catalogue, profiles
from pdhandoff.layouts.catalogue import DeviceRole, Options, PageOrder
from support.layouts import TINY, TINY_GQA
from support.strided import plane_bytes

SHUFFLED = (3, 0, 2, 1)
TOKENS = range(5, 60)


def numbered(*shape: int) -> npt.NDArray[np.uint16]:
    """An array of two-byte elements, all different."""
    return np.arange(np.prod(shape), dtype=np.uint16).reshape(shape)


def read(
    component: Component, plane: str, array: npt.NDArray[np.generic], pages: tuple[int, ...]
) -> npt.NDArray[np.uint16]:
    """Two-byte elements `[token, head, element]` that a plane finds in an array's memory."""
    memory = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
    raw = plane_bytes(component, component.plane(plane), memory, pages, TOKENS)
    return np.ascontiguousarray(raw).view(np.uint16)[..., 0]


def places(pages: tuple[int, ...], page_tokens: int) -> list[tuple[int, int]]:
    return [(pages[token // page_tokens], token % page_tokens) for token in TOKENS]


def test_bf16_rows_are_latent_then_rope() -> None:
    component = catalogue.mla_rows(layers=[0], page_tokens=16, latent=24, rope=8)
    array = numbered(4, 16, 32)
    expected = np.stack([array[page, slot] for page, slot in places(SHUFFLED, 16)])
    assert (read(component, "latent", array, SHUFFLED)[:, 0] == expected[:, :24]).all()
    assert (read(component, "rope", array, SHUFFLED)[:, 0] == expected[:, 24:]).all()
    assert catalogue.mla_rows(layers=[0]).row_bytes == 1152


def test_fp8_ds_mla_rows_are_656_bytes() -> None:
    component = catalogue.fp8_ds_mla_rows(layers=[0])
    assert component.row_bytes == 656
    assert [(plane.name, plane.offset, plane.row_bytes) for plane in component.planes] == [
        ("latent", 0, 512),
        ("latent.scale", 512, 16),
        ("rope", 528, 128),
    ]
    assert {plane.token_stride for plane in component.planes} == {656}
    assert component.plane("rope").rope_order is RopeOrder.INTERLEAVED


@pytest.mark.parametrize("scales", [Element.F32, Element.UE8M0X4])
def test_index_pages_are_values_then_scales(scales: Element) -> None:
    component = catalogue.index_pages(layers=[0], rope_order=RopeOrder.HALF_SPLIT, scales=scales)
    assert component.region_page_bytes("") == 8448
    assert component.row_bytes == 132
    pages = np.arange(2 * 8448, dtype=np.uint32).astype(np.uint8).reshape(2, 8448)
    values = plane_bytes(component, component.plane("index_key"), pages.reshape(-1), (1, 0), range(128))
    words = plane_bytes(component, component.plane("index_key.scale"), pages.reshape(-1), (1, 0), range(128))
    assert (values.reshape(2, 8192) == pages[::-1, :8192]).all()
    assert (words.reshape(2, 256) == pages[::-1, 8192:]).all()


def test_index_pages_have_no_other_scale_word() -> None:
    with pytest.raises(LayoutError, match="ue8m0 is no scale word") as caught:
        catalogue.index_pages(layers=[0], rope_order=RopeOrder.HALF_SPLIT, scales=Element.UE8M0)
    assert caught.value.field == "index_key.scale"


@pytest.mark.parametrize("order", PageOrder)
def test_key_value_pages(order: PageOrder) -> None:
    component = catalogue.key_value_pages(
        layers=[0], heads=range(2, 5), heads_total=8, head_elements=8, order=order, page_tokens=16
    )
    array = numbered(4, 16, 3, 16) if order is PageOrder.NHD else numbered(4, 3, 16, 16)
    logical = array if order is PageOrder.NHD else array.transpose(0, 2, 1, 3)
    expected = np.stack([logical[page, slot] for page, slot in places(SHUFFLED, 16)])
    assert (read(component, "key", array, SHUFFLED) == expected[..., :8]).all()
    assert (read(component, "value", array, SHUFFLED) == expected[..., 8:]).all()
    assert (component.head_start, component.heads, component.heads_total) == (2, 3, 8)


def test_flash_pages_have_the_strides_that_vllm_prints() -> None:
    # 8 heads, 16 tokens, 128 elements: strides of (block, head, token, element), in bytes
    shape = {"layers": [0], "heads": range(8), "heads_total": 8, "head_elements": 128}
    nhd = catalogue.key_value_pages(**shape, order=PageOrder.NHD).plane("key")  # type: ignore[arg-type]
    hnd = catalogue.key_value_pages(**shape, order=PageOrder.HND).plane("key")  # type: ignore[arg-type]
    assert (nhd.page_stride, nhd.head_stride, nhd.token_stride) == (65536, 512, 4096)
    assert (hnd.page_stride, hnd.head_stride, hnd.token_stride) == (65536, 8192, 512)


def test_cpu_keys_are_transposed_and_values_are_not() -> None:
    component = catalogue.cpu_attention_pages(
        layers=[0], heads=range(3), heads_total=3, head_elements=8, page_tokens=16
    )
    array = numbered(4, 3, 2, 8 * 16)
    keys = array[:, :, 0].reshape(4, 3, 8, 16).transpose(0, 3, 1, 2)
    values = array[:, :, 1].reshape(4, 3, 16, 8).transpose(0, 2, 1, 3)
    at = places(SHUFFLED, 16)
    assert (read(component, "key", array, SHUFFLED) == np.stack([keys[p, s] for p, s in at])).all()
    assert (read(component, "value", array, SHUFFLED) == np.stack([values[p, s] for p, s in at])).all()
    assert not component.plane("key").row_is_dense


def test_tensors_of_a_dynamic_cache() -> None:
    component = catalogue.key_value_tensors(
        layers=[0], heads=range(3), heads_total=3, head_elements=8, length=64, rope_order=RopeOrder.HALF_SPLIT, rope=8
    )
    keys = numbered(1, 3, 64, 8)
    expected = keys[0].transpose(1, 0, 2)[TOKENS.start : TOKENS.stop]
    assert component.regions == ("key", "value")
    assert (read(component, "key", keys, (0,)) == expected).all()
    assert (read(component, "value", keys, (0,)) == expected).all()


def test_tilert_planes_are_contiguous_tensors() -> None:
    component = catalogue.latent_planes(layers=[0], length=64, latent=32, rope=8)
    latent = numbered(1, 64, 32)
    assert component.regions == ("latent", "rope")
    assert (read(component, "latent", latent, (0,))[:, 0] == latent[0, TOKENS.start : TOKENS.stop]).all()
    assert catalogue.latent_planes(layers=[0], length=100).row_bytes == 1152
    keys = catalogue.index_plane(layers=[0], length=100, rope_order=RopeOrder.INTERLEAVED)
    assert keys.plane("index_key").rotation is Rotation.HADAMARD128
    assert keys.row_bytes == 256


def test_tilert_fp8_latent_rows_are_528_bytes() -> None:
    component = catalogue.latent_planes_fp8(layers=[0], length=100)
    assert component.region_page_bytes("latent") == 100 * 528
    assert component.plane("latent.scale").offset == 512
    assert component.row_bytes == 528 + 128


def test_tilert_devices_have_roles() -> None:
    layouts = catalogue.device_layouts(profiles.GLM5, Options(length=1000))
    assert len(layouts) == 8
    assert [component.name for component in layouts[0].components] == ["index_key"]
    assert {component.name for layout in layouts[1:] for component in layout.components} == {"mla_latent"}
    assert all(len(layout.components[0].layers) == 79 for layout in layouts)
    both = catalogue.tilert_layout(profiles.GLM5, Options(length=1000), role=DeviceRole.ALL, fp8=True)
    assert [component.name for component in both.components] == ["mla_latent", "index_key"]


@pytest.mark.parametrize(
    "function", [catalogue.fp8_ds_mla_rows, lambda **k: catalogue.latent_planes_fp8(length=9, **k)]
)
def test_fp8_latents_come_in_groups_of_128(function: object) -> None:
    assert callable(function)
    with pytest.raises(LayoutError, match="no multiple of the 128") as caught:
        function(layers=[0], latent=500)
    assert caught.value.field == "mla_latent.latent"


MLA_ENTRIES = ("vllm.mla", "vllm.fp8_ds_mla", "tilert.bf16", "tilert.fp8")
GQA_ENTRIES = ("vllm.flash_attn", "vllm.flashinfer", "vllm.cpu_attn", "huggingface.dynamic")


@pytest.mark.parametrize("entry", MLA_ENTRIES)
@pytest.mark.parametrize("profile", [profiles.GLM5, profiles.DSV32, profiles.GLM5_2])
def test_latent_entries_describe_every_layer(entry: str, profile: profiles.Profile) -> None:
    layout = catalogue.build(entry, profile, Options(length=4096))
    assert layout.validate() is layout
    assert layout.component("mla_latent").layers == profile.all_layers
    keys = layout.component("index_key")
    assert {*keys.layers, *dict(keys.shared_layers)} == set(profile.all_layers)
    assert profile.indexer is not None
    assert keys.plane("index_key").rope_order is profile.indexer.rope_order


@pytest.mark.parametrize("entry", GQA_ENTRIES)
def test_head_entries_describe_one_rank(entry: str) -> None:
    layout = catalogue.build(entry, TINY_GQA, Options(length=100, tp_rank=1, tp_size=2))
    component = layout.component("key_value")
    assert (component.head_start, component.heads, component.heads_total) == (2, 2, 4)
    assert component.plane("key").rope_order is RopeOrder.HALF_SPLIT


def test_every_entry_is_tested_and_has_a_source() -> None:
    assert {*MLA_ENTRIES, *GQA_ENTRIES, "vllm.cpu_mla"} == set(catalogue.CATALOGUE)
    assert all(entry.summary and entry.source for entry in catalogue.CATALOGUE.values())


def test_one_token_of_glm5_takes_62252_bytes_in_fp8() -> None:
    layout = catalogue.build("vllm.fp8_ds_mla", profiles.GLM5)
    assert sum(component.row_bytes * len(component.layers) for component in layout.components) == 62252


def test_a_model_without_an_indexer_has_no_index_pages() -> None:
    dense = profiles.mla("dense", layers=2)
    assert [component.name for component in catalogue.build("vllm.mla", dense).components] == ["mla_latent"]
    rows = catalogue.build("vllm.cpu_mla", dense).component("mla_latent")
    assert (rows.page_tokens, rows.row_bytes) == (16, 1152)


def test_an_engine_without_draft_state_has_no_draft_rows() -> None:
    model = profiles.GLM5_2.model(draft_layers=())
    layout = catalogue.build("vllm.fp8_ds_mla", profiles.GLM5_2, Options(model=model))
    assert layout.component("mla_latent").layers == tuple(range(78))
    assert layout.component("index_key").layers[-1] == 74


REFUSALS = {
    "unknown": ("vllm.paged", TINY, Options(), "layout", "not in the catalogue"),
    "fp8 keys by name": ("vllm.flash_attn_fp8", TINY_GQA, Options(), "layout", "static scale per layer"),
    "four-bit rows by name": ("vllm.nvfp4_ds_mla", TINY, Options(), "layout", "not supported"),
    "latent entry, head model": ("vllm.mla", TINY_GQA, Options(), "profile.mla", "no latent attention"),
    "head entry, latent model": ("vllm.flash_attn", TINY, Options(), "profile.gqa", "has latent attention"),
    "sparse attention on CPU": ("vllm.cpu_mla", TINY, Options(), "profile.indexer", "no sparse attention on CPU"),
    "no indexer in TileRT": (
        "tilert.bf16",
        profiles.mla("dense", layers=2),
        Options(length=9),
        "profile.indexer",
        "has no indexer",
    ),
    "no length": ("tilert.bf16", TINY, Options(), "options.length", "how many tokens"),
    "another depth": (
        "vllm.mla",
        TINY,
        Options(model=profiles.GLM5.model()),
        "model.layers",
        "78 given, but profile tiny has 3",
    ),
    "empty pages": ("vllm.mla", TINY, Options(page_tokens=0), "mla_latent.page_tokens", "must lie in"),
    "rank too high": ("vllm.flash_attn", TINY_GQA, Options(tp_rank=2, tp_size=2), "options.tp_rank", "outside 0..1"),
    "three ranks, four heads": ("vllm.flash_attn", TINY_GQA, Options(tp_size=3), "options.tp_size", "evenly"),
    "six ranks, four heads": ("vllm.flash_attn", TINY_GQA, Options(tp_size=6), "options.tp_size", "evenly"),
} | {
    f"fp8 keys in {entry}": (
        entry,
        TINY_GQA,
        Options(element=Element.E4M3, length=9),
        "key_value.element",
        "static scale per layer",
    )
    for entry in GQA_ENTRIES
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_cannot_be_described_is_refused(case: str) -> None:
    name, profile, options, field, reason = REFUSALS[case]
    with pytest.raises(LayoutError, match=reason) as caught:
        catalogue.build(name, profile, options)
    assert caught.value.field == field


@pytest.mark.parametrize("name", catalogue.REFUSED)
def test_a_layout_refused_by_name_is_in_no_catalogue(name: str) -> None:
    assert name not in catalogue.CATALOGUE


@pytest.mark.parametrize(
    ("tp_size", "ranges"),
    [
        (1, [range(4)]),
        (2, [range(2), range(2, 4)]),
        (4, [range(i, i + 1) for i in range(4)]),
        (8, [range(i // 2, i // 2 + 1) for i in range(8)]),
    ],
)
def test_heads_are_sharded_or_replicated(tp_size: int, ranges: list[range]) -> None:
    assert [catalogue.head_range(4, tp_rank=rank, tp_size=tp_size) for rank in range(tp_size)] == ranges


def test_a_block_of_128_tokens_is_two_pages() -> None:
    assert catalogue.expand_blocks([5, 0, 2], block_tokens=128, page_tokens=64) == [10, 11, 0, 0, 4, 5]
    assert catalogue.expand_blocks([5, 0], block_tokens=128, page_tokens=64, null=None) == [10, 11, 0, 1]
    assert catalogue.expand_blocks([5, 7], block_tokens=64, page_tokens=64) == [5, 7]
    for block_tokens, page_tokens in ((96, 64), (64, 0), (0, 64)):
        with pytest.raises(LayoutError, match="no whole number"):
            catalogue.expand_blocks([1], block_tokens=block_tokens, page_tokens=page_tokens)


def test_a_block_holds_the_pages_of_all_layers() -> None:
    packed = catalogue.build("vllm.fp8_ds_mla", TINY)
    outermost = catalogue.block_outermost(packed)
    strides = {plane.page_stride for component in outermost.components for plane in component.planes}
    assert strides == {201728}
    assert {plane.page_stride for plane in packed.component("index_key").planes} == {8448}


def test_what_shares_no_block_has_no_block_outermost_form() -> None:
    planes: Layout = catalogue.build("tilert.bf16", TINY, Options(length=64))
    with pytest.raises(LayoutError, match="several regions"):
        catalogue.block_outermost(planes)
    small = catalogue.build("vllm.fp8_ds_mla", TINY, Options(page_tokens=32))
    mixed = Layout(
        name="mixed",
        model=small.model,
        components=(small.component("mla_latent"), catalogue.build("vllm.fp8_ds_mla", TINY).component("index_key")),
    )
    with pytest.raises(LayoutError, match="pages differ in length"):
        catalogue.block_outermost(mixed)
