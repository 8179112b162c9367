"""What the connector costs vLLM's own threads per step: nothing claimed, and GLM-5 prompts that are handed off.

Neither vLLM nor a model is needed: the two sides of the connector are called as vLLM calls them, between a scheduler's
output that is made up and a real producer that sends over loopback to a consumer in this process.
"""

from __future__ import annotations

import ctypes
import gc
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

from pdhandoff import Consumer, HandoffId, Producer
from pdhandoff.engines.base import Memory
from pdhandoff.layouts import Layout
from pdhandoff.layouts.catalogue import build
from pdhandoff.layouts.profiles import GLM5
from pdhandoff.planner import Placement, Shard
from pdhandoff_vllm.caches import Caches
from pdhandoff_vllm.config import Config, read_config
from pdhandoff_vllm.meta import NOTHING
from pdhandoff_vllm.scheduler_side import Facts, SchedulerSide
from pdhandoff_vllm.worker_side import WorkerSide

__all__ = ["main"]

BATCH = 256
"requests that run beside"
BLOCK = 64
CHUNK = 2048
"tokens of a step"
PROMPT = 8192
BLOCKS = PROMPT // BLOCK + 1
HANDOFFS = 10
STEPS = 2000
WAIT_S = 60.0


class Sides(NamedTuple):
    """The connector, both sides of it."""

    scheduler: SchedulerSide
    worker: WorkerSide


def step(sides: Sides, scheduled: Any, finished: set[str]) -> dict[str, float]:
    """One step, as vLLM calls it. Returns seconds in the scheduler's hooks, and in the worker's."""
    started = time.perf_counter()
    meta = sides.scheduler.build_meta(scheduled)
    built = time.perf_counter()
    if meta is not NOTHING:
        sides.worker.handle_preemptions(meta)
        sides.worker.bind(meta)
    before = time.perf_counter()
    if meta is not NOTHING:
        sides.worker.wait_for_save(meta)
    saved = time.perf_counter()
    sides.worker.finished(finished)
    sides.worker.tally()
    report = sides.worker.report()
    ended = time.perf_counter()
    sides.scheduler.update_output(report)
    updated = time.perf_counter()
    return {
        "scheduler": built - started + updated - ended,
        "save": saved - before,
        "worker": ended - built,
    }


def batch_step(more: dict[str, tuple[int, int]]) -> Any:
    """VLLM's output for a step of `BATCH` decoding requests, and of `more`: request -> (computed, scheduled)."""
    decoding = [f"other-{number}" for number in range(BATCH)]
    names = [*decoding, *(name for name, (computed, _) in more.items() if computed)]
    computed = [1000] * BATCH + [computed for computed, _ in more.values() if computed]
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, num_computed_tokens=0) for name, (computed, _) in more.items() if not computed
        ],
        scheduled_cached_reqs=SimpleNamespace(req_ids=names, num_computed_tokens=computed),
        num_scheduled_tokens=dict.fromkeys(decoding, 1) | {name: count for name, (_, count) in more.items()},
        preempted_req_ids=set(),
        kv_connector_block_state=SimpleNamespace(get_block_ids=lambda _: [list(range(1, BLOCKS))]),
    )


def request_of(name: str, consumer: str) -> SimpleNamespace:
    """VLLM's request."""
    return SimpleNamespace(
        request_id=name,
        kv_transfer_params={"pdhandoff": {"consumer": consumer, "handoff": str(HandoffId.mint())}},
        num_prompt_tokens=PROMPT,
        prompt_token_ids=[7] * PROMPT,
        output_token_ids=[],
        status=SimpleNamespace(name="FINISHED_LENGTH_CAPPED"),
    )


def caches_of(layout: Layout) -> tuple[Caches, list[Any]]:
    """Caches of `BLOCKS` blocks, and the buffers that hold them."""
    buffers: list[Any] = []
    placements: dict[str, Placement] = {}
    for component in layout.components:
        page = component.row_bytes * component.page_tokens
        layers = [ctypes.create_string_buffer(BLOCKS * page) for _ in component.layers]
        buffers += layers
        placements[component.name] = Placement(BLOCKS, {"": [ctypes.addressof(layer) for layer in layers]})
    memory = tuple(Memory(ctypes.addressof(buffer), len(buffer), owner=buffer) for buffer in buffers)
    groups = {component.name: (0, 1) for component in layout.components}
    return Caches(layout, placements, memory, groups, Shard(0, 1), (1,)), buffers


