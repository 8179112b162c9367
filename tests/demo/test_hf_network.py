"""The engine for Hugging Face models computes what a plain formula does, and its caches are consistent."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from pdhandoff.demo.hf.attention import LatentAttention, Span, attend
from pdhandoff.demo.hf.checkpoint import Checkpoint
from pdhandoff.demo.hf.config import Experts, read_config
from pdhandoff.demo.hf.layers import route
from pdhandoff.demo.hf.network import HfNetwork
from pdhandoff.demo.hf.weights import load_weights
from pdhandoff.errors import LocalError
from support.hf_models import VARIANTS, VOCABULARY, write_model
from support.hf_reference import PlainModel

TOKENS = 40


def load(folder: Path, *, dtype: torch.dtype = torch.float32, draft: bool | None = None) -> HfNetwork:
    torch.set_num_threads(1)
    config = read_config(folder)
    wanted = config.draft_layers > 0 if draft is None else draft
    return HfNetwork(config, load_weights(config, Checkpoint(folder, dtype), draft=wanted), length=128)


def prompt(seed: int, tokens: int = TOKENS) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(VOCABULARY - 1) for _ in range(tokens)]


def logits(network: HfNetwork, tokens: Sequence[int]) -> torch.Tensor:
    return network.logits(network.target(network.new_cache(), start=0, tokens=tokens))


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_a_plain_formula(variant: str, tmp_path: Path) -> None:
    folder = write_model(variant, tmp_path / "model")
    tokens = prompt(1)
    _, expected = PlainModel(folder).feed(tokens)
    found = logits(load(folder), tokens)
    assert found.dtype is torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=2e-4, atol=2e-4)
    assert expected.std() > 0.3  # a model that says something


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_decoding_equals_a_prefill_at_every_position(variant: str, tmp_path: Path) -> None:
    network = load(write_model(variant, tmp_path / "model"))
    tokens = prompt(2)
    whole = logits(network, tokens)
    cache = network.new_cache()
    steps = [network.logits(network.target(cache, start=at, tokens=tokens[at : at + 1])) for at in range(9)]
    for start, stop in ((9, 12), (12, 13), (13, TOKENS)):  # runs of several tokens, as verify steps have them
        steps.append(network.logits(network.target(cache, start=start, tokens=tokens[start:stop])))
    torch.testing.assert_close(torch.cat(steps), whole, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("variant", VARIANTS)
def test_half_precision_is_close(variant: str, dtype: torch.dtype, tmp_path: Path) -> None:
    folder = write_model(variant, tmp_path / "model", torch_dtype=str(dtype).removeprefix("torch."))
    tokens = prompt(3)
    exact, found = logits(load(folder), tokens), logits(load(folder, dtype=dtype), tokens)
    assert torch.cosine_similarity(exact, found, dim=-1).median() > 0.99


@pytest.mark.slow
def test_drafts_are_those_of_a_plain_formula(tmp_path: Path) -> None:
    folder = write_model("deepseek", tmp_path / "model")
    network, plain = load(folder), PlainModel(folder)
    tokens = prompt(4)
    states, _ = plain.feed(tokens)
    following = [*tokens[1:], 5]
    expected = plain.draft(states, following)
    cache = network.new_cache()
    hidden = network.target(cache, start=0, tokens=tokens)
    found = network.logits(network.draft(cache, start=0, hidden=hidden, next_tokens=following))
    torch.testing.assert_close(found.double(), expected, rtol=2e-4, atol=2e-4)


@pytest.mark.slow
def test_drafts_row_by_row_equal_a_fresh_computation(tmp_path: Path) -> None:
    network = load(write_model("deepseek", tmp_path / "model"))
    tokens = prompt(5)
    following = [*tokens[1:], 5]
    fresh, cache = network.new_cache(), network.new_cache()
    hidden = network.target(fresh, start=0, tokens=tokens)
    network.target(cache, start=0, tokens=tokens)
    whole = network.draft(fresh, start=0, hidden=hidden, next_tokens=following)
    parts = [
        network.draft(cache, start=start, hidden=hidden[start:stop], next_tokens=following[start:stop])
        for start, stop in ((0, 1), (1, 4), (4, 30), (30, TOKENS))
    ]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-4, atol=1e-4)


def test_rows_before_the_first_draft_row_are_not_read(tmp_path: Path) -> None:
    network = load(write_model("deepseek", tmp_path / "model"))
    tokens = prompt(6)
    clean, dirty = network.new_cache(), network.new_cache()
    dirty.rows[-1].fill_(float("nan"))  # type: ignore[union-attr]  # a latent cache
    drafted = []
    for cache in (clean, dirty):
        cache.first_draft_row = 30
        hidden = network.target(cache, start=0, tokens=tokens)
        drafted.append(network.draft(cache, start=30, hidden=hidden[30:], next_tokens=[*tokens[31:], 5]))
    assert torch.equal(*drafted)


def test_rows_after_the_last_token_are_not_read(tmp_path: Path) -> None:
    network = load(write_model("llama", tmp_path / "model"))
    tokens = prompt(7)
    cache = network.new_cache()
    for part in (*cache.keys, *cache.values):  # type: ignore[union-attr]  # a key/value cache
        part.fill_(float("nan"))
    assert torch.equal(network.logits(network.target(cache, start=0, tokens=tokens)), logits(network, tokens))


def test_split_files_are_the_same_model(tmp_path: Path) -> None:
    whole = load(write_model("llama_tied", tmp_path / "whole"))
    split = load(write_model("llama_tied", tmp_path / "split", split=True))
    assert torch.equal(logits(whole, prompt(8)), logits(split, prompt(8)))


def test_without_a_draft_layer_nothing_is_drafted(tmp_path: Path) -> None:
    network = load(write_model("deepseek", tmp_path / "model"), draft=False)
    assert network.layers == 2
    cache = network.new_cache()
    with pytest.raises(LocalError, match="without a draft layer"):
        network.draft(cache, start=0, hidden=torch.zeros(1, 32), next_tokens=[1])


def test_attention_and_cache_are_of_one_kind(tmp_path: Path) -> None:
    latent = load(write_model("deepseek", tmp_path / "latent"))
    grouped = load(write_model("llama", tmp_path / "grouped"))
    attention = latent._weights.layers[0].attention
    assert isinstance(attention, LatentAttention)
    span = Span(grouped.new_cache(), 0, 0, 0, latent._rope.at(0, 1))
    with pytest.raises(TypeError, match="LatentAttention cannot read a KeyValueCache"):
        attend(span, attention, torch.zeros(1, 32))


def test_experts_are_chosen_with_the_correction_and_weighed_without_it() -> None:
    shape = Experts(
        routed=6,
        shared=0,
        per_token=2,
        groups=3,
        groups_kept=1,
        width=1,
        first_layer=0,
        every=1,
        scale=1.0,
        normalise=True,
        sigmoid=True,
        corrected=True,
    )
    scores = torch.tensor([[0.9, 0.1, 0.6, 0.5, 0.3, 0.2]])
    share, chosen = route(scores.logit(), shape, torch.tensor([0.0, 0.0, 0.0, 0.0, 0.4, 0.4]))
    assert set(chosen[0].tolist()) == {4, 5}  # 0.7 + 0.6 beats 0.6 + 0.5 and 0.9 + 0.1
    assert share[0].tolist() == pytest.approx([0.6, 0.4])
    plain, chosen = route(scores.logit(), shape._replace(corrected=False, normalise=False), None)
    assert set(chosen[0].tolist()) == {0, 1}  # without a correction the best expert of a group speaks for it
    assert plain[0].tolist() == pytest.approx([0.9, 0.1])
