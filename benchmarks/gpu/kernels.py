"""GLM-5 rows on one GPU: gather from random pages and convert into TileRT's planes, against a device-to-device copy.

    python benchmarks/gpu/kernels.py [--tokens N ...] [--quick] > result.json

Needs torch with CUDA and the CUDA kernels. Times are those of the kernels themselves, as the profiler reads them off
the device; `call_us` is what the caller's thread spends. Rates count bytes read plus bytes written. Every result is
compared with torch's: all bytes of a gather, all rows of some layers of a conversion.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from pdhandoff.layouts.catalogue import Options, build
from pdhandoff.layouts.profiles import GLM5
from pdhandoff.native import GatherPart, Native, load
from pdhandoff.native.encodings import dequantise_blocks
from pdhandoff.native.rotation import hadamard128
from pdhandoff.planner import PageTable, Placement, derive_conversion, landing_component, stepped_component

__all__ = ["main"]

PAGE: Final = 64
SOURCE: Final = build("vllm.fp8_ds_mla", GLM5)
LAYERS: Final = GLM5.all_layers
REPEATS: Final = 15


class Rows(NamedTuple):
    """Source caches, landing memory and destination planes for one prompt length."""

    tokens: int
    table: PageTable
    caches: dict[str, list[torch.Tensor]]
    "component -> [layer] uint8 [page, byte]"
    landing: torch.Tensor
    parts: list[GatherPart]
    planes: dict[tuple[str, str], list[torch.Tensor]]
    "(component, region) -> [layer] bf16 [token, element]"


def main() -> None:
    """Measure, and print JSON."""
    options = argparse.ArgumentParser()
    options.add_argument("--tokens", type=int, nargs="*", default=[2048, 8192, 32768])
    options.add_argument("--quick", action="store_true", help="leave the matrix products out")
    chosen = options.parse_args()
    native = load("cuda")
    result: dict[str, Any] = {"machine": machine(), "layers": len(LAYERS), "runs": []}
    for tokens in chosen.tokens:
        result["runs"].append(measure(native, tokens))
        torch.cuda.empty_cache()
    if not chosen.quick:
        result["matrix_products"] = beside_products(native)
    json.dump(result, sys.stdout, indent=1)


def machine() -> dict[str, str]:
    """Card and versions."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    card, driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip().split(", ")
    return {
        "card": card,
        "driver": driver,
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "python": platform.python_version(),
    }


def rows_of(tokens: int) -> Rows:
    """Caches of twice as many pages as the prompt takes, filled with plausible rows, and everything behind them."""
    pages = tokens // PAGE
    generator = torch.Generator().manual_seed(tokens)
    table = PageTable(torch.randperm(2 * pages, generator=generator)[:pages].tolist(), PAGE)
    caches = {
        "mla_latent": [latent_pages(2 * pages) for _ in LAYERS],
        "index_key": [index_pages(2 * pages) for _ in LAYERS],
    }
    step = len(LAYERS) * sum(caches[name][0].shape[1] for name in caches)
    landing = torch.full((pages * step,), 0xA5, dtype=torch.uint8, device="cuda")
    parts, offset = [], 0
    for component in SOURCE.components:
        page_bytes = caches[component.name][0].shape[1]
        landed = stepped_component(landing_component(component), step)
        bases = [landing.data_ptr() + offset + index * page_bytes for index in range(len(LAYERS))]
        offset += page_bytes * len(LAYERS)
        parts.append(
            GatherPart(
                source=component,
                source_bases={"": [cache.data_ptr() for cache in caches[component.name]]},
                source_pages=table,
                destination=landed,
                destination_bases=bases,
                destination_pages=PageTable(range(pages), PAGE),
                layers=LAYERS,
                heads=range(1),
            )
        )
    return Rows(tokens, table, caches, landing, parts, planes_of(tokens))


def latent_pages(pages: int) -> torch.Tensor:
    """[page, 64 x 656]: codes, scales, rope."""
    rows = torch.empty((pages * PAGE, 656), dtype=torch.uint8, device="cuda")
    rows[:, :512] = random_codes(len(rows), 512)
    rows[:, 512:528] = (torch.rand((len(rows), 4), device="cuda") + 0.5).view(torch.uint8)
    rows[:, 528:] = torch.randn((len(rows), 64), device="cuda").bfloat16().view(torch.uint8)
    return rows.reshape(pages, -1)


