"""The beginning and the end of a mover."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING

import msgspec

from pdhandoff.engines.base import Memory, TransferState, Writes
from pdhandoff.errors import MoverError
from pdhandoff.testing.rule import Need, Rule, refuses, require
from pdhandoff.testing.rules.death import end_of, storm_under_way
from pdhandoff.testing.rules.proofs import GUARD, watch

if TYPE_CHECKING:
    from pdhandoff.testing.bench import Bench, Other

__all__ = ["RULES"]

_WARM_UP = 2
"movers that are made and closed before anything is counted: what a process needs once is no leak"
_ROUNDS = 3
_SETTLE_S = 2.0


def _record(bench: Bench) -> None:
    side, other = bench.side(), bench.other()
    capabilities = side.mover.capabilities
    require(side.mover.name, "the mover has no name")
    require(side.mover.name == other.name, f"it is {side.mover.name!r} here and {other.name!r} in another process")
    require(msgspec.to_builtins(capabilities) == other.capabilities, "the capabilities differ from process to process")
    require(bench.place.kind in capabilities.memory_kinds, f"{bench.place.kind.value} is not among its `memory_kinds`")
    require(capabilities.max_writes >= 1, f"max_writes is {capabilities.max_writes}")
    alignment = capabilities.alignment
    require(alignment >= 1 and not alignment & (alignment - 1), f"alignment is {alignment}, no power of two")


def _close_ends_own_writes(bench: Bench) -> None:
    units = -(-bench.sizes.storm_bytes // bench.unit)
    owner, other = bench.side(units), bench.other(units)
    other.fill(0x5A)
    handle = other.connect_to(owner, owner.whole())
    other.ask("storm", peer=handle, destination=owner.address, nbytes=owner.length, forget=False)
    storm_under_way(bench, other)
    other.ask("close")
    owner.fill(GUARD)
    watch(bench, owner, None, "after a writer's close returned")


def _closed_peers_take_nothing(bench: Bench) -> None:
    writer, other = bench.side(), bench.other()
    description = other.describe(other.whole())
    peer = writer.connect(description, [other.whole()])
    writer.write(peer, (writer.address, other.address, 64))
    other.ask("close")
    what = "a write to a mover that was closed"
    for connects in (False, True):
        try:
            handle = writer.connect(description, [other.whole()]) if connects else peer
            transfer = writer.mover.submit(handle, Writes.of((writer.address, other.address, 64)))
        except MoverError:
            continue
        (state,) = end_of(bench, writer, [transfer], what)
        require(state is not TransferState.DONE, f"{what} is reported as done")


def _close_is_final(bench: Bench) -> None:
    side, other = bench.side(), bench.other()
    peer = side.connect(other.describe(other.whole()), [other.whole()])
    mover = side.mover
    side.close()
    mover.close()
    calls: dict[str, Callable[[], object]] = {
        "allocate": lambda: mover.allocate(1),
        "register": lambda: mover.register(Memory(1 << 20, 1 << 20)),
        "describe": lambda: mover.describe([]),
        "connect": lambda: mover.connect(other.identity),
        "submit": lambda: mover.submit(peer, Writes.of()),
    }
    for verb, call in calls.items():
        with refuses(f"{verb} of a closed mover"):
            call()


def _leaks(bench: Bench) -> None:
    other = bench.other()
    for _ in range(_WARM_UP):
        _one_life(bench, other)
    before = _counts()
    for _ in range(_ROUNDS):
        _one_life(bench, other)
    sizes = bench.sizes
    allowed = {"threads": _ROUNDS * sizes.leaked_threads, "open descriptors": _ROUNDS * sizes.leaked_descriptors}
    deadline = time.monotonic() + min(_SETTLE_S, sizes.settle_s)
    while over := {
        what: count - before[what] for what, count in _counts().items() if count > before[what] + allowed[what]
    }:
        if time.monotonic() > deadline:
            break
        gc.collect()
        Event().wait(0.01)
    words = " and ".join(f"{count} {what}" for what, count in over.items())
    require(not over, f"{_ROUNDS} movers that were closed left {words} behind")


def _one_life(bench: Bench, other: Other) -> None:
    side = bench.side()
    peer = side.connect(other.describe(other.whole()), [other.whole()])
    side.write(peer, (side.address, other.address, side.length))
    handle = other.connect_to(side, side.whole())
    other.write(handle, (0, side.address, side.length))
    side.close()


def _counts() -> dict[str, int]:
    return {
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "open descriptors": len(list(Path("/proc/self/fd").iterdir())),
    }


RULES = (
    Rule(
        number="M-35",
        title="the record",
        must="Name and capabilities MUST be the same in every process, and make sense.",
        check=_record,
    ),
    Rule(
        number="M-36",
        title="close ends what was begun",
        must="What a mover was writing MUST NOT land any more after its `close` returned.",
        check=_close_ends_own_writes,
        need=Need(capability="quiesce", instead="memory of a closed peer stays in quarantine until it is fenced"),
    ),
    Rule(
        number="M-37",
        title="nothing is done at a closed peer",
        must="A write to a peer whose mover was closed MUST NOT be DONE; with `reports_peer_death` it MUST fail "
        "in time.",
        check=_closed_peers_take_nothing,
    ),
    Rule(
        number="M-38",
        title="close is final",
        must="`close` MUST be idempotent, and every later call that would start something MUST raise MoverError.",
        check=_close_is_final,
    ),
    Rule(
        number="M-39",
        title="no leaks",
        must="Threads and open descriptors MUST be back where they were when a mover is closed, but for what the "
        "process needs once.",
        check=_leaks,
    ),
)
