"""The demo proves something only if every part of the state matters: what a wrong or missing row does to the output."""

from __future__ import annotations

import pytest
import torch

from pdhandoff.demo.model import (
    DecodeEngine,
    DraftSeed,
    PrefillEngine,
    convert_by_hand,
    decode,
    fingerprint,
    prompt_text,
    prompt_tokens,
    text_of,
)
from pdhandoff.demo.model.planes import INDEX_PLANE, LATENT_PLANE, PLANES, ROPE_PLANE
from pdhandoff.demo.model.weights import build_weights
from support.demo_model import Prefilled, injected, network, prefilled, run

SOURCE_TOKENS = 300


def last_logits(engine: DecodeEngine, source: Prefilled) -> torch.Tensor:
    """Logits after the replay of the last prompt token."""
    position = len(source.prompt) - 1
    hidden = network().target(engine.decode_layer.planes, start=position, tokens=source.prompt[-1:])
    return network().logits(hidden)[0]


def told_once() -> tuple[Prefilled, int]:
    """A prompt whose end stood once before, and the position of what followed then."""
    cue = "Door seven opens with "
    text = f"{cue}zebra. {prompt_text(9, 250)}. {cue}"
    engine = PrefillEngine(network())
    prompt = (network().config.begin_token, *text.encode("ascii"))
    request = engine.add(prompt)
    first_token = run(engine, request, 128)
    return Prefilled(prompt, tuple(convert_by_hand(engine, request)), first_token), 1 + len(cue)


@pytest.mark.slow
def test_zeroing_one_row_that_is_attended_to_changes_the_logits() -> None:
    source, at = told_once()
    assert chr(source.prompt[at]) == "z"
    before = last_logits(injected(source), source)
    assert int(before.argmax()) == ord("z")
    for layer in (2, 3):
        for kind in (INDEX_PLANE, LATENT_PLANE, ROPE_PLANE):
            engine = injected(source)
            engine.decode_layer.planes.by_device[0][PLANES * layer + kind][0, at] = 0
            change = before - last_logits(engine, source)
            assert change.abs().max() > 1e-3, (layer, kind)
            if kind != ROPE_PLANE:  # the copied token itself loses, and others do not
                assert int(change.argmax()) == ord("z"), (layer, kind)
                assert change.max() > 1, (layer, kind)


@pytest.mark.slow
def test_without_both_layers_rows_of_one_token_another_token_comes_out() -> None:
    source, at = told_once()
    for kind in (INDEX_PLANE, LATENT_PLANE):
        engine = injected(source)
        for layer in (2, 3):
            engine.decode_layer.planes.by_device[0][PLANES * layer + kind][0, at] = 0
        assert int(last_logits(engine, source).argmax()) != ord("z")


@pytest.mark.slow
@pytest.mark.parametrize("kind", [INDEX_PLANE, LATENT_PLANE])
def test_missing_state_changes_the_text(kind: int) -> None:
    source = prefilled(0, SOURCE_TOKENS)
    engine = injected(source)
    for plane in engine.decode_layer.planes.by_device[0][kind : PLANES * 4 : PLANES]:
        plane[0, : SOURCE_TOKENS - 1] = 0
    assert _tokens(engine, source) != _tokens(injected(source), source)


def _tokens(engine: DecodeEngine, source: Prefilled) -> tuple[int, ...]:
    return _decode(engine, source, DraftSeed.REPLAY)[0]


def _decode(engine: DecodeEngine, source: Prefilled, seed: DraftSeed) -> tuple[tuple[int, ...], int]:
    result = decode(
        engine,
        prompt_last_token=source.prompt[-1],
        first_token=source.first_token,
        prompt_tokens=len(source.prompt),
        max_tokens=10,
        seed=seed,
    )
    return result.tokens, result.drafts_accepted_first_step


@pytest.mark.slow
def test_drafts_are_good_from_the_first_step_where_the_draft_rows_arrived() -> None:
    warm, cold, without_rows = [], [], []
    for number in range(4):
        source = prefilled(number, SOURCE_TOKENS)
        warm.append(_decode(injected(source), source, DraftSeed.REPLAY)[1])
        cold.append(_decode(injected(source), source, DraftSeed.MISSING)[1])
        engine = injected(source)
        for plane in engine.decode_layer.planes.by_device[0][PLANES * 4 :]:
            plane.zero_()
        without_rows.append(_decode(engine, source, DraftSeed.REPLAY)[1])
    assert sum(warm) / len(warm) >= 1.5
    assert sum(cold) == 0
    assert sum(without_rows) < sum(warm) / 2


def test_the_text_goes_on_where_the_cue_stood_before() -> None:
    source = prefilled(0, SOURCE_TOKENS)
    assert text_of(source.prompt).endswith(". The silver clock of t")
    assert text_of(_tokens(injected(source), source)) == "he harbour"
    assert "The silver clock of the harbour" in text_of(source.prompt)


def test_the_same_config_builds_the_same_bits() -> None:
    config = network().config
    assert fingerprint(build_weights(config)) == fingerprint(network().weights)
    other = build_weights(type(config)(seed=config.seed + 1))
    assert fingerprint(other) != fingerprint(network().weights)


@pytest.mark.parametrize("tokens", [1, 2, 5, 60, 129, 300, 2049])
def test_prompts_have_exactly_the_length_asked_for(tokens: int) -> None:
    prompts = [prompt_tokens(number, tokens) for number in range(4)]
    assert {len(prompt) for prompt in prompts} == {tokens}
    assert prompts[0][0] == network().config.begin_token
    assert prompt_text(3, tokens) == prompt_text(3, tokens)
    assert tokens < 60 or len({tuple(prompt) for prompt in prompts}) == 4


def test_text_of_leaves_out_what_is_no_byte() -> None:
    assert text_of([257, 72, 105, 0xFF, 256]) == "Hi\\xff"
