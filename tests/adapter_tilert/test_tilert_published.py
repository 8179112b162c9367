"""The published TileRT package: what this adapter relies on, read from its files, or run where no engine is needed."""

from __future__ import annotations

import ast
import inspect
import os
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from pdhandoff.layouts.profiles import DSV32, GLM5, Profile
from pdhandoff_tilert.caches import LiveCaches, describe, discover
from pdhandoff_tilert.engine import DecodeRequest
from pdhandoff_tilert.generator import TOKEN_OUT
from pdhandoff_tilert.inject import CacheInjector
from pdhandoff_tilert.parking import Facts, Parking
from pdhandoff_tilert.published import MODELS, model_named
from pdhandoff_tilert.sampling import POOL
from support import tilert_generator
from support.demo_model import network
from support.tilert_generator import Dsv32Layer, Dsv32StandIn, Glm5Layer, Glm5StandIn
from support.tilert_package import HostTensor, Published, fetch, host_torch
from support.tilert_path import engine_for, link, source

GLM: Final = "models.glm_5"
DS: Final = "models.deepseek_v3_2"
ROWS: Final = 13
SILENT: Final = SimpleNamespace(info=lambda *_: None, warning=lambda *_: None)


@pytest.fixture(scope="module")
def package() -> Published:
    found = fetch()
    if isinstance(found, str):
        pytest.skip(found)
    return Published(found)


# ---- signatures


GENERATOR = {
    "inject_cache": ["self", "layer_caches", "start_pos=0", "end_pos=None"],
    "set_cur_pos": ["self", "cur_pos"],
    "update_sampling_params": ["self", "temperature=1.0", "top_p=0.95", "top_k=256", "use_topp=True"],
    "from_pretrained": ["self"],
    "cleanup": ["self"],
}
LAYER = {
    "_get_device_result": ["self", "device_id"],
    "forward": ["self", "token_id", "with_mtp=None"],
    "get_next_draft_tokens": ["self", "device_id=0"],
    "get_num_accepted": ["self", "device_id=0"],
    "get_predicted_tokens": ["self", "device_id=0"],
    "set_sampling_seed": ["self", "seed", "with_mtp=None"],
    "reset_sequence": ["self"],
}
GLM_LAYER = {
    **LAYER,
    "set_prefill_valid_tokens": ["self", "num_valid_tokens", "with_mtp=None"],
    "show_hands": ["self", "prev_draft_tokens", "ar_steps=1"],
    "ar_accepted_tokens": ["self", "dev=0"],
    "ar_num_accepted": ["self", "dev=0"],
    "show_hands_no_mtp": ["self", "prev_token", "ar_steps=1"],
    "ar_accepted_tokens_no_mtp": ["self", "dev=0"],
}
DS_LAYER = {**LAYER, "set_prefill_valid_tokens": ["self", "num_valid_tokens"]}
CLASSES: Final[dict[tuple[str, str], tuple[dict[str, list[str]], type]]] = {
    (f"{GLM}.generator", "GLM5Generator"): (GENERATOR, Glm5StandIn),
    (f"{DS}.generator", "DSAv32Generator"): (GENERATOR, Dsv32StandIn),
    (f"{GLM}.modules.end2end", "ShowHandsDSALayer"): (GLM_LAYER, Glm5Layer),
    (f"{DS}.modules.end2end", "ShowHandsDSALayer"): (DS_LAYER, Dsv32Layer),
}
NAMES = ["glm5", "dsv32", "glm5 layer", "dsv32 layer"]


@pytest.mark.parametrize(("at", "wanted"), [(at, wanted) for at, (wanted, _) in CLASSES.items()], ids=NAMES)
def test_the_calls_have_the_arguments_that_we_give(
    package: Published, at: tuple[str, str], wanted: dict[str, list[str]]
) -> None:
    module, name = at
    assert {call: package.signature(module, f"{name}.{call}") for call in wanted} == wanted


@pytest.mark.parametrize(
    ("at", "stand_in", "calls"),
    [(at, stand_in, [*wanted]) for at, (wanted, stand_in) in CLASSES.items()],
    ids=NAMES,
)
def test_the_stand_in_has_the_same_calls(
    package: Published, at: tuple[str, str], stand_in: type, calls: list[str]
) -> None:
    module, name = at
    for call in calls:
        if call == "from_pretrained":
            continue  # a stand-in is loaded
        arguments = [
            argument.name if argument.default is argument.empty else f"{argument.name}={argument.default}"
            for argument in inspect.signature(getattr(stand_in, call)).parameters.values()
        ]
        assert arguments == package.signature(module, f"{name}.{call}")


