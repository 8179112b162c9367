"""The engine says what a real vLLM said, from scratch and from vLLM's own pages. See tests/data/vllm_cpu/README.md."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

import pytest
import torch
from safetensors import safe_open

from pdhandoff import Placement
from pdhandoff.demo.engine import Engine
from pdhandoff.demo.hf import create
from pdhandoff.demo.hf.config import read_config
from pdhandoff.demo.hf.layouts import profile_of
from pdhandoff.demo.hf.network import HfNetwork
from pdhandoff.layouts import Element, catalogue
from pdhandoff.layouts.catalogue.options import Options
from support.hf_decoding import Ask, decode
from support.hf_pages import arriving
from support.vllm_models import cached_model

DATA: Final = Path(__file__).parents[1] / "data" / "vllm_cpu"
KINDS: Final = ("gqa", "mla", "mla_mtp")


class Said(NamedTuple):
    pages: dict[str, torch.Tensor]
    prompts: list[list[int]]
    tokens: list[list[int]]


@cache
def said(kind: str) -> Said:
    with safe_open(DATA / f"{kind}.safetensors", framework="pt") as file:
        metadata = file.metadata()
        pages = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is no mapping
    weights = hashlib.blake2b((cached_model(kind) / "model.safetensors").read_bytes(), digest_size=8).hexdigest()
    assert metadata["weights"] == weights, f"the model has changed: run tests/data/vllm_cpu/make.py {kind}"
    return Said(pages, json.loads(metadata["prompts"]), json.loads(metadata["tokens"]))


@cache
def loaded(kind: str) -> Engine:
    torch.set_num_threads(1)
    return create(model=cached_model(kind), dtype="float32", max_seq_len=512)


def network(kind: str) -> HfNetwork:
    found = loaded(kind)._network
    assert isinstance(found, HfNetwork)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_are_vllms(kind: str) -> None:
    model = network(kind)
    for prompt, tokens in zip(said(kind).prompts, said(kind).tokens, strict=True):
        rows = model.new_cache()
        found = [int(model.logits(model.target(rows, start=0, tokens=prompt)[-1:])[0].argmax())]
        for position in range(len(prompt), len(prompt) + len(tokens) - 1):
            hidden = model.target(rows, start=position, tokens=found[-1:])
            found.append(int(model.logits(hidden)[0].argmax()))
        assert found == tokens


@pytest.mark.slow
def test_draft_rows_are_vllms() -> None:
    model, kept = network("mla_mtp"), said("mla_mtp")
    prompt, first = kept.prompts[0], kept.tokens[0][0]
    rows = model.new_cache()
    hidden = model.target(rows, start=0, tokens=prompt)
    model.draft(rows, start=0, hidden=hidden, next_tokens=[*prompt[1:], first])
    assert len(kept.pages) == 4
    for layer, name in enumerate(sorted(kept.pages)):
        theirs = kept.pages[name].reshape(-1, 576)[: len(prompt)]
        torch.testing.assert_close(rows.rows[layer][: len(prompt)], theirs, rtol=1e-3, atol=1e-4)  # type: ignore[union-attr]


def hand_off(kind: str, engine: Engine, prompt: Sequence[int]) -> object:
    """vLLM's pages of the first prompt, converted and parked."""
    pages = said(kind).pages
    profile = profile_of(read_config(cached_model(kind)), kind, draft_layers=len(engine.layout.model.draft_layers))
    name = "vllm.cpu_attn" if kind == "gqa" else "vllm.cpu_mla"
    layout = catalogue.build(name, profile, Options(model=engine.layout.model, element=Element.F32))
    (component,) = layout.components
    count = -(-len(prompt) // component.page_tokens)
    at = {component.name: Placement(count, {"": [pages[layer].data_ptr() for layer in sorted(pages)]})}
    with arriving(engine.layout, (layout, at, range(count), len(prompt))) as (arrival,):
        return engine.park(arrival)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_vllms_pages_decode_to_vllms_tokens(kind: str) -> None:
    engine, prompt, (first, *tokens) = loaded(kind), said(kind).prompts[0], said(kind).tokens[0]
    engine.inject(hand_off(kind, engine, prompt))  # type: ignore[arg-type]  # what park returned
    found, speculation = decode(engine, Ask(prompt, first, max_tokens=64))
    assert found == tokens
    assert (sum(drafted for drafted, _ in speculation) > 0) == (kind == "mla_mtp")
