"""How long it takes to plan the gather of one long GLM-5 prompt, every copy of it, in one go."""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

from pdhandoff.layouts.catalogue import Options, build
from pdhandoff.layouts.profiles import GLM5
from pdhandoff.planner import CopyPlan, PageTable, Placement, Shard, landing_component, plan_copies, shard_manifest

__all__ = ["main"]

PROMPT = 128 * 1024
REPEATS = 51


def gather_inputs() -> list[dict[str, Any]]:
    """Both components of all 79 layers, from shuffled 64-token pages into packed landing pages."""
    pages = PROMPT // 64
    ids = random.Random(1).sample(range(1, 2 * pages), pages)
    inputs: list[dict[str, Any]] = []
    for component in build("vllm.fp8_ds_mla", GLM5).components:
        at = {"": [(1 << 40) + (layer << 32) for layer in range(len(component.layers))]}
        inputs.append(
            {
                "source": component,
                "source_at": Placement(2 * pages, at),
                "source_pages": PageTable(ids, 64, null=0),
                "destination_at": Placement(pages, at),
            }
        )
    return inputs


def plan_gather(inputs: list[dict[str, Any]]) -> CopyPlan:
    """What a producer does for one chunk, here the whole prompt."""
    return CopyPlan.join(
        [
            plan_copies(
                **each,
                destination=landing_component(each["source"]),
                destination_pages=PageTable.packed(range(PROMPT), 64),
                tokens=range(PROMPT),
            )
            for each in inputs
        ]
    )


def expand(plan: CopyPlan) -> int:
    """Every copy as absolute addresses."""
    return sum(len(writes.length) for writes in plan.writes())


def median_ms(work: Callable[[], object]) -> float:
    """Median over several runs, in milliseconds."""
    times: list[float] = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def main() -> list[dict[str, object]]:
    """Measure."""
    inputs = gather_inputs()
    plan = plan_gather(inputs)
    source, decode = build("vllm.fp8_ds_mla", GLM5), build("tilert.bf16", GLM5, Options(length=PROMPT))
    return [
        {
            "name": "plan 128k tokens x 79 layers",
            "value": median_ms(lambda: plan_gather(inputs)),
            "unit": "ms",
            "reach": "<= 5",
            "meaning": f"shuffled 64-token pages, two components, {plan.copies} copies; median of {REPEATS}",
        },
        {
            "name": "the same, as absolute addresses",
            "value": median_ms(lambda: expand(plan)),
            "unit": "ms",
            "reach": "",
            "meaning": "all copies written out for a mover, in batches as they are asked for",
        },
        {
            "name": "manifest of one rank of eight",
            "value": median_ms(lambda: shard_manifest(source, Shard(3, 8), [decode], prompt_tokens=PROMPT)),
            "unit": "ms",
            "reach": "",
            "meaning": "replicated GLM-5 state divided by layer; once a link",
        },
    ]


if __name__ == "__main__":
    print(json.dumps(main(), indent=2))