def index_pages(pages: int) -> torch.Tensor:
    """[page, 64 x 128 + 64 x 4]: codes, then scales."""
    values = random_codes(pages, PAGE * 128)
    scales = torch.exp2(torch.randint(-9, -2, (pages, PAGE), device="cuda").float())
    return torch.cat((values, scales.view(torch.uint8)), dim=1)


def random_codes(rows: int, width: int) -> torch.Tensor:
    """Any e4m3 code but NaN."""
    return (
        torch.randint(0, 127, (rows, width), device="cuda") + 128 * torch.randint(0, 2, (rows, width), device="cuda")
    ).to(torch.uint8)


def planes_of(tokens: int) -> dict[tuple[str, str], list[torch.Tensor]]:
    """Destination planes of a length of their own, filled with what no conversion writes."""
    layout = build("tilert.bf16", GLM5, Options(length=tokens))
    planes = {}
    for component in layout.components:
        for plane in component.planes:
            shape = (tokens, plane.elements)
            planes[component.name, plane.region] = [
                torch.full(shape, -7.0, dtype=torch.bfloat16, device="cuda") for _ in LAYERS
            ]
    return planes


def converter(native: Native, rows: Rows) -> Callable[[int | None], int]:
    """Converts everything that has landed; returns the digest, where layers to hash are given."""
    layout = build("tilert.bf16", GLM5, Options(length=rows.tokens))
    calls = []
    for part in rows.parts:
        target = layout.component(part.source.name)
        at = Placement(
            1, {region: [t.data_ptr() for t in rows.planes[target.name, region]] for region in target.regions}
        )
        calls.append((derive_conversion(part.destination, target), part, at))

    def convert(digest: int | None) -> int:
        total = 0
        for conversion, part, at in calls:
            total += native.convert(
                conversion,
                source_bases=part.destination_bases,
                source_pages=part.destination_pages,
                destination_at=at,
                destination_pages=PageTable((0,), rows.tokens),
                tokens=range(rows.tokens),
                zero_until=0,
                digest_layers=None if digest is None else LAYERS,
            )
        return total % (1 << 64)

    return convert