@pytest.mark.parametrize("entry", MODELS.values(), ids=list(MODELS))
def test_a_generator_is_made_with_arguments_that_it_has(package: Published, entry: Any) -> None:
    module = entry.module.removeprefix("tilert.")
    have = {argument.split("=")[0] for argument in package.signature(module, f"{entry.generator}.__init__")}
    given = {"model_args", "max_new_tokens", "model_weights_dir", "with_mtp", "use_topp", *entry.options}
    assert given <= have
    assert isinstance(package.definition(entry.arguments[0].removeprefix("tilert."), entry.arguments[1]), ast.ClassDef)


def test_models_have_the_names_that_operators_know(package: Published) -> None:
    aliases = package.value("pd_vllm.profiles.base", "_ALIASES")
    ours = {alias: model for alias, model in aliases.items() if model in MODELS}
    assert len(ours) == 8
    assert {alias: model_named(alias).profile.name for alias in ours} == ours


@pytest.mark.parametrize("tree", [GLM, DS])
def test_intermediates_have_the_places_that_we_read(package: Published, tree: str) -> None:
    places = package.constants(f"{tree}.temp_var_indices", "DsaTempVarIdx")
    assert places["TOKEN_OUT"] == TOKEN_OUT
    for name in ("TOKEN_OUT", "CUR_POS", "PREDICTED_TOKENS", "ACCEPTED_TOKENS", "NEXT_DRAFT_TOKENS"):
        assert getattr(tilert_generator, name) == places[name]


def test_sampling_is_asked_for_as_their_own_integration_does(package: Published) -> None:
    assert package.value("pd_vllm.sampling", "_KERNEL_TOP_K_POOL") == POOL
    decode = package.source("pd_vllm.profiles.mla_nsa", "MlaNsaEngineAdapter.decode")
    assert "update_sampling_params(temperature=1.0, top_p=1.0, top_k=1, use_topp=False)" in decode


# ---- caches


def model_arguments(package: Published, tree: str, **changed: Any) -> SimpleNamespace:
    base = package.constants(f"{GLM}._dsa_v32.model_args" if tree == GLM else f"{tree}.model_args", "ModelArgs")
    own = package.constants(f"{GLM}.model_args", "ModelArgsGLM5") if tree == GLM else {}
    return SimpleNamespace(**base | own | changed)


@pytest.mark.parametrize(("tree", "profile"), [(GLM, GLM5), (DS, DSV32)], ids=["glm5", "dsv32"])
def test_profiles_have_the_models_numbers(package: Published, tree: str, profile: Profile) -> None:
    arguments = model_arguments(package, tree)
    assert profile.mla is not None
    assert profile.indexer is not None
    assert (arguments.n_layers, arguments.max_batch_size) == (profile.layers, 1)
    assert (arguments.kv_lora_rank, arguments.qk_rope_head_dim) == (profile.mla.latent, profile.mla.rope)
    assert arguments.index_head_dim == profile.indexer.elements
    assert arguments.kv_cache_pad == 2 * 4  # what the last steps of a request write past its end


def their_caches(package: Published, tree: str, layers: int, **changed: Any) -> list[list[Tensor]]:
    """As the package's own `get_cache_vars` makes them, on CPU."""
    arguments = model_arguments(package, tree, max_seq_len=16, **changed)
    names = {"torch": host_torch, "Base": type("Base", (), {"get_cache_vars": lambda _: []})}
    devices = []
    for device in range(8):
        kind = "SparseSelectMlaV2" if device == 0 else "PureMlaV2"
        make = package.function(f"{tree}.modules.mla_v2", f"{kind}.get_cache_vars", names)
        owner = make.__globals__[kind]
        caches: list[Tensor] = []
        for _ in range(layers):
            block = owner()
            vars(block).update(model_args=arguments, device_id=device, ki_cache=None, kv_cache=None, pe_cache=None)
            caches += [tensor.as_subclass(Tensor) for tensor in block.get_cache_vars()]
        devices.append(caches)
    return devices


def held(caches: Sequence[Sequence[Tensor]]) -> Any:
    """A decode layer that holds these."""
    positions = [[torch.zeros(1, dtype=torch.int32) for _ in range(60)] for _ in caches]
    return SimpleNamespace(
        num_devices=len(caches), _get_device_result=lambda device: (positions[device], caches[device], [], None)
    )


@pytest.mark.parametrize(
    ("tree", "profile", "fp8", "holding"),
    [(GLM, GLM5, False, [1, 7, 7]), (GLM, GLM5, True, [1, 7, 7]), (DS, DSV32, False, [8, 8, 8])],
    ids=["glm5", "glm5 fp8", "dsv32"],
)
def test_caches_that_the_package_makes_are_found(
    package: Published, tree: str, profile: Profile, fp8: bool, holding: list[int]
) -> None:
    live = discover(held(their_caches(package, tree, profile.layers + 1, fp8_kv_cache=fp8)), profile)
    assert live.shape == (profile.layers + 1, 24, 24, fp8, (256, 528 if fp8 else 1024, 128))
    assert [len(holders) for holders in live.holders.values()] == holding
    assert describe(live.shape, profile).components


