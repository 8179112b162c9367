"""Quiesce and fence: what is claimed about writers that may not have stopped."""

from __future__ import annotations

import time
from threading import Event
from typing import TYPE_CHECKING

from pdhandoff.engines.base import Extent, TransferState
from pdhandoff.errors import MoverError
from pdhandoff.testing.rule import Need, Rule, Violation, refuses, require
from pdhandoff.testing.rules.death import storm_under_way

if TYPE_CHECKING:
    from pdhandoff.testing.bench import Bench, Other
    from pdhandoff.testing.side import Side

__all__ = ["GUARD", "RULES", "watch"]

GUARD = 0xC3
"what an owner fills its memory with where nothing may be written any more"
_LATE = 0x5A
_ATTEMPTS = 24
"by a late writer, before it may be believed to do no harm"
_PAUSE_S = 0.1

_QUIESCE = Need(capability="quiesce", instead="memory of an ended peer stays in quarantine until it is fenced")
_FENCE = Need(capability="fence", instead="memory of a peer that does not answer stays in quarantine for good")


def watch(bench: Bench, owner: Side, late: Other | None, what: str) -> None:
    """Raises Violation when anything lands in memory that is filled with GUARD, while a late writer goes on."""
    deadline = time.monotonic() + bench.sizes.late_s
    if late is None:
        Event().wait(min(_PAUSE_S, bench.sizes.late_s))
    else:
        goal = late.ask("storm_count")["attempts"] + _ATTEMPTS
        while time.monotonic() < deadline and late.ask("storm_count")["attempts"] < goal:
            Event().wait(_PAUSE_S / 20)
    wanted = bytes((GUARD,)) * owner.length
    landed = owner.length - owner.read().count(wanted[:1])
    require(not landed, f"{what}, {landed} bytes landed where nothing may land any more")


def _living_is_not_quiet(bench: Bench) -> None:
    owner, other = bench.side(), bench.other()
    peer = owner.connect(other.identity)
    other.write(other.connect_to(owner, owner.whole()), (0, owner.address, 64))
    for wait_s, stopped in ((0.0, False), (_PAUSE_S, False), (_PAUSE_S, True)):
        if stopped:
            other.stop()
        deadline = time.monotonic() + wait_s
        quiet = owner.mover.quiesce(peer, deadline)
        late_s = time.monotonic() - deadline
        require(not quiet, f"quiesce calls a peer quiet that {'stands still' if stopped else 'lives'} and can write")
        require(late_s <= bench.sizes.at_once_s, f"quiesce returned {late_s:.1f} s after its deadline")
    other.go_on()
    if not bench.capabilities.quiesce:
        other.kill()
        quiet = owner.mover.quiesce(peer, time.monotonic() + _PAUSE_S)
        require(not quiet, "quiesce answers True, though the mover does not claim to be able to prove it")


