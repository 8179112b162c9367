"""Sizes and constants of the demo's model. Both processes of a demo build the same model from the same config."""

from __future__ import annotations

from typing import final

import msgspec

__all__ = ["DEFAULT_CONFIG", "ModelConfig"]


@final
class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A small relative of DeepSeek-V3.2: latent attention, a sparse indexer, mixture MLPs and one draft (MTP) layer.

    Cache widths are the real ones, so that every byte layout of the handoff is the real one too.
    """

    layers: int = 4
    "target layers; the draft layer has the id after them"
    dense_layers: int = 2
    "leading target layers with a dense MLP; the others, and the draft layer, mix experts"
    hidden: int = 256
    code: int = 60
    "elements of one of the four slots in the hidden state"
    heads: int = 8
    nope: int = 64
    "elements of a head's query that carry no position; at least a code"
    value: int = 64
    "elements of a head's value; at least a code"
    latent: int = 512
    "elements of the cached latent, per token and layer"
    rope: int = 64
    "elements of the cached rotary key, per token and layer"
    index_heads: int = 4
    index_key: int = 128
    "elements of the cached index key, per token and layer"
    index_rope: int = 64
    "leading elements of an index key that are rotary"
    index_topk: int = 64
    "past tokens that a token attends to; prompts should be longer, or the indexer decides nothing"
    dense_width: int = 256
    experts: int = 4
    experts_per_token: int = 2
    expert_width: int = 128
    rope_theta: float = 10000.0
    norm_epsilon: float = 1e-6
    outputs: int = 257
    "tokens that can be predicted: the 256 bytes and the end of text"
    end_token: int = 256
    begin_token: int = 257
    pad_token: int = 258
    "stands where there is no token; it can never be predicted"
    vocabulary: int = 259
    draft_depth: int = 3
    "draft tokens per verify step"
    page_tokens: int = 64
    "tokens in a page of the prefill caches"
    max_seq_len: int = 1024
    "tokens that the decode caches hold"
    seed: int = 2

    @property
    def draft_layer(self) -> int:
        """Global id of the draft (MTP) layer."""
        return self.layers

    @property
    def all_layers(self) -> range:
        """Target layers, then the draft layer."""
        return range(self.layers + 1)

    @property
    def mtp_seq_len(self) -> int:
        """Tokens of one verify step: the last accepted one and the drafts."""
        return self.draft_depth + 1


DEFAULT_CONFIG = ModelConfig()
