"""A model of who owns which bytes, driven at random against the real mover with faults.

The model is exact: it knows every byte of landing memory at every step. So bytes of a former owner, of another owner,
or of a write that was refused, dropped or fenced show at once, wherever they land.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    MultipleResults,
    RuleBasedStateMachine,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from pdhandoff.engines.base import Extent, Peer, TransferState, Writes
from pdhandoff.engines.faults import Fault, Faulty, FaultyTransfer, Rule
from pdhandoff.engines.loopback import create
from pdhandoff.engines.loopback.remote import LoopbackPeer
from pdhandoff.errors import MoverError
from support.movers import PAGE, Side, settle, soon

EXTENTS = 4
WRITERS = 2
PAGES = 2
"of one extent"
NBYTES = PAGES * PAGE


@dataclass
class Writer:
    """A writer: its mover with one wrapper for each fault, and its scratch memory."""

    side: Side
    plain: Faulty
    wrappers: dict[Fault, Faulty]
    seen_by_owner: Peer
    alive: bool = True
    kept: list[tuple[Fault, FaultyTransfer, Grant, int, int, int]] = field(default_factory=list)
    "held and late writes: grant, first byte, bytes, value"


@dataclass
class Grant:
    """Extents given to one writer."""

    writer: Writer
    extents: tuple[int, ...]
    peer: Peer
    base: int
    "address of the owner's memory"
    valid: bool = True


class Ownership(RuleBasedStateMachine):
    """Grants, writes with faults, fences, deaths and restarts, in any order."""

    grants: Bundle[Grant] = Bundle("grants")

    @initialize()
    def start(self) -> None:
        self.value = 0
        self.owner = Side(create(), EXTENTS * PAGES)
        self.expected = bytearray(EXTENTS * NBYTES)
        self.free = set(range(EXTENTS))
        self.given: list[Grant] = []
        self.writers = [self._writer() for _ in range(WRITERS)]

    def _writer(self) -> Writer:
        inner = create()
        wrappers = {
            fault: Faulty(inner, [Rule(fault=fault, times=None)])
            for fault in (Fault.HOLD, Fault.LATE, Fault.FAIL, Fault.DROP, Fault.PARTIAL, Fault.DUPLICATE, Fault.REFUSE)
        }
        plain = Faulty(inner)
        side = Side(plain, PAGES)
        return Writer(side, plain, wrappers, self.owner.mover.connect(side.mover.describe([])))

    def _extent(self, number: int) -> Extent:
        return self.owner.extent(number * PAGES, PAGES)

    def _next_value(self) -> int:
        self.value = self.value % 255 + 1
        return self.value

    @precondition(lambda self: self.free)
    @rule(target=grants, index=st.integers(0, WRITERS - 1), wanted=st.sets(st.integers(0, EXTENTS - 1), min_size=1))
    def grant(self, index: int, wanted: set[int]) -> Grant | MultipleResults[Grant]:
        extents = tuple(sorted(wanted & self.free))
        if not extents:
            return multiple()
        self.free -= set(extents)
        writer = self.writers[index]
        peer = writer.side.connect(self.owner, *(self._extent(number) for number in extents))
        grant = Grant(writer, extents, peer, self.owner.address)
        self.given.append(grant)
        return grant

    @rule(
        grant=grants,
        fault=st.sampled_from([None, *(f for f in Fault if f not in {Fault.FLIP, Fault.DELAY, Fault.REGISTER})]),
        which=st.integers(0, EXTENTS - 1),
        start=st.integers(0, NBYTES - 1),
        length=st.integers(0, NBYTES),
    )
    def write(self, grant: Grant, fault: Fault | None, which: int, start: int, length: int) -> None:
        writer = grant.writer
        length = min(length, NBYTES - start)
        at = grant.extents[which % len(grant.extents)] * NBYTES + start
        value = self._next_value()
        if not writer.alive:
            with pytest.raises(MoverError):
                writer.plain.submit(grant.peer, Writes.of((writer.side.address, grant.base + at, length)))
            return
        writer.side.fill(value)
        mover = writer.plain if fault is None else writer.wrappers[fault]
        batch = Writes.of((writer.side.address, grant.base + at, length))
        if fault is Fault.REFUSE:
            with pytest.raises(MoverError):
                mover.submit(grant.peer, batch)
            return
        transfer = mover.submit(grant.peer, batch)
        if fault in {Fault.HOLD, Fault.LATE}:
            writer.kept.append((fault, transfer, grant, at, length, value))
            return
        status = settle(mover, transfer)
        assert status.quiet
        good = fault in {None, Fault.DUPLICATE}
        if length:
            assert (status.state is TransferState.DONE) is (good and grant.valid)
        if grant.valid and fault in {None, Fault.DUPLICATE, Fault.PARTIAL}:
            landed = length // 2 if fault is Fault.PARTIAL else length
            self.expected[at : at + landed] = bytes((value,)) * landed

    @rule(index=st.integers(0, WRITERS - 1), fault=st.sampled_from([Fault.HOLD, Fault.LATE]))
    def let_go(self, index: int, fault: Fault) -> None:
        """Held and late writes land: in memory that is still granted to this writer, or nowhere."""
        writer = self.writers[index]
        mover = writer.wrappers[fault]
        kept = [entry for entry in writer.kept if entry[0] is fault]
        writer.kept = [entry for entry in writer.kept if entry[0] is not fault]
        value = self._next_value()
        writer.side.fill(value)  # a write reads its source when it runs
        assert (mover.release_hold() if fault is Fault.HOLD else mover.land_late()) == len(kept)
        for _, transfer, grant, at, length, _ in kept:
            if grant.valid:
                self.expected[at : at + length] = bytes((value,)) * length
            if length:
                assert mover.landed(transfer) is grant.valid
            if fault is Fault.HOLD and length:
                assert settle(mover, transfer).state is (TransferState.DONE if grant.valid else TransferState.FAILED)

    @rule(grant=grants)
    def end(self, grant: Grant) -> None:
        """A handoff ends: its extents become free by a fence, or by the proof that the writer has ended."""
        if not grant.valid:
            return
        writer = grant.writer
        self._retire(grant)
        if not writer.alive:
            assert self.owner.mover.quiesce(writer.seen_by_owner, soon())
            return
        extents = [self._extent(number) for number in grant.extents]
        self.owner.mover.fence(writer.seen_by_owner, extents, soon())
        for number in grant.extents:
            self.expected[number * NBYTES : (number + 1) * NBYTES] = bytes(NBYTES)
        self._late_store(grant)
        status = writer.side.write(grant.peer, (writer.side.address, extents[0].address, 1))
        assert status.state is TransferState.FAILED

    def _retire(self, grant: Grant) -> None:
        grant.valid = False
        self.free |= set(grant.extents)

    def _late_store(self, grant: Grant) -> None:
        """A copy that was running before the fence, and looks at nothing."""
        assert isinstance(grant.peer, LoopbackPeer)
        grant.writer.side.fill(self._next_value())
        for number in grant.extents:
            batch = Writes.of((grant.writer.side.address, self._extent(number).address, NBYTES))
            for local, source, length in grant.peer.localise(batch):
                Side.store(local, source, length)

    @rule(index=st.integers(0, WRITERS - 1))
    def writer_ends(self, index: int) -> None:
        """A writer ends: that is proven, and its extents may be granted again without a fence."""
        writer = self.writers[index]
        assert not self.owner.mover.quiesce(writer.seen_by_owner, 0.0)
        writer.plain.close()
        for wrapper in writer.wrappers.values():
            wrapper.close()
        writer.alive = False
        assert self.owner.mover.quiesce(writer.seen_by_owner, soon())
        self.writers[index] = self._writer()

    @rule()
    def owner_restarts(self) -> None:
        """The owner ends and starts again: every grant of its former life is void."""
        self.owner.mover.close()
        for grant in self.given:
            grant.valid = False
        self.owner = Side(create(), EXTENTS * PAGES)
        self.expected = bytearray(EXTENTS * NBYTES)
        self.free = set(range(EXTENTS))
        self.given = []
        for writer in self.writers:
            writer.seen_by_owner = self.owner.mover.connect(writer.side.mover.describe([]))

    @invariant()
    def every_byte_is_the_current_owners(self) -> None:
        if hasattr(self, "owner"):
            assert self.owner.bytes() == bytes(self.expected)

    def teardown(self) -> None:
        if hasattr(self, "owner"):
            for writer in self.writers:
                writer.plain.close()
            self.owner.mover.close()


TestOwnership = pytest.mark.slow(Ownership.TestCase)
TestOwnership.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
