"""The CPU kernels beside the torch reference and a plain copy: GLM-5 rows, a few layers, shuffled 64-token pages."""

from __future__ import annotations

import ctypes
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

from pdhandoff.errors import LocalError
from pdhandoff.layouts.catalogue import Options, build
from pdhandoff.layouts.profiles import GLM5
from pdhandoff.native import GatherPart, Native, load
from pdhandoff.planner import PageTable, Placement, derive_conversion, landing_component

__all__ = ["main"]

TOKENS = 2048
LAYERS = range(4)
PAGES = TOKENS // 64
REPEATS = 7


class Memory:
    """Bytes at an address."""

    def __init__(self, nbytes: int) -> None:
        self._owner = (ctypes.c_ubyte * nbytes)()
        self.address = ctypes.addressof(self._owner)
        ctypes.memset(self.address, 0x3A, nbytes)  # a code and a scale that decode to ordinary numbers


def parts() -> tuple[list[GatherPart], list[Memory]]:
    """Both components of the layers, from pages into landing form."""
    ids = random.Random(1).sample(range(2 * PAGES), PAGES)
    made, kept = [], []
    for component in build("vllm.fp8_ds_mla", GLM5).components:
        landing = landing_component(component)
        page = component.region_page_bytes("")
        here = [Memory(2 * PAGES * page) for _ in LAYERS]
        there = [Memory(PAGES * page) for _ in LAYERS]
        kept += here + there
        made.append(
            GatherPart(
                source=component,
                source_bases={"": [memory.address for memory in here]},
                source_pages=PageTable(ids, 64),
                destination=landing,
                destination_bases=[memory.address for memory in there],
                destination_pages=PageTable(range(PAGES), 64),
                layers=LAYERS,
                heads=range(1),
            )
        )
    return made, kept


def conversions(gathered: list[GatherPart]) -> tuple[list[dict[str, Any]], list[Memory]]:
    """Arguments that convert what was gathered into bf16 planes, index keys rotated."""
    layout = build("tilert.bf16", GLM5, Options(length=TOKENS))
    calls, kept = [], []
    for part in gathered:
        target = layout.component(part.source.name)
        bases: dict[str, list[int]] = {}
        for region in target.regions:
            planes = [Memory(target.region_page_bytes(region)) for _ in target.layers[: len(LAYERS)]]
            kept += planes
            bases[region] = [planes[index % len(planes)].address for index in range(len(target.layers))]
        calls.append(
            {
                "conversion": derive_conversion(part.destination, target, tuple(LAYERS)),
                "source_bases": part.destination_bases,
                "source_pages": part.destination_pages,
                "destination_at": Placement(1, bases),
                "destination_pages": PageTable((0,), TOKENS),
                "tokens": range(TOKENS),
                "zero_until": 0,
            }
        )
    return calls, kept


def seconds(work: Callable[[], object]) -> float:
    """Median."""
    work()
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> list[dict[str, object]]:
    """Rows for run.py. None where the CPU library is not built."""
    try:
        cpu = load("cpu")
    except LocalError as error:
        print(error.reason)
        return []
    gathered, kept = parts()
    calls, planes = conversions(gathered)
    nbytes = TOKENS * len(LAYERS) * sum(part.source.row_bytes for part in gathered)
    flat = Memory(nbytes), Memory(nbytes)
    plain = seconds(lambda: ctypes.memmove(flat[0].address, flat[1].address, nbytes))

    def gather(native: Native, *, digest: bool) -> float:
        return seconds(lambda: native.gather(gathered, range(TOKENS), digest=digest))

    def convert(native: Native) -> float:
        return seconds(lambda: [native.convert(**call) for call in calls])

    copied, hashed, converted = gather(cpu, digest=False), gather(cpu, digest=True), convert(cpu)
    rows = [
        row("gather, CPU kernels", plain / copied, "of a plain copy", "a copy of the same bytes in one piece is 1"),
        row("gather with digest, CPU kernels", nbytes / hashed / 1e9, "GB/s", "one core"),
        row("convert to bf16, CPU kernels", nbytes / converted / 1e9, "GB/s", "one core; landed bytes"),
    ]
    try:
        reference = load("reference")
    except LocalError:
        return rows
    rows.append(
        row("convert, CPU kernels", convert(reference) / converted, "times the reference's speed", "one thread")
    )
    kept.clear()
    planes.clear()
    return rows


def row(name: str, value: float, unit: str, meaning: str) -> dict[str, object]:
    """One figure."""
    return {
        "name": name,
        "value": round(value, 2),
        "unit": unit,
        "reach": "",
        "meaning": f"{TOKENS} GLM-5 rows, {meaning}",
    }


if __name__ == "__main__":
    for each in main():
        print(each)
