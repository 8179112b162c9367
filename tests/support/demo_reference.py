"""The demo's model once more, plainly: one token at a time, nothing absorbed, nothing tiled."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pdhandoff.demo.model import ModelConfig, Network
from pdhandoff.demo.model.decode import LayerRows
from pdhandoff.demo.model.layers import Dense, Indexer, Layer, Mixture
from pdhandoff.native.reference import hadamard128

__all__ = ["DenseModel"]


class DenseModel:
    """Target layers over rows that were injected, then token by token.

    Args:
        network: for its weights.
        rows: per layer, as `DecodeEngine.inject_cache` takes them.
        tokens: how many of the rows to use.
    """

    def __init__(self, network: Network, rows: Sequence[LayerRows], tokens: int) -> None:
        self.config: ModelConfig = network.config
        self._weights = network.weights
        self._rows = [tuple(part[:tokens].float() for part in layer) for layer in rows]

    def feed(self, token: int) -> int:
        """Append a token; the most likely next one."""
        x = self._weights.embedding[token]
        for number, layer in enumerate(self._weights.layers):
            x = self._layer(number, layer, x)
        return int((self._weights.head @ _norm(x, self._weights.norm)).argmax())

    def continue_greedily(self, token: int, count: int) -> list[int]:
        """That many tokens after `token`, which is fed first."""
        out = []
        for _ in range(count):
            token = self.feed(token)
            out.append(token)
        return out

    def _layer(self, number: int, weights: Layer, x: Tensor) -> Tensor:
        config, attention = self.config, weights.attention
        position = len(self._rows[number][0])
        normed = _norm(x, attention.norm)
        rotated = hadamard128(self._index_key(weights.indexer, normed, position))
        latent = _norm(attention.latent @ normed, attention.latent_norm)
        rope = _turn(attention.rope_key @ normed, position, config.rope_theta)
        fresh = (rotated, latent, rope)
        self._rows[number] = tuple(
            torch.cat((old, new.to(torch.bfloat16).float()[None]))
            for old, new in zip(self._rows[number], fresh, strict=True)
        )
        chosen = self._chosen(weights.indexer, normed, position, self._rows[number][0])
        latents, ropes = (part[chosen] for part in self._rows[number][1:])
        query = (attention.query @ normed).reshape(config.heads, -1)
        values = []
        for head in range(config.heads):
            keys = latents @ attention.up_key[head].T
            turned = _turn(query[head, config.nope :], position, config.rope_theta)
            scores = keys @ query[head, : config.nope] + ropes @ turned
            share = torch.softmax(scores / (config.nope + config.rope) ** 0.5, 0)
            values.append(share @ (latents @ attention.up_value[head]))
        x = x + attention.output @ torch.cat(values)
        return x + self._mlp(weights.mlp, _norm(x, weights.mlp_norm))

    def _index_key(self, weights: Indexer, normed: Tensor, position: int) -> Tensor:
        key = weights.key @ normed
        key = (key - key.mean()) / (key.var(correction=0) + 1e-6).sqrt() * weights.key_norm + weights.key_bias
        return self._turned_halves(key, position)

    def _turned_halves(self, x: Tensor, position: int) -> Tensor:
        """Half-split rotary elements: interleave, turn, and put back."""
        rope = self.config.index_rope
        interleaved = x[:rope].reshape(2, -1).T.reshape(-1)
        turned = _turn(interleaved, position, self.config.rope_theta).reshape(-1, 2).T.reshape(-1)
        return torch.cat((turned, x[rope:]))

    def _chosen(self, weights: Indexer, normed: Tensor, position: int, keys: Tensor) -> list[int]:
        config = self.config
        query = (weights.query @ normed).reshape(config.index_heads, config.index_key)
        share = weights.head @ normed
        scores = torch.zeros(len(keys))
        for head in range(config.index_heads):
            rotated = hadamard128(self._turned_halves(query[head], position))
            scores += share[head] * (keys @ rotated).clamp(min=0)
        ranked = sorted(range(len(keys)), key=lambda token: -float(scores[token]))
        return sorted(ranked[: config.index_topk])

    def _mlp(self, weights: Dense | Mixture, x: Tensor) -> Tensor:
        if isinstance(weights, Dense):
            return weights.down @ (torch.nn.functional.silu(weights.gate @ x) * (weights.up @ x))
        affinity = weights.router @ x
        best = sorted(range(len(affinity)), key=lambda expert: -float(affinity[expert]))[
            : self.config.experts_per_token
        ]
        share = torch.softmax(affinity[best], 0)
        out = torch.zeros_like(x)
        for weight, expert in zip(share, best, strict=True):
            inner = torch.nn.functional.silu(weights.gate[expert] @ x) * (weights.up[expert] @ x)
            out += weight * (weights.down[expert] @ inner)
        return out


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean() + 1e-6).sqrt() * weight


def _turn(x: Tensor, position: int, theta: float) -> Tensor:
    """Rotary embedding of interleaved pairs, as a complex product."""
    pairs = torch.view_as_complex(x.double().reshape(-1, 2).contiguous())
    frequencies = theta ** (-torch.arange(len(pairs), dtype=torch.float64) / len(pairs))
    turned = pairs * torch.polar(torch.ones_like(frequencies), position * frequencies)
    return torch.view_as_real(turned).reshape(-1).float()
