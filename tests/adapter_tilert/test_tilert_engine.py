"""The engine behind the node's seam: options, order of calls, sampling, parked memory."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from pdhandoff.errors import ErrorCode, LocalError
from pdhandoff.layouts.profiles import GLM5
from pdhandoff_tilert.caches import shape_for_calls
from pdhandoff_tilert.engine import DecodeRequest
from pdhandoff_tilert.parking import ParkedRows, Parking
from pdhandoff_tilert.sampling import refusal
from pdhandoff_tilert.tilert_engine import TilertEngine, create
from support.demo_model import network
from support.tilert_generator import Dsv32StandIn, Glm5StandIn
from support.tilert_path import PROFILE, Link, engine_for, link, source

TOKENS = 20


@contextmanager
def ready(**options: Any) -> Iterator[tuple[TilertEngine, Glm5StandIn, Link]]:
    generator = Glm5StandIn(network())
    engine = engine_for(generator, **options)
    with link(engine) as node:
        yield engine, generator, node


def request(**more: Any) -> DecodeRequest:
    given = source(4, TOKENS)
    return DecodeRequest(**{"prompt": given.prompt, "first_token": given.first_token, "max_tokens": 4, **more})


# ---- sampling


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ({"min_tokens": 2}, "min_tokens 2"),
        ({"temperature": -0.1}, "temperature -0.1"),
        ({"temperature": float("nan")}, "temperature nan"),
        ({"temperature": 0.5, "top_p": 0.0}, "top_p 0.0"),
        ({"temperature": 0.5, "top_p": 1.1}, "top_p 1.1"),
        ({"temperature": 0.5, "top_k": 257}, "top_k 257"),
        ({"temperature": 0.5, "top_k": -1}, "top_k -1"),
        ({"temperature": 0.5, "seed": -1}, "seed -1"),
        ({"temperature": 0.5, "seed": 1 << 63}, "seed"),
    ],
)
def test_what_the_engine_cannot_honour_is_refused_by_name(parameters: dict[str, Any], named: str) -> None:
    assert refusal(request(**parameters), can_seed=True).startswith(named)


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"min_tokens": 1},
        {"top_p": 0.3, "top_k": 999, "seed": 7},  # greedy: they choose among one token
        {"temperature": 0.7, "top_p": 1.0, "top_k": 256, "seed": 0},
    ],
)
def test_what_it_can_honour_is_not(parameters: dict[str, Any]) -> None:
    assert refusal(request(**parameters), can_seed=True) == ""


def test_a_seed_needs_an_engine_that_takes_one() -> None:
    assert refusal(request(temperature=1.0, seed=3), can_seed=False) == "seed 3: this engine takes none"
    assert refusal(request(temperature=1.0), can_seed=False) == ""


@pytest.mark.slow
def test_the_engine_is_told_how_to_sample() -> None:
    with ready(park_bytes=1 << 30) as (engine, generator, node):
        layer = generator.decode_layer

        def told(**parameters: Any) -> tuple[tuple[float, float, int, bool], list[int]]:
            engine.inject(engine.park(node.hand_off(source(4, TOKENS))))
            layer.seeds.clear()
            engine.begin(request(**parameters))
            engine.end()
            return layer.config, list(layer.seeds)

        assert told(temperature=0.0, top_p=0.5, top_k=9) == ((1.0, 1.0, 1, False), [])
        assert told(temperature=0.8, top_p=0.5, top_k=9, seed=11) == ((0.8, 0.5, 9, True), [11])
        assert told(temperature=0.8, seed=12) == ((0.8, 1.0, 256, True), [12])
        # without a seed, equal requests get different ones
        assert told(temperature=0.8)[1] != told(temperature=0.8)[1]
        engine.inject(engine.park(node.hand_off(source(4, TOKENS))))
        with pytest.raises(LocalError, match="top_k 300"):
            engine.begin(request(temperature=0.8, top_k=300))


# ---- order of calls, and what is injected


@pytest.mark.slow
def test_a_request_gets_only_its_own_rows() -> None:
    with ready() as (engine, generator, node):

        def inject() -> None:
            engine.inject(engine.park(node.hand_off(source(4, TOKENS))))

        with pytest.raises(LocalError, match="no rows were injected"):
            engine.begin(request())
        prompt = source(4, TOKENS).prompt
        for wrong in ((*prompt, 1), prompt[:-1], (), (*prompt[:-1], prompt[-1] ^ 1)):
            inject()
            with pytest.raises(LocalError, match="and the rows that were injected are of 20 tokens"):
                engine.begin(request(prompt=wrong))
            with pytest.raises(LocalError, match="no rows were injected"):  # they are used up, too
                engine.begin(request())
        inject()
        with pytest.raises(LocalError, match="none was asked for"):
            engine.begin(request(max_tokens=0))
        inject()
        engine.begin(request())
        with pytest.raises(LocalError, match="no rows were injected"):
            engine.begin(request())
        engine.end()
        with pytest.raises(LocalError, match="no rows were injected"):  # those of the request that ended are gone
            engine.begin(request())
        engine.close()
        engine.close()
        assert generator.cleanups == 1


@pytest.mark.slow
def test_only_what_park_returned_can_be_injected_and_only_once() -> None:
    with ready() as (engine, _, node):
        parked = engine.park(node.hand_off(source(4, TOKENS)))
        assert isinstance(parked, ParkedRows)
        engine.drop(parked)
        engine.drop(parked)
        with pytest.raises(LocalError, match="dropped"):
            engine.inject(parked)
        with pytest.raises(LocalError, match="no rows were injected"):
            engine.begin(request())
        parked = engine.park(node.hand_off(source(4, TOKENS)))
        engine.inject(parked)
        with pytest.raises(LocalError, match="dropped"):
            engine.inject(parked)
        with pytest.raises(LocalError, match="no rows were injected"):  # the failed injection has undone the good one
            engine.begin(request())
        with pytest.raises(LocalError, match="str cannot be injected"):
            engine.inject("rows")
        engine.drop("rows")


@pytest.mark.slow
def test_an_arrival_that_is_dropped_or_refused_gives_its_landing_memory_back() -> None:
    with ready(park_bytes=0) as (engine, _, node):
        arrival = engine.park(node.hand_off(source(4, TOKENS)))
        engine.drop(arrival)
        engine.drop(arrival)
        free, total = node.free_bytes()
        assert free == total
        with pytest.raises(LocalError, match="released"):
            engine.inject(arrival)
        running = engine.park(node.hand_off(source(4, TOKENS)))
        engine.inject(running)
        engine.begin(request())
        with pytest.raises(LocalError, match="a request is running"):
            engine.inject(engine.park(node.hand_off(source(4, TOKENS))))
        free, total = node.free_bytes()
        assert free == total


@pytest.mark.slow
@pytest.mark.parametrize("park_bytes", [0, 1 << 30])
def test_a_prompt_whose_beginning_did_not_move_is_refused(park_bytes: int) -> None:
    given = source(5, 130)
    with ready(park_bytes=park_bytes) as (engine, _, node):
        arrival = node.hand_off(given, start_token=64)
        assert arrival.start_token == 64
        with pytest.raises(LocalError, match="this engine keeps no prefix"):
            engine.park(arrival)
        free, total = node.free_bytes()
        assert free == total


@pytest.mark.slow
def test_parked_memory_is_bounded_and_comes_back() -> None:
    row = 5 * (256 + 1024 + 128)
    with ready(park_bytes=2 * TOKENS * row) as (engine, _, node):
        parked = [engine.park(node.hand_off(source(4, TOKENS))) for _ in range(3)]
        assert [isinstance(each, ParkedRows) for each in parked] == [True, True, False]
        engine.drop(parked[0])
        assert isinstance(engine.park(node.hand_off(source(4, TOKENS))), ParkedRows)
        engine.inject(parked[2])
        engine.inject(parked[1])
        assert isinstance(engine.park(node.hand_off(source(4, TOKENS))), ParkedRows)


def test_a_device_without_memory_parks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    parking = Parking(shape_for_calls(PROFILE, length=64, draft_layer=True), 1 << 40, torch.device("cpu"))

    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr("pdhandoff_tilert.parking.torch.zeros", full)
    assert parking.take(16) is None
    with pytest.raises(LocalError, match="no memory on cpu to convert 16 tokens in"):
        parking.must_take(16)
    assert parking.used_bytes == 0


# ---- options


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"steps_per_call": 0}, "steps_per_call 0"),
        ({"steps_per_call": 1025}, "steps_per_call 1025"),
        ({"park_bytes": -1}, "park_bytes -1"),
        ({"inject": "guess"}, "inject=guess: use direct or calls"),
        ({"convert_on": "moon"}, "convert_on=moon: torch knows no such device"),
        ({"convert_on": "meta"}, "convert_on=meta: conversions run on cpu or cuda:0"),
        ({"max_seq_len": 1017}, "max_seq_len 1017: this engine's caches hold 1024 tokens, 8 of which"),
        ({"max_seq_len": -1}, "max_seq_len -1"),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, Any], said: str) -> None:
    with pytest.raises(LocalError, match=said) as caught:
        engine_for(Glm5StandIn(network()), **options)
    assert caught.value.code is ErrorCode.CONFIG


def test_the_operator_may_shorten_requests_and_name_the_model() -> None:
    engine = engine_for(Glm5StandIn(network()), max_seq_len=300, served_model="mine", revision="r7", weight_epoch=2)
    assert (engine.max_seq_len, engine.model) == (300, "mine")
    assert (engine.layout.model.revision, engine.layout.model.weight_epoch) == ("r7", 2)
    plain = Dsv32StandIn(network(), with_mtp=False)
    assert engine_for(plain).max_seq_len == plain.config.max_seq_len


def test_the_engines_own_injection_must_be_there_and_know_its_length() -> None:
    generator = Glm5StandIn(network())
    generator.config = SimpleNamespace()
    with pytest.raises(LocalError, match="give max_seq_len"):
        engine_for(generator, inject="calls")
    assert engine_for(generator, inject="calls", max_seq_len=300).max_seq_len == 300
    calls = {name: getattr(generator, name) for name in ("decode_layer", "set_cur_pos", "update_sampling_params")}
    with pytest.raises(LocalError, match="this generator has no inject_cache"):
        engine_for(SimpleNamespace(with_mtp=True, mtp_seq_len=4, **calls), inject="calls")  # type: ignore[arg-type]


# ---- the published package's generators


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "weights: give the folder"),
        ({"weights": "w", "speed": 9}, "unknown field `speed`.*there are model, weights"),
        ({"weights": "w", "mtp": "yes"}, r"Expected `bool`, got `str` - at `\$.mtp`"),
        ({"weights": "w", "model": "glm5_2"}, "there is no model 'glm5_2' for TileRT's CUDA engines: use glm5, dsv32"),
    ],
)
def test_wrong_engine_arguments_are_named(options: dict[str, Any], said: str) -> None:
    with pytest.raises(LocalError, match=said):
        create(**options)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tilert", None)
    with pytest.raises(LocalError, match="tilert cannot be imported, because there is no tilert: install"):
        create(weights="folder")


class Published:
    """A package named tilert, with the names that are imported from it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, fp8_argument: bool = True) -> None:
        self.backends: list[str] = []
        self.arguments: dict[str, Any] = {}
        self.loaded = 0
        small = network().config
        arguments = SimpleNamespace(max_seq_len=small.max_seq_len)
        if fp8_argument:
            arguments.fp8_kv_cache = False
        published = self

        class GLM5Generator(SimpleNamespace):
            def __init__(self, **given: Any) -> None:
                published.arguments = given
                fp8 = getattr(given["model_args"], "fp8_kv_cache", False)
                super().__init__(**vars(stand_in(fp8=fp8, with_mtp=given["with_mtp"])))

            def from_pretrained(self) -> None:
                published.loaded += 1

            set_cur_pos = update_sampling_params = lambda *_, **__: None

        names: dict[str, dict[str, Any]] = {
            "tilert": {"load_backend": self.backends.append},
            "tilert.models": {},
            "tilert.models.glm_5": {},
            "tilert.models.glm_5.generator": {"GLM5Generator": GLM5Generator},
            "tilert.models.glm_5.model_args": {"ModelArgsGLM5": lambda: arguments},
        }
        for name, parts in names.items():
            module = ModuleType(name)
            vars(module).update(parts)
            monkeypatch.setitem(sys.modules, name, module)


