"""The layouts that both processes of `bench_handoff` know by name."""

from __future__ import annotations

from pdhandoff import Layout
from pdhandoff.layouts.catalogue import build
from pdhandoff.layouts.profiles import GLM5, mla

__all__ = ["named_layout"]


def named_layout(name: str) -> Layout:
    """A small model (2 layers of bf16 latent rows), or GLM-5 as vLLM keeps it."""
    if name == "small":
        return build("vllm.mla", mla("small", layers=2))
    return build("vllm.fp8_ds_mla", GLM5)
