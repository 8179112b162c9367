"""A fake prefill engine, a decode side that checks every row, and the two joined in one process.

Every row says which request, component, plane, layer, head and token it belongs to, so that any mix-up shows.
"""

from __future__ import annotations

import ctypes
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import msgspec

from pdhandoff import (
    Arrival,
    Consumer,
    HandoffId,
    Layout,
    Limits,
    Memory,
    Outgoing,
    PageTable,
    Placement,
    Producer,
    Shard,
)
from pdhandoff.engines.base import Mover
from pdhandoff.engines.faults import Faulty, Rule
from pdhandoff.engines.loopback import create
from pdhandoff.layouts import Component, ComponentKind, Element, Model, Plane
from pdhandoff.protocol.consumer import ConsumerStatistics
from pdhandoff.runtime.chunks import Chunk
from support.components import fp8_index

__all__ = [
    "FAST",
    "LAYOUT",
    "WIDE",
    "Counts",
    "Pair",
    "Prefill",
    "Request",
    "check_rows",
    "counts",
    "index_component",
    "kv_component",
    "leaves_nothing",
    "make_layout",
    "push_all",
    "right_rows",
    "until",
]

DEADLINE_S = 20.0
"nothing that works takes this long"

FAST = Limits(drain_s=0.2)
"ended writers are fenced soon; everything else has time"


def kv_component(
    name: str = "kv", *, page_tokens: int = 16, layers: Sequence[int] = (0, 1, 2), heads: range = range(2), of: int = 2
) -> Component:
    """Keys and values of 8 bytes, side by side, heads inside a token."""
    row = 16 * len(heads)
    key = Plane(
        name="key", element=Element.BF16, elements=4, page_stride=page_tokens * row, token_stride=row, head_stride=16
    )
    return Component(
        name=name,
        kind=ComponentKind.KEY_VALUE,
        layers=tuple(layers),
        page_tokens=page_tokens,
        planes=(key, msgspec.structs.replace(key, name="value", offset=8)),
        heads=len(heads),
        head_start=heads.start,
        heads_total=of,
    )


def index_component(name: str = "index_key", *, page_tokens: int = 8, layers: Sequence[int] = (0, 1, 2)) -> Component:
    """Planar pages: all values of a page, then all scales."""
    return fp8_index(name=name, layers=layers, page_tokens=page_tokens, elements=16)


def make_layout(*components: Component, layers: int = 3) -> Layout:
    """A layout of these components."""
    return Layout(name="test", model=Model(name="test", layers=layers), components=components)


LAYOUT = make_layout(kv_component(), index_component())
"two components with different page sizes"


_KEY = Plane(name="key", element=Element.BF16, elements=16384, page_stride=1 << 20, token_stride=1 << 16)
WIDE = make_layout(
    Component(
        name="wide",
        kind=ComponentKind.KEY_VALUE,
        layers=(0, 1, 2),
        page_tokens=16,
        planes=(_KEY, msgspec.structs.replace(_KEY, name="value", offset=1 << 15)),
    )
)
"few rows of 32 KiB: moving a prompt takes a while, checking it does not"