@pytest.mark.parametrize("tree", [GLM, DS])
def test_draft_caches_follow_the_targets_and_device_0_selects(package: Published, tree: str) -> None:
    load = package.source(f"{tree}.modules.end2end", "ShowHandsDSALayer._init_weights")
    assert load.index("caches.extend(dsa.get_cache_vars())") < load.index("caches.extend(mtp.get_cache_vars())")
    selector = "SparseSelectMlaV2 if device_id == 0 else PureMlaV2"
    assert selector in load
    assert selector in package.source(f"{tree}.modules.dsa", "Dsa.__init__")


# ---- injection


def rows_of(layers: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Rows to inject: other values everywhere."""
    generator = torch.Generator().manual_seed(3)
    return [
        tuple(torch.randn(ROWS, width, generator=generator).to(torch.bfloat16) for width in (128, 512, 64))  # type: ignore[misc]
        for _ in range(layers)
    ]


def inject_directly(
    live: LiveCaches, profile: Profile, rows: Sequence[tuple[Tensor, ...]], *, parked_on: str, pinned: bool
) -> None:
    """What the adapter does with parked rows."""
    parking = Parking(live.shape, 1 << 30, torch.device(parked_on), pinned=pinned)
    parked = parking.take(ROWS)
    assert parked is not None
    for part, target in enumerate(parked.parts):
        target.copy_(torch.stack([layer[part] for layer in rows]).view(torch.uint8))
    parked.facts = Facts(ROWS, mtp_cold=False, last_token=None)
    CacheInjector(live, parking, layers=profile.layers, direct=False).inject(parked)


def real_calls(package: Published, tree: str, layer: Any, *, on_gpu: bool = False) -> Any:
    """The package's own inject_cache and set_cur_pos over these caches."""
    places = package.constants(f"{tree}.temp_var_indices", "DsaTempVarIdx")
    names = {"torch": torch if on_gpu else host_torch, "logger": SILENT, "Idx": SimpleNamespace(**places)}
    owner = "GLM5Generator" if tree == GLM else "DSAv32Generator"
    this = SimpleNamespace(decode_layer=layer, with_mtp=True)
    calls = {
        name: package.function(f"{tree}.generator", f"{owner}.{name}", names)
        for name in ("inject_cache", "set_cur_pos")
    }
    return SimpleNamespace(
        inject_cache=lambda *given: calls["inject_cache"](this, *given),
        set_cur_pos=lambda position: calls["set_cur_pos"](this, position),
        cur_pos=places["CUR_POS"],
    )


@pytest.mark.parametrize(
    ("tree", "profile", "where"),
    [
        pytest.param(tree, profile, where, marks=[] if where == "cpu" else [pytest.mark.gpu], id=f"{name}, {where}")
        for name, tree, profile in (("glm5", GLM, GLM5), ("dsv32", DS, DSV32))
        for where in ("cpu", "cuda", "cuda, parked there")
    ],
)
@pytest.mark.slow
def test_direct_injection_equals_the_packages_own(package: Published, tree: str, profile: Profile, where: str) -> None:
    layers = profile.layers + 1
    device = where.partition(",")[0]
    count = torch.cuda.device_count() if device == "cuda" else 8

    def engine() -> list[list[Tensor]]:
        made = their_caches(package, tree, layers)
        chosen = made if count == 8 else made[1 : 1 + count]  # with fewer devices, the first one has every part
        if count < 8 and tree == GLM:
            chosen[0] = [(made[0] if at % 3 == 0 else made[1])[at] for at in range(3 * layers)]
        return [
            [tensor.fill_(7).to(f"cuda:{number}" if device == "cuda" else "cpu") for tensor in caches]
            for number, caches in enumerate(chosen)
        ]

    theirs, ours = engine(), engine()
    rows = rows_of(layers)
    sent = [tuple(part.as_subclass(HostTensor) for part in layer) for layer in rows] if device == "cpu" else rows
    holder = held(theirs)
    real = real_calls(package, tree, holder, on_gpu=device == "cuda")
    real.inject_cache(sent, 0, ROWS)
    parked_on = "cuda:0" if where == "cuda, parked there" else "cpu"
    inject_directly(
        discover(held(ours), profile),
        profile,
        rows,
        parked_on=parked_on,
        pinned=device == "cuda" and parked_on == "cpu",
    )
    for number in range(count):
        for one, other in zip(theirs[number], ours[number], strict=True):
            assert torch.equal(one, other)
    real.set_cur_pos(ROWS - 1)
    positions = [int(holder._get_device_result(number)[0][real.cur_pos]) for number in range(count)]
    assert positions == [ROWS - 1] * count


def test_the_packages_own_injection_cannot_fill_fp8_caches(package: Published) -> None:
    """Why the adapter writes the caches itself."""
    caches = their_caches(package, GLM, 1, fp8_kv_cache=True)
    rows = [tuple(part.as_subclass(HostTensor) for part in layer) for layer in rows_of(1)]
    with pytest.raises(RuntimeError, match="size of tensor"):
        real_calls(package, GLM, held(caches)).inject_cache(rows, 0, ROWS)


# ---- conversions and decoding


@pytest.mark.slow
def test_converted_rows_are_those_of_their_own_conversion(package: Published) -> None:
    given = source(0, 200)
    count = len(given.prompt)
    generator = Glm5StandIn(network())
    engine = engine_for(generator)
    with link(engine) as node:
        engine.inject(engine.park(node.hand_off(given)))
    module = "pd_vllm.profiles.mla_nsa"
    sizes = {name: value for name, value in module_constants(package, module).items() if name.isupper()}
    matrix = torch.tensor(
        [[1.0 - 2.0 * ((row & column).bit_count() % 2) for column in range(128)] for row in range(128)]
    )
    names = {"torch": torch, **sizes, "_hadamard": lambda x: (x.float() @ (matrix * 128**-0.5)).to(x.dtype)}
    latents = package.function(module, "MlaNsaProfile._dequant_kv", names)
    keys = package.function(module, "MlaNsaProfile._dequant_ki", names)
    pages = torch.tensor(given.table)
    for layer, raw in enumerate(given.raw_latents()):
        index, latent, _ = (
            generator.decode_layer.caches.by_device[device][3 * layer + part][0, :count]
            for device, part in ((0, 0), (3, 1), (3, 2))
        )
        assert torch.equal(latent, latents(raw, count))
        theirs = keys(given.engine.tensors.index[layer][pages].flatten(1), count, False)
        assert torch.allclose(index.float(), theirs.float(), rtol=2**-7, atol=1e-4)


def module_constants(package: Published, module: str) -> dict[str, Any]:
    """Names that a module gives to numbers, from numbers and from one another."""
    found: dict[str, Any] = {}
    for node in package.tree(module).body:
        if isinstance(node, ast.Assign) and not any(isinstance(part, ast.Call) for part in ast.walk(node.value)):
            exec(compile(ast.Module([node], []), module, "exec"), {}, found)  # noqa: S102 - arithmetic
    return found


@pytest.mark.slow
def test_their_own_loops_drive_the_stand_ins_to_the_same_tokens(package: Published) -> None:
    """The stand-ins are what their loops take them for; and ours accepts more drafts in its first step."""
    given = source(0, 200)
    budget = 24

    def injected(generator: Dsv32StandIn) -> Any:
        engine = engine_for(generator, steps_per_call=1)
        with link(engine) as node:
            engine.inject(engine.park(node.hand_off(given)))
        return engine

    ours = injected(Dsv32StandIn(network()))
    ours.begin(DecodeRequest(prompt=given.prompt, first_token=given.first_token, max_tokens=budget))
    steps = [ours.step()]
    while not steps[-1].finish_reason:
        steps.append(ours.step())
    tokens = [given.first_token, *(token for step in steps for token in step.tokens)]

    generator = Dsv32StandIn(network())
    injected(generator)
    generator.set_cur_pos(len(given.prompt) - 1)
    adapter = SimpleNamespace(
        gen=generator, mtp_seq_len=4, _ignore_eos=False, stop_ids={256}, _torch=host_torch, last_stats={}
    )
    adapter._last_prompt_token = given.prompt[-1]
    decode = package.function("pd_vllm.profiles.mla_nsa", "MlaNsaEngineAdapter._decode_mtp", {"os": os})
    assert decode(adapter, given.first_token, budget, None, None) == tokens
    assert steps[1].accepted == 3
    assert adapter.last_stats["mtp_verify_calls"] > len(steps) - 1

    several = Glm5StandIn(network())
    injected(several)
    several.set_cur_pos(len(given.prompt) - 1)
    several.decode_layer.set_prefill_valid_tokens(0)
    total = len(given.prompt) + budget
    out = torch.tensor([[*given.prompt, *[-1] * budget]])
    this = SimpleNamespace(
        decode_layer=several.decode_layer,
        mtp_seq_len=4,
        default_device="cpu",
        stop_token_ids={256},
        max_new_tokens=budget,
        tokenizer=SimpleNamespace(batch_decode=lambda *_, **__: [""]),
    )
    clock = SimpleNamespace(time=lambda: 0.0)
    loop = package.function(f"{GLM}.generator", "GLM5Generator._decode_ar", {"torch": torch, "time": clock})
    loop(this, out, len(given.prompt) - 1, len(given.prompt), total, 8, False)
    assert out[0, len(given.prompt) :].tolist() == tokens
