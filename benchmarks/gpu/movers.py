"""Movers in GPU memory: the conformance table, raw writes, and handoffs beside them, between two processes.

    python benchmarks/gpu/movers.py --out FOLDER [--mover nixl] [--mover mooncake] [--tokens N ...]

Writes FOLDER/movers-NAME.json, with the card and the versions, and a summary on standard output. A mover whose wheel is
not installed is named and left out. `--memory cpu` tries the script on a machine without a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from pdhandoff import Consumer, HandoffId, Limits, PageTable, PdHandoffError, Placement, Producer, Staging
from pdhandoff.engines.base import Extent, Memory, MemoryKind, Mover, TransferState, Writes
from pdhandoff.layouts.catalogue import build
from pdhandoff.layouts.profiles import GLM5
from pdhandoff.testing.bytes_at import fill_bytes, read_bytes
from pdhandoff.testing.lines import LineProcess
from pdhandoff.testing.loading import make_mover
from pdhandoff.testing.place import Place
from pdhandoff.testing.rule import Violation
from pdhandoff.testing.side import Side

__all__ = ["main"]

LAYOUT: Final = build("vllm.fp8_ds_mla", GLM5)
OPTIONS: Final[dict[str, dict[str, object]]] = {"mooncake": {"protocol": "nvlink_intra"}}
"in GPU memory"
PACKAGES: Final = ("torch", "nixl-cu13", "mooncake-transfer-engine-cuda13", "msgspec", "cffi")
RAW_BYTES: Final = (64 << 10, 1 << 20, 16 << 20, 256 << 20, 1 << 30)
SMALL: Final = (4096, 16 << 10)
"writes of one batch, and bytes of each"
REPEATS: Final = 7
CHUNK: Final = 2048
FILL: Final = 0x5A
DEADLINE_S: Final = 120.0
PAUSE: Final = threading.Event()
"never set"
_PROBLEMS: Final = (PdHandoffError, RuntimeError, TimeoutError, ValueError, Violation)
"what is written down where a figure would be"


def conformance(name: str, options: dict[str, object], place: Place, within_s: float) -> dict[str, Any]:
    """What `pdhandoff conformance` finds, in a process of its own with a deadline."""
    command = [sys.executable, "-m", "pdhandoff", "conformance", "--mover", name, "--json"]
    command += ["--memory", place.kind.value, "--device", str(place.device)]
    for key, value in options.items():
        command += ["--option", f"{key}={json.dumps(value)}"]
    started = time.monotonic()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=within_s, check=False)
    except subprocess.TimeoutExpired:
        return {"problem": f"it did not end within {within_s:g} s"}
    if not done.stdout:
        return {"problem": done.stderr[-2000:]}
    results = json.loads(done.stdout)["results"]
    counts = {verdict: sum(each["verdict"] == verdict for each in results) for verdict in ("pass", "fail", "skip")}
    return {"exit": done.returncode, "elapsed_s": time.monotonic() - started, **counts, "results": results}


def timed(mover: Mover, peer: Any, writes: Writes) -> float:
    """Seconds of one batch, from `submit` to DONE."""
    started = time.perf_counter()
    transfer = mover.submit(peer, writes)
    while (status := mover.poll(transfer)).state is TransferState.PENDING:
        if time.perf_counter() - started > DEADLINE_S:
            raise TimeoutError(f"a write took more than {DEADLINE_S:g} s")
        PAUSE.wait(0.0001)  # without it the mover's own thread waits for the interpreter's lock, 5 ms at a time
    took = time.perf_counter() - started
    mover.release(transfer)
    if status.state is TransferState.FAILED:
        raise RuntimeError(status.reason)
    return took


def raw(
    name: str, options: dict[str, object], place: Place, sizes: Sequence[int], *, small: bool = False
) -> list[dict[str, Any]]:
    """Single writes of several sizes, and one batch of many small ones, into another process's memory."""
    other = LineProcess("pdhandoff.testing.peer", name, json.dumps(options), place.spell())
    side = None
    try:
        units = -(-max(*sizes, SMALL[0] * SMALL[1]) // os.sysconf("SC_PAGESIZE"))
        opened = other.ask({"do": "open", "units": units, "settle_s": DEADLINE_S}, DEADLINE_S)
        side = Side(make_mover(name, options), units, DEADLINE_S, place)
        whole = Extent(opened["address"], side.length)
        description = other.ask({"do": "describe", "extents": [whole]}, DEADLINE_S)["description"]
        peer = side.connect(bytes.fromhex(description), [whole])
        rows = []
        for nbytes in sizes:
            write = Writes.of((side.address, whole.address, nbytes))
            rows.append(_figures(f"one write of {nbytes >> 10} KiB", nbytes, side.mover, peer, write))
        if small:
            count, each = SMALL
            order = [(index * 37) % count * each for index in range(count)]
            batch = Writes.of(*((side.address + at, whole.address + at, each) for at in order))
            rows.append(_figures(f"{count} writes of {each >> 10} KiB", count * each, side.mover, peer, batch))
        return rows
    finally:
        other.end()
        if side is not None:
            side.close()


def _figures(what: str, nbytes: int, mover: Mover, peer: Any, writes: Writes) -> dict[str, Any]:
    first = timed(mover, peer, writes)
    times = [timed(mover, peer, writes) for _ in range(REPEATS)]
    median = statistics.median(times)
    return {"what": what, "first_ms": first * 1e3, "median_ms": median * 1e3, "gb_per_s": nbytes / median / 1e9}


# ---- handoffs


def consume(name: str, options: dict[str, object], place: Place, arena: int) -> None:
    """The other process: announces every id that it is told, and looks at what has landed."""
    mover = make_mover(name, options)
    with Consumer(
        mover=mover, layout=LAYOUT, arena_bytes=arena, memory=place.kind, limits=Limits(announce_s=600.0)
    ) as consumer:
        say(consumer.address)
        for line in sys.stdin:
            ticket = consumer.announce(HandoffId.parse(line.strip()))
            consumer.statistics()
            say("announced")
            with ticket.wait(DEADLINE_S) as arrival:
                say(wrong_bytes(arrival, place))
    mover.close()


def wrong_bytes(arrival: Any, place: Place) -> int:
    """Bytes that are not what the source holds, in the first and the last page of every layer."""
    wrong = 0
    for landed in arrival.rows():
        step, page_bytes = landed.component.planes[0].page_stride, landed.entry.page_bytes
        for base in landed.placement.bases[""]:
            for page in {0, len(landed.pages.ids) - 1}:
                memory = Memory(base + page * step, page_bytes, place.kind, place.device)
                wrong += page_bytes - read_bytes(memory, 0, page_bytes).count(FILL)
    return wrong


def say(*words: object) -> None:
    """A line for the other side."""
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


@contextmanager
def consumer_process(name: str, place: Place, arena: int) -> Iterator[Any]:
    """A consumer, by its pipes."""
    command = [sys.executable, __file__, "--consume", name, "--memory", place.kind.value, "--arena", str(arena)]
    command += ["--device", str(place.device)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        try:
            yield child
        finally:
            if child.stdin is not None:
                child.stdin.close()
            try:
                child.wait(30)
            except subprocess.TimeoutExpired:
                child.kill()


def handoffs(name: str, options: dict[str, object], place: Place, tokens: int, staging: Staging) -> dict[str, Any]:
    """Offer to READY, GLM-5 rows in shuffled pages, the prompt pushed in chunks; and raw writes of as many bytes."""
    pages = -(-tokens // 64)
    table = PageTable([(index * 37) % (2 * pages) for index in range(pages)], 64)
    nbytes = tokens * sum(each.row_bytes * len(each.layers) for each in LAYOUT.components)
    mover = make_mover(name, options)
    placements, memory = {}, []
    for component in LAYOUT.components:
        layer_bytes = component.planes[0].page_stride * 2 * pages
        cache = mover.allocate(layer_bytes * len(component.layers), place.kind, place.device)
        fill_bytes(cache, FILL, 0, cache.length)
        bases = [cache.address + index * layer_bytes for index in range(len(component.layers))]
        placements[component.name] = Placement(2 * pages, {"": bases})
        memory.append(cache)
    times, wrong = [], 0
    with (
        consumer_process(name, place, 2 * nbytes + (64 << 20)) as child,
        Producer(
            mover=mover,
            layout=LAYOUT,
            placements=placements,
            memory=memory,
            staging=staging,
            staging_bytes=512 << 20,
            ring_kind=place.kind,
            ring_device=place.device,
        ) as producer,
    ):
        address = child.stdout.readline().strip()
        for _ in range(REPEATS + 1):
            handoff = HandoffId.mint()
            child.stdin.write(f"{handoff}\n")
            child.stdin.flush()
            child.stdout.readline()
            started = time.perf_counter()
            outgoing = producer.offer(address, handoff, prompt_tokens=tokens, queue_s=30)
            for first in range(0, tokens, CHUNK):
                outgoing.push(table, tokens=range(first, min(first + CHUNK, tokens)))
            outgoing.commit()
            outgoing.wait(DEADLINE_S)
            times.append(time.perf_counter() - started)
            wrong += int(child.stdout.readline())
    mover.close()
    median = statistics.median(times[1:])
    return {
        "staging": staging.value,
        "tokens": tokens,
        "bytes": nbytes,
        "median_ms": median * 1e3,
        "gb_per_s": nbytes / median / 1e9,
        "bytes_landed_wrong": wrong,
    }


def beside_raw(name: str, options: dict[str, object], place: Place, tokens: int) -> Iterator[dict[str, Any]]:
    """Handoffs of one length, staged and direct, and the raw write of as many bytes in the same run."""
    for staging in (Staging.STAGED, Staging.DIRECT):
        try:
            row = handoffs(name, options, place, tokens, staging)
            (whole,) = raw(name, options, place, [row["bytes"]])
        except _PROBLEMS as error:
            yield {"staging": staging.value, "tokens": tokens, "problem": f"{type(error).__name__}: {error}"}
        else:
            ratio = whole["median_ms"] / row["median_ms"]
            yield {**row, "raw_ms": whole["median_ms"], "goodput_over_raw": ratio}


# ---- everything


def measure(name: str, place: Place, tokens: Sequence[int], within_s: float) -> dict[str, Any]:
    """All of one mover."""
    options = OPTIONS.get(name, {}) if place.kind is MemoryKind.CUDA else {}
    result: dict[str, Any] = {"mover": name, "options": options, "memory": place.kind.value, **machine(place)}
    say(f"{name}: conformance in {place.kind.value} memory")
    result["conformance"] = conformance(name, options, place, within_s)
    say({key: value for key, value in result["conformance"].items() if key != "results"})
    try:
        result["raw"] = raw(name, options, place, RAW_BYTES, small=True)
    except _PROBLEMS as error:
        result["raw"] = {"problem": f"{type(error).__name__}: {error}"}
    say(json.dumps(result["raw"]))
    result["handoffs"] = []
    for count in tokens:
        for row in beside_raw(name, options, place, count):
            result["handoffs"].append(row)
            say(json.dumps(row))
    return result


def machine(place: Place) -> dict[str, Any]:
    """The card and the versions."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    facts: dict[str, Any] = {"python": platform.python_version(), "versions": found}
    if place.kind is MemoryKind.CUDA:
        command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader", "-i", str(place.device)]
        facts["card"] = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return facts


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="folder for the results")
    parser.add_argument("--mover", action="append", help="default: nixl and mooncake")
    parser.add_argument("--tokens", type=int, action="append", help="multiples of 64 (default: 8192 and 32768)")
    parser.add_argument("--memory", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--device", type=int, default=0)
    parser.add_argument("--within", type=float, default=300.0, help="seconds for the conformance table of one mover")
    parser.add_argument("--consume", metavar="NAME", help=argparse.SUPPRESS)
    parser.add_argument("--arena", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    """Measure what is installed. 1 when a rule failed, bytes landed wrong, or something could not be measured."""
    options = arguments()
    place = Place(MemoryKind(options.memory), options.device)
    if options.consume:
        mover_options = OPTIONS.get(options.consume, {}) if place.kind is MemoryKind.CUDA else {}
        consume(options.consume, mover_options, place, options.arena)
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    good = True
    for name in options.mover or ("nixl", "mooncake"):
        try:
            make_mover(name, OPTIONS.get(name, {}) if place.kind is MemoryKind.CUDA else {}).close()
        except PdHandoffError as error:
            say(f"{name}: left out: {error.reason}")
            continue
        result = measure(name, place, options.tokens or (8192, 32768), options.within)
        (options.out / f"movers-{name}.json").write_text(json.dumps(result, indent=2) + "\n")
        rows = result["handoffs"]
        good &= result["conformance"].get("exit") == 0 and not any(row.get("bytes_landed_wrong", 1) for row in rows)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
