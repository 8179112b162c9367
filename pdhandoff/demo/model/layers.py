"""The model's layers, on tiles of eight tokens.

A tile holds the tokens at positions 8t .. 8t + 7, whatever the chunk: a chunk that starts or ends inside a tile
leaves the other rows unused. So every matrix product has the same shape and a token always has the same row in it,
and prefill in one chunk, prefill in many chunks, and decoding with or without drafts give the same bits.

Arithmetic is float32. What a token reads of the past, its own row included, comes from a `Cache`.
"""

from __future__ import annotations

from typing import Final, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as fn

from pdhandoff.demo.model.config import ModelConfig

__all__ = [
    "INDEX_BLOCK",
    "TILE",
    "Attention",
    "Cache",
    "Dense",
    "Indexer",
    "Layer",
    "Mixture",
    "RopeTable",
    "Tile",
    "decoder_layer",
    "rms_norm",
    "rope_table",
    "tile_at",
]

TILE: Final = 8
"tokens in a tile"
INDEX_BLOCK: Final = 64
"index keys that are scored by one matrix product"


class RopeTable(NamedTuple):
    """Cosines and sines of the rotary angles, [position, pair]."""

    cos: Tensor
    sin: Tensor


class Attention(NamedTuple):
    """Latent attention in absorbed form."""

    norm: Tensor
    "[hidden]"
    query: Tensor
    "[heads * (nope + rope), hidden]"
    latent: Tensor
    "[latent, hidden]"
    latent_norm: Tensor
    "[latent]"
    rope_key: Tensor
    "[rope, hidden]"
    up_key: Tensor
    "[heads, nope, latent]: takes a head's query into latent space"
    up_value: Tensor
    "[heads, latent, value]: takes what a head attended to out of latent space"
    output: Tensor
    "[hidden, heads * value]"


class Indexer(NamedTuple):
    """Chooses which past tokens a token attends to."""

    query: Tensor
    "[index_heads * index_key, hidden]"
    key: Tensor
    "[index_key, hidden]"
    key_norm: Tensor
    "[index_key]"
    key_bias: Tensor
    "[index_key]"
    head: Tensor
    "[index_heads, hidden]: how much each index head counts"


class Dense(NamedTuple):
    """A gated MLP."""

    gate: Tensor
    "[width, hidden]"
    up: Tensor
    "[width, hidden]"
    down: Tensor
    "[hidden, width]"


class Mixture(NamedTuple):
    """A mixture of gated MLPs, of which each token uses a few."""

    router: Tensor
    "[experts, hidden]"
    gate: Tensor
    "[experts, width, hidden]"
    up: Tensor
    "[experts, width, hidden]"
    down: Tensor
    "[experts, hidden, width]"


class Layer(NamedTuple):
    """One decoder layer."""

    attention: Attention
    indexer: Indexer
    mlp_norm: Tensor
    "[hidden]"
    mlp: Dense | Mixture


