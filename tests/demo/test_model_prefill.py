"""The prefill engine: chunks, phases, pages."""

from __future__ import annotations

import pytest
import torch

from pdhandoff.demo.model import PrefillEngine, convert_by_hand, prompt_tokens
from pdhandoff.demo.model.decode import LayerRows
from pdhandoff.errors import LocalError
from support.demo_model import network, run

PROMPT = prompt_tokens(3, 150)


def rows_of(engine: PrefillEngine, request: int) -> list[bytes]:
    """Per layer, the bytes of the request's rows in token order: latent rows, then index values, then index scales."""
    tokens = engine.progress(request).target_tokens
    table = torch.tensor(engine.block_table(request))
    out = []
    for latent, index in zip(engine.tensors.latent, engine.tensors.index, strict=True):
        planar = index[table].reshape(len(table), -1)
        values, scales = planar[:, : 64 * 128].reshape(-1, 128), planar[:, 64 * 128 :].reshape(-1, 4)
        parts = (latent[table].reshape(-1, 656), values, scales)
        out.append(b"".join(part[:tokens].numpy().tobytes() for part in parts))
    return out


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [149, 64, 29])
def test_chunks_leave_the_same_bytes_as_one_shot(chunk: int) -> None:
    whole, chunked = PrefillEngine(network()), PrefillEngine(network(), seed=1)
    first, second = whole.add(PROMPT), chunked.add(PROMPT)
    assert run(whole, first, len(PROMPT)) == run(chunked, second, chunk)
    assert rows_of(whole, first) == rows_of(chunked, second)
    assert whole.block_table(first) != chunked.block_table(second)


@pytest.mark.slow
def test_requests_that_take_turns_do_not_touch_each_other() -> None:
    engine = PrefillEngine(network())
    prompts = [prompt_tokens(number, 90 + 20 * number) for number in range(3)]
    requests = [engine.add(prompt) for prompt in prompts]
    while not all(engine.progress(request).finished for request in requests):
        for request in requests:
            if not engine.progress(request).finished:
                engine.step(request, 40)
    tables = [engine.block_table(request) for request in requests]
    held = [page for table in tables for page in table]
    assert len(set(held)) == len(held)
    assert 0 not in held
    assert held != sorted(held)
    for prompt, request in zip(prompts, requests, strict=True):
        alone = PrefillEngine(network())
        other = alone.add(prompt)
        run(alone, other, len(prompt))
        assert rows_of(alone, other) == rows_of(engine, request)


def test_draft_rows_come_in_a_phase_of_their_own() -> None:
    engine = PrefillEngine(network())
    request = engine.add(PROMPT[:70])
    assert engine.step(request, 30).new_pages == engine.block_table(request)
    before = rows_of(engine, request)
    progress = engine.step_target(request, 40)
    assert (progress.target_tokens, progress.draft_tokens, progress.finished) == (70, 30, False)
    assert progress.new_pages == engine.block_table(request)[1:]
    assert progress.first_token is not None
    halfway = rows_of(engine, request)
    assert halfway[0] != before[0]
    draft = engine.config.draft_layer
    assert halfway[draft][: 30 * 656] == before[draft][: 30 * 656]
    assert not any(halfway[draft][30 * 656 : 64 * 656])
    progress = engine.step_draft(request)
    assert (progress.draft_tokens, progress.finished, progress.new_pages) == (70, True, ())
    assert rows_of(engine, request)[:draft] == halfway[:draft]
    assert any(rows_of(engine, request)[draft][69 * 656 : 70 * 656])


def test_draft_rows_follow_the_prompt_and_the_last_one_the_sampled_token() -> None:
    prompt = PROMPT[:40]
    engine = PrefillEngine(network())
    request = engine.add(prompt)
    first_token = run(engine, request, 24)  # ends a chunk after row 23, whose next token is prompt[24]
    longer = PrefillEngine(network())
    other = longer.add([*prompt, first_token, 0])
    run(longer, other, 100)
    draft = engine.config.draft_layer
    assert _head(convert_by_hand(longer, other)[draft], 40) == _head(convert_by_hand(engine, request)[draft], 40)
    wrong = PrefillEngine(network())
    other = wrong.add([*prompt, (first_token + 1) % 256, 0])
    run(wrong, other, 100)
    changed = convert_by_hand(wrong, other)[draft]
    assert _head(changed, 39) == _head(convert_by_hand(engine, request)[draft], 39)
    assert _head(changed, 40) != _head(convert_by_hand(engine, request)[draft], 40)


def _head(rows: LayerRows, tokens: int) -> list[list[list[float]]]:
    return [part[:tokens].tolist() for part in rows]


@pytest.mark.slow
def test_a_preempted_request_starts_over_on_other_pages_with_the_same_rows() -> None:
    engine = PrefillEngine(network(), pages=9)
    request = engine.add(PROMPT)
    engine.step(request, 100)
    engine.step_target(request, 20)
    table = engine.block_table(request)
    engine.preempt(request)
    assert engine.block_table(request) == ()
    assert engine.progress(request).target_tokens == 0
    assert engine.free_pages == 8
    first_token = run(engine, request, 100)
    assert not set(table) & set(engine.block_table(request))
    undisturbed = PrefillEngine(network())
    other = undisturbed.add(PROMPT)
    assert run(undisturbed, other, 100) == first_token
    assert rows_of(undisturbed, other) == rows_of(engine, request)
    engine.free(request)
    assert engine.free_pages == 8


def test_exactly_full_pages_bring_no_empty_one() -> None:
    engine = PrefillEngine(network())
    request = engine.add(PROMPT[:64])
    run(engine, request, 64)
    assert len(engine.block_table(request)) == 1
    assert engine.prompt(request) == tuple(PROMPT[:64])


def test_a_prompt_of_one_token() -> None:
    engine = PrefillEngine(network())
    request = engine.add(PROMPT[:1])
    progress = engine.step(request, 8)
    assert progress.finished
    assert progress.first_token is not None


def test_what_cannot_be_prefilled_is_refused() -> None:
    engine = PrefillEngine(network(), pages=2)
    with pytest.raises(LocalError, match="empty"):
        engine.add([])
    with pytest.raises(LocalError, match="token 259"):
        engine.add([1, 259])
    with pytest.raises(LocalError, match="1024 tokens"):
        engine.add([0] * 1024)
    with pytest.raises(LocalError, match="no request 7"):
        engine.step(7, 1)
    request = engine.add(PROMPT)
    with pytest.raises(LocalError, match="draft rows"):
        engine.step_draft(request)
    with pytest.raises(LocalError, match="chunk of 0"):
        engine.step(request, 0)
    with pytest.raises(LocalError, match="3 pages are needed and 1 are free"):
        engine.step(request, 150)
    assert engine.free_pages == 1
    engine.step_target(request, 8)
    with pytest.raises(LocalError, match="run the draft phase"):
        engine.step_target(request, 8)
    short = PrefillEngine(network())
    done = short.add([65])
    run(short, done, 1)
    with pytest.raises(LocalError, match="or stop"):
        short.step(done, 1)
