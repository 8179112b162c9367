"""Handoffs between two processes over the loopback mover: latency and rate of small ones, goodput of a large one."""

from __future__ import annotations

import ctypes
import json
import mmap
import random
import socket
import statistics
import subprocess
import sys
import time
from collections import deque
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pdhandoff import HandoffId, Memory, Outgoing, PageTable, Placement, Producer, Staging

sys.path.insert(0, str(Path(__file__).parent))
from handoff_layouts import named_layout

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["main"]

PEER: Final = Path(__file__).with_name("handoff_peer.py")
SMALL_TOKENS: Final = 64
SMALL: Final = 2000
WINDOW: Final = 64
LARGE_TOKENS: Final = 4352
"about 256 MiB of GLM-5 rows"
CHUNK: Final = 512
REPEATS: Final = 7


class Peer:
    """The consumer process."""

    def __init__(self, layout: str, arena: int, mover: str = "loopback") -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(PEER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._tell({"mover": mover, "layout": layout, "arena": arena})
        self.address = self._hear()

    def announce(self, ids: list[HandoffId]) -> None:
        """Have the peer wait for these."""
        self._tell([str(each) for each in ids])
        self._hear()

    def arrived(self) -> None:
        """Wait until all that was announced last has arrived and was released."""
        self._hear()

    def close(self) -> None:
        """End it."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait(30)

    def _tell(self, what: object) -> None:
        if self._process.stdin is not None:
            self._process.stdin.write(json.dumps(what) + "\n")
            self._process.stdin.flush()

    def _hear(self) -> str:
        return "" if self._process.stdout is None else self._process.stdout.readline().strip()


class Caches:
    """Paged caches of one model, filled once, in anonymous memory."""

    def __init__(self, layout: str, pages: int) -> None:
        self.layout = named_layout(layout)
        self.placements: dict[str, Placement] = {}
        self.memory: list[Memory] = []
        for component in self.layout.components:
            stride = component.planes[0].page_stride
            memory = mmap.mmap(-1, stride * pages * len(component.layers))
            memory.write(bytes(range(256)) * (len(memory) // 256))
            base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
            self.memory.append(Memory(base, len(memory), owner=memory))
            bases = [base + index * stride * pages for index in range(len(component.layers))]
            self.placements[component.name] = Placement(pages, {"": bases})


@contextmanager
def pair(
    caches: Caches, name: str, arena: int, mover: str = "loopback", **options: Any
) -> Iterator[tuple[Producer, Peer]]:
    """A producer here, a consumer in another process."""
    peer = Peer(name, arena, mover)
    try:
        with Producer(
            mover=mover, layout=caches.layout, placements=caches.placements, memory=caches.memory, **options
        ) as producer:
            yield producer, peer
    finally:
        peer.close()


def hand_off(producer: Producer, peer: Peer, handoff: HandoffId, tokens: int, pages: list[int]) -> Outgoing:
    """Offer, push in chunks, commit."""
    outgoing = producer.offer(peer.address, handoff, prompt_tokens=tokens, queue_s=30)
    for start in range(0, tokens, CHUNK):
        outgoing.push(PageTable(pages, 64), tokens=range(start, min(start + CHUNK, tokens)))
    outgoing.commit()
    return outgoing


def small() -> tuple[float, float]:
    """Median latency in us, one after another, and handoffs a second with a window of them under way."""
    caches = Caches("small", 64)
    with pair(caches, "small", 256 << 20, staging_bytes=64 << 20) as (producer, peer):
        ids = [HandoffId.mint() for _ in range(SMALL)]
        peer.announce(ids)
        times = []
        for each in ids:
            started = time.perf_counter()
            hand_off(producer, peer, each, SMALL_TOKENS, [5]).wait(10)
            times.append(time.perf_counter() - started)
        peer.arrived()
        ids = [HandoffId.mint() for _ in range(SMALL)]
        peer.announce(ids)
        started = time.perf_counter()
        window: deque[Outgoing] = deque()
        for each in ids:
            if len(window) == WINDOW:
                window.popleft().wait(10)
            window.append(hand_off(producer, peer, each, SMALL_TOKENS, [5]))
        while window:
            window.popleft().wait(10)
        rate = SMALL / (time.perf_counter() - started)
        peer.arrived()
    return statistics.median(times[100:]) * 1e6, rate


def bare_round_trip() -> float:
    """Median us of a 100-byte message there and back over TCP between two Python processes that do nothing else."""
    code = "import socket,sys\ns=socket.create_connection(('127.0.0.1',int(sys.argv[1])))\ns.setsockopt(6,1,1)\n"
    code += "while (d:=s.recv(4096)): s.sendall(d)\n"
    with socket.create_server(("127.0.0.1", 0)) as server:
        command = [sys.executable, "-c", code, str(server.getsockname()[1])]
        with subprocess.Popen(command) as child, server.accept()[0] as sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            times = []
            for _ in range(SMALL):
                started = time.perf_counter()
                sock.sendall(bytes(100))
                sock.recv(4096)
                times.append(time.perf_counter() - started)
            sock.close()
            child.wait(10)
    return statistics.median(times) * 1e6


def large(staging: Staging) -> float:
    """Best seconds from offer to READY of about 256 MiB of GLM-5 rows in shuffled pages."""
    pages = LARGE_TOKENS // 64
    caches = Caches("glm5", 2 * pages)
    table = [(index * 37) % (2 * pages) for index in range(pages)]
    best = float("inf")
    with pair(caches, "glm5", 512 << 20, staging=staging, staging_bytes=320 << 20) as (producer, peer):
        for _ in range(REPEATS):
            handoff = HandoffId.mint()
            peer.announce([handoff])
            started = time.perf_counter()
            hand_off(producer, peer, handoff, LARGE_TOKENS, table).wait(60)
            best = min(best, time.perf_counter() - started)
            peer.arrived()
    return best


def plain_copy(nbytes: int, page_bytes: int) -> float:
    """Best seconds of memmoves of as many bytes, a page at a time in shuffled order, into shared memory."""
    source, destination = mmap.mmap(-1, nbytes), mmap.mmap(-1, nbytes)
    source.write(bytes(nbytes))
    destination.write(bytes(nbytes))
    from_, to = (ctypes.addressof(ctypes.c_char.from_buffer(each)) for each in (source, destination))
    offsets = [index * page_bytes for index in range(nbytes // page_bytes)]
    shuffled = random.Random(1).sample(offsets, len(offsets))
    best = float("inf")
    for _ in range(REPEATS):
        started = time.perf_counter()
        for destination_offset, source_offset in zip(offsets, shuffled, strict=True):
            ctypes.memmove(to + destination_offset, from_ + source_offset, page_bytes)
        best = min(best, time.perf_counter() - started)
    return best


def main() -> list[dict[str, object]]:
    """All figures."""
    latency, rate = small()
    nbytes = LARGE_TOKENS * sum(
        component.row_bytes * len(component.layers) for component in named_layout("glm5").components
    )
    components = named_layout("glm5").components
    copy = sum(
        plain_copy(LARGE_TOKENS * each.row_bytes * len(each.layers), each.planes[0].page_stride) for each in components
    )
    shape = f"{SMALL_TOKENS} tokens, 2 layers, loopback mover, two processes"
    size = f"{nbytes >> 20} MiB of GLM-5 rows, {LARGE_TOKENS} tokens x 79 layers, shuffled pages, chunks of {CHUNK}"
    rows: list[dict[str, object]] = [
        {
            "name": "small handoff, offer to READY, median",
            "value": latency,
            "unit": "us",
            "reach": "<= 300",
            "meaning": f"{shape}, one after another",
        },
        {
            "name": "bare TCP round trip, median",
            "value": bare_round_trip(),
            "unit": "us",
            "reach": "",
            "meaning": "the floor under the line above: a handoff makes two of them, OFFER and GRANT, COMMIT and READY",
        },
        {
            "name": "small handoffs",
            "value": rate,
            "unit": "a second",
            "reach": ">= 2,000",
            "meaning": f"{shape}, {WINDOW} under way",
        },
    ]
    for staging, name in ((Staging.DIRECT, "direct"), (Staging.STAGED, "staged")):
        rows.append(
            {
                "name": f"goodput of a large handoff over a plain copy of its pages, {name}",
                "value": copy / large(staging),
                "unit": "",
                "reach": "",
                "meaning": f"{size}; {'one copy' if staging is Staging.DIRECT else 'two copies, through the ring'}",
            }
        )
    return rows


if __name__ == "__main__":
    print(json.dumps(main(), indent=2))
