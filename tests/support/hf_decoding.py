"""A request, and running one to its end behind the decode node's calls."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from pdhandoff.demo.engine import Engine
from pdhandoff.demo.engine.decoding import Step

__all__ = ["Ask", "decode", "decoded"]


class Ask(NamedTuple):
    """What is asked of an engine. Greedy, and to the last token, where nothing else is said."""

    prompt: Sequence[int]
    first_token: int
    max_tokens: int = 24
    min_tokens: int = 0
    stop_token_ids: Collection[int] = ()
    ignore_eos: bool = True
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None


def decoded(step: Callable[[], Step]) -> tuple[list[int], list[tuple[int, int]]]:
    """Tokens, and (drafted, accepted) of every step."""
    tokens: list[int] = []
    speculation = []
    while True:
        made = step()
        tokens += made.tokens
        speculation.append((made.drafted, made.accepted))
        if made.finish_reason:
            return tokens, speculation


def decode(engine: Engine, ask: Ask) -> tuple[list[int], list[tuple[int, int]]]:
    """Decode what was injected."""
    engine.begin(ask)
    out = decoded(engine.step)
    engine.end()
    return out
