"""How much of a mover's own speed a handoff gets: 256 MiB of GLM-5 rows against one raw write of as many bytes."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

from pdhandoff import HandoffId, PdHandoffError, Staging
from pdhandoff.engines.base import TransferState, Writes
from pdhandoff.engines.registry import create

sys.path.insert(0, str(Path(__file__).parent))
from bench_handoff import LARGE_TOKENS, Caches, hand_off, pair

__all__ = ["main"]

MOVERS: Final = ("loopback", "nixl", "mooncake")
REPEATS: Final = 5
CONCURRENT: Final = (1, 8, 64)
DEADLINE_S: Final = 120.0
ROW_BYTES: Final = 62_252
"of GLM-5, all layers"


class Raw:
    """One write of `nbytes` from memory that holds something to another process's, without any handoff."""

    def __init__(self, name: str, nbytes: int) -> None:
        size = -(-nbytes // 4096) * 4096
        command = [sys.executable, str(Path(__file__).with_name("raw_peer.py")), name, str(size)]
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._name = name
        self._mover = create(name)
        said = "" if self._child.stdout is None else self._child.stdout.readline()
        description, address = said.split()
        memory = self._mover.allocate(size)
        ctypes.memset(memory.address, 7, size)  # pages that were never written to are all one page of zeros
        self._mover.register(memory)
        self._peer = self._mover.connect(bytes.fromhex(description))
        self._write = memory.address, int(address), nbytes
        self()

    def __call__(self) -> float:
        """Seconds of one write."""
        mover = self._mover
        started = time.perf_counter()
        transfer = mover.submit(self._peer, Writes.of(self._write))
        while (status := mover.poll(transfer)).state is TransferState.PENDING:
            if time.perf_counter() - started > DEADLINE_S:
                raise TimeoutError(f"{self._name}: a raw write took more than {DEADLINE_S:.0f} s")
            time.sleep(0.0005)
        took = time.perf_counter() - started
        mover.release(transfer)
        if status.state is TransferState.FAILED:
            raise RuntimeError(f"{self._name}: {status.reason}")
        return took

    def close(self) -> None:
        """End the other process."""
        self._child.communicate(timeout=30)
        self._mover.close()


def handoffs(raw: Raw, name: str, staging: Staging, tokens: int, concurrent: int) -> tuple[float, float]:
    """Best seconds of a raw write, and of that many handoffs at once, offer to READY, of `tokens` tokens each.

    They take turns, so that whatever else the machine does slows down both.
    """
    pages = tokens // 64
    caches = Caches("glm5", 2 * pages)
    table = [(index * 37) % (2 * pages) for index in range(pages)]
    best = best_raw = float("inf")
    with pair(caches, "glm5", 640 << 20, name, staging=staging, staging_bytes=320 << 20) as (producer, peer):
        for _ in range(REPEATS):
            best_raw = min(best_raw, raw())
            ids = [HandoffId.mint() for _ in range(concurrent)]
            peer.announce(ids)
            started = time.perf_counter()
            outgoing = [hand_off(producer, peer, each, tokens, table) for each in ids]
            for each in outgoing:
                each.wait(DEADLINE_S)
            best = min(best, time.perf_counter() - started)
            peer.arrived()
    return best_raw, best


def main() -> list[dict[str, object]]:
    """All figures, of the movers that are installed."""
    rows: list[dict[str, object]] = []
    for name in MOVERS:
        try:
            create(name).close()
        except PdHandoffError as error:
            print(f"{name}: not measured: {error.reason}", file=sys.stderr)
            continue
        raw = Raw(name, LARGE_TOKENS * ROW_BYTES)
        try:
            rows += measure(name, raw)
        finally:
            raw.close()
    return rows


def measure(name: str, raw: Raw) -> list[dict[str, object]]:
    """The figures of one mover."""
    rows: list[dict[str, object]] = []
    fastest = float("inf")
    for staging in (Staging.STAGED, Staging.DIRECT):
        for concurrent in CONCURRENT if staging is Staging.STAGED else (1,):
            tokens = LARGE_TOKENS // concurrent // 64 * 64
            alone, together = handoffs(raw, name, staging, tokens, concurrent)
            fastest = min(fastest, alone)
            moved = tokens * concurrent / LARGE_TOKENS
            rows.append(
                _row(
                    f"handoff goodput over the raw write, {name}, {staging.value}, {concurrent} at once",
                    moved * alone / together,
                    "",
                    ">= 0.95" if concurrent == 1 and staging is Staging.STAGED else "",
                    f"{concurrent} x {tokens} tokens of GLM-5, 79 layers, shuffled pages; in turns with the raw write",
                )
            )
    speed = LARGE_TOKENS * ROW_BYTES / fastest / 1e9
    return [_row(f"raw write, {name}", speed, "GB/s", "", "one write of 258 MiB between two processes"), *rows]


def _row(name: str, value: float, unit: str, reach: str, meaning: str) -> dict[str, object]:
    return {"name": name, "value": value, "unit": unit, "reach": reach, "meaning": meaning}


if __name__ == "__main__":
    print(json.dumps(main(), indent=2))
