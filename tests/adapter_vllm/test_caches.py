from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from pdhandoff.errors import LayoutError
from pdhandoff.layouts import Element, RopeOrder, catalogue, profiles
from pdhandoff.layouts.catalogue import Options, block_outermost
from pdhandoff.planner import Shard
from pdhandoff_vllm.caches import Caches, CacheSpec, ModelFacts, describe_caches, layer_number

BLOCKS = 10
DSA = ModelFacts(name="dsv32", layers=3, latent=512, rope=64)
GQA = ModelFacts(name="llama", layers=2, kv_heads=8)
PROFILE = profiles.mla("dsv32", layers=3, draft_layers=1, index_rope_order=RopeOrder.HALF_SPLIT)


def mla_spec(**more: Any) -> CacheSpec:
    return CacheSpec(**{"group": 0, "block_tokens": 64, "kind": "MLAAttentionSpec", "head_size": 576, **more})


def full_spec(**more: Any) -> CacheSpec:
    return CacheSpec(
        **{"group": 0, "block_tokens": 16, "kind": "FullAttentionSpec", "heads": 8, "head_size": 128, **more}
    )


def describe(
    tensors: Mapping[str, torch.Tensor], spec: CacheSpec, facts: ModelFacts, *, blocks: int = BLOCKS, **specs: CacheSpec
) -> Caches:
    return describe_caches(tensors, {name: specs.get(name, spec) for name in tensors}, facts, num_blocks=blocks)


def dsa(*, fp8: bool = True, drafts: int = 1, prefix: str = "model.", owners: Any = None) -> dict[str, torch.Tensor]:
    """All index caches, then all latent caches, as vLLM registers them: views of one allocation."""
    layers = range(3 + drafts)
    owners = layers if owners is None else owners
    shapes = {f"{prefix}layers.{layer}.self_attn.indexer.k_cache": (132, torch.uint8) for layer in owners}
    row, dtype = (656, torch.uint8) if fp8 else (576, torch.bfloat16)
    shapes |= {f"{prefix}layers.{layer}.self_attn.attn": (row, dtype) for layer in layers}
    total = sum(BLOCKS * 64 * row * dtype.itemsize for row, dtype in shapes.values())
    raw, at, found = torch.zeros(total, dtype=torch.int8), 0, {}
    for name, (row, dtype) in shapes.items():
        nbytes = BLOCKS * 64 * row * dtype.itemsize
        found[name] = raw[at : at + nbytes].view(dtype).view(BLOCKS, 1, 64, row)
        at += nbytes
    return found


@pytest.mark.parametrize("prefix", ["model.", "language_model.model.", "thinker.language_model.model."])
@pytest.mark.parametrize("fp8", [True, False])
def test_a_sparse_model_with_a_draft_layer(prefix: str, fp8: bool) -> None:
    tensors = dsa(fp8=fp8, prefix=prefix)
    facts = ModelFacts(name="dsv32", layers=3, draft_tokens=1)
    caches = describe(tensors, mla_spec(element="fp8_ds_mla" if fp8 else ""), facts)
    named = catalogue.build(
        "vllm.fp8_ds_mla" if fp8 else "vllm.mla", PROFILE, Options(model=PROFILE.model(spec_depth=1))
    )
    assert caches.layout.components == named.components
    assert caches.layout.model == named.model
    placement = caches.placements["mla_latent"]
    assert placement.pages == BLOCKS
    assert list(placement.bases[""]) == [tensors[f"{prefix}layers.{n}.self_attn.attn"].data_ptr() for n in range(4)]
    (memory,) = caches.memory
    assert memory.length == sum(tensor.nbytes for tensor in tensors.values())
    assert caches.block_bytes == (4 * 64 * ((656 if fp8 else 1152) + 132),)
    assert not caches.on_cuda


def test_older_versions_register_three_axes() -> None:
    """vLLM 0.26: [page, token, row]."""
    tensors = {name: tensor.squeeze(1) for name, tensor in dsa().items()}
    spec = mla_spec(element="fp8_ds_mla")
    assert describe(tensors, spec, DSA).layout == describe(dsa(), spec, DSA).layout


