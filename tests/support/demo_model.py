"""One network per test process, and prompts that were prefilled once."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch

from pdhandoff.demo.model import DecodeEngine, Network, PrefillEngine, convert_by_hand, prompt_tokens
from pdhandoff.demo.model.decode import LayerRows

__all__ = ["Prefilled", "injected", "network", "prefilled", "run"]


class Prefilled(NamedTuple):
    """A prompt after its prefill."""

    prompt: tuple[int, ...]
    rows: tuple[LayerRows, ...]
    first_token: int


@cache
def network() -> Network:
    """The demo's model."""
    torch.set_num_threads(1)
    return Network()


def run(engine: PrefillEngine, request: int, chunk: int) -> int:
    """Prefill to the end; the first token."""
    progress = engine.step(request, chunk)
    while not progress.finished:
        progress = engine.step(request, chunk)
    assert progress.first_token is not None
    return progress.first_token


@cache
def prefilled(number: int, tokens: int) -> Prefilled:
    """A default prompt, prefilled and converted by hand. Nobody changes the rows."""
    prompt = tuple(prompt_tokens(number, tokens))
    engine = PrefillEngine(network())
    request = engine.add(prompt)
    first_token = run(engine, request, 128)
    return Prefilled(prompt, tuple(convert_by_hand(engine, request)), first_token)


def injected(source: Prefilled, devices: int = 1) -> DecodeEngine:
    """A decode engine that holds the prompt's rows."""
    engine = DecodeEngine(network(), devices=devices)
    engine.inject_cache(source.rows)
    return engine
