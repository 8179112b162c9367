"""All catalogue layouts by name, and the layouts that are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple, final

from pdhandoff.errors import ErrorCode, LayoutError
from pdhandoff.layouts.catalogue.huggingface import dynamic_cache
from pdhandoff.layouts.catalogue.options import Options, refused
from pdhandoff.layouts.catalogue.tilert import tilert, tilert_fp8
from pdhandoff.layouts.catalogue.vllm_cpu import cpu_attn, cpu_mla
from pdhandoff.layouts.catalogue.vllm_gqa import flash_attn, flashinfer
from pdhandoff.layouts.catalogue.vllm_mla import fp8_ds_mla, mla_plain
from pdhandoff.layouts.descriptor import Layout
from pdhandoff.layouts.profiles import Profile

__all__ = ["CATALOGUE", "REFUSED", "Named", "build"]


@final
class Named(NamedTuple):
    """One catalogue entry."""

    build: Callable[[Profile, Options], Layout]
    summary: str
    source: str
    "whose layout it is, and the version that was read"


CATALOGUE: Final = {
    "vllm.mla": Named(mla_plain, "latent rows, bf16 by default, and planar index pages", "vLLM 0.33"),
    "vllm.fp8_ds_mla": Named(fp8_ds_mla, "656-byte fp8 latent rows and planar index pages", "vLLM 0.33"),
    "vllm.flash_attn": Named(flash_attn, "key/value pages, tokens outermost (NHD)", "vLLM 0.33"),
    "vllm.flashinfer": Named(flashinfer, "key/value pages, heads outermost (HND)", "vLLM 0.33"),
    "vllm.cpu_attn": Named(cpu_attn, "key/value pages with transposed keys", "vLLM 0.33"),
    "vllm.cpu_mla": Named(cpu_mla, "latent rows in 16-token pages", "vLLM 0.33"),
    "tilert.bf16": Named(tilert, "contiguous latent, rope and rotated index keys", "TileRT 0.1.6.post3"),
    "tilert.fp8": Named(tilert_fp8, "contiguous fp8 latent, bf16 rope and index keys", "TileRT 0.1.6.post3"),
    "huggingface.dynamic": Named(dynamic_cache, "contiguous keys and values per head", "transformers DynamicCache"),
}
"catalogue entries by name"

_STATIC_SCALE: Final = "its static scale per layer lies in the weights, in no cache plane: values could not be decoded"

REFUSED: Final = {
    "vllm.flash_attn_fp8": f"{_STATIC_SCALE}; run prefill with kv_cache_dtype auto",
    "vllm.flashinfer_fp8": f"{_STATIC_SCALE}; run prefill with kv_cache_dtype auto",
    "vllm.mla_fp8": f"{_STATIC_SCALE}; use fp8_ds_mla or auto",
    "vllm.nvfp4_ds_mla": "four-bit values with permuted scales have no encoding here; use fp8_ds_mla or auto",
    "vllm.index_mxfp4": "four-bit index keys have no encoding here; leave indexer_kv_dtype at its default",
    "vllm.index_rocm": "tile-shuffled index pages with FNUZ fp8 have no encoding here",
}
"layouts that exist and cannot be described, with the reason"


def build(name: str, profile: Profile, options: Options | None = None) -> Layout:
    """The validated layout of a model as one engine keeps it.

    Args:
        name: an entry of CATALOGUE.
        profile: the model (`layouts.profiles`).
        options: the engine's choices; None: its defaults.

    Raises:
        LayoutError: an unknown name, a layout that is refused by name, or options that contradict the model.
    """
    if name in REFUSED:
        raise refused("layout", f"{name} is not supported: {REFUSED[name]}")
    entry = CATALOGUE.get(name)
    if entry is None:
        raise LayoutError(
            ErrorCode.LAYOUT_MISMATCH,
            f"layout: {name!r} is not in the catalogue ({', '.join(CATALOGUE)})",
            field="layout",
        )
    return entry.build(profile, Options() if options is None else options)
