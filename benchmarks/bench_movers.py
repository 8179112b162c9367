"""How much of a mover's own speed a handoff gets: 256 MiB of GLM-5 rows against one raw write of as many bytes."""

from __future__ import annotations

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


def raw_write(name: str, nbytes: int) -> float:
    """Best seconds of one write of `nbytes` through the mover, between two processes."""
    command = [sys.executable, str(Path(__file__).with_name("raw_peer.py")), name, str(-(-nbytes // 4096) * 4096)]
    mover = create(name)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        try:
            said = "" if child.stdout is None else child.stdout.readline()
            description, address = said.split()
            memory = mover.allocate(nbytes)
            mover.register(memory)
            peer = mover.connect(bytes.fromhex(description))
            best = float("inf")
            for _ in range(REPEATS + 1):  # the first one also touches the pages
                started = time.perf_counter()
                transfer = mover.submit(peer, Writes.of((memory.address, int(address), nbytes)))
                while (status := mover.poll(transfer)).state is TransferState.PENDING:
                    if time.perf_counter() - started > DEADLINE_S:
                        raise TimeoutError(f"{name}: a raw write took more than {DEADLINE_S:.0f} s")
                    time.sleep(0.0005)
                best = min(best, time.perf_counter() - started)
                mover.release(transfer)
                if status.state is TransferState.FAILED:
                    raise RuntimeError(f"{name}: {status.reason}")
        finally:
            child.communicate(timeout=30)
            mover.close()
    return best


def handoffs(name: str, staging: Staging, tokens: int, concurrent: int) -> float:
    """Best seconds of that many handoffs at once, offer to READY, of `tokens` tokens each."""
    pages = tokens // 64
    caches = Caches("glm5", 2 * pages)
    table = [(index * 37) % (2 * pages) for index in range(pages)]
    best = float("inf")
    with pair(caches, "glm5", 640 << 20, name, staging=staging, staging_bytes=320 << 20) as (producer, peer):
        for _ in range(REPEATS):
            ids = [HandoffId.mint() for _ in range(concurrent)]
            peer.announce(ids)
            started = time.perf_counter()
            outgoing = [hand_off(producer, peer, each, tokens, table) for each in ids]
            for each in outgoing:
                each.wait(DEADLINE_S)
            best = min(best, time.perf_counter() - started)
            peer.arrived()
    return best


def main() -> list[dict[str, object]]:
    """All figures, of the movers that are installed."""
    rows: list[dict[str, object]] = []
    row_bytes = 62_252  # of GLM-5, all layers
    for name in MOVERS:
        try:
            create(name).close()
        except PdHandoffError as error:
            print(f"{name}: not measured: {error.reason}", file=sys.stderr)
            continue
        raw = LARGE_TOKENS * row_bytes / raw_write(name, LARGE_TOKENS * row_bytes)
        rows.append(_row(f"raw write, {name}", raw / 1e9, "GB/s", "", "one write of 258 MiB between two processes"))
        for staging in (Staging.STAGED, Staging.DIRECT):
            for concurrent in CONCURRENT if staging is Staging.STAGED else (1,):
                tokens = LARGE_TOKENS // concurrent // 64 * 64
                moved = tokens * row_bytes * concurrent / handoffs(name, staging, tokens, concurrent)
                rows.append(
                    _row(
                        f"handoff goodput over the raw write, {name}, {staging.value}, {concurrent} at once",
                        moved / raw,
                        "",
                        ">= 0.95" if concurrent == 1 and staging is Staging.STAGED and name != "loopback" else "",
                        f"{concurrent} x {tokens} tokens of GLM-5, 79 layers, shuffled pages",
                    )
                )
    return rows


def _row(name: str, value: float, unit: str, reach: str, meaning: str) -> dict[str, object]:
    return {"name": name, "value": value, "unit": unit, "reach": reach, "meaning": meaning}


if __name__ == "__main__":
    print(json.dumps(main(), indent=2))