def stand_in(*, fp8: bool, with_mtp: bool) -> Dsv32StandIn:
    """Caches of GLM-5's depth, and of 16 tokens."""
    config = msgspec.structs.replace(network().config, layers=GLM5.layers, max_seq_len=32)
    return Glm5StandIn(SimpleNamespace(config=config), with_mtp=with_mtp, fp8=fp8)  # type: ignore[arg-type]


def test_the_published_generator_is_made_as_its_own_integration_makes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    published = Published(monkeypatch)
    engine = create(model="GLM-5", weights="folder", mtp=True, fp8=True)
    assert (published.backends, published.loaded) == (["glm5"], 1)
    arguments = published.arguments
    assert (arguments.pop("model_args").fp8_kv_cache, arguments) == (
        True,
        {
            "max_new_tokens": 4096 - 256,
            "model_weights_dir": "folder",
            "with_mtp": True,
            "use_topp": True,
            "enable_thinking": False,
        },
    )
    assert (engine.layout.name, engine.model, engine.max_seq_len) == ("tilert.fp8/glm5", "glm5", 24)
    assert engine.layout.model.spec_depth == 1


def test_a_package_that_lacks_a_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    Published(monkeypatch, fp8_argument=False)
    with pytest.raises(LocalError, match="fp8: glm5's engine keeps latents in bf16 only"):
        create(weights="folder", fp8=True)
    monkeypatch.delattr(sys.modules["tilert.models.glm_5.generator"], "GLM5Generator")
    with pytest.raises(LocalError, match=r"tilert.models.glm_5.generator has no GLM5Generator"):
        create(weights="folder")


def test_a_step_that_nothing_began_is_refused() -> None:
    engine = engine_for(Glm5StandIn(network()))
    with pytest.raises(LocalError, match="no request is running"):
        engine.step()
