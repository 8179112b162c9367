"""The connector's class as vLLM uses it: registered, asked in every process, and unable to raise."""

from __future__ import annotations

import inspect
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("vllm")

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

with warnings.catch_warnings():  # what vLLM's own packages complain about is not these tests' matter
    warnings.simplefilter("ignore")
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, supports_hma

import pdhandoff_vllm
from pdhandoff import HandoffFailed
from pdhandoff.errors import PdHandoffError
from pdhandoff_vllm.connector import PDHandoffConnector, TileRTConnector
from pdhandoff_vllm.hooks import guarded
from pdhandoff_vllm.meta import NOTHING, StepMeta
from pdhandoff_vllm.plugin import NAMES, register
from pdhandoff_vllm.scheduler_side import SchedulerSide
from pdhandoff_vllm.stats import HandoffPromMetrics, HandoffStats
from pdhandoff_vllm.tally import Tally
from pdhandoff_vllm.worker_side import WorkerSide
from support.vllm_engine import Order, PretendedEngine, Shape
from support.vllm_landing import Landing, vllm_layout

LAYERS = 3
SETTLED_S = 20.0
HOOKS: Mapping[str, object] = {
    "handle_preemptions": None,
    "bind_connector_metadata": None,
    "clear_connector_metadata": None,
    "start_load_kv": None,
    "wait_for_layer_load": None,
    "save_kv_layer": None,
    "wait_for_save": None,
    "get_finished": (None, None),
    "get_block_ids_with_load_errors": set(),
    "get_kv_connector_stats": None,
    "build_connector_worker_meta": None,
    "get_handshake_metadata": None,
    "set_xfer_handshake_metadata": None,
    "set_xfer_handshake_metadata_pp_aware": None,
    "shutdown": None,
    "on_new_request": None,
    "get_num_new_matched_tokens": (0, False),
    "update_state_after_alloc": None,
    "build_connector_meta": NOTHING,
    "update_connector_output": None,
    "request_finished": (False, None),
    "request_finished_all_groups": (False, None),
    "has_pending_push_work": False,
}
"what vLLM gets of each hook when anything inside has raised"


def settings(**keys: Any) -> dict[str, Any]:
    return {
        "kv_connector": "PDHandoffConnector",
        "kv_connector_module_path": "pdhandoff_vllm",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"model": "tiny", "mover": "loopback", "allow": ["127.0.0.1"], **keys},
    }


@pytest.fixture(scope="module")
def landing() -> Iterator[Landing]:
    with Landing(vllm_layout("mla", layers=LAYERS, draft_layers=1, spec_depth=1), arena_bytes=64 << 20) as landing:
        yield landing


