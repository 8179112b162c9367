"""Attention over contiguous rows: grouped queries, and latent attention in absorbed form.

Products of queries, keys and values are float32; what leaves a matrix is rounded to the model's type.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pdhandoff.demo.hf.caches import KeyValueCache, LatentCache
from pdhandoff.demo.hf.config import GroupedShape, LatentShape
from pdhandoff.demo.hf.layers import Linear, Norm, linear, rms_norm
from pdhandoff.demo.hf.rope import RopeTable, rotate

__all__ = ["GroupedAttention", "LatentAttention", "Span", "attend"]


class GroupedAttention(NamedTuple):
    """Grouped-query attention: every key/value head serves a group of query heads."""

    shape: GroupedShape
    query: Linear
    key: Linear
    value: Linear
    output: Linear
    scale: float


class LatentAttention(NamedTuple):
    """Multi-head latent attention."""

    shape: LatentShape
    query_down: Linear | None
    query_norm: Norm | None
    query: Linear
    latent: Linear
    "[latent + rope, hidden]"
    latent_norm: Norm
    up_key: Tensor
    "[heads, nope, latent]: takes a head's query into latent space"
    up_value: Tensor
    "[heads, latent, value]: takes what a head attended to out of it"
    output: Linear
    scale: float


class Span(NamedTuple):
    """Which tokens run, and where the rows of the past are."""

    cache: KeyValueCache | LatentCache
    layer: int
    "of the cache"
    start: int
    first: int
    "the earliest row that is attended to"
    rope: RopeTable
    "of these tokens"


def attend(span: Span, weights: GroupedAttention | LatentAttention, x: Tensor) -> Tensor:
    """Keep the rows of `x` [tokens, hidden] at positions `span.start` and on, then attend to them and all before.

    Raises:
        TypeError: the cache is of the other kind.
    """
    if isinstance(weights, GroupedAttention) and isinstance(span.cache, KeyValueCache):
        return _grouped(span, span.cache, weights, x)
    if isinstance(weights, LatentAttention) and isinstance(span.cache, LatentCache):
        return _latent(span, span.cache, weights, x)
    raise TypeError(f"{type(weights).__name__} cannot read a {type(span.cache).__name__}")


def _grouped(span: Span, cache: KeyValueCache, weights: GroupedAttention, x: Tensor) -> Tensor:
    heads, kv_heads, elements = weights.shape
    tokens = len(x)
    query = rotate(linear(x, weights.query).view(tokens, heads, elements), span.rope)
    key = rotate(linear(x, weights.key).view(tokens, kv_heads, elements), span.rope)
    cache.keep(span.layer, span.start, key, linear(x, weights.value).view(tokens, kv_heads, elements))
    rows = slice(span.first, span.start + tokens)
    keys, values = (part[span.layer][:, rows].float() for part in (cache.keys, cache.values))
    group = heads // kv_heads
    asked = query.float().view(tokens, kv_heads, group, elements).permute(1, 2, 0, 3).reshape(kv_heads, -1, elements)
    scores = torch.bmm(asked, keys.transpose(1, 2)).view(kv_heads, group, tokens, -1)
    share = _softmax(scores * weights.scale, span).view(kv_heads, group * tokens, -1)
    out = torch.bmm(share, values).view(kv_heads, group, tokens, elements).permute(2, 0, 1, 3)
    return linear(out.reshape(tokens, heads * elements).to(x.dtype), weights.output)


def _latent(span: Span, cache: LatentCache, weights: LatentAttention, x: Tensor) -> Tensor:
    shape, tokens = weights.shape, len(x)
    made = linear(x, weights.latent)
    rope_key = rotate(made[:, None, shape.latent :], span.rope)[:, 0]
    cache.keep(span.layer, span.start, rms_norm(made[:, : shape.latent], weights.latent_norm), rope_key)
    asked = x
    if weights.query_down is not None and weights.query_norm is not None:
        asked = rms_norm(linear(x, weights.query_down), weights.query_norm)
    query = linear(asked, weights.query).view(tokens, shape.heads, shape.nope + shape.rope)
    in_latent = torch.bmm(query[..., : shape.nope].transpose(0, 1), weights.up_key)
    turned = rotate(query[..., shape.nope :], span.rope).transpose(0, 1)
    whole = torch.cat((in_latent, turned), dim=-1).float()
    rows = cache.rows[span.layer][span.first : span.start + tokens].float()
    share = _softmax((whole @ rows.T) * weights.scale, span)
    attended = (share @ rows[:, : shape.latent]).to(x.dtype)
    out = torch.bmm(attended, weights.up_value).transpose(0, 1)
    return linear(out.reshape(tokens, shape.heads * shape.value), weights.output)


def _softmax(scores: Tensor, span: Span) -> Tensor:
    """Over the rows that a token may see: itself and those before. `scores`: [..., tokens, rows]."""
    tokens, rows = scores.shape[-2:]
    if tokens > 1:
        position = torch.arange(span.start, span.start + tokens)[:, None]
        scores = scores.masked_fill(torch.arange(span.first, span.first + rows) > position, -torch.inf)
    return scores.softmax(-1)
