"""Models in Hugging Face's format behind the calls of a decode node."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final, final

import torch

from pdhandoff.demo.engine.seam import Engine
from pdhandoff.demo.hf.caches import KeyValueCache, LatentCache
from pdhandoff.demo.hf.checkpoint import Checkpoint
from pdhandoff.demo.hf.config import HfConfig, read_config
from pdhandoff.demo.hf.layouts import cache_layout, profile_of
from pdhandoff.demo.hf.network import HfNetwork
from pdhandoff.demo.hf.weights import load_weights
from pdhandoff.errors import ErrorCode, LocalError
from pdhandoff.planner import Placement

__all__ = ["create"]

_TYPES: Final = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def create(
    *,
    model: str | Path,
    name: str | None = None,
    revision: str = "",
    max_seq_len: int | None = None,
    dtype: str | None = None,
    drafts: int | None = None,
    spec_depth: int = 1,
    parked: int = 1,
) -> Engine:
    """A decode engine in plain torch on CPU, for a folder with config.json and safetensors.

    Args:
        model: the folder.
        name: what the prefill side calls the model; None: the folder's name.
        revision: of the weights, as the prefill side says it.
        max_seq_len: tokens of one request, prompt and output; None: what the model was made for, 4,096 at most.
        dtype: what is computed in, and the type of the rows: bfloat16, float16 or float32; None: the config's. Keys and
            values per head are not converted, so there the prefill side has to use the same.
        drafts: draft tokens per verify step; None: 3 where the model has a draft layer; 0: no speculation, and no rows
            of the draft layer are asked for.
        spec_depth: draft tokens per step on the prefill side.
        parked: requests whose rows may wait, converted, while another one decodes.

    Raises:
        LocalError: the folder, or an option, cannot be used; it says which and why.
    """
    folder = Path(model)
    config = read_config(folder)
    length = min(config.positions, 4096) if max_seq_len is None else max_seq_len
    chosen = config.dtype if dtype is None else dtype
    depth = _depth(config, drafts)
    if chosen not in _TYPES or length < 2 or parked < 0 or spec_depth < 0:
        raise LocalError(
            ErrorCode.CONFIG,
            f"dtype={chosen}, max_seq_len={length}, parked={parked}, spec_depth={spec_depth}: a type is one of "
            f"{', '.join(_TYPES)}, a sequence has 2 tokens or more, and nothing is negative",
        )
    weights = load_weights(config, Checkpoint(folder, _TYPES[chosen]), draft=depth > 0)
    network = HfNetwork(config, weights, length=length)
    profile = profile_of(config, name or folder.resolve().name, draft_layers=int(depth > 0))
    identity = profile.model(revision=revision, spec_depth=spec_depth if depth else 0)
    return Engine(
        network=network,
        layout=cache_layout(profile, identity, length=length, dtype=network.dtype),
        model=profile.name,
        max_seq_len=length,
        vocabulary=config.vocabulary,
        new_memory=lambda: _Rows(network.new_cache()),
        parked=parked,
        drafts=depth,
        end_tokens=config.end_tokens,
    )


def _depth(config: HfConfig, drafts: int | None) -> int:
    """Draft tokens per step."""
    depth = (3 if config.draft_layers == 1 else 0) if drafts is None else drafts
    if depth < 0 or (depth and config.draft_layers != 1):
        raise LocalError(
            ErrorCode.CONFIG,
            f"drafts={depth}: the model has {config.draft_layers} draft layers, and only one is computed here; use 0",
        )
    return depth


@final
class _Rows:
    """Contiguous rows of one request."""

    def __init__(self, cache: KeyValueCache | LatentCache) -> None:
        self.cache = cache

    @property
    def placements(self) -> Mapping[str, Placement]:
        """Component -> where its rows are."""
        return self.cache.placements

    def begin(self, tokens: int, *, cold: bool) -> None:
        """Without draft rows, the draft layer attends to what it writes itself."""
        self.cache.first_draft_row = tokens if cold else 0
