"""Pages that a real vLLM 0.26 wrote on a GPU: the same prompt with a bf16 and with an fp8 latent cache."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pdhandoff.layouts.descriptor import Component
from pdhandoff.native import Native
from pdhandoff.native.encodings import ScaleRule, decode_ue8m0, dequantise_blocks, encode_ue8m0, quantise_blocks
from pdhandoff.native.rotation import hadamard128
from pdhandoff.native.strided import gather_rows
from pdhandoff.planner.conversions import derive_conversion
from pdhandoff.planner.landing import landing_component
from support.caches import Cache, page_table
from support.native_components import index_contiguous, index_planar, latent_contiguous, latent_rows

PAGES = Path(__file__).parents[1] / "data" / "vllm_pages"
TOKENS = 333
LAYERS = range(4)  # three target layers and the draft layer


@pytest.fixture(scope="module")
def fp8() -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = load_file(PAGES / "v32_fp8_C333.safetensors")
    return tensors


@pytest.fixture(scope="module")
def bf16() -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = load_file(PAGES / "v32_bf16_C333.safetensors")
    return tensors


def attention(tensors: dict[str, torch.Tensor], layer: int) -> torch.Tensor:
    """[token, row] of the latent cache."""
    pages = tensors[f"model.layers.{layer}.self_attn.attn"]
    return pages.reshape(-1, pages.shape[-1])[:TOKENS]


def latent(tensors: dict[str, torch.Tensor], layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows = attention(tensors, layer)
    codes = rows[:, :512].contiguous().view(torch.float8_e4m3fn)
    return codes, rows[:, 512:528].contiguous().view(torch.float32)


def index(tensors: dict[str, torch.Tensor], layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    pages = tensors[f"model.layers.{layer}.self_attn.indexer.k_cache"].reshape(-1, 64 * 132)
    codes = pages[:, :8192].contiguous().view(torch.float8_e4m3fn).reshape(-1, 128)
    return codes[:TOKENS], pages[:, 8192:].contiguous().view(torch.float32).reshape(-1, 1)[:TOKENS]


@pytest.mark.parametrize("layer", LAYERS)
def test_quantising_the_bf16_rows_gives_vllms_fp8_rows_bit_for_bit(
    fp8: dict[str, torch.Tensor], bf16: dict[str, torch.Tensor], layer: int
) -> None:
    codes, scales = quantise_blocks(attention(bf16, layer)[:, :512], 128, ScaleRule.AMAX)
    stored_codes, stored_scales = latent(fp8, layer)
    assert torch.equal(scales, stored_scales)
    assert torch.equal(codes.view(torch.uint8), stored_codes.view(torch.uint8))


@pytest.mark.parametrize("layer", LAYERS)
def test_index_scales_are_powers_of_two_that_the_rule_gives_back(fp8: dict[str, torch.Tensor], layer: int) -> None:
    codes, scales = index(fp8, layer)
    assert torch.equal(decode_ue8m0(encode_ue8m0(scales)), scales)
    keys = dequantise_blocks(codes, scales, 128)
    again, smaller = quantise_blocks(keys, 128, ScaleRule.POWER_OF_TWO)
    assert torch.equal(dequantise_blocks(again, smaller, 128), keys)
    # where rounding took the largest code to 224, half the scale does
    assert set((scales / smaller).flatten().tolist()) <= {1.0, 2.0}


def into(native: Native, source: Component, pages: dict[int, torch.Tensor], target: Component) -> Cache:
    """Convert pages of all layers, in block order, into a contiguous cache."""
    here, there = Cache(source, 6), Cache(target, 1)
    start = here.placement.bases[""][0]
    for position, layer in enumerate(source.layers):
        at = here.placement.bases[""][position] - start + 64
        raw = bytes(pages[layer].flatten().tolist())
        here.memory[at : at + len(raw)] = raw
    conversion = derive_conversion(landing_component(source), target)
    native.convert(
        conversion,
        source_bases=here.bases(conversion.layers)[""],
        source_pages=page_table(source, range(6)),
        destination_at=there.placement,
        destination_pages=page_table(target, [0]),
        tokens=range(TOKENS),
        zero_until=384,
    )
    return there


def rows(cache: Cache, plane: str, layer: int) -> torch.Tensor:
    at = cache.component.plane(plane)
    table = page_table(cache.component, [0])
    return gather_rows(cache.component, at, cache.bases([layer])[at.region][0], table, range(TOKENS)).squeeze(1)


def test_conversion_of_fp8_pages(native: Native, fp8: dict[str, torch.Tensor], bf16: dict[str, torch.Tensor]) -> None:
    pages = {layer: fp8[f"model.layers.{layer}.self_attn.attn"] for layer in LAYERS}
    cache = into(native, latent_rows(layers=LAYERS), pages, latent_contiguous(384, layers=LAYERS))
    for layer in LAYERS:
        codes, scales = latent(fp8, layer)
        exact = codes.double().reshape(TOKENS, 4, 128) * scales.double().unsqueeze(-1)
        assert torch.equal(rows(cache, "latent", layer), exact.reshape(TOKENS, 512).float().bfloat16())
        assert torch.equal(rows(cache, "rope", layer), attention(bf16, layer)[:, 512:])


def test_conversion_of_index_pages(native: Native, fp8: dict[str, torch.Tensor]) -> None:
    pages = {layer: fp8[f"model.layers.{layer}.self_attn.indexer.k_cache"] for layer in LAYERS}
    cache = into(native, index_planar(layers=LAYERS), pages, index_contiguous(384, layers=LAYERS))
    for layer in LAYERS:
        keys = dequantise_blocks(*index(fp8, layer), 128)
        assert torch.equal(rows(cache, "index_key", layer), hadamard128(keys).bfloat16())
