"""The decode engine and its loop."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from pdhandoff.demo.model import DecodeEngine, DecodeResult, DraftSeed, ModelConfig, Network, decode, decode_locally
from pdhandoff.errors import LocalError
from support.demo_model import Prefilled, injected, network, prefilled
from support.demo_reference import DenseModel

TOKENS = 24


def decoded(
    engine: DecodeEngine, source: Prefilled, *, seed: DraftSeed = DraftSeed.REPLAY, max_tokens: int = TOKENS
) -> DecodeResult:
    return decode(
        engine,
        prompt_last_token=source.prompt[-1],
        first_token=source.first_token,
        prompt_tokens=len(source.prompt),
        max_tokens=max_tokens,
        seed=seed,
    )


def greedy(engine: DecodeEngine, source: Prefilled) -> list[int]:
    """Decoding without drafts: one token a step."""
    pads = [engine.config.pad_token] * 3
    engine.set_cur_pos(len(source.prompt) - 1)
    engine.decode_layer.forward(torch.tensor([[source.prompt[-1], *pads]]))
    tokens = [source.first_token]
    for position in range(len(source.prompt), len(source.prompt) + TOKENS - 1):
        engine.set_cur_pos(position)
        engine.decode_layer.forward(torch.tensor([[tokens[-1], *pads]]))
        assert engine.decode_layer.get_num_accepted(0) == 1
        tokens.append(int(engine.decode_layer.get_predicted_tokens(0)[0]))
    return tokens


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1, 2])
def test_drafts_change_no_token_and_no_row(number: int) -> None:
    source = prefilled(number, 200)
    plain, speculating = injected(source), injected(source)
    expected = greedy(plain, source)
    result = decoded(speculating, source)
    assert list(result.tokens) == expected
    assert not result.stopped
    assert sum(result.drafts_accepted) + result.steps >= TOKENS - 1
    last = len(source.prompt) + TOKENS - 2
    planes = [engine.decode_layer.planes.by_device[0] for engine in (plain, speculating)]
    for one, other in zip(*planes, strict=True):
        assert torch.equal(one[0, :last], other[0, :last])


@pytest.mark.slow
@pytest.mark.parametrize(("number", "tokens"), [(0, 200), (4, 200), (1, 20)])
def test_decoding_equals_a_dense_reference(number: int, tokens: int) -> None:
    source = prefilled(number, tokens)
    reference = DenseModel(network(), source.rows, len(source.prompt) - 1)
    reference.feed(source.prompt[-1])
    expected = [source.first_token, *reference.continue_greedily(source.first_token, TOKENS - 1)]
    assert list(decoded(injected(source), source).tokens) == expected


@pytest.mark.slow
def test_divided_roles_decode_the_same() -> None:
    source = prefilled(1, 200)
    divided = injected(source, devices=2)
    shapes = [
        [tuple(cache.shape) for cache in divided.decode_layer._get_device_result(device)[1][:3]] for device in range(2)
    ]
    assert shapes == [[(1, 1024, 128), (1, 1, 512), (1, 1, 64)], [(1, 1, 128), (1, 1024, 512), (1, 1024, 64)]]
    assert decoded(divided, source) == decoded(injected(source), source)


@pytest.mark.slow
def test_the_local_oracle_decodes_the_same_whatever_its_chunks() -> None:
    source = prefilled(2, 130)
    expected = decoded(injected(source), source, max_tokens=9)
    assert decode_locally(network(), source.prompt, max_tokens=9, chunk=50) == expected


@pytest.mark.slow
def test_T037_without_a_seed_the_first_step_runs_without_drafts_and_says_so() -> None:
    source = prefilled(3, 200)
    warm = decoded(injected(source), source)
    cold_engine = injected(source)
    draft_planes = cold_engine.decode_layer.planes.by_device[0][12:]
    for plane in draft_planes:
        plane.zero_()
    cold = decoded(cold_engine, source, seed=DraftSeed.MISSING)
    assert not warm.cold_start
    assert warm.drafts_accepted_first_step > 0
    assert cold.cold_start
    assert cold.drafts_accepted_first_step == 0
    assert cold.tokens == warm.tokens
    assert cold.steps > warm.steps


def test_another_first_token_than_the_replays_own_starts_cold() -> None:
    source = prefilled(0, 100)
    other = source._replace(first_token=(source.first_token + 1) % 256)
    result = decoded(injected(source), other, max_tokens=3)
    assert result.cold_start
    assert result.drafts_accepted_first_step == 0
    assert result.tokens[0] == other.first_token


@pytest.mark.parametrize(("first_token", "max_tokens"), [(256, 5), (65, 1)])
def test_nothing_is_run_when_the_first_token_ends_it(first_token: int, max_tokens: int) -> None:
    engine = DecodeEngine(network())
    source = Prefilled((65,), (), first_token)
    result = decoded(engine, source, max_tokens=max_tokens)
    assert result.tokens == (() if first_token == 256 else (65,))
    assert result.stopped == (first_token == 256)
    assert (result.steps, result.drafts_accepted_first_step) == (0, 0)
    assert engine.decode_layer.position == 0


@pytest.mark.slow
def test_a_stop_token_inside_an_accepted_run_ends_there() -> None:
    source = prefilled(3, 200)
    engine = injected(source)
    whole = decoded(engine, source).tokens
    stop = whole[6]
    engine = injected(source)
    engine.stop_token_ids = (stop,)
    seen: list[int] = []
    result = decode(
        engine,
        prompt_last_token=source.prompt[-1],
        first_token=source.first_token,
        prompt_tokens=len(source.prompt),
        max_tokens=TOKENS,
        on_tokens=seen.extend,
    )
    assert result.stopped
    assert result.tokens == whole[: whole.index(stop)]
    assert seen == list(result.tokens)


@pytest.mark.slow
@pytest.mark.parametrize("room", [0, 1, 5])
def test_decoding_ends_where_the_caches_end(room: int) -> None:
    small = Network(ModelConfig(max_seq_len=128))
    source = prefilled(5, 128 - room)
    engine = DecodeEngine(small)
    engine.inject_cache(source.rows)
    result = decoded(engine, source)
    assert len(result.tokens) == room + 1
    assert result.tokens == decoded(injected(source), source).tokens[: room + 1]


def test_rows_that_are_injected_in_parts_are_the_rows() -> None:
    source = prefilled(0, 100)
    whole, parts = injected(source), DecodeEngine(network())
    parts.inject_cache(source.rows, 0, 60)
    assert not parts.decode_layer.planes.by_device[0][1][0, 60:].any()
    parts.inject_cache([tuple_from(layer, 60) for layer in source.rows], start_pos=60)
    for one, other in zip(whole.decode_layer.planes.by_device[0], parts.decode_layer.planes.by_device[0], strict=True):
        assert torch.equal(one, other)


def tuple_from(layer: Sequence[torch.Tensor], start: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    index_key, latent, rope = layer
    return index_key[start:], latent[start:], rope[start:]


def test_what_the_engine_cannot_do_is_refused() -> None:
    engine = DecodeEngine(network())
    source = prefilled(0, 100)
    with pytest.raises(LocalError, match="the model has 5"):
        engine.inject_cache(source.rows[:4])
    with pytest.raises(LocalError, match="do not fit"):
        engine.inject_cache(source.rows, start_pos=1000)
    with pytest.raises(LocalError, match="position 1024"):
        engine.set_cur_pos(1024)
    with pytest.raises(LocalError, match="greedy"):
        engine.update_sampling_params(temperature=0.7, top_p=0.9, top_k=50, use_topp=True)
    with pytest.raises(LocalError, match="decodes what another one has prefilled"):
        engine.decode_layer.set_prefill_valid_tokens(4)
    with pytest.raises(LocalError, match=r"not \(1, 4\)"):
        engine.decode_layer.forward(torch.zeros(1, 3))
    with pytest.raises(LocalError, match="3 devices"):
        DecodeEngine(network(), devices=3)
    with pytest.raises(LocalError, match="no multiple of 64"):
        DecodeEngine(Network(ModelConfig(max_seq_len=100)))
    with pytest.raises(LocalError, match="0 tokens"):
        decoded(engine, source, max_tokens=0)
    with pytest.raises(LocalError, match="4 layers"):
        Network(ModelConfig(layers=5))


def test_reset_forgets_the_request() -> None:
    engine = injected(prefilled(0, 100))
    engine.set_cur_pos(99)
    engine.decode_layer.forward(torch.tensor([[65, 66, 67, 68]]))
    assert engine.decode_layer.position > 99
    engine.reset_sequence()
    assert engine.decode_layer.position == 0
    assert engine.decode_layer.get_num_accepted(0) == 0
    assert engine.decode_layer.get_next_draft_tokens(0).numel() == 0
