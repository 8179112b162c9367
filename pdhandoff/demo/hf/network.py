"""The model as two calls, target and draft, each over a run of consecutive positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor
from torch.nn import functional as fn

from pdhandoff.demo.hf.attention import Span, attend
from pdhandoff.demo.hf.caches import KeyValueCache, LatentCache
from pdhandoff.demo.hf.config import HfConfig, LatentShape
from pdhandoff.demo.hf.layers import Mixture, add_and_norm, linear, mixture, mlp, rms_norm
from pdhandoff.demo.hf.rope import rope_table
from pdhandoff.demo.hf.weights import LayerWeights, Weights
from pdhandoff.errors import ErrorCode, LocalError

__all__ = ["HfNetwork"]


@final
class HfNetwork:
    """Weights and the arithmetic that goes with them. Holds no request's state.

    Args:
        config: the model's.
        weights: the model's, all of one type, which is what is computed in.
        length: positions that can be reached.
    """

    def __init__(self, config: HfConfig, weights: Weights, *, length: int) -> None:
        self.config = config
        self.dtype = weights.embedding.dtype
        self.length = length
        self._weights = weights
        shape = config.attention
        latent = isinstance(shape, LatentShape)
        self._rope = rope_table(
            config.rope,
            elements=shape.rope if isinstance(shape, LatentShape) else shape.elements,
            positions=length,
            interleaved=latent,
            dtype=self.dtype,
        )

    @property
    def layers(self) -> int:
        """Layers that keep rows."""
        return len(self._weights.layers) + (self._weights.draft is not None)

    def new_cache(self) -> KeyValueCache | LatentCache:
        """Memory for one request."""
        shape = self.config.attention
        if isinstance(shape, LatentShape):
            return LatentCache(shape, layers=self.layers, length=self.length, dtype=self.dtype)
        return KeyValueCache(shape, layers=self.layers, length=self.length, dtype=self.dtype)

    @torch.inference_mode()
    def target(self, cache: KeyValueCache | LatentCache, *, start: int, tokens: Sequence[int]) -> Tensor:
        """Run the target layers over `tokens` at positions `start` and on; their rows go into the cache.

        Returns the hidden states [tokens, hidden] after the last norm.
        """
        weights = self._weights
        x = fn.embedding(torch.tensor(list(tokens), dtype=torch.int64), weights.embedding)
        residual: Tensor | None = None
        for layer, each in enumerate(weights.layers):
            x, residual = self._layer(self._span(cache, layer, start, len(tokens)), each, x, residual)
        return rms_norm(x, weights.norm) if residual is None else add_and_norm(x, residual, weights.norm)[0]

    @torch.inference_mode()
    def draft(
        self, cache: KeyValueCache | LatentCache, *, start: int, hidden: Tensor, next_tokens: Sequence[int]
    ) -> Tensor:
        """Run the draft layer over positions `start` and on; its rows go into the cache.

        Row p is made of the hidden state at p and the token at p + 1, and predicts the token at p + 2. At position 0
        the token counts as nothing, as in vLLM 0.32 (model_executor/models/deepseek_mtp.py).

        Args:
            cache: where rows are kept. Rows before its `first_draft_row` are not attended to.
            start: the first position.
            hidden: [n, hidden], of the target, or of the draft layer itself one step before.
            next_tokens: n tokens, one position later than the hidden states.

        Returns:
            Hidden states [n, hidden] after the draft layer's own norm.

        Raises:
            LocalError: the network was made without a draft layer.
        """
        weights = self._weights.draft
        if weights is None:
            raise LocalError(ErrorCode.MISUSE, "this network was made without a draft layer")
        tokens = fn.embedding(torch.tensor(list(next_tokens), dtype=torch.int64), self._weights.embedding)
        if start == 0:
            tokens[0] = 0
        both = torch.cat((rms_norm(tokens, weights.token_norm), rms_norm(hidden, weights.hidden_norm)), dim=-1)
        span = self._span(cache, self.config.layers, start, len(hidden))._replace(first=cache.first_draft_row)
        x, residual = self._layer(span, weights.layer, linear(both, weights.project), None)
        return rms_norm((residual + x), weights.norm)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [n, vocabulary] of hidden states [n, hidden], float32."""
        return linear(hidden, self._weights.head).float()

    def _span(self, cache: KeyValueCache | LatentCache, layer: int, start: int, tokens: int) -> Span:
        return Span(cache=cache, layer=layer, start=start, first=0, rope=self._rope.at(start, tokens))

    @staticmethod
    def _layer(span: Span, weights: LayerWeights, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """One decoder layer. What it returns has yet to be added to the residual."""
        if residual is None:
            normed, residual = rms_norm(x, weights.attention_norm), x
        else:
            normed, residual = add_and_norm(x, residual, weights.attention_norm)
        normed, residual = add_and_norm(attend(span, weights.attention, normed), residual, weights.mlp_norm)
        inner = weights.mlp
        return (mixture(normed, inner) if isinstance(inner, Mixture) else mlp(normed, inner)), residual