class Explodes:
    """A side of the connector that raises whatever it is asked."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def explode(*_: object, **__: object) -> None:
            raise ZeroDivisionError(name)

        return explode

    def __bool__(self) -> bool:
        return True


def broken() -> PDHandoffConnector:
    """A connector whose sides raise, even when they are told of a fault."""
    connector = object.__new__(PDHandoffConnector)
    connector._scheduler = connector._worker = cast("Any", Explodes())
    connector._meta = StepMeta(restarts=("r",))
    connector._connector_metadata = None
    return connector


def test_every_hook_is_known_to_these_tests() -> None:
    ours = {
        name
        for name, value in vars(PDHandoffConnector).items()
        if inspect.isfunction(value) and not name.startswith("__")
    }
    assert ours - {"fault", "register_kv_caches"} == set(HOOKS)


@pytest.mark.parametrize("name", HOOKS)
def test_no_hook_raises(name: str) -> None:
    hook = getattr(broken(), name)
    given = [Explodes() for each in inspect.signature(hook).parameters.values() if each.kind is not each.VAR_KEYWORD]
    assert hook(*given) == HOOKS[name]


@pytest.mark.parametrize("name", HOOKS)
def test_hooks_have_the_arguments_that_vllm_gives(name: str) -> None:
    theirs = getattr(KVConnectorBase_V1, name, None)
    if theirs is None:  # of SupportsHMA
        assert name == "request_finished_all_groups"
        return
    ours = list(inspect.signature(getattr(PDHandoffConnector, name)).parameters)
    assert ours == list(inspect.signature(theirs).parameters)


def test_a_fault_is_logged_and_counted_without_flooding_the_log(caplog: pytest.LogCaptureFixture) -> None:
    class Side:
        faults = 0

        def fault(self, hook: str, error: Exception) -> None:
            assert (hook, str(error)) == ("work", "no")
            self.faults += 1

        @guarded(lambda: 7)
        def work(self) -> int:
            raise ValueError("no")

    side = Side()
    assert {side.work() for _ in range(100)} == {7}
    assert side.faults == 100
    assert len(caplog.records) == 7


SIDES: list[tuple[type, str]] = [
    (SchedulerSide, "on_new_request"),
    (SchedulerSide, "build_meta"),
    (SchedulerSide, "_chunk"),
    (SchedulerSide, "_commit"),
    (SchedulerSide, "request_finished"),
    (SchedulerSide, "update_output"),
    (SchedulerSide, "has_pending_work"),
    (WorkerSide, "handle_preemptions"),
    (WorkerSide, "bind"),
    (WorkerSide, "_offer"),
    (WorkerSide, "wait_for_save"),
    (WorkerSide, "_tables"),
    (WorkerSide, "finished"),
    (WorkerSide, "tally"),
    (WorkerSide, "report"),
]


@pytest.mark.slow
@pytest.mark.parametrize("nth", [1, 3])
@pytest.mark.parametrize(("side", "name"), SIDES, ids=lambda value: getattr(value, "__name__", value))
def test_after_a_fault_anywhere_the_engine_goes_on_and_no_block_is_lost(
    side: type, name: str, nth: int, landing: Landing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The n-th call raises. Requests end, blocks go back, what landed is right, and the next handoff works."""
    engine = PretendedEngine(Shape(order=Order.V2_LATE, asynchronous=True, layers=LAYERS), settings())
    free = engine.free_blocks
    real, calls = getattr(side, name), 0

    def fails(self: object, *args: object, **more: object) -> object:
        nonlocal calls
        calls += 1
        if calls == nth:
            raise ZeroDivisionError(name)
        return real(self, *args, **more)

    monkeypatch.setattr(side, name, fails)
    try:
        tickets = {}
        for number in range(4):
            tickets[f"r{number}"] = ticket = landing.expect()
            engine.add(f"r{number}", prompt(100 + 60 * number), max_tokens=2, params=landing.mark(ticket))
        engine.add("unmarked", prompt(90), max_tokens=2)
        run(engine)
        assert set(engine.answers) == {*tickets, "unmarked"}
        assert all(len(answer.tokens) == 2 for answer in engine.answers.values())
        assert engine.answers["unmarked"].params is None
        for request, ticket in tickets.items():
            outcome(landing, ticket, engine, request)
        monkeypatch.setattr(side, name, real)
        assert engine.free_blocks == free
        after = landing.expect()
        engine.add("after", prompt(77), max_tokens=1, params=landing.mark(after))
        run(engine)
        assert landing.take(after, SETTLED_S).prompt_tokens == 77
        assert engine.free_blocks == free
    finally:
        engine.close()


def prompt(length: int) -> list[int]:
    return [(length + at * 7) % 250 for at in range(length)]


def run(engine: PretendedEngine) -> None:
    deadline, pause = time.monotonic() + SETTLED_S, threading.Event()
    while engine.busy:
        engine.advance()
        pause.wait(0.0005)
        assert time.monotonic() < deadline, "the engine is still busy"


def outcome(landing: Landing, ticket: Any, engine: PretendedEngine, request: str) -> None:
    """A handoff has landed whole, or has failed; the consumer of one that is said to be sent hears of it."""
    params = engine.answers[request].params
    if params is None or params["pdhandoff"]["status"] == "failed":
        ticket.cancel()
        return
    try:
        landed = landing.take(ticket, SETTLED_S)
    except HandoffFailed:
        return
    assert landed.first_token == engine.answers[request].tokens[0]


def test_both_classes_are_found_in_every_way() -> None:
    for name, wanted in (("PDHandoffConnector", PDHandoffConnector), ("TileRTConnector", TileRTConnector)):
        for path in ("pdhandoff_vllm", "pdhandoff_vllm.connector", None):
            config = KVTransferConfig(kv_connector=name, kv_role="kv_producer", kv_connector_module_path=path)
            assert KVConnectorFactory.get_connector_class(config) is wanted
        assert KVConnectorFactory.get_connector_class_by_name(name) is wanted
        assert getattr(pdhandoff_vllm, name) is wanted
        assert supports_hma(wanted)


def test_registering_again_and_names_that_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    before = {name: KVConnectorFactory._registry[name] for name in NAMES}
    register()
    assert {name: KVConnectorFactory._registry[name] for name in NAMES} == before
    taken: dict[str, Any] = {"TileRTConnector": lambda: int}
    monkeypatch.setattr(KVConnectorFactory, "_registry", taken)
    register()
    assert KVConnectorFactory.get_connector_class_by_name("TileRTConnector") is int
    assert KVConnectorFactory.get_connector_class_by_name("PDHandoffConnector") is PDHandoffConnector


