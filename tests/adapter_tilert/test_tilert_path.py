"""From a prefill engine's pages to output tokens: landing, parking, injection and the decode loop, over stand-ins."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from pdhandoff import HandoffId
from pdhandoff.demo.model import DecodeEngine, DraftSeed, ModelConfig, Network, decode
from pdhandoff.errors import LocalError
from pdhandoff_tilert.engine import DecodeRequest, DecodeStep
from pdhandoff_tilert.parking import ParkedRows
from pdhandoff_tilert.tilert_engine import TilertEngine
from support.demo_model import network
from support.node import Node, body_of
from support.tilert_caches import LATENT, DeviceTensors
from support.tilert_generator import Dsv32StandIn, Glm5StandIn
from support.tilert_path import PROFILE, Source, engine_for, link, sending, source

TOKENS = 24
PARTS = range(3)


class Output(NamedTuple):
    tokens: tuple[int, ...]
    steps: tuple[DecodeStep, ...]


def decoded(
    engine: TilertEngine, given: Source, *, first_token: int | None = None, max_tokens: int = TOKENS, **more: Any
) -> Output:
    """Decode what was injected, to the end."""
    first = given.first_token if first_token is None else first_token
    engine.begin(DecodeRequest(prompt=given.prompt, first_token=first, max_tokens=max_tokens, **more))
    steps = [engine.step()]
    while not steps[-1].finish_reason:
        steps.append(engine.step())
    engine.end()
    return Output((first, *(token for step in steps for token in step.tokens)), tuple(steps))


def local(given: Source, *, first_token: int | None = None, max_tokens: int = TOKENS) -> tuple[int, ...]:
    """The demo's own decode engine, after a conversion that was written out by hand."""
    engine = DecodeEngine(network())
    engine.inject_cache(given.rows)
    return decode(
        engine,
        prompt_last_token=given.prompt[-1],
        first_token=given.first_token if first_token is None else first_token,
        prompt_tokens=len(given.prompt),
        max_tokens=max_tokens,
        seed=DraftSeed.MISSING,
    ).tokens


def local_fp8(given: Source) -> tuple[int, ...]:
    """Token by token over fp8 caches that hold the pages' bytes."""
    caches = DeviceTensors(network().config, layers=5, roles=True, fp8=True)
    for layer, (parts, raw) in enumerate(zip(given.rows, given.raw_latents(), strict=True)):
        for part, rows in enumerate((parts[0], raw, parts[2])):
            for device in caches.devices_of(part):
                caches.by_device[device][3 * layer + part][0, : len(rows)] = rows
    tokens = [given.first_token]
    for position in range(len(given.prompt), len(given.prompt) + TOKENS - 1):
        hidden = network().target(caches, start=position, tokens=tokens[-1:])
        tokens += network().greedy(hidden)
    return tuple(tokens)


def drafts(output: Output) -> list[tuple[int, int]]:
    return [(step.drafted, step.accepted) for step in output.steps]


@pytest.mark.slow
@pytest.mark.parametrize("parked", [True, False], ids=["parked", "straight"])
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("model", [Glm5StandIn, Dsv32StandIn])
def test_tokens_are_those_of_a_local_run(model: type[Dsv32StandIn], fp8: bool, parked: bool) -> None:
    given = source(0, 200)
    engine = engine_for(model(network(), fp8=fp8), park_bytes=1 << 30 if parked else 0)
    with link(engine) as node:
        landed = engine.park(node.hand_off(given))
        assert isinstance(landed, ParkedRows) is parked
        engine.inject(landed)
    output = decoded(engine, given)
    assert output.tokens == (local_fp8(given) if fp8 else local(given))
    # warm: the first step after the replay verifies drafts, and the model was made so that they are right
    assert output.steps[0] == DecodeStep(tokens=())
    assert output.steps[1].drafted >= 3
    assert output.steps[1].accepted == output.steps[1].drafted


@pytest.mark.slow
@pytest.mark.parametrize("model", [Glm5StandIn, Dsv32StandIn])
def test_plain_decoding_replays_nothing(model: type[Dsv32StandIn]) -> None:
    given = source(1, 130)
    generator = model(network(), with_mtp=False)
    engine = engine_for(generator)
    assert engine.layout.model.draft_layers == ()
    with link(engine) as node:
        engine.inject(engine.park(node.hand_off(given, drafts=False)))
    output = decoded(engine, given)
    assert output.tokens == local(given)
    assert set(drafts(output)) == {(0, 0)}
    assert generator.decode_layer.steps == TOKENS - 1


