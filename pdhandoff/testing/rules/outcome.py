"""How a transfer ends, and what handles are worth."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from threading import Event
from typing import TYPE_CHECKING, TypeVar

from pdhandoff.engines.base import Mover, Transfer, TransferState, TransferStatus, Writes
from pdhandoff.errors import MoverError
from pdhandoff.testing.rule import Rule, require
from pdhandoff.testing.side import settle

if TYPE_CHECKING:
    from pdhandoff.testing.bench import Bench

__all__ = ["RULES"]

_POLLS = 50
_QUIET_S = 0.2

T = TypeVar("T")


def _same(mover: Mover, transfer: Transfer, first: TransferStatus, when: str) -> None:
    for _ in range(_POLLS):
        now = mover.poll(transfer)
        same = now.state is first.state and now.reason == first.reason and now.quiet >= first.quiet
        require(same, f"a final answer changed {when}: first {first}, then {now}")


def _final_answer_stays(bench: Bench) -> None:
    writer, other = bench.side(), bench.other()
    peer = writer.connect(other.describe(other.whole()), [other.whole()])
    transfer = writer.mover.submit(peer, Writes.of((writer.address, other.address, 3 * bench.unit)))
    first = settle(writer.mover, transfer, bench.sizes.settle_s)
    _same(writer.mover, transfer, first, "by itself")
    other.kill()
    _same(writer.mover, transfer, first, "when the peer died")
    if not bench.capabilities.reports_peer_death:
        return
    try:
        failing = writer.mover.submit(peer, Writes.of((writer.address, other.address, 3 * bench.unit)))
    except MoverError:
        return
    failed = settle(writer.mover, failing, bench.sizes.death_s)
    _same(writer.mover, failing, failed, "by itself")
    writer.mover.release(failing)


def _release(bench: Bench) -> None:
    units = -(-bench.sizes.storm_bytes // bench.unit)
    writer, other = bench.side(units), bench.other(units)
    writer.fill(8)
    peer = writer.connect(other.describe(other.whole()), [other.whole()])
    for _ in range(4):
        pending = writer.mover.submit(peer, Writes.of((writer.address, other.address, writer.length)))
        writer.mover.release(pending)
        writer.mover.release(pending)
    kept = writer.mover.submit(peer, Writes.of((writer.address, other.address, writer.length)))
    status = settle(writer.mover, kept, bench.sizes.settle_s)
    require(status.state is TransferState.DONE, f"a write among released ones failed: {status.reason}")
    require(other.digest() == writer.digest(), "a write among released ones arrived changed")
    writer.mover.release(kept)
    writer.mover.release(kept)


def _at_once(bench: Bench) -> None:
    units = -(-bench.sizes.storm_bytes // bench.unit)
    writer, other = bench.side(units), bench.other(units)
    writer.fill(9)
    description = other.describe(other.whole())
    peer = writer.connect(description, [other.whole()])
    writes = Writes.of((writer.address, other.address, writer.length))
    writer.finish(writer.mover.submit(peer, writes))
    other.stop()
    _timed(bench, "connect", lambda: writer.mover.connect(description))
    _timed(bench, "describe", lambda: writer.mover.describe([writer.extent(0)]))
    transfers = [_timed(bench, "submit", lambda: writer.mover.submit(peer, writes)) for _ in range(4)]
    statuses = [_timed(bench, "poll", partial(writer.mover.poll, one)) for one in transfers]
    over = all(status.state is TransferState.FAILED and status.quiet for status in statuses)
    other.go_on()
    if over:
        other.fill(5)
        Event().wait(_QUIET_S)
        bench.same(other.read(), b"\5" * other.length, "memory that writes were to change which failed and are quiet")
        return
    for transfer in transfers:
        settle(writer.mover, transfer, bench.sizes.settle_s)
        _timed(bench, "release", partial(writer.mover.release, transfer))


def _timed(bench: Bench, verb: str, call: Callable[[], T]) -> T:
    start = time.monotonic()
    result = call()
    took = time.monotonic() - start
    require(took <= bench.sizes.at_once_s, f"{verb} took {took:.1f} s while the peer's process stood still")
    return result


def _incarnations(bench: Bench) -> None:
    writer, other, third = bench.side(), bench.other(), bench.other()
    keys = [
        writer.connect(other.identity).key,
        writer.connect(other.identity).key,
        writer.connect(other.describe(other.extent(0)), [other.extent(0)]).key,
    ]
    require(len(set(keys)) == 1, f"grants of one incarnation have different keys: {sorted(set(keys))}")
    require(writer.connect(third.identity).key not in keys, "two living peers have the same key")
    other.kill()
    again = bench.other()
    require(writer.connect(again.identity).key not in keys, "a peer that was restarted has its former key")


RULES = (
    Rule(
        number="M-19",
        title="a final answer stays",
        must="The first DONE or FAILED of a transfer MUST stay with its reason, even when the peer dies; only "
        "`quiet` may still become True.",
        check=_final_answer_stays,
    ),
    Rule(
        number="M-20",
        title="release",
        must="`release` MUST be idempotent, before and after the end of a transfer, and MUST NOT disturb other "
        "transfers.",
        check=_release,
    ),
    Rule(
        number="M-21",
        title="calls return at once",
        must="`connect`, `describe`, `submit`, `poll` and `release` MUST NOT wait for a peer, even for one that "
        "stands still.",
        check=_at_once,
    ),
    Rule(
        number="M-22",
        title="incarnations",
        must="A peer's `key` MUST be the same for every grant of one incarnation, and another after a restart.",
        check=_incarnations,
    ),
)