def kernel_us(run: Callable[[], None], *, copies: bool = False) -> list[float]:
    """Microseconds of device work of each call: kernels, or copies on the device."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    found = []
    for _ in range(REPEATS):
        with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:
            run()
            torch.cuda.synchronize()
        events = [event for event in seen.events() if ("run_" in event.name) != copies and "HtoD" not in event.name]
        wanted = [
            event.device_time_total for event in events if "DtoH" not in event.name and event.device_time_total > 0
        ]
        found.append(sum(wanted))
    return found


def measure(native: Native, tokens: int) -> dict[str, Any]:
    """One prompt length."""
    rows = rows_of(tokens)
    convert = converter(native, rows)
    stream = torch.cuda.current_stream().cuda_stream
    gathered = native.gather(rows.parts, range(tokens), digest=True, stream=stream)
    gathered.wait()
    check_gather(rows)
    reference = sum(
        native.digest(part.source, layers=LAYERS, bases=part.source_bases, pages=rows.table, tokens=range(tokens))
        for part in rows.parts
    ) % (1 << 64)
    if not gathered.digest == reference == convert(0):
        raise SystemExit("the digests of gather, convert and digest differ")
    check_conversion(rows)
    moved = rows.landing.numel()
    written = sum(t.numel() * t.element_size() for planes in rows.planes.values() for t in planes)
    result: dict[str, Any] = {"tokens": tokens, "gathered_bytes": moved, "converted_bytes": written}
    for name, nbytes, run in (
        ("gather", 2 * moved, lambda: native.gather(rows.parts, range(tokens), digest=False, stream=stream).wait()),
        (
            "gather+digest",
            2 * moved,
            lambda: native.gather(rows.parts, range(tokens), digest=True, stream=stream).wait(),
        ),
        ("convert", moved + written, lambda: void(convert(None))),
        ("convert+digest", moved + written, lambda: void(convert(0))),
    ):
        floor = copy_us(nbytes)
        times = kernel_us(run)
        middle = statistics.median(times)
        result[name] = {
            "us": round(middle, 1),
            "spread_us": [round(min(times), 1), round(max(times), 1)],
            "tb_per_s": round(nbytes / middle / 1e6, 3),
            "copy_us": round(floor, 1),
            "copy_tb_per_s": round(nbytes / floor / 1e6, 3),
            "share_of_copy": round(floor / middle, 3),
            "call_us": round(call_us(native, rows, name, convert, stream), 1),
        }
        print(tokens, name, json.dumps(result[name]), file=sys.stderr)
    return result


def void(_: object) -> None:
    """Nothing."""


def copy_us(nbytes: int) -> float:
    """Median time of a device-to-device copy that reads and writes `nbytes` in total."""
    here = torch.randint(0, 255, (nbytes // 2,), dtype=torch.uint8, device="cuda")
    there = torch.empty_like(here)
    return statistics.median(kernel_us(lambda: void(there.copy_(here)), copies=True))


def call_us(native: Native, rows: Rows, name: str, convert: Callable[[int | None], int], stream: int) -> float:
    """What the calling thread spends: a gather returns before it is done, a conversion when it is."""
    times = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        if name.startswith("gather"):
            native.gather(rows.parts, range(rows.tokens), digest="digest" in name, stream=stream)
        else:
            convert(0 if "digest" in name else None)
        times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times)


def check_gather(rows: Rows) -> None:
    """All bytes."""
    pages = len(rows.table.ids)
    landed = rows.landing.reshape(pages, -1)
    ids = torch.tensor(list(rows.table.ids), device="cuda")
    at = 0
    for name in ("mla_latent", "index_key"):
        for cache in rows.caches[name]:
            width = cache.shape[1]
            if not torch.equal(landed[:, at : at + width], cache[ids]):
                raise SystemExit(f"gathered rows of {name} differ from the pages")
            at += width


def check_conversion(rows: Rows) -> None:
    """Every seventh layer, against torch."""
    ids = torch.tensor(list(rows.table.ids), device="cuda")
    for index in range(0, len(LAYERS), 7):
        latent = rows.caches["mla_latent"][index][ids].reshape(-1, 656)
        codes = latent[:, :512].contiguous().view(torch.float8_e4m3fn)
        values = dequantise_blocks(codes, latent[:, 512:528].contiguous().view(torch.float32), 128)
        keys = rows.caches["index_key"][index][ids]
        scales = keys[:, PAGE * 128 :].contiguous().view(torch.float32).reshape(-1, 1)
        decoded = dequantise_blocks(
            keys[:, : PAGE * 128].contiguous().view(torch.float8_e4m3fn).reshape(-1, 128), scales, 128
        )
        for (name, region), expected in {
            ("mla_latent", "latent"): values.bfloat16(),
            ("mla_latent", "rope"): latent[:, 528:].contiguous().view(torch.bfloat16),
            ("index_key", ""): hadamard128(decoded).bfloat16(),
        }.items():
            matching = [planes for key, planes in rows.planes.items() if key[0] == name and region in {key[1], ""}]
            if not any(torch.equal(planes[index], expected) for planes in matching):
                raise SystemExit(f"converted rows of {name}.{region} in layer {index} differ from torch's")


def beside_products(native: Native) -> dict[str, Any]:
    """How much later a loop of matrix products ends when a gather runs beside it."""
    rows = rows_of(32768)
    a, b = (torch.randn((8192, 8192), device="cuda").bfloat16() for _ in range(2))
    out = torch.empty_like(a)
    side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    count = 20

    def loop(gathers: int) -> float:
        torch.cuda.synchronize()
        start: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        stop: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record()
        for index in range(count):
            torch.mm(a, b, out=out)
            if index < gathers:
                native.gather(rows.parts, range(rows.tokens), digest=True, stream=side.cuda_stream)
        stop.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(stop))

    loop(1)
    result: dict[str, Any] = {"products": count, "size": 8192, "gathered_bytes": rows.landing.numel()}
    alone = statistics.median(loop(0) for _ in range(7))
    result["alone_ms"] = round(alone, 3)
    for gathers in (1, 4, 16):
        beside = statistics.median(loop(gathers) for _ in range(7))
        result[f"with_{gathers}_gathers_ms"] = round(beside, 3)
        result[f"cost_ms_per_gather_of_{gathers}"] = round((beside - alone) / gathers, 3)
    return result


if __name__ == "__main__":
    main()