def test_blocks_larger_than_pages() -> None:
    """Trap 13: block b of the manager is pages 2b and 2b + 1."""
    caches = describe(dsa(), mla_spec(element="fp8_ds_mla", block_tokens=128), DSA, blocks=BLOCKS // 2)
    assert caches.groups == {"mla_latent": (0, 2), "index_key": (0, 2)}
    assert caches.placements["index_key"].pages == BLOCKS


def test_all_layers_of_a_block_side_by_side() -> None:
    """Trap 11: strided views that must not be reshaped."""
    block = 4 * 64 * (656 + 132)
    raw = torch.zeros(BLOCKS, block, dtype=torch.uint8)
    tensors, at = {}, 0
    for name, tensor in dsa().items():
        row = tensor.shape[-1]
        tensors[name] = raw.as_strided((BLOCKS, 1, 64, row), (block, row, row, 1), at)
        at += 64 * row
    caches = describe(tensors, mla_spec(element="fp8_ds_mla"), DSA)
    named = catalogue.build("vllm.fp8_ds_mla", PROFILE)
    assert caches.layout.components == block_outermost(named).components
    assert caches.memory[0].length == BLOCKS * block


def test_layers_without_an_indexer_share_their_leaders() -> None:
    caches = describe(dsa(owners=(0, 2, 3)), mla_spec(element="fp8_ds_mla"), DSA)
    index = caches.layout.component("index_key")
    assert index.layers == (0, 2, 3)
    assert index.shared_layers == ((1, 0),)


def test_index_scales_and_rope_order_are_the_engines() -> None:
    facts = ModelFacts(name="glm5", layers=3, index_scales=Element.UE8M0X4, index_rope_order=RopeOrder.INTERLEAVED)
    index = describe(dsa(), mla_spec(element="fp8_ds_mla"), facts).layout.component("index_key")
    assert index.plane("index_key.scale").element is Element.UE8M0X4
    assert index.plane("index_key").rope_order is RopeOrder.INTERLEAVED


@pytest.mark.parametrize(("draft_tokens", "drafts", "depth"), [(0, 0, 0), (1, 1, 1), (4, 0, 0)])
def test_the_depth_of_speculation_counts_where_there_are_draft_rows(draft_tokens: int, drafts: int, depth: int) -> None:
    facts = ModelFacts(name="dsv32", layers=3, draft_tokens=draft_tokens)
    model = describe(dsa(drafts=drafts), mla_spec(element="fp8_ds_mla"), facts).layout.model
    assert (model.draft_layers, model.spec_depth) == (tuple(range(3, 3 + drafts)), depth)


def test_T022_a_pipeline_stage_knows_the_whole_model() -> None:
    tensors = {name: tensor for name, tensor in dsa(drafts=0).items() if "layers.2." not in name}
    facts = ModelFacts(name="dsv32", layers=3, draft_layers=(3,), draft_tokens=1, pp_size=2, tp_size=4, tp_rank=1)
    caches = describe(tensors, mla_spec(element="fp8_ds_mla"), facts)
    assert caches.layout.model.draft_layers == (3,)
    assert caches.layout.component("mla_latent").layers == (0, 1)
    assert facts.shard == Shard(1, 8)
    assert caches.replicas == Shard(1, 4)


def gqa(
    order: str, *, heads: int = 8, tokens: int = 16, dtype: torch.dtype = torch.bfloat16
) -> dict[str, torch.Tensor]:
    """(pages, heads, tokens, key | value), in bytes [token][head] (NHD) or [head][token] (HND)."""

    def cache() -> torch.Tensor:
        if order == "NHD":
            return torch.zeros(BLOCKS, tokens, heads, 256, dtype=dtype).transpose(1, 2)
        return torch.zeros(BLOCKS, heads, tokens, 256, dtype=dtype)

    return {f"model.layers.{layer}.self_attn.attn": cache() for layer in range(2)}


class OnGpu:
    """A tensor that says it is in GPU memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self.device = torch.device("cuda", 3)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tensor, name)


def on_gpu(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    return {name: OnGpu(tensor) for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    ("backend", "order", "entry"),
    [
        ("FLASH_ATTN", "NHD", "vllm.flash_attn"),
        ("FLASHINFER", "HND", "vllm.flashinfer"),
        ("FLASHINFER", "NHD", "vllm.flash_attn"),
    ],
)
def test_keys_and_values_in_gpu_memory(backend: str, order: str, entry: str) -> None:
    caches = describe(on_gpu(gqa(order)), full_spec(backend=backend), GQA)
    named = catalogue.build(entry, profiles.gqa("llama", layers=2, heads=8, head_elements=128))
    assert caches.layout.components == named.components
    assert caches.on_cuda
    assert {piece.device for piece in caches.memory} == {3}
    assert len(caches.memory) == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_keys_and_values_in_cpu_memory(dtype: torch.dtype) -> None:
    spec = full_spec(backend="CPU_ATTN", block_tokens=128)
    caches = describe(gqa("HND", tokens=128, dtype=dtype), spec, GQA)
    element = Element.BF16 if dtype is torch.bfloat16 else Element.F32
    named = catalogue.build(
        "vllm.cpu_attn", profiles.gqa("llama", layers=2, heads=8, head_elements=128), Options(element=element)
    )
    assert caches.layout.components == named.components


@pytest.mark.parametrize(
    ("tp_rank", "tp_size", "heads", "replicas"), [(1, 2, range(4, 8), Shard(0, 1)), (5, 16, range(2, 3), Shard(1, 2))]
)
def test_T019_T020_ranks_hold_heads(tp_rank: int, tp_size: int, heads: range, replicas: Shard) -> None:
    facts = ModelFacts(name="llama", layers=2, kv_heads=8, tp_rank=tp_rank, tp_size=tp_size)
    tensors = on_gpu(gqa("NHD", heads=len(heads)))
    caches = describe(tensors, full_spec(backend="FLASH_ATTN", heads=len(heads)), facts)
    component = caches.layout.component("key_value")
    assert (component.head_start, component.heads, component.heads_total) == (heads.start, len(heads), 8)
    assert caches.replicas == replicas


def test_partly_rotary_keys() -> None:
    facts = ModelFacts(name="glm", layers=2, kv_heads=8, key_rope_share=0.5, key_rope_order=RopeOrder.INTERLEAVED)
    key = (
        describe(on_gpu(gqa("NHD")), full_spec(backend="FLASH_ATTN"), facts).layout.component("key_value").plane("key")
    )
    assert (key.rope_elements, key.rope_order) == (64, RopeOrder.INTERLEAVED)


def refused(tensors: Mapping[str, Any], spec: CacheSpec, facts: ModelFacts, **more: Any) -> str:
    with pytest.raises(LayoutError) as caught:
        describe(tensors, spec, facts, **more)
    return caught.value.reason


def test_what_cannot_be_described_is_refused_by_name() -> None:
    fp8 = mla_spec(element="fp8_ds_mla")
    assert "none" in refused({}, fp8, DSA)
    per_tensor = {"model.layers.0.self_attn.attn": torch.zeros(BLOCKS, 1, 64, 576, dtype=torch.uint8)}
    assert "--kv-cache-dtype" in refused(per_tensor, mla_spec(element="fp8"), DSA)
    nvfp4 = {"model.layers.0.self_attn.attn": torch.zeros(BLOCKS, 1, 64, 352, dtype=torch.uint8)}
    assert "nvfp4_ds_mla" in refused(nvfp4, mla_spec(element="nvfp4_ds_mla"), DSA)
    mxfp4 = {"model.layers.0.self_attn.indexer.k_cache": torch.zeros(BLOCKS, 1, 64, 68, dtype=torch.uint8)}
    assert "indexer_kv_dtype" in refused(mxfp4, fp8, DSA)
    window = refused(gqa("NHD"), full_spec(kind="SlidingWindowSpec"), GQA)
    assert "model.layers.0.self_attn.attn" in window
    assert "SlidingWindowSpec" in window
    e4m3 = {"model.layers.0.self_attn.attn": torch.zeros(BLOCKS, 8, 16, 256, dtype=torch.uint8)}
    assert "--kv-cache-dtype auto" in refused(on_gpu(e4m3), full_spec(backend="FLASH_ATTN"), GQA)
    assert "--attention-backend" in refused(on_gpu(gqa("NHD")), full_spec(backend="TRITON_ATTN"), GQA)
    assert "not known" in refused(on_gpu(gqa("NHD")), full_spec(), GQA)
    assert "AMX" in refused(gqa("HND", tokens=16), full_spec(backend="AMX"), GQA)
    old = {"model.layers.0.self_attn.attn": torch.zeros(2, BLOCKS, 16, 8, 128, dtype=torch.bfloat16)}
    assert "version of vLLM" in refused(on_gpu(old), full_spec(backend="FLASH_ATTN"), GQA)
    assert "heads" in refused(
        on_gpu(gqa("NHD")), full_spec(backend="FLASH_ATTN"), ModelFacts(name="m", layers=2, kv_heads=4)
    )


def test_strides_that_leave_gaps_are_refused() -> None:
    gaps = {"model.layers.0.self_attn.attn": torch.zeros(BLOCKS, 1, 64, 1024, dtype=torch.bfloat16)[..., :576]}
    assert "VLLM_KV_CACHE_LAYOUT" in refused(gaps, mla_spec(), DSA)
    turned = {"model.layers.0.self_attn.attn": torch.zeros(BLOCKS, 8, 256, 16, dtype=torch.bfloat16).transpose(2, 3)}
    assert "VLLM_KV_CACHE_LAYOUT" in refused(on_gpu(turned), full_spec(backend="FLASH_ATTN"), GQA)
    assert "VLLM_KV_CACHE_LAYOUT" in refused(gqa("NHD"), full_spec(backend="CPU_ATTN"), GQA)
    flat = {"model.layers.0.self_attn.attn": torch.zeros(BLOCKS, 64 * 576, dtype=torch.bfloat16)}
    assert "shape" in refused(flat, mla_spec(), DSA)


def test_layers_that_do_not_fit_together_are_refused() -> None:
    fp8 = mla_spec(element="fp8_ds_mla")
    other = {"model.layers.1.self_attn.attn": mla_spec(element="fp8_ds_mla", group=1)}
    assert "layers.1." in refused(dsa(), fp8, DSA, **other)
    twice = {**dsa(), "draft.layers.0.self_attn.attn": torch.zeros(BLOCKS, 1, 64, 656, dtype=torch.uint8)}
    assert "several caches" in refused(twice, fp8, DSA)
    facts = ModelFacts(name="dsv32", layers=3, draft_layers=(), pp_size=2)
    assert "draft layers" in refused(dsa(), fp8, facts)
    nameless = {"encoder.attn": torch.zeros(BLOCKS, 1, 64, 656, dtype=torch.uint8)}
    assert "layers.N" in refused(nameless, fp8, DSA)
    assert "no whole number" in refused(dsa(), mla_spec(element="fp8_ds_mla", block_tokens=96), DSA)
    assert "pages where" in refused(dsa(), fp8, DSA, blocks=BLOCKS + 1)
    with pytest.raises(LayoutError, match="configuration does not have it"):
        describe_caches(dsa(), {}, DSA, num_blocks=BLOCKS)


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("model.layers.12.self_attn.attn", 12),
        ("language_model.model.layers.3.self_attn.indexer.k_cache", 3),
        ("layers.0.mixer", 0),
    ],
)
def test_layer_numbers_are_found_behind_any_prefix(name: str, number: int) -> None:
    assert layer_number(name) == number
