"""How a token is chosen from logits: greedily, or drawn after temperature, top-k and top-p, in this order."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, final

import torch
from torch import Tensor

__all__ = ["GREEDY_BELOW", "Sampler"]

GREEDY_BELOW: Final = 1e-5
"temperatures below this one are greedy, as in vLLM"


@final
class Sampler:
    """Chooses tokens. Every chosen token takes exactly one draw, so drafts do not change what a seed gives.

    Args:
        temperature: 0: greedy.
        top_p: keep the likeliest tokens that together reach this probability, at least one; 1: all.
        top_k: keep that many of the likeliest tokens; 0 or less: all.
        seed: of the draws; None: another one each time.
    """

    def __init__(
        self, *, temperature: float = 0.0, top_p: float = 1.0, top_k: int = 0, seed: int | None = None
    ) -> None:
        self._temperature = temperature
        self._top_p = top_p
        self._top_k = top_k
        self._generator = torch.Generator()
        if seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(seed)

    def choose(self, logits: Tensor, *, forbidden: Collection[int] = ()) -> int:
        """One token.

        Args:
            logits: [vocabulary], float32.
            forbidden: tokens that must not be chosen.
        """
        if forbidden:
            logits = logits.index_fill(0, torch.tensor(sorted(forbidden)), -torch.inf)
        if self._temperature < GREEDY_BELOW:
            return int(logits.argmax())
        return int(torch.multinomial(self.probabilities(logits), 1, generator=self._generator))

    def probabilities(self, logits: Tensor) -> Tensor:
        """What is drawn from: [vocabulary], summing to one."""
        logits = logits / self._temperature
        if 0 < self._top_k < len(logits):
            least = logits.topk(self._top_k).values[-1]
            logits = logits.masked_fill(logits < least, -torch.inf)
        probabilities = logits.softmax(0)
        if self._top_p < 1:
            ranked, order = probabilities.sort(descending=True, stable=True)
            before = ranked.cumsum(0) - ranked  # what likelier tokens reach without this one
            dropped = order[(before >= self._top_p) & (torch.arange(len(ranked)) > 0)]
            probabilities = probabilities.index_fill(0, dropped, 0.0)
            probabilities = probabilities / probabilities.sum()
        return probabilities