def row_bytes(tag: int, component: str, plane: Plane, *, layer: int, head: int, token: int) -> bytes:
    """What a row holds: the start says whose it is."""
    mark = sum(component.encode()) + sum(plane.name.encode()) * 7 & 0xFF
    seed = bytes((tag & 0xFF, token & 0xFF, mark, layer << 4 | head, token >> 8 & 0xFF, tag >> 8 & 0xFF, 0x5A, 0xC3))
    return (seed * (plane.row_bytes // 8 + 1))[: plane.row_bytes]


class Request(NamedTuple):
    """One prompt, and the pages that hold its rows."""

    tag: int
    tokens: int
    tables: Mapping[str, PageTable]


class Prefill:
    """Paged caches with shuffled page ids. Pages of other requests lie between those of one."""

    def __init__(self, layout: Layout = LAYOUT, *, pages: int = 128, seed: int = 0) -> None:
        self.layout = layout
        self.placements: dict[str, Placement] = {}
        self.memory: list[Memory] = []
        self._random = random.Random(seed)
        self._free: dict[str, list[int]] = {}
        for component in layout.components:
            ids = list(range(1, pages))
            self._random.shuffle(ids)
            self._free[component.name] = ids
            bases: dict[str, list[int]] = {region: [] for region in component.regions}
            for region in component.regions:
                stride = max(plane.page_stride for plane in component.planes if plane.region == region)
                for _ in component.layers:
                    buffer = (ctypes.c_ubyte * (pages * stride))()
                    bases[region].append(ctypes.addressof(buffer))
                    self.memory.append(Memory(ctypes.addressof(buffer), pages * stride, owner=buffer))
            self.placements[component.name] = Placement(pages, bases)

    def request(self, tag: int, tokens: int, *, filled: bool = True) -> Request:
        """Pages for a prompt, and its rows unless they come later."""
        tables = {
            component.name: PageTable(
                [self._free[component.name].pop() for _ in range(-(-tokens // component.page_tokens))],
                component.page_tokens,
            )
            for component in self.layout.components
        }
        request = Request(tag, tokens, tables)
        if filled:
            self.fill(request, range(tokens))
        return request

    def fill(self, request: Request, tokens: range, *, tag: int | None = None) -> None:
        """Write the rows of some tokens."""
        whose = request.tag if tag is None else tag
        for address, data in self._rows(request, tokens, whose):
            ctypes.memmove(address, data, len(data))

    def free(self, request: Request) -> None:
        """Its pages go to others, which overwrite them."""
        self.fill(request, range(request.tokens), tag=0xDEAD)
        for name, table in request.tables.items():
            self._free[name].extend(table.ids)

    def _rows(self, request: Request, tokens: range, tag: int) -> Iterator[tuple[int, bytes]]:
        for component in self.layout.components:
            at = self.placements[component.name]
            table = request.tables[component.name]
            yield from right_rows(component, at, layers=component.layers, table=table, tokens=tokens, tag=tag)


def right_rows(
    component: Component, at: Placement, *, layers: Sequence[int], table: PageTable, tokens: range, tag: int
) -> Iterator[tuple[int, bytes]]:
    """(address, right bytes) of every row, by the address formula of the descriptor. Dense rows only."""
    for plane in component.planes:
        for base, layer in zip(at.bases[plane.region], layers, strict=True):
            for token in tokens:
                page, slot = divmod(token - table.first_token, table.page_tokens)
                row = base + table.ids[page] * plane.page_stride + plane.offset + slot * plane.token_stride
                for head in range(component.heads):
                    data = row_bytes(
                        tag, component.name, plane, layer=layer, head=component.head_start + head, token=token
                    )
                    yield row + head * plane.head_stride, data


def check_rows(arrival: Arrival, tag: int) -> int:
    """Check every landed row of an arrival. Returns how many there were."""
    count = 0
    for landed in arrival.rows():
        layers, table = landed.entry.layers, landed.pages
        rows = right_rows(landed.component, landed.placement, layers=layers, table=table, tokens=landed.tokens, tag=tag)
        for address, data in rows:
            assert ctypes.string_at(address, len(data)) == data, f"{landed.entry.component} of {tag:#x} at {address:#x}"
            count += 1
    return count


def until(condition: Callable[[], object], what: str = "", *, timeout_s: float = DEADLINE_S) -> None:
    """Wait until something is so; fail when it takes too long."""
    deadline = time.monotonic() + timeout_s
    never = threading.Event()
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"still not so after {timeout_s} s: {what or condition}")
        never.wait(0.001)


class Counts(NamedTuple):
    """What a process holds that an endpoint could leak."""

    threads: int
    descriptors: int


def counts() -> Counts:
    """How it is now."""
    ours = [thread for thread in threading.enumerate() if thread.name.startswith("pdhandoff")]
    return Counts(len(ours), len(list(Path("/proc/self/fd").iterdir())))


@contextmanager
def leaves_nothing() -> Iterator[None]:
    """Fail when there are more threads or descriptors afterwards than before."""
    before = counts()
    yield
    until(lambda: all(now <= then for now, then in zip(counts(), before, strict=True)), f"{counts()} after {before}")


class Pair:
    """A consumer and one or more producers in one process, each with a fake prefill engine and a mover of its own."""

    def __init__(
        self,
        *,
        layout: Layout = LAYOUT,
        shards: Sequence[Layout] | None = None,
        limits: Limits = FAST,
        arena_bytes: int = 1 << 20,
        staging_bytes: int = 1 << 18,
        rules: Sequence[Rule] = (),
        consumer: Mapping[str, Any] | None = None,
        producer: Mapping[str, Any] | None = None,
        counted: bool = True,
        mover: Callable[[], Mover] = create,
    ) -> None:
        self.before = counts() if counted else None
        self._stack = ExitStack()
        self._mover = mover
        sources = [layout] if shards is None else list(shards)
        self.landing_mover = mover()
        self._stack.callback(self.landing_mover.close)
        self.consumer = Consumer(
            mover=self.landing_mover, layout=layout, arena_bytes=arena_bytes, limits=limits, **(consumer or {})
        )
        self._stack.callback(lambda: self.consumer.close(drain_s=1.0))
        self.total_bytes = self.consumer.statistics().book.total_bytes
        self.engines: list[Prefill] = []
        self.faults: list[Faulty] = []
        self.producers: list[Producer] = []
        common = {"replicas": Shard(0, 1), "limits": limits, "staging_bytes": staging_bytes}
        self._options = {**common, **(producer or {})}
        for rank, source in enumerate(sources):
            self._add(source, Shard(rank, len(sources)), rules)

    def replace_producer(self) -> None:
        """The only producer is closed: another one, on another mover without faults, takes its place."""
        layout = self.engine.layout
        for things in (self.engines, self.faults, self.producers):
            things.clear()
        self._add(layout, Shard(0, 1), ())

    def _add(self, layout: Layout, shard: Shard, rules: Sequence[Rule]) -> None:
        engine = Prefill(layout, seed=shard.rank)
        mover = Faulty(self._mover(), rules)
        self._stack.callback(mover.close)
        producer = Producer(
            mover=mover,
            layout=layout,
            placements=engine.placements,
            memory=engine.memory,
            **{"shard": shard, **self._options},
        )
        self._stack.callback(lambda: producer.close(drain_s=1.0))
        self.engines.append(engine)
        self.faults.append(mover)
        self.producers.append(producer)

    @property
    def address(self) -> str:
        """Where the consumer listens."""
        return str(self.consumer.address)

    @property
    def producer(self) -> Producer:
        """The only one."""
        (producer,) = self.producers
        return producer

    @property
    def engine(self) -> Prefill:
        """Of the only producer."""
        (engine,) = self.engines
        return engine

    @property
    def fault(self) -> Faulty:
        """The only producer's mover."""
        (mover,) = self.faults
        return mover

    def offer(self, handoff: HandoffId, tokens: int, **options: Any) -> Outgoing:
        """Offer by the only producer."""
        return self.producer.offer(self.address, handoff, prompt_tokens=tokens, **options)

    def send(
        self, handoff: HandoffId, request: Request, *, chunk: int = 1 << 20, rank: int = 0, **options: Any
    ) -> Outgoing:
        """Offer, push and commit everything."""
        outgoing = self.producers[rank].offer(self.address, handoff, prompt_tokens=request.tokens, **options)
        push_all(outgoing, request, chunk)
        outgoing.commit(first_token=request.tag)
        return outgoing

    def hand_off(self, tag: int, tokens: int, *, chunk: int = 1 << 20, **options: Any) -> None:
        """One whole handoff, every row checked."""
        handoff = HandoffId.mint()
        ticket = self.consumer.announce(handoff)
        request = self.engine.request(tag, tokens)
        outgoing = self.send(handoff, request, chunk=chunk, **options)
        with ticket.wait(DEADLINE_S) as arrival:
            assert check_rows(arrival, tag) > 0
            assert arrival.value("first_token") == tag
        outgoing.wait(DEADLINE_S)
        assert outgoing.source_free.wait(DEADLINE_S)
        self.engine.free(request)

    def statistics(self) -> ConsumerStatistics:
        """Of the consumer."""
        return self.consumer.statistics()

    def all_free(self) -> bool:
        """Whether no landing memory, handoff or ring stretch is held by anybody."""
        book = self.consumer.statistics()
        rings = [producer._sender._ring.used for producer in self.producers]
        active = [producer.statistics().active for producer in self.producers]
        return book.book.free_bytes == self.total_bytes and not book.states and not any(rings) and not any(active)

    def check_clean(self) -> None:
        """Wait until everything is free, and look for entries that nobody would remove."""
        until(self.all_free, "everything is free")
        consumer = self.consumer
        until(lambda: not consumer._tickets and not consumer._layouts_of, "the consumer has forgotten its handoffs")
        for producer in self.producers:
            sender = producer._sender
            until(lambda p=producer: not p._outgoing, "the producer has forgotten its handoffs")  # type: ignore[misc]
            assert not sender._ways
            assert not sender._writer._writes
            assert not sender._gathering
            assert not sender._unready
            assert not sender._parked

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
        before = self.before
        if kind is None and before is not None:
            until(lambda: all(now <= then for now, then in zip(counts(), before, strict=True)), "nothing is left")


def push_all(outgoing: Outgoing, request: Request, chunk: int) -> list[Chunk]:
    """Push a whole prompt, some tokens at a time."""
    return [
        outgoing.push(request.tables, tokens=range(start, min(start + chunk, request.tokens)))
        for start in range(0, request.tokens, chunk)
    ]
