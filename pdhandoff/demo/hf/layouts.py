"""What the decode engine's memory holds, described for the handoff."""

from __future__ import annotations

from typing import Final

import torch

from pdhandoff.demo.hf.config import GroupedShape, HfConfig
from pdhandoff.layouts import Element, Layout, Model
from pdhandoff.layouts.catalogue.huggingface import dynamic_cache
from pdhandoff.layouts.catalogue.options import Options
from pdhandoff.layouts.catalogue.vllm_mla import mla_rows
from pdhandoff.layouts.profiles import Profile, gqa, mla

__all__ = ["cache_layout", "profile_of"]

_ELEMENTS: Final = {torch.bfloat16: Element.BF16, torch.float16: Element.F16, torch.float32: Element.F32}


def profile_of(config: HfConfig, name: str, *, draft_layers: int) -> Profile:
    """The model's attention state, independent of any engine.

    Args:
        config: the model's.
        name: what both sides call it.
        draft_layers: how many draft layers keep rows.
    """
    shape = config.attention
    if isinstance(shape, GroupedShape):
        return gqa(name, layers=config.layers, heads=shape.kv_heads, head_elements=shape.elements)
    return mla(name, layers=config.layers, draft_layers=draft_layers, latent=shape.latent, rope=shape.rope)


def cache_layout(profile: Profile, model: Model, *, length: int, dtype: torch.dtype) -> Layout:
    """Contiguous rows of one request: keys and values per head, or latent rows `[length, latent | rope]`.

    Args:
        profile: from `profile_of`.
        model: whose state it is.
        length: tokens that a cache holds.
        dtype: of the rows.
    """
    options = Options(model=model, length=length, element=_ELEMENTS[dtype])
    if profile.mla is None:
        return dynamic_cache(profile, options)
    rows = mla_rows(
        layers=(*range(model.layers), *model.draft_layers),
        page_tokens=length,
        latent=profile.mla.latent,
        rope=profile.mla.rope,
        element=options.element,
    )
    return Layout(name=f"huggingface.latent/{profile.name}", model=model, components=(rows,)).validate()