def _ended_is_quiet(bench: Bench) -> None:
    units = -(-bench.sizes.storm_bytes // bench.unit)
    owner = bench.side(units)
    for how in ("killed", "closed"):
        other = bench.other(units)
        other.fill(_LATE)
        peer = owner.connect(other.identity)
        _start_storm(bench, owner, other, forget=False)
        if how == "killed":
            other.kill()
        else:
            other.ask("close")
        quiet = owner.mover.quiesce(peer, time.monotonic() + bench.sizes.death_s)
        require(quiet, f"quiesce does not find a writer quiet that was {how}, within {bench.sizes.death_s:g} s")
        owner.fill(GUARD)
        watch(bench, owner, None, f"after quiesce said that a writer that was {how} is quiet")


def _start_storm(bench: Bench, owner: Side, other: Other, *, forget: bool) -> None:
    handle = other.connect_to(owner, owner.whole())
    other.ask("storm", peer=handle, destination=owner.address, nbytes=owner.length, forget=forget)
    if forget:
        while other.ask("storm_count")["attempts"] < _ATTEMPTS:
            Event().wait(_PAUSE_S / 20)
    else:
        storm_under_way(bench, other)


def _late_writers(bench: Bench) -> None:
    units = -(-bench.sizes.storm_bytes // bench.unit)
    owner = bench.side(units)
    other: Other | None = None
    for how in ("writes on", "has released its handles", "wrote before a deregistration", "stands still", "was killed"):
        if other is None:
            other = bench.other(units)
            other.fill(_LATE)
        peer = owner.connect(other.identity)
        _start_storm(bench, owner, other, forget=how == "has released its handles")
        if how == "wrote before a deregistration":
            owner.mover.deregister(owner.region)
            owner.region = owner.mover.register(owner.memory)
        elif how == "stands still":
            other.stop()
        elif how == "was killed":
            other.kill()
        begun = time.monotonic()
        try:
            owner.mover.fence(peer, [owner.whole()], begun + bench.sizes.fence_s)
        except MoverError as error:
            raise Violation(f"a writer that {how} cannot be fenced: {error.reason}") from error
        late_s = time.monotonic() - begun - bench.sizes.fence_s
        require(late_s <= bench.sizes.at_once_s, f"fence returned {late_s:.1f} s after its deadline")
        owner.fill(GUARD)
        other.go_on()
        watch(bench, owner, other if other.healthy else None, f"though a writer that {how} was fenced")
        if other.healthy:
            other.ask("storm_end")


def _fenced_grants_fail(bench: Bench) -> None:
    owner, other = bench.side(), bench.other()
    handle = other.connect_to(owner, owner.whole())
    write = (0, owner.address, owner.length)
    require(other.write(handle, write) is TransferState.DONE, "a write is not done")
    owner.mover.fence(owner.connect(other.identity), [owner.whole()], time.monotonic() + bench.sizes.fence_s)
    for _ in range(2):
        state = other.write(handle, write)
        require(state is not TransferState.DONE, "a write through a fenced grant is reported as done")


def _fence_leaves_others(bench: Bench) -> None:
    owner, fenced, other = bench.side(), bench.other(), bench.other()
    fenced.connect_to(owner, owner.extent(0, 2))
    kept = owner.extent(4, 2)
    handle = other.connect_to(owner, kept)
    other.fill(3)
    owner.put(b"\x11" * bench.unit, 7 * bench.unit)
    owner.mover.fence(
        owner.connect(fenced.identity), [owner.extent(0), owner.extent(1)], time.monotonic() + bench.sizes.fence_s
    )
    write = (0, kept.address, kept.length)
    if other.write(handle, write) is not TransferState.DONE:
        state = other.write(other.connect_to(owner, kept), write)
        require(
            state is TransferState.DONE, "a writer that was not fenced gets nothing done, though it connected again"
        )
    bench.same(owner.read(4 * bench.unit, kept.length), b"\3" * kept.length, "what the other writer wrote")
    bench.same(owner.read(7 * bench.unit), b"\x11" * bench.unit, "memory that was not fenced")


def _grant_after_fence(bench: Bench) -> None:
    owner, other = bench.side(), bench.other()
    for value, (first, units) in enumerate(((1, 1), (0, 8), (3, 4)), start=1):
        other.fill(value)
        handle = other.connect_to(owner, owner.whole())
        other.write(handle, (0, owner.address, owner.length))
        deadline = time.monotonic() + bench.sizes.fence_s
        owner.mover.fence(owner.connect(other.identity), [owner.extent(first, units)], deadline)
        other.fill(value + 100)
        handle = other.connect_to(owner, owner.whole())
        state = other.write(handle, (0, owner.address, owner.length))
        require(state is TransferState.DONE, f"a new grant of memory that was fenced ({units} units) takes no write")
        bench.same(owner.read(), bytes((value + 100,)) * owner.length, "what was written by the new grant")


def _fence_is_honest(bench: Bench) -> None:
    owner, other = bench.side(), bench.other()
    owner.fill(GUARD)
    peer = owner.connect(other.identity)
    deadline = time.monotonic() + bench.sizes.fence_s
    if not bench.capabilities.fence:
        with refuses("a fence, by a mover that does not claim it,"):
            owner.mover.fence(peer, [owner.whole()], deadline)
        return
    for bad, what in (
        (Extent(1 << 40, bench.unit), "memory that is not registered"),
        (owner.extent(-1, 2), "memory that begins before registered memory"),
        (owner.extent(7, 2), "memory that ends behind registered memory"),
        (Extent(owner.address, 0), "no memory"),
    ):
        with refuses(f"a fence of {what}"):
            owner.mover.fence(peer, [bad], deadline)
    bench.same(owner.read(), bytes((GUARD,)) * owner.length, "memory that only refused fences name")


RULES = (
    Rule(
        number="M-28",
        title="a living writer is not quiet",
        must="`quiesce` MUST answer False, by its deadline, while the peer's process lives and its mover is "
        "open, and always without the capability.",
        check=_living_is_not_quiet,
    ),
    Rule(
        number="M-29",
        title="an ended writer is quiet",
        must="`quiesce` MUST answer True in time once the peer was killed or has closed, and nothing may land "
        "afterwards.",
        check=_ended_is_quiet,
        need=_QUIESCE,
    ),
    Rule(
        number="M-30",
        title="a fence holds",
        must="After `fence` returned, a late writer MUST NOT change the extents: neither one that writes on, nor "
        "one that released its handles, stood still, wrote across a deregistration, or was killed.",
        check=_late_writers,
        need=_FENCE,
    ),
    Rule(
        number="M-31",
        title="a fenced writer is told",
        must="A write through a grant that a fence has ended MUST fail or be refused.",
        check=_fenced_grants_fail,
        need=_FENCE,
    ),
    Rule(
        number="M-32",
        title="a fence leaves others alone",
        must="A fence MUST NOT change memory outside its extents, and other writers MUST be able to go on, if "
        "need be by a new grant after a failed write.",
        check=_fence_leaves_others,
        need=_FENCE,
    ),
    Rule(
        number="M-33",
        title="grants after a fence",
        must="Memory that was fenced MUST be grantable again, together with memory that was not.",
        check=_grant_after_fence,
        need=_FENCE,
    ),
    Rule(
        number="M-34",
        title="an honest fence",
        must="`fence` MUST raise MoverError where it cannot keep its promise: without the capability always, "
        "with it for extents outside registered memory.",
        check=_fence_is_honest,
    ),
)