@pytest.mark.slow
@pytest.mark.parametrize("parked", [True, False], ids=["parked", "straight"])
def test_T037_without_draft_rows_the_first_step_runs_without_drafts_and_says_so(parked: bool) -> None:
    given = source(0, 200)
    generator = Glm5StandIn(network())
    engine = engine_for(generator, park_bytes=1 << 30 if parked else 0)
    with link(engine) as node:
        arrival = node.hand_off(given, drafts=False)
        assert arrival.mtp_cold
        engine.inject(engine.park(arrival))
    for device, part in ((0, 0), (1, 1), (7, 2)):
        rows = generator.decode_layer.caches.by_device[device][3 * PROFILE.layers + part][0]
        assert not rows[: len(given.prompt)].any()
        assert (rows[len(given.prompt) :] == 3.0).all()
    output = decoded(engine, given, max_tokens=TOKENS)
    assert output.tokens == local(given)
    replay, cold = generator.decode_layer.calls[:2]
    assert replay[0] == [given.prompt[-1]] * 4
    assert cold[0] == [given.first_token] * 4
    # of the call's steps, the first one has verified no drafts
    assert output.steps[1].drafted == 3 * (cold[1] - 1)


@pytest.mark.slow
@pytest.mark.parametrize("model", [Glm5StandIn, Dsv32StandIn])
def test_prefills_token_counts_where_the_replay_predicts_another(model: type[Dsv32StandIn]) -> None:
    given = source(0, 200)
    other = ord("z")
    assert other != given.first_token
    generator = model(network())
    engine = engine_for(generator, steps_per_call=1)
    caches = generator.decode_layer.caches
    with link(engine) as node:
        engine.inject(engine.park(node.hand_off(given, first_token=other)))
    landed = [caches.by_device[1][3 * PROFILE.layers + part][0, 199].clone() for part in (1, 2)]
    engine.begin(DecodeRequest(prompt=given.prompt, first_token=other, max_tokens=TOKENS))
    assert engine.step() == DecodeStep(tokens=())
    assert generator.decode_layer.position() == len(given.prompt)
    for device in (1, 7):
        for part, row in zip((1, 2), landed, strict=True):
            # made from prefill's token; the replay has made it from its own in between
            assert torch.equal(caches.by_device[device][3 * PROFILE.layers + part][0, 199], row)
    cold, warm = engine.step(), engine.step()
    assert (cold.drafted, warm.drafted) == (0, 3)
    engine.end()
    with link(engine) as node:
        engine.inject(engine.park(node.hand_off(given, first_token=other)))
    assert decoded(engine, given, first_token=other).tokens == local(given, first_token=other)


@pytest.mark.slow
def test_a_request_lands_and_parks_while_another_decodes() -> None:
    first, second = source(0, 200), source(1, 130)
    engine = engine_for(Glm5StandIn(network()), steps_per_call=1)
    with link(engine) as node:
        engine.inject(engine.park(node.hand_off(first)))
        engine.begin(DecodeRequest(prompt=first.prompt, first_token=first.first_token, max_tokens=TOKENS))
        tokens = [first.first_token, *engine.step().tokens, *engine.step().tokens]
        held: list[object] = []
        beside = threading.Thread(target=lambda: held.append(engine.park(node.hand_off(second))))
        beside.start()
        beside.join(60)
        (parked,) = held
        assert isinstance(parked, ParkedRows)
        free, total = node.free_bytes()
        assert free == total  # parking has given the landing memory back
        with pytest.raises(LocalError, match="a request is running"):
            engine.inject(engine.park(node.hand_off(second)))
        step = engine.step()
        while not step.finish_reason:
            tokens += step.tokens
            step = engine.step()
        assert (*tokens, *step.tokens) == local(first)
        engine.end()
        engine.inject(parked)
        assert decoded(engine, second).tokens == local(second)
        free, total = node.free_bytes()
        assert free == total


@pytest.mark.slow
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("parked", [True, False], ids=["parked", "straight"])
@pytest.mark.parametrize("model", [Glm5StandIn, Dsv32StandIn])
def test_every_device_gets_its_parts_rows_and_nothing_else_is_written(
    model: type[Dsv32StandIn], parked: bool, fp8: bool
) -> None:
    given = source(2, 129)
    generator = model(network(), fp8=fp8)
    engine = engine_for(generator, park_bytes=1 << 30 if parked else 0)
    caches = generator.decode_layer.caches
    before = [[tensor.clone() for tensor in device] for device in caches.by_device]
    with link(engine) as node:
        engine.inject(engine.park(node.hand_off(given)))
    raw = given.raw_latents()
    for device, tensors in enumerate(caches.by_device):
        for layer, parts in enumerate(given.rows):
            for part in PARTS:
                now, then = tensors[3 * layer + part][0], before[device][3 * layer + part][0]
                if device not in caches.devices_of(part):
                    assert torch.equal(now, then)
                    continue
                rows = raw[layer] if fp8 and part == LATENT else parts[part]
                assert close(now[: len(given.prompt)], rows)
                assert torch.equal(now[len(given.prompt) :], then[len(given.prompt) :])


