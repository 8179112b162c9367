"""What happens when a process is killed."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Sequence
from threading import Event
from typing import TYPE_CHECKING

from pdhandoff.engines.base import Peer, Transfer, TransferState, Writes
from pdhandoff.errors import MoverError
from pdhandoff.testing.rule import Need, Rule, require

if TYPE_CHECKING:
    from pdhandoff.testing.bench import Bench, Other
    from pdhandoff.testing.side import Side

__all__ = ["RULES", "end_of", "storm_under_way"]

_LOOK_S = 0.002
_UNDER_WAY = 16
_ATTEMPTS = 5


def end_of(bench: Bench, side: Side, transfers: Sequence[Transfer], what: str) -> list[TransferState]:
    """How transfers to a peer that is gone end. Those that still pend count so, unless the mover promises an end."""
    deadline = time.monotonic() + bench.sizes.death_s
    pending = list(transfers)
    states: list[TransferState] = []
    while pending and time.monotonic() < deadline:
        transfer = pending[0]
        start = time.monotonic()
        status = side.mover.poll(transfer)
        took = time.monotonic() - start
        require(took <= bench.sizes.at_once_s, f"poll of {what} took {took:.1f} s")
        if status.state is TransferState.PENDING:
            Event().wait(_LOOK_S)
            continue
        if status.state is TransferState.FAILED:
            require(status.reason, f"{what} failed without a reason")
        states.append(status.state)
        side.mover.release(pending.pop(0))
    promised = bench.capabilities.reports_peer_death
    require(not (pending and promised), f"{what} still pends after {bench.sizes.death_s:g} s")
    for transfer in pending:
        side.mover.release(transfer)
    return states + [TransferState.PENDING] * len(pending)


def _never_lands(bench: Bench, side: Side, peer: Peer, destination: int, what: str) -> None:
    """A write to memory that is gone is refused or fails, and is never done."""
    try:
        transfer = side.mover.submit(peer, Writes.of((side.address, destination, 64)))
    except MoverError:
        return
    (state,) = end_of(bench, side, [transfer], what)
    require(state is not TransferState.DONE, f"{what} is reported as done")


def storm_under_way(bench: Bench, other: Other) -> None:
    """Wait until a storm in another process has had some writes done."""
    deadline = time.monotonic() + bench.sizes.settle_s
    while not other.ask("storm_count")["done"]:
        require(time.monotonic() < deadline, "a writer that writes without end gets nothing done")


def _killed_before(bench: Bench) -> None:
    writer, other = bench.side(), bench.other()
    peer = writer.connect(other.describe(other.whole()), [other.whole()])
    require(writer.write(peer, (writer.address, other.address, 64)).state is TransferState.DONE, "a write is not done")
    other.kill()
    for _ in range(2):
        _never_lands(bench, writer, peer, other.address, "a write to a peer that was killed before")


def _killed_during(bench: Bench) -> None:
    """Again with other peers until one dies during a write to it: a busy machine may let all finish first."""
    for _ in range(_ATTEMPTS):
        if any(state is not TransferState.DONE for state in _kill_amid_writes(bench)):
            return


def _kill_amid_writes(bench: Bench) -> list[TransferState]:
    """Write to a peer without a pause until it is dead. How the last writes ended."""
    units = -(-bench.sizes.storm_bytes // bench.unit)
    writer, other = bench.side(units), bench.other(units)
    peer = writer.connect(other.describe(other.whole()), [other.whole()])
    writes = Writes.of((writer.address, other.address, writer.length))
    writer.finish(writer.mover.submit(peer, writes))
    under_way = deque(writer.mover.submit(peer, writes) for _ in range(_UNDER_WAY))
    other.begin_to_kill()
    with contextlib.suppress(MoverError):  # the peer's death was noticed
        while not other.process.ended:
            if writer.mover.poll(under_way[0]).state is not TransferState.PENDING:
                under_way.append(writer.mover.submit(peer, writes))
                writer.mover.release(under_way.popleft())
    other.kill()
    return end_of(bench, writer, under_way, "a write to a peer that was killed meanwhile")


def _survivors(bench: Bench) -> None:
    writer, dying, living = bench.side(), bench.other(), bench.other()
    writer.fill(4)
    doomed = writer.connect(dying.describe(dying.whole()), [dying.whole()])
    peer = writer.connect(living.describe(living.whole()), [living.whole()])
    writer.write(doomed, (writer.address, dying.address, writer.length))
    dying.kill()
    try:
        transfer = writer.mover.submit(doomed, Writes.of((writer.address, dying.address, writer.length)))
        end_of(bench, writer, [transfer], "a write to a peer that was killed")
    except MoverError:
        pass  # that is as good an end
    again = bench.other()
    fresh = writer.connect(again.describe(again.whole()), [again.whole()])
    for handle, other, what in ((peer, living, "another peer"), (fresh, again, "the peer's successor")):
        status = writer.write(handle, (writer.address, other.address, writer.length))
        require(status.state is TransferState.DONE, f"after one peer died, a write to {what} failed: {status.reason}")
        bench.same(other.read(), writer.read(), f"what was written to {what}")


def _owner_survives_writer(bench: Bench) -> None:
    units = -(-bench.sizes.storm_bytes // bench.unit)
    owner, dying, living = bench.side(units + 4), bench.other(units), bench.other(4)
    granted = owner.extent(0, units)
    dying.ask(
        "storm",
        peer=dying.connect_to(owner, granted),
        destination=granted.address,
        nbytes=bench.sizes.storm_bytes,
        forget=False,
    )
    owner.connect(dying.identity)
    storm_under_way(bench, dying)
    dying.kill()
    living.fill(3)
    rest = owner.extent(units, 4)
    state = living.write(living.connect_to(owner, rest), (0, rest.address, rest.length))
    require(state is TransferState.DONE, "after one writer was killed, another one gets nothing done")
    bench.same(owner.read(units * bench.unit), b"\3" * rest.length, "what the other writer wrote")


def _restart(bench: Bench) -> None:
    writer, first = bench.side(), bench.other()
    writer.fill(1)
    stale = first.describe(first.whole())
    old = writer.connect(stale, [first.whole()])
    writer.write(old, (writer.address, first.address, 64))
    first.kill()
    second = bench.other()
    second.fill(0xC3)
    writer.connect(second.describe(second.whole()), [second.whole()])
    _never_lands(bench, writer, old, first.address, "a write to the former incarnation of a peer")
    try:
        late = writer.connect(stale, [first.whole()])
    except MoverError:
        pass  # as it should be; failing later will do
    else:
        _never_lands(bench, writer, late, first.address, "a write by a description of a former incarnation")
    bench.same(second.read(), b"\xc3" * second.length, "memory of the new incarnation, which nobody wrote to")


RULES = (
    Rule(
        number="M-23",
        title="peer killed before a write",
        must="A write to a killed peer MUST NOT be DONE or hang a call; with `reports_peer_death` it MUST fail "
        "in time.",
        check=_killed_before,
    ),
    Rule(
        number="M-24",
        title="peer killed during a write",
        must="With `reports_peer_death`, every write that is under way when the peer is killed MUST become final "
        "in time.",
        check=_killed_during,
        need=Need(capability="reports_peer_death", instead="such a write ends by its time budget"),
    ),
    Rule(
        number="M-25",
        title="others outlive a dead peer",
        must="The death of one peer MUST NOT disturb writes to others, nor to its successor.",
        check=_survivors,
    ),
    Rule(
        number="M-26",
        title="owner outlives a dead writer",
        must="A writer that is killed in the middle of a write MUST NOT disturb the owner or other writers.",
        check=_owner_survives_writer,
    ),
    Rule(
        number="M-27",
        title="restart",
        must="What a former incarnation granted MUST fail or be refused, and MUST NOT touch memory of its successor.",
        check=_restart,
    ),
)