@contextmanager
def sides_of(config: Config, caches: Caches) -> Iterator[Sides]:
    """Both sides, with a producer that runs."""
    producer = Producer(
        mover="loopback", layout=caches.layout, placements=caches.placements, staging_bytes=config.staging_bytes
    )
    worker = WorkerSide(config, caches, producer)
    scheduler = SchedulerSide(config, Facts(group_tokens=(BLOCK,), max_model_len=1 << 20))
    try:
        yield Sides(scheduler, worker)
    finally:
        worker.shutdown()
        scheduler.close()


def idle(sides: Sides) -> tuple[float, int]:
    """Microseconds of all hooks in a step without handoffs, and bytes that they leave allocated after many."""
    scheduled, finished = batch_step({}), {"other-0"}
    times = [sum(step(sides, scheduled, finished)[key] for key in ("scheduler", "worker")) for _ in range(STEPS)]
    gc.collect()
    tracemalloc.start()
    first = tracemalloc.get_traced_memory()[0]
    for _ in range(STEPS):
        sides.scheduler.build_meta(scheduled)
        sides.worker.finished(finished)
        sides.worker.tally()
        sides.worker.report()
    left = tracemalloc.get_traced_memory()[0] - first
    tracemalloc.stop()
    return statistics.median(times) * 1e6, max(left, 0)


def claimed(sides: Sides, consumer: Consumer) -> dict[str, list[float]]:
    """Seconds of the hooks in each step of prompts that are handed off, one after the other."""
    times: dict[str, list[float]] = {"scheduler": [], "save": [], "worker": []}
    for number in range(HANDOFFS):
        name = f"r{number}"
        request = request_of(name, str(consumer.address))
        ticket = consumer.announce(
            HandoffId.parse(request.kv_transfer_params["pdhandoff"]["handoff"]), deadline_s=WAIT_S
        )
        sides.scheduler.on_new_request(request)
        for computed in range(0, PROMPT, CHUNK):
            spent = step(sides, batch_step({name: (computed, CHUNK)}), set())
            for key, seconds in spent.items():
                times[key].append(seconds)
        request.output_token_ids.append(5)
        sides.scheduler.request_finished(request)
        step(sides, batch_step({}), {name})
        with ticket.wait(WAIT_S):
            pass
        step(sides, batch_step({}), set())
    return times


def main() -> list[dict[str, object]]:
    """Measure both."""
    config = read_config({"allow": ["127.0.0.1"], "mover": "loopback", "staging_bytes": 1 << 30})
    caches, buffers = caches_of(build("vllm.fp8_ds_mla", GLM5))
    arena = PROMPT * sum(component.row_bytes * len(component.layers) for component in caches.layout.components)
    with (
        sides_of(config, caches) as sides,
        Consumer(
            mover="loopback", layout=caches.layout, arena_bytes=arena + (64 << 20), listen="127.0.0.1:0"
        ) as consumer,
    ):
        idle_us, left = idle(sides)
        times = claimed(sides, consumer)
    del buffers
    return [
        row("idle step", idle_us, "us", "<= 5", f"all hooks, {BATCH} other requests, nothing claimed"),
        row("idle step, memory", left / STEPS, "B", "<= 1", "that all hooks of a step leave allocated"),
        *(
            row(f"claimed step, {name}", pick(times[key]) * 1e6, "us", "", meaning)
            for name, key, pick, meaning in _CLAIMED
        ),
    ]


_CLAIMED: tuple[tuple[str, str, Callable[[list[float]], float], str], ...] = (
    ("scheduler", "scheduler", statistics.median, f"its hooks, {CHUNK} tokens of GLM-5 handed off"),
    ("forward thread", "worker", statistics.median, "all hooks of a worker in the same step"),
    ("wait_for_save", "save", statistics.median, "of these, what comes between the step and its results"),
    ("wait_for_save, worst", "save", max, f"of {HANDOFFS * PROMPT // CHUNK} steps, while rows are copied and sent"),
)


def row(name: str, value: float, unit: str, reach: str, meaning: str) -> dict[str, object]:
    """A figure."""
    return {"name": f"vLLM hooks: {name}", "value": value, "unit": unit, "reach": reach, "meaning": meaning}
