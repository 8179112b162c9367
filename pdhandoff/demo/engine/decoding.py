"""Decoding one request after its rows were injected: verify steps, with drafts where there is a draft layer.

Before the first step the last prompt token is replayed: that rebuilds its hidden state, which is no part of the
handoff. With the draft rows that came along, the draft layer goes on from the token that prefill sampled, so that
speculation is warm from the first step. Without them (`cold`) the first step runs without drafts, and the draft layer
starts with the rows that it writes itself.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Protocol, final

import msgspec
from torch import Tensor

from pdhandoff.demo.engine.sampling import Sampler
from pdhandoff.errors import ErrorCode, LocalError

__all__ = ["Decoding", "Request", "Speculator", "Step"]


class Request(Protocol):
    """What is read of a request. A decode node's own record has it all."""

    @property
    def prompt(self) -> Sequence[int]:
        """Token ids."""

    @property
    def first_token(self) -> int:
        """Sampled by the prefill engine: the first output token."""

    @property
    def max_tokens(self) -> int:
        """Output tokens in all."""

    @property
    def min_tokens(self) -> int:
        """Output tokens before which no end token may be chosen."""

    @property
    def stop_token_ids(self) -> Collection[int]:
        """They end the output, and are returned."""

    @property
    def ignore_eos(self) -> bool:
        """The model's own end tokens do not end the output."""

    @property
    def temperature(self) -> float:
        """0: greedy."""

    @property
    def top_p(self) -> float:
        """1: all."""

    @property
    def top_k(self) -> int:
        """0: all."""

    @property
    def seed(self) -> int | None:
        """Of the draws."""


class Speculator(Protocol):
    """A model with a draft layer, or without one: `HfNetwork`, or the demo's `Network`. Caches are its own."""

    def target(self, cache: Any, /, *, start: int, tokens: Sequence[int]) -> Tensor:
        """Run tokens at positions `start` and on. Returns hidden states [tokens, hidden]."""

    def draft(self, cache: Any, /, *, start: int, hidden: Tensor, next_tokens: Sequence[int]) -> Tensor:
        """Run the draft layer over hidden states and the tokens after them. Returns hidden states of its own."""

    def logits(self, hidden: Tensor, /) -> Tensor:
        """Logits [n, vocabulary], float32, of what `target` or `draft` returned."""


@final
class Step(msgspec.Struct, frozen=True, kw_only=True):
    """What one verify step produced."""

    tokens: tuple[int, ...]
    "new output tokens"
    finish_reason: str = ""
    "stop or length, with the last tokens"
    drafted: int = 0
    "draft tokens that were verified"
    accepted: int = 0
    "of those, the ones that were right"


@final
class Decoding:
    """One request under way.

    Args:
        network: the model.
        cache: holds the rows of the prompt.
        request: what to decode.
        drafts: draft tokens per verify step; 0: no speculation.
        cold: the draft layer's rows of the prompt did not arrive.
        end_tokens: the model's own.
        max_seq_len: tokens that a request may have, prompt and output.
    """

    def __init__(
        self,
        network: Speculator,
        cache: object,
        request: Request,
        *,
        drafts: int,
        cold: bool,
        end_tokens: Collection[int],
        max_seq_len: int,
    ) -> None:
        self._network = network
        self._cache = cache
        self._last_prompt_token = request.prompt[-1]
        self._depth = drafts
        self._warm = drafts > 0 and not cold
        self._position = len(request.prompt)
        "of `_token`"
        self._token = request.first_token
        self._made = 1
        self._limit = min(request.max_tokens, max_seq_len - len(request.prompt))
        self._least = request.min_tokens
        self._stops = frozenset(request.stop_token_ids) | (frozenset() if request.ignore_eos else frozenset(end_tokens))
        self._withheld = frozenset(request.stop_token_ids) | frozenset(end_tokens)
        self._drafts: list[int] | None = None
        "for the next step; None before the first"
        self._finished = self._reason(self._token)
        "why the output ends with what was made so far; empty: it does not"
        self._over = False
        "the reason was told"
        self._sampler = Sampler(
            temperature=request.temperature, top_p=request.top_p, top_k=request.top_k, seed=request.seed
        )

    def step(self) -> Step:
        """The next tokens: one, and as many more as drafts were right.

        Raises:
            LocalError: the output has ended.
        """
        if self._over:
            raise LocalError(ErrorCode.MISUSE, f"the output has ended ({self._finished}): end the request")
        if self._finished:  # by the first token
            self._over = True
            return Step(tokens=(), finish_reason=self._finished)
        drafts = self._first_drafts() if self._drafts is None else self._drafts
        hidden = self._network.target(self._cache, start=self._position, tokens=[self._token, *drafts])
        tokens = self._verify(self._network.logits(hidden), drafts)
        start, accepted = self._position, sum(map(int.__eq__, tokens, drafts))
        self._position += len(tokens)
        self._token = tokens[-1]
        self._over = bool(self._finished)
        if not self._over:
            self._drafts = self._draft(start, hidden[: len(tokens)], tokens)
        return Step(tokens=tuple(tokens), finish_reason=self._finished, drafted=len(drafts), accepted=accepted)

    def _verify(self, logits: Tensor, drafts: Sequence[int]) -> list[int]:
        """Tokens chosen one after another, as long as the draft in that place is the token that was chosen."""
        tokens: list[int] = []
        for place, row in enumerate(logits):
            token = self._sampler.choose(row, forbidden=self._withheld if self._made < self._least else ())
            tokens.append(token)
            self._made += 1
            self._finished = self._reason(token)
            if self._finished or place == len(drafts) or drafts[place] != token:
                break
        return tokens

    def _reason(self, token: int) -> str:
        if token in self._stops:
            return "stop"
        return "length" if self._made >= self._limit else ""

    def _first_drafts(self) -> list[int]:
        if not self._warm:
            return []
        start = self._position - 1
        hidden = self._network.target(self._cache, start=start, tokens=[self._last_prompt_token])
        return self._draft(start, hidden, [self._token])

    def _draft(self, start: int, hidden: Tensor, following: list[int]) -> list[int]:
        """Write the draft rows of accepted tokens, then go on alone, one token after another.

        Args:
            start: position of the first hidden state.
            hidden: [n, hidden], of tokens that count.
            following: the n tokens after them.
        """
        depth = min(self._depth, self._limit - self._made - 1)  # a step gives one token more than it has drafts
        drafts: list[int] = []
        while len(drafts) < depth:
            out = self._network.draft(self._cache, start=start, hidden=hidden, next_tokens=following)
            start += len(following)
            hidden = out[-1:]
            following = [int(self._network.logits(hidden)[0].argmax())]
            drafts += following
        return drafts
