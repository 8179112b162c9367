"""GLM-5 rows from one process's GPU memory into another's over NIXL, on one GPU: raw writes, and whole handoffs.

    python benchmarks/gpu/handoff_nixl.py [--tokens N] > result.json

Needs torch with CUDA, cupy, nixl. Rows are written straight from shuffled pages (direct): there is no gather kernel
yet, so the source is not staged. Landed bytes are compared with the pages, all of them.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from importlib.metadata import version
from typing import Any, Final

import cupy
import torch

from pdhandoff import Consumer, HandoffId, Limits, MemoryKind, PageTable, Placement, Producer, Staging, Unannounced
from pdhandoff.engines.base import Extent, Memory, TransferState, Writes
from pdhandoff.engines.registry import create
from pdhandoff.layouts.catalogue import build
from pdhandoff.layouts.profiles import GLM5

__all__ = ["main"]

LAYOUT: Final = build("vllm.fp8_ds_mla", GLM5)
REPEATS: Final = 6
CHUNK: Final = 2048
ARENA: Final = 4 << 30


def on_gpu(address: int, nbytes: int) -> Any:
    """Raw GPU memory of this process as a cupy array of bytes."""
    memory = cupy.cuda.UnownedMemory(address, nbytes, None)
    return cupy.ndarray((nbytes,), cupy.uint8, cupy.cuda.MemoryPointer(memory, 0))


def pattern(layer: int, pages: Any, page_bytes: int) -> Any:
    """Contents [page, byte] of pages: another value for every layer, page and place."""
    place = cupy.arange(page_bytes, dtype=cupy.int64)
    return ((place[None] * 13 + pages[:, None] * 7 + layer * 131) % 251).astype(cupy.uint8)


def shuffled(tokens: int) -> list[int]:
    """The block table of a prompt in a cache of twice as many pages."""
    pages = -(-tokens // 64)
    return [(index * 37) % (2 * pages) for index in range(pages)]


def consume() -> None:
    """The other process: raw memory first, then handoffs; everything landed is compared."""
    mover = create("nixl")
    raw = mover.allocate(ARENA, MemoryKind.CUDA)
    region = mover.register(raw)
    say(mover.describe([Extent(raw.address, raw.length)]).hex(), raw.address)
    sys.stdin.readline()
    mover.deregister(region)
    mover.close()
    del raw
    torch.cuda.empty_cache()
    mover = create("nixl")
    limits = Limits(announce_s=600.0)
    with Consumer(
        mover=mover,
        layout=LAYOUT,
        arena_bytes=ARENA,
        memory=MemoryKind.CUDA,
        unannounced=Unannounced.WAIT,
        limits=limits,
    ) as consumer:
        say(consumer.address)
        for line in sys.stdin:
            handoff, tokens = line.split()
            ticket = consumer.announce(HandoffId.parse(handoff))
            consumer.statistics()
            say("announced")
            with ticket.wait(60) as arrival:
                say(compare(arrival, shuffled(int(tokens))))
    mover.close()


def compare(arrival: Any, table: list[int]) -> int:
    """Bytes of landed pages that differ from what their source pages hold."""
    wrong = 0
    ids = cupy.asarray(table, dtype=cupy.int64)
    for landed in arrival.rows():
        page_bytes, step, pages = landed.entry.page_bytes, landed.component.planes[0].page_stride, len(landed.pages.ids)
        first = landed.pages.first_token // landed.pages.page_tokens
        for layer, base in zip(landed.entry.layers, landed.placement.bases[""], strict=True):
            span = on_gpu(base, step * (pages - 1) + page_bytes)
            have = cupy.lib.stride_tricks.as_strided(span, (pages, page_bytes), (step, 1))
            wrong += int((have != pattern(layer, ids[first : first + pages], page_bytes)).sum())
    return wrong


def say(*words: object) -> None:
    """A line for the other side."""
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def raw_ms(mover: Any, child: Any, nbytes: int) -> list[float]:
    """Milliseconds of single writes of `nbytes`, the first one left out."""
    description, address = child.stdout.readline().split()
    source = mover.allocate(nbytes, MemoryKind.CUDA)
    region = mover.register(source)
    peer = mover.connect(bytes.fromhex(description))
    times = []
    for _ in range(REPEATS + 1):
        started = time.perf_counter()
        transfer = mover.submit(peer, Writes.of((source.address, int(address), nbytes)))
        while (status := mover.poll(transfer)).state is TransferState.PENDING:
            time.sleep(0.0001)
        times.append((time.perf_counter() - started) * 1e3)
        mover.release(transfer)
        if status.state is TransferState.FAILED:
            raise RuntimeError(status.reason)
    mover.deregister(region)
    child.stdin.write("\n")
    child.stdin.flush()
    return times[1:]


def handoff_ms(mover: Any, child: Any, tokens: int) -> tuple[list[float], int]:
    """Milliseconds from offer to READY, the first one left out, and bytes that landed wrong in all of them."""
    address = child.stdout.readline().strip()
    pages = 2 * len(shuffled(tokens))
    placements, memory = {}, []
    for component in LAYOUT.components:
        page_bytes = component.planes[0].page_stride
        layer_bytes = page_bytes * pages
        cache: Memory = mover.allocate(layer_bytes * len(component.layers), MemoryKind.CUDA)
        bases = [cache.address + index * layer_bytes for index in range(len(component.layers))]
        for layer, base in zip(component.layers, bases, strict=True):
            filled = pattern(layer, cupy.arange(pages, dtype=cupy.int64), page_bytes)
            on_gpu(base, layer_bytes)[:] = filled.reshape(-1)
        placements[component.name] = Placement(pages, {"": bases})
        memory.append(cache)
    cupy.cuda.runtime.deviceSynchronize()
    times, wrong = [], 0
    with Producer(
        mover=mover, layout=LAYOUT, placements=placements, memory=memory, staging=Staging.DIRECT, staging_bytes=1 << 20
    ) as producer:
        for _ in range(REPEATS + 1):
            handoff = HandoffId.mint()
            child.stdin.write(f"{handoff} {tokens}\n")
            child.stdin.flush()
            child.stdout.readline()
            started = time.perf_counter()
            outgoing = producer.offer(address, handoff, prompt_tokens=tokens, queue_s=30)
            for first in range(0, tokens, CHUNK):
                last = min(first + CHUNK, tokens)
                outgoing.push(PageTable(shuffled(tokens), 64), tokens=range(first, last))
            outgoing.commit()
            outgoing.wait(60)
            times.append((time.perf_counter() - started) * 1e3)
            wrong += int(child.stdout.readline())
    return times[1:], wrong


def main() -> int:
    """Measure, and print JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--consume", action="store_true")
    options = parser.parse_args()
    if options.consume:
        consume()
        return 0
    tokens = options.tokens
    nbytes = tokens * sum(each.row_bytes * len(each.layers) for each in LAYOUT.components)
    command = [sys.executable, __file__, "--consume"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        mover = create("nixl")
        raw = statistics.median(raw_ms(mover, child, nbytes))
        times, wrong = handoff_ms(mover, child, tokens)
        child.stdin.close()  # type: ignore[union-attr]
        child.wait(60)
        mover.close()
    direct = statistics.median(times)
    result = {
        "what": "handoff of GLM-5 rows between two processes on one GPU, NIXL, direct from shuffled 64-token pages",
        "card": torch.cuda.get_device_name(),
        "driver_cuda": torch.version.cuda,
        "versions": {name: version(name) for name in ("torch", "nixl-cu13", "msgspec")},
        "python": platform.python_version(),
        "tokens": tokens,
        "bytes": nbytes,
        "raw_write_ms": raw,
        "raw_gb_per_s": nbytes / raw / 1e6,
        "handoff_ms": direct,
        "handoff_gb_per_s": nbytes / direct / 1e6,
        "goodput_over_raw": raw / direct,
        "bytes_landed_wrong": wrong,
    }
    print(json.dumps(result, indent=2))
    return 0 if wrong == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