def test_what_is_asked_of_the_class() -> None:
    assert not PDHandoffConnector.requires_piecewise_for_cudagraph({})
    assert not PDHandoffConnector.supports_sleep_mode(SimpleNamespace())
    assert PDHandoffConnector.get_required_kvcache_layout(SimpleNamespace()) is None
    assert isinstance(NOTHING, KVConnectorMetadata)
    assert TileRTConnector.other_spec_depth
    assert not PDHandoffConnector.other_spec_depth


def tally(**counts: Any) -> dict[str, Any]:
    return Tally({"ready": 2, "failed": {"busy": 1}, "seconds": [0.1, 0.3], "tail_seconds": [0.01], **counts}).data


def test_statistics_add_up_as_plain_data() -> None:
    one, two = HandoffStats(data=tally(tokens=5)), HandoffStats(data=tally(nbytes=1 << 20))
    total = PDHandoffConnector.build_kv_connector_stats(one.aggregate(two).to_dict())
    assert total.data == tally(
        ready=4,
        failed={"busy": 2},
        tokens=5,
        nbytes=1 << 20,
        seconds=[0.1, 0.3, 0.1, 0.3],
        tail_seconds=[0.01, 0.01],
    )
    assert total.reduce()["Handoffs failed"] == 2
    assert not HandoffStats(data=Tally({"failed": {"busy": 1}}).data).is_empty()
    assert PDHandoffConnector.build_kv_connector_stats().is_empty()
    total.reset()
    assert total.is_empty()


def metrics(connector: type[PDHandoffConnector], registry: CollectorRegistry) -> HandoffPromMetrics:
    def made(kind: Any) -> Callable[..., Any]:
        return lambda **more: kind(registry=registry, **more)

    types = {kind: made(kind) for kind in (Counter, Gauge, Histogram)}
    config = SimpleNamespace(kv_transfer_config=None)
    found = connector.build_prom_metrics(config, types, ["engine"], {0: ["0"], 1: ["1"]})
    assert found is not None
    return found


def test_metrics_of_both_classes_live_side_by_side(caplog: pytest.LogCaptureFixture) -> None:
    registry = CollectorRegistry()
    ours, theirs = metrics(PDHandoffConnector, registry), metrics(TileRTConnector, registry)
    ours.observe(tally(), 1)
    ours.observe(tally(), 1)
    theirs.observe(tally(), 0)
    value = registry.get_sample_value
    assert value("vllm:pdhandoff_handoffs_ready_total", {"engine": "1"}) == 4
    assert value("vllm:pdhandoff_handoffs_failed_total", {"engine": "1", "error": "busy"}) == 2
    assert value("vllm:pdhandoff_handoff_seconds_count", {"engine": "1"}) == 4
    assert value("vllm:tilert_handoffs_ready_total", {"engine": "0"}) == 2
    assert not caplog.records
    for garbage in ({"ready": "x"}, {"seconds": 3}, {"failed": [1]}):
        ours.observe(garbage, 0)
    ours.observe(tally(), 7)
    assert len(caplog.records) == 4


def test_taken_metric_names_are_no_reason_to_die(caplog: pytest.LogCaptureFixture) -> None:
    registry = CollectorRegistry()
    metrics(PDHandoffConnector, registry)
    with pytest.raises(AssertionError):
        metrics(PDHandoffConnector, registry)
    assert "names are taken" in caplog.text


@pytest.mark.parametrize(
    ("keys", "named"),
    [({"unknown_key": 1}, "unknown_key"), ({"staging": "often"}, "staging"), ({"allow": []}, "allow")],
)
def test_a_wrong_key_stops_the_start(keys: dict[str, Any], named: str) -> None:
    with pytest.raises(PdHandoffError, match=named):
        PretendedEngine(Shape(order=Order.V1, asynchronous=False, layers=LAYERS), settings(**keys))


@pytest.mark.parametrize(
    ("keys", "named"), [({"mover": "pigeon"}, "pigeon"), ({"staging_bytes": 4096}, "staging_bytes")]
)
def test_a_producer_that_cannot_be_made_stops_the_start(keys: dict[str, Any], named: str) -> None:
    with pytest.raises(PdHandoffError, match=named):
        PretendedEngine(Shape(order=Order.V1, asynchronous=False, layers=LAYERS), settings(**keys))


def test_an_unmarked_request_costs_nothing() -> None:
    """Nothing is kept of it, and no step says anything."""
    engine = PretendedEngine(Shape(order=Order.V2, asynchronous=False, layers=LAYERS), settings())
    try:
        engine.add("r", prompt(100), max_tokens=3, params={"do_remote_decode": True})
        run(engine)
        side: Any = engine.scheduler.connector
        assert not side._scheduler._live
        assert not side._scheduler._refused
        assert engine.worker._meta is NOTHING
        assert engine.answers["r"].params is None
    finally:
        engine.close()