def close(rows: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal; index keys up to the last bit of a sum that is taken in another order."""
    if rows.dtype is torch.uint8 or rows.shape[1] != 128:
        return torch.equal(rows, expected)
    return torch.allclose(rows.float(), expected.float(), rtol=2**-7, atol=1e-4)


@pytest.mark.slow
def test_the_engines_own_injection_leads_to_the_same_tokens() -> None:
    given = source(0, 200)
    generator = Glm5StandIn(network())
    engine = engine_for(generator, inject="calls", park_bytes=0)
    assert engine.max_seq_len == generator.config.max_seq_len
    with link(engine) as node:
        landed = engine.park(node.hand_off(given))
        assert not isinstance(landed, ParkedRows)
        engine.inject(landed)
        free, total = node.free_bytes()
        assert free == total
    assert decoded(engine, given).tokens == local(given)


@pytest.mark.slow
def test_a_cancelled_request_leaves_nothing_to_the_next_one() -> None:
    first, second = source(0, 200), source(1, 130)
    generator = Glm5StandIn(network())
    engine = engine_for(generator, steps_per_call=1)
    with link(engine) as node:
        engine.inject(engine.park(node.hand_off(first)))
        engine.begin(DecodeRequest(prompt=first.prompt, first_token=first.first_token, max_tokens=TOKENS))
        engine.step()
        engine.step()
        engine.end()
        engine.end()
        assert generator.decode_layer.resets == 1
        with pytest.raises(LocalError, match="no request is running"):
            engine.step()
        engine.inject(engine.park(node.hand_off(second)))
    assert decoded(engine, second).tokens == local(second)


@pytest.mark.slow
def test_output_goes_on_to_the_end_of_the_caches_and_not_beyond() -> None:
    small = Network(ModelConfig(max_seq_len=256))
    given = source(3, 240)
    engine = engine_for(Glm5StandIn(small))
    assert engine.max_seq_len == 248
    with link(engine) as node:
        engine.inject(engine.park(node.hand_off(given)))
    output = decoded(engine, given, max_tokens=100, ignore_eos=True)
    assert output.tokens == local(given, max_tokens=8)
    assert len(output.tokens) == 8
    assert output.steps[-1].finish_reason == "length"


def stopping(given: Source, tokens: Sequence[int]) -> tuple[int, int]:
    """A token of the output that has not come before it, and its place."""
    at = next(number for number in range(3, len(tokens)) if tokens[number] not in tokens[:number])
    assert tokens[at] != given.first_token
    return tokens[at], at


@pytest.mark.slow
def test_a_stop_token_ends_the_output_inside_a_call_and_is_returned() -> None:
    given = source(0, 200)
    expected = local(given)
    stop, at = stopping(given, expected)
    engine = engine_for(Glm5StandIn(network()))
    with link(engine) as node:
        engine.inject(engine.park(node.hand_off(given)))
        output = decoded(engine, given, stop_token_ids=frozenset({stop}))
        assert output.tokens == expected[: at + 1]
        assert output.steps[-1].finish_reason == "stop"
        # the model's own end token, unless it is to be ignored
        generator = Glm5StandIn(network())
        generator.stop_token_ids = {stop}
        engine = engine_for(generator)
        assert engine.end_token_ids == {stop}
        engine.inject(engine.park(node.hand_off(given)))
        assert decoded(engine, given).tokens == expected[: at + 1]
        engine.inject(engine.park(node.hand_off(given)))
        assert decoded(engine, given, ignore_eos=True).tokens == expected


@pytest.mark.slow
def test_the_decode_node_serves_it(tmp_path: Path) -> None:
    given = source(0, 200)
    engine = ("--engine", "support.tilert_path:create", "--engine-arg", "steps_per_call=2")
    with Node(tmp_path, "--arena-bytes", "16M", engine=engine) as node:
        for _ in range(2):
            handoff = HandoffId.mint()
            with sending(node.control, handoff, given) as outgoing:
                answer = node.generate(body_of(handoff, given.prompt, TOKENS)).raise_for_status().json()
                outgoing.wait(30)
            assert answer["choices"][0]["token_ids"] == list(local(given))
        refused = node.generate(body_of(HandoffId.mint(), given.prompt, TOKENS, sampling={"min_tokens": 5}))
        assert refused.status_code == 400
        assert "min_tokens" in refused.json()["error"]["message"]
        node.idle()