class Cache(Protocol):
    """Where a layer's rows are kept: quantised pages on the prefill side, bf16 planes on the decode side."""

    def write(self, layer: int, positions: Tensor, latent: Tensor, rope: Tensor, index_key: Tensor) -> None:
        """Keep the rows of some positions: [n], [n, latent], [n, rope], [n, index_key], all float32."""
        ...

    def index_query(self, query: Tensor) -> Tensor:
        """Index queries [..., index_key], in the rotation that the kept keys have."""
        ...

    def index_keys(self, layer: int, tokens: int) -> Tensor:
        """Index keys [m, index_key] of positions 0 .. m - 1; m is `tokens` rounded up to INDEX_BLOCK."""
        ...

    def rows(self, layer: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Latent [..., latent] and rotary key [..., rope] of the positions [...], float32."""
        ...


class Tile(NamedTuple):
    """Eight consecutive positions, of which some are real."""

    config: ModelConfig
    cache: Cache
    positions: Tensor
    "[8], the first one a multiple of 8"
    valid: Tensor
    "[8] bool"
    rope: RopeTable
    "[8, rope / 2]"
    index_rope: RopeTable
    "[8, index_rope / 2]"


def rope_table(config: ModelConfig, elements: int) -> RopeTable:
    """Angles position * theta ** (-2i / elements), [position, elements / 2], for all positions the model can reach."""
    pairs = torch.arange(elements // 2, dtype=torch.float64)
    frequencies = config.rope_theta ** (-2.0 * pairs / elements)
    positions = torch.arange(config.max_seq_len + 2 * TILE, dtype=torch.float64)
    angles = positions[:, None] * frequencies
    return RopeTable(cos=angles.cos().float(), sin=angles.sin().float())


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """`x` [..., n] over its root mean square, times weight [n]."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * weight


def tile_at(
    config: ModelConfig, ropes: tuple[RopeTable, RopeTable], cache: Cache, *, positions: Tensor, valid: Tensor
) -> Tile:
    """The tile at these positions.

    Args:
        config: the model's.
        ropes: tables for the attention and for the indexer.
        cache: where rows are kept.
        positions: [8], consecutive.
        valid: [8] bool; other rows are computed and mean nothing.
    """
    rope, index_rope = (RopeTable(table.cos[positions], table.sin[positions]) for table in ropes)
    return Tile(config=config, cache=cache, positions=positions, valid=valid, rope=rope, index_rope=index_rope)


def decoder_layer(tile: Tile, weights: Layer, *, layer: int, x: Tensor) -> Tensor:
    """One layer over one tile; the rows of valid tokens are written to the cache before any is read.

    Args:
        tile: which tokens.
        weights: the layer's.
        layer: global id, for the cache.
        x: hidden states [8, hidden].

    Returns:
        Hidden states [8, hidden].
    """
    attention, epsilon, valid = weights.attention, tile.config.norm_epsilon, tile.valid
    normed = rms_norm(x, attention.norm, epsilon)
    latent = rms_norm(fn.linear(normed, attention.latent), attention.latent_norm, epsilon)
    rope_key = _rotate_interleaved(fn.linear(normed, attention.rope_key), tile.rope)
    index_key = _index_key(tile, weights.indexer, normed)
    tile.cache.write(layer, tile.positions[valid], latent[valid], rope_key[valid], index_key[valid])
    chosen, allowed = _choose(tile, weights.indexer, normed, layer)
    x = x + _attend(tile, attention, normed, tile.cache.rows(layer, chosen), allowed)
    return x + _mlp(tile.config, weights.mlp, rms_norm(x, weights.mlp_norm, epsilon))


def _per_head(table: RopeTable) -> RopeTable:
    return RopeTable(table.cos[:, None], table.sin[:, None])


def _rotate_interleaved(x: Tensor, table: RopeTable) -> Tensor:
    """Rotary embedding of pairs (2i, 2i + 1)."""
    even, odd = x[..., 0::2], x[..., 1::2]
    pairs = torch.stack((even * table.cos - odd * table.sin, even * table.sin + odd * table.cos), dim=-1)
    return pairs.reshape(x.shape)


def _rotate_half_split(x: Tensor, table: RopeTable) -> Tensor:
    """Rotary embedding of pairs (i, i + n / 2)."""
    low, high = x.chunk(2, dim=-1)
    return torch.cat((low * table.cos - high * table.sin, low * table.sin + high * table.cos), dim=-1)


def _index_key(tile: Tile, weights: Indexer, normed: Tensor) -> Tensor:
    config = tile.config
    key = fn.linear(normed, weights.key)
    key = fn.layer_norm(key, (config.index_key,), weights.key_norm, weights.key_bias, config.norm_epsilon)
    rotary = _rotate_half_split(key[:, : config.index_rope], tile.index_rope)
    return torch.cat((rotary, key[:, config.index_rope :]), dim=-1)


def _choose(tile: Tile, weights: Indexer, normed: Tensor, layer: int) -> tuple[Tensor, Tensor]:
    """The past tokens to attend to, best first, and which of them exist: [8, index_topk] each.

    A token's score is the weighted sum over index heads of ReLU(query . key). Ties go to the later token.
    """
    config, positions = tile.config, tile.positions[:, None]
    query = fn.linear(normed, weights.query).reshape(TILE, config.index_heads, config.index_key)
    rotary = _rotate_half_split(query[..., : config.index_rope], _per_head(tile.index_rope))
    query = tile.cache.index_query(torch.cat((rotary, query[..., config.index_rope :]), dim=-1))
    flat = query.reshape(TILE * config.index_heads, config.index_key)
    keys = tile.cache.index_keys(layer, int(tile.positions[-1]) + 1)
    blocks = [keys[first : first + INDEX_BLOCK] for first in range(0, len(keys), INDEX_BLOCK)]
    by_head = torch.cat([fn.linear(flat, block) for block in blocks], dim=-1).relu()
    by_head = by_head.reshape(TILE, config.index_heads, -1)
    weight = fn.linear(normed, weights.head)
    scores = by_head[:, 0] * weight[:, :1]
    for head in range(1, config.index_heads):
        scores = scores + by_head[:, head] * weight[:, head : head + 1]
    past = torch.arange(len(keys)) <= positions
    backwards = scores.where(past, -torch.inf).flip(-1)
    ranked = torch.sort(backwards, dim=-1, descending=True, stable=True).indices
    chosen = len(keys) - 1 - ranked[:, : config.index_topk]
    allowed = chosen <= positions
    # A slot without a token reads row 0, which exists: unwritten memory may hold NaN, and 0 * NaN is NaN.
    return chosen.where(allowed, 0), allowed


def _attend(tile: Tile, weights: Attention, normed: Tensor, rows: tuple[Tensor, Tensor], allowed: Tensor) -> Tensor:
    """Attention of every head over the chosen rows: [8, hidden]."""
    config = tile.config
    latent, rope = rows
    query = fn.linear(normed, weights.query).reshape(TILE, config.heads, config.nope + config.rope)
    nope = query[..., : config.nope].transpose(0, 1).contiguous()
    in_latent = torch.bmm(nope, weights.up_key).transpose(0, 1).contiguous()
    rotary = _rotate_interleaved(query[..., config.nope :], _per_head(tile.rope))
    scores = torch.bmm(in_latent, latent.transpose(1, 2)) + torch.bmm(rotary, rope.transpose(1, 2))
    scores = (scores * (config.nope + config.rope) ** -0.5).where(allowed[:, None], -torch.inf)
    attended = torch.bmm(scores.softmax(-1), latent)
    value = torch.bmm(attended.transpose(0, 1).contiguous(), weights.up_value)
    return fn.linear(value.transpose(0, 1).reshape(TILE, -1), weights.output)


def _mlp(config: ModelConfig, weights: Dense | Mixture, x: Tensor) -> Tensor:
    if isinstance(weights, Dense):
        return fn.linear(fn.silu(fn.linear(x, weights.gate)) * fn.linear(x, weights.up), weights.down)
    affinity = fn.linear(x, weights.router)
    best = affinity.topk(config.experts_per_token, dim=-1)
    share = torch.zeros_like(affinity).scatter(-1, best.indices, best.values.softmax(-1))
    total = torch.zeros_like(x)
    for expert in range(config.experts):
        inner = fn.silu(fn.linear(x, weights.gate[expert])) * fn.linear(x, weights.up[expert])
        total = total + share[:, expert : expert + 1] * fn.linear(inner, weights.down[expert])
    return total
