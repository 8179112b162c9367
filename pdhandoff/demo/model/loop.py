"""The decode loop: from injected rows and the token that prefill sampled to text.

The first forward replays the last prompt token: that rebuilds the hidden state, which is no part of the handoff.
Decoding then starts from the token that prefill sampled, whatever the replay says. Where the replay predicts that
same token, its drafts continue it, and speculation is warm from the first step. Otherwise the first step runs without
drafts: copies of a token, or random ones, would be verified for nothing.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import final

import msgspec
import torch

from pdhandoff.demo.model.decode import DecodeEngine
from pdhandoff.errors import ErrorCode, LocalError

__all__ = ["DecodeResult", "DraftSeed", "decode"]


@final
class DraftSeed(enum.Enum):
    """Where the first step's drafts come from."""

    REPLAY = "replay"  # the draft layer's rows arrived: what it says after the replay of the last prompt token
    MISSING = "missing"  # they did not: the first step runs without drafts


@final
class DecodeResult(msgspec.Struct, frozen=True, kw_only=True):
    """What one request was decoded to."""

    tokens: tuple[int, ...]
    "the token that prefill sampled first; a token that stops is left out"
    drafts_accepted: tuple[int, ...]
    "per verify step, the replay not counted: how many of its drafts were accepted"
    cold_start: bool
    "the first step ran without drafts"
    stopped: bool
    "a stop token ended it; otherwise the token limit, or the end of the caches"

    @property
    def drafts_accepted_first_step(self) -> int:
        """Drafts that the first verify step accepted."""
        return self.drafts_accepted[0] if self.drafts_accepted else 0

    @property
    def steps(self) -> int:
        """Verify steps, the replay not counted."""
        return len(self.drafts_accepted)


def decode(
    engine: DecodeEngine,
    *,
    prompt_last_token: int,
    first_token: int,
    prompt_tokens: int,
    max_tokens: int,
    seed: DraftSeed = DraftSeed.REPLAY,
    on_tokens: Callable[[Sequence[int]], None] | None = None,
) -> DecodeResult:
    """Decode greedily after an injection of the prompt's rows.

    Args:
        engine: holds rows 0 .. prompt_tokens - 1 of all layers.
        prompt_last_token: the token at position prompt_tokens - 1.
        first_token: the token that prefill sampled after it.
        prompt_tokens: tokens of the prompt.
        max_tokens: at most that many tokens, the first one included.
        seed: MISSING where the draft layer's rows did not come along.
        on_tokens: called with every step's new tokens, the first token before any step.

    Returns:
        The tokens, and how speculation went.

    Raises:
        LocalError: no token is wanted, or the prompt does not fit.
    """
    if max_tokens < 1 or not 0 < prompt_tokens <= engine.max_seq_len:
        raise LocalError(
            ErrorCode.MISUSE,
            f"{max_tokens} tokens after {prompt_tokens}: ask for 1 or more after a prompt of 1 to {engine.max_seq_len}",
        )
    out = _Output(frozenset(engine.stop_token_ids), max_tokens, on_tokens)
    out.add([first_token])
    pads = [engine.config.pad_token] * (engine.mtp_seq_len - 1)
    if out.done():
        return out.result([], cold_start=False)
    engine.update_sampling_params(temperature=1.0, top_p=1.0, top_k=1, use_topp=False)
    step = engine.decode_layer
    step.set_prefill_valid_tokens(0)
    engine.set_cur_pos(prompt_tokens - 1)
    step.forward(torch.tensor([[prompt_last_token, *pads]], dtype=torch.int32))
    warm = seed is DraftSeed.REPLAY and int(step.get_predicted_tokens(0)[0]) == first_token
    draft = step.get_next_draft_tokens(0).reshape(1, -1) if warm else torch.tensor([[first_token, *pads]])
    position = prompt_tokens
    accepted: list[int] = []
    while not out.done() and position < engine.max_seq_len:
        step.forward(draft)
        count = step.get_num_accepted(0)
        out.add([int(token) for token in step.get_predicted_tokens(0)[:count]])
        accepted.append(count - 1)
        position += count
        draft = step.get_next_draft_tokens(0).reshape(1, -1)
    step.reset_sequence()
    return out.result(accepted, cold_start=not warm)


class _Output:
    """Collects tokens up to a stop token or the limit."""

    def __init__(
        self, stop_tokens: frozenset[int], max_tokens: int, on_tokens: Callable[[Sequence[int]], None] | None
    ) -> None:
        self._stop_tokens = stop_tokens
        self._max_tokens = max_tokens
        self._on_tokens = on_tokens
        self._tokens: list[int] = []
        self._stopped = False

    def done(self) -> bool:
        return self._stopped or len(self._tokens) >= self._max_tokens

    def add(self, tokens: Sequence[int]) -> None:
        """Take a step's tokens in, as far as they count."""
        stop = next((at for at, token in enumerate(tokens) if token in self._stop_tokens), len(tokens))
        taken = tokens[: min(stop, self._max_tokens - len(self._tokens))]
        self._tokens += taken
        self._stopped = stop < len(tokens) and len(taken) == stop
        if taken and self._on_tokens is not None:
            self._on_tokens(taken)

    def result(self, accepted: Sequence[int], *, cold_start: bool) -> DecodeResult:
        return DecodeResult(
            tokens=tuple(self._tokens),
            drafts_accepted=tuple(accepted),
            cold_start=cold_start,
            stopped=self._stopped,
        )
