"""The model as two calls, target and draft, each over a run of consecutive positions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import final

import torch
from torch import Tensor
from torch.nn import functional as fn

from pdhandoff.demo.model.config import DEFAULT_CONFIG, ModelConfig
from pdhandoff.demo.model.layers import TILE, Cache, Tile, decoder_layer, rms_norm, rope_table, tile_at
from pdhandoff.demo.model.weights import build_weights

__all__ = ["Network"]


@final
class Network:
    """Weights and the arithmetic that goes with them. Holds no request's state; engines share one.

    Args:
        config: sizes and seed.
    """

    def __init__(self, config: ModelConfig = DEFAULT_CONFIG) -> None:
        self.config = config
        self.weights = build_weights(config)
        self._ropes = (rope_table(config, config.rope), rope_table(config, config.index_rope))

    @torch.inference_mode()
    def target(self, cache: Cache, *, start: int, tokens: Sequence[int]) -> Tensor:
        """Run the target layers over `tokens` at positions `start` and on; their rows go into the cache.

        Returns the hidden states [tokens, hidden] before the last norm.
        """
        embedded = self.weights.embedding[torch.tensor(list(tokens), dtype=torch.int64)]
        done = []
        for tile, rows in self._tiles(cache, start, embedded):
            x = rows
            for layer, weights in enumerate(self.weights.layers):
                x = decoder_layer(tile, weights, layer=layer, x=x)
            done.append(x[tile.valid])
        return torch.cat(done)

    @torch.inference_mode()
    def draft(self, cache: Cache, *, start: int, hidden: Tensor, next_tokens: Sequence[int]) -> Tensor:
        """Run the draft layer over positions `start` and on; its rows go into the cache.

        Row p is made of the hidden state at p and the token at p + 1, and predicts the token at p + 2.

        Args:
            cache: where rows are kept.
            start: the first position.
            hidden: [n, hidden], of the target, or of the draft layer itself one step before.
            next_tokens: n tokens, one position later than the hidden states.

        Returns:
            Hidden states [n, hidden] before the last norm.
        """
        config, draft = self.config, self.weights.draft
        tokens = self.weights.embedding[torch.tensor(list(next_tokens), dtype=torch.int64)]
        done = []
        for tile, rows in self._tiles(cache, start, torch.cat((tokens, hidden), dim=-1)):
            token = rms_norm(rows[:, : config.hidden], draft.token_norm, config.norm_epsilon)
            before = rms_norm(rows[:, config.hidden :], draft.hidden_norm, config.norm_epsilon)
            x = fn.linear(torch.cat((token, before), dim=-1), draft.project)
            done.append(decoder_layer(tile, draft.layer, layer=config.draft_layer, x=x)[tile.valid])
        return torch.cat(done)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [n, outputs] of hidden states [n, hidden], row by row, so that they do not depend on n."""
        normed = rms_norm(hidden, self.weights.norm, self.config.norm_epsilon)
        return torch.stack([fn.linear(row, self.weights.head) for row in normed])

    def greedy(self, hidden: Tensor) -> list[int]:
        """The most likely token after each hidden state [n, hidden]."""
        return [int(token) for token in self.logits(hidden).argmax(-1)]

    def _tiles(self, cache: Cache, start: int, rows: Tensor) -> Iterator[tuple[Tile, Tensor]]:
        """Rows [n, width] of positions `start` and on as tiles, each with its rows [8, width]."""
        stop = start + len(rows)
        for first in range(start - start % TILE, stop, TILE):
            positions = torch.arange(first, first + TILE)
            valid = (positions >= start) & (positions < stop)
            padded = torch.zeros(TILE, rows.shape[1])
            padded[valid] = rows[max(first, start) - start : min(first + TILE, stop) - start]
            yield tile_at(self.config, self._ropes, cache, positions=positions, valid=valid), padded
