"""Rows that another engine prefilled, handed off for real, parked, injected and decoded."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, NamedTuple, Self

import pytest
import torch

from pdhandoff.demo.engine import Engine
from pdhandoff.demo.engine import create as create_demo
from pdhandoff.demo.engine.decoding import Decoding
from pdhandoff.demo.hf import create
from pdhandoff.demo.hf.config import read_config
from pdhandoff.demo.hf.layouts import profile_of
from pdhandoff.demo.hf.network import HfNetwork
from pdhandoff.demo.model import PrefillEngine, decode_locally, fingerprint, prefill_layout, prefill_placements
from pdhandoff.errors import LocalError
from pdhandoff.layouts import Policy
from support.demo_model import network, run
from support.hf_decoding import Ask, decode, decoded
from support.hf_models import VOCABULARY, write_model
from support.hf_pages import Paged, arriving, vllm_cpu

TOKENS = 37


class Prefilled(NamedTuple):
    ask: Ask
    paged: Paged
    tokens: list[int]
    "what the same network decodes from its own rows"
    speculation: list[tuple[int, int]]

    @property
    def request(self) -> tuple[Any, ...]:
        return self.paged.layout, self.paged.placements, self.paged.table, len(self.ask.prompt)


def prefilled(
    engine: Engine, folder: Path, seed: int, *, rows: str | None = None, draft_rows: bool = True
) -> Prefilled:
    """A prompt that the engine's own kind of network has prefilled, in vLLM's pages."""
    source = engine if rows is None else create(model=folder, dtype=rows)
    network = source._network
    assert isinstance(network, HfNetwork)
    draw = random.Random(seed)
    tokens = [draw.randrange(VOCABULARY - 1) for _ in range(TOKENS)]
    cache = network.new_cache()
    hidden = network.target(cache, start=0, tokens=tokens)
    first = int(network.logits(hidden[-1:])[0].argmax())
    drafting = network.layers > network.config.layers
    if drafting:
        network.draft(cache, start=0, hidden=hidden, next_tokens=[*tokens[1:], first])
    model = engine.layout.model
    profile = profile_of(read_config(folder), model.name, draft_layers=len(model.draft_layers))
    if not draft_rows:
        model = profile.model(draft_layers=())
    paged = vllm_cpu(cache, TOKENS, profile=profile, model=model)
    ask = Ask(tokens, first)
    local = Decoding(network, cache, ask, drafts=3 * drafting, cold=False, end_tokens=(), max_seq_len=512)
    found, speculation = decoded(local.step)
    return Prefilled(ask, paged, found, speculation)


@pytest.mark.slow
@pytest.mark.parametrize("parked", [0, 1])
@pytest.mark.parametrize(
    ("variant", "dtype"),
    [("llama", "float32"), ("llama_tied", "bfloat16"), ("deepseek", "float32"), ("deepseek", "bfloat16")],
)
def test_vllm_pages_decode_as_the_rows_they_were_made_of(tmp_path: Path, variant: str, dtype: str, parked: int) -> None:
    torch.set_num_threads(1)
    folder = write_model(variant, tmp_path / "model")
    engine = create(model=folder, dtype=dtype, parked=parked)
    source = prefilled(engine, folder, seed=1)
    with arriving(engine.layout, source.request) as (arrival,):
        held = engine.park(arrival)
        assert (held is arrival) == (not parked)
        engine.inject(held)
    assert decode(engine, source.ask) == (source.tokens, source.speculation)


@pytest.mark.slow
def test_bf16_rows_decode_in_an_f32_engine(tmp_path: Path) -> None:
    folder = write_model("deepseek", tmp_path / "model")
    engine = create(model=folder)
    source = prefilled(engine, folder, seed=2, rows="bfloat16")
    with arriving(engine.layout, source.request) as (arrival,):
        engine.inject(engine.park(arrival))
    rows = engine._live.cache.rows
    for layer, pages in enumerate(source.paged.pages):
        flat = torch.cat([pages[page] for page in source.paged.table])[:TOKENS]
        assert torch.equal(rows[layer][:TOKENS], flat.float())
    tokens, _ = decode(engine, source.ask)
    assert len(tokens) == 23


@pytest.mark.slow
def test_T037_without_draft_rows_decoding_starts_without_drafts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_model("deepseek", tmp_path / "model")
    engine = create(model=folder)
    warm, cold = prefilled(engine, folder, seed=3), prefilled(engine, folder, seed=3, draft_rows=False)
    engine._live.cache.rows[-1].fill_(torch.nan)  # draft rows of a former request
    engine._free[0].cache.rows[-1].fill_(torch.nan)
    with arriving(engine.layout, cold.request, policy=Policy(cold_drafts=True)) as (arrival,):
        assert arrival.mtp_cold
        engine.inject(engine.park(arrival))
    sound = []
    draft = engine._network.draft

    def watched(*arguments: Any, **more: Any) -> torch.Tensor:
        hidden = draft(*arguments, **more)
        sound.append(bool(hidden.isfinite().all()))
        return hidden

    with monkeypatch.context() as patch:
        patch.setattr(engine._network, "draft", watched)
        tokens, speculation = decode(engine, cold.ask)
    assert tokens == warm.tokens
    assert sound
    assert all(sound)  # no row of the former request was read
    assert speculation[0] == (0, 0)
    assert all(drafted for drafted, _ in speculation[1:-1])
    with arriving(engine.layout, warm.request) as (arrival,):  # the next request is warm again
        engine.inject(engine.park(arrival))
    assert decode(engine, warm.ask) == (warm.tokens, warm.speculation)


@pytest.mark.slow
def test_one_request_lands_and_converts_while_another_decodes(tmp_path: Path) -> None:
    folder = write_model("llama", tmp_path / "model")
    engine = create(model=folder)
    one, two, three = (prefilled(engine, folder, seed=seed) for seed in (4, 5, 6))
    with arriving(engine.layout, one.request, two.request, three.request) as (first, second, third):
        engine.inject(engine.park(first))
        engine.begin(one.ask)
        begun = list(engine.step().tokens)
        waiting = engine.park(second)
        assert waiting is not second
        assert engine.park(third) is third  # no memory left: it stays where it has landed
        rest, _ = decoded(engine.step)
        assert begun + rest == one.tokens
        engine.end()
        engine.inject(waiting)
        assert decode(engine, two.ask)[0] == two.tokens
        engine.inject(third)
        assert decode(engine, three.ask)[0] == three.tokens


@pytest.mark.slow
@pytest.mark.parametrize("drafts", [0, 3])
def test_the_demos_engine_decodes_what_its_prefill_engine_prefilled(drafts: int) -> None:
    engine = create_demo(drafts=drafts)
    source = PrefillEngine(network(), seed=9)
    draw = random.Random(1)
    prompt = [257, *(draw.randrange(32, 127) for _ in range(120))]
    request = source.add(prompt)
    first = run(source, request, 50)
    layout = prefill_layout(network().config, revision=fingerprint(network().weights))
    asked = (layout, prefill_placements(source), source.block_table(request), len(prompt))
    with arriving(engine.layout, asked, chunk=50) as (arrival,):
        engine.inject(engine.park(arrival))
    local = decode_locally(network(), prompt, max_tokens=12)
    tokens, speculation = decode(engine, Ask(prompt, first, max_tokens=12))
    assert (first, *tokens) == local.tokens
    assert speculation[0] == ((3, local.drafts_accepted_first_step) if drafts else (0, 0))
    assert local.drafts_accepted_first_step > 0


def test_T037_a_cold_start_reads_no_draft_row_of_a_former_request_in_the_demos_engine() -> None:
    engine = create_demo(max_seq_len=64)
    landed: Any = Landed(cold=True)
    parked = engine.park(landed)
    planes = parked.memory.cache.by_device[0]  # type: ignore[union-attr]
    for plane in planes:
        plane.fill_(1)
    engine.inject(parked)
    engine.begin(Ask((1, 2, 3), 4))
    assert all(not plane[0, :3].any() and plane[0, 3:].all() for plane in planes[-3:])
    assert all(plane.all() for plane in planes[:-3])


class Landed:
    """An arrival without rows."""

    def __init__(self, *, tokens: int = 3, start: int = 0, cold: bool = False, fails: bool = False) -> None:
        self.prompt_tokens = tokens
        self.start_token = start
        self.mtp_cold = cold
        self.released = 0
        self._fails = fails

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        self.released += 1

    def convert_into(self, caches: Any) -> None:
        assert caches
        if self._fails:
            raise LocalError(81, "the consumer was closed")


@pytest.fixture
def engine(tmp_path: Path) -> Any:
    return create(model=write_model("llama", tmp_path / "model"), max_seq_len=16)


def test_a_failed_conversion_gives_everything_back(engine: Any) -> None:
    broken = Landed(fails=True)
    with pytest.raises(LocalError, match="was closed"):
        engine.park(broken)
    assert broken.released == 1
    sound = Landed()
    assert engine.park(sound) is not sound  # the memory is free again
    with pytest.raises(LocalError, match="was closed"):
        engine.inject(Landed(fails=True))
    with pytest.raises(LocalError, match="no rows were injected"):
        engine.begin(Ask((1, 2, 3), 4))


def test_rows_that_did_not_come_are_not_made_up(engine: Any) -> None:
    partial = Landed(start=2)
    with pytest.raises(LocalError, match="rows before token 2"):
        engine.park(partial)
    assert partial.released == 1


def test_parked_rows_are_injected_once_or_dropped(engine: Any) -> None:
    parked = engine.park(Landed())
    engine.inject(parked)
    with pytest.raises(LocalError, match="injected or dropped before"):
        engine.inject(parked)
    engine.drop(parked)  # they are live: this takes nothing away
    engine.begin(Ask((1, 2, 3), 4))
    other = engine.park(Landed())
    engine.drop(other)
    engine.drop(other)
    assert engine.park(Landed()).memory is not None  # given back once, so it can be had once
    last = Landed()
    assert engine.park(last) is last
    engine.drop(last)
    assert last.released == 1


def test_calls_out_of_order_are_refused(engine: Any) -> None:
    with pytest.raises(LocalError, match="no request was begun"):
        engine.step()
    engine.inject(engine.park(Landed()))
    with pytest.raises(LocalError, match="4 tokens, and rows of 3 were"):
        engine.begin(Ask((1, 2, 3, 4), 4))
    engine.begin(Ask((1, 2, 3), 4))
    with pytest.raises(LocalError, match="end it first"):
        engine.begin(Ask((1, 2, 3), 4))
    with pytest.raises(LocalError, match="end it first"):
        engine.inject(Landed())
    engine.end()
    engine.end()
    with pytest.raises(LocalError, match="no rows were injected"):
        engine.begin(Ask((1, 2, 3), 4))
    parked = engine.park(Landed())
    engine.close()
    engine.close()
    engine.drop(parked)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({}, ""),
        ({"prompt": (1, VOCABULARY)}, "prompt: token 96"),
        ({"prompt": (-1,)}, "prompt: token -1"),
        ({"prompt": ()}, "prompt: 0 tokens"),
        ({"prompt": (1,) * 16}, "prompt: 16 tokens, where 1 to 15"),
        ({"prompt": (1,) * 15}, ""),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": 5, "temperature": 0.7, "top_p": 0.5, "seed": 3}, ""),
        ({"min_tokens": 3, "stop_token_ids": range(VOCABULARY)}, "min_tokens"),
    ],
)
def test_what_cannot_be_honoured_is_named(engine: Any, changes: dict[str, Any], named: str) -> None:
    said = engine.unsupported(Ask((1, 2, 3), 0)._replace(**changes))
    assert said.startswith(named)
    assert bool(said) == bool(named)


@pytest.mark.parametrize("options", [{"max_seq_len": 10}, {"max_seq_len": 100}, {"drafts": -1}, {"parked": -1}])
def test_options_of_the_demos_engine_are_checked(options: dict[str, int]) -> None:
    with pytest.raises(LocalError):
        create_demo(**options)
