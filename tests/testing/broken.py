"""Movers that break one rule each: wrappers around loopback, named after the rule.

What they do wrong is narrowed down, by sizes or by who has died, until no other rule notices.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
import weakref
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from pdhandoff.engines.base import (
    Extent,
    Memory,
    MemoryKind,
    Mover,
    MoverCapabilities,
    Peer,
    Region,
    Transfer,
    TransferState,
    TransferStatus,
    Writes,
)
from pdhandoff.engines.bounds import Runs
from pdhandoff.engines.forwarding import Forwarding
from pdhandoff.engines.loopback import create, wire
from pdhandoff.engines.loopback.remote import LoopbackPeer
from pdhandoff.errors import ErrorCode, MoverError
from pdhandoff.ids import ID_BYTES, Incarnation

PAGE = os.sysconf("SC_PAGESIZE")
BIG = 1 << 20
"bytes of a storm's writes in these tests; the large write is larger"


def refusal(reason: str) -> MoverError:
    return MoverError(ErrorCode.MOVER_FAILED, reason)


def dead(peer: Peer) -> bool:
    """Whether the peer's process is gone, not only its mover."""
    assert isinstance(peer, LoopbackPeer)
    return peer.remote.ended and not Path(f"/proc/{peer.remote.pid}").exists()


class Broken(Forwarding):
    """Remembers what the subclasses look at."""

    def __init__(self) -> None:
        super().__init__(create())
        self.peers: list[LoopbackPeer] = []
        self.peer_of: weakref.WeakKeyDictionary[Any, LoopbackPeer] = weakref.WeakKeyDictionary()
        self.size_of: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def connect(self, description: bytes) -> Peer:
        peer = self._mover.connect(description)
        assert isinstance(peer, LoopbackPeer)
        self.peers.append(peer)
        return peer

    @property
    def capabilities(self) -> MoverCapabilities:
        return msgspec.structs.replace(self._mover.capabilities, max_writes=8192)

    def submit(self, peer: Peer, writes: Writes) -> Transfer:
        changed = self.change(writes)
        if len(changed.length) > self.capabilities.max_writes:
            raise refusal("this batch is too long")
        transfer = self._mover.submit(peer, changed)
        assert isinstance(peer, LoopbackPeer)
        self.peer_of[transfer] = peer
        self.size_of[transfer] = writes.nbytes
        return transfer

    def change(self, writes: Writes) -> Writes:
        """What is written in place of a batch."""
        return writes


class DirtyMemory(Broken):
    def allocate(self, nbytes: int, kind: MemoryKind = MemoryKind.CPU, device: int = 0) -> Memory:
        memory = super().allocate(nbytes, kind, device)
        ctypes.memset(memory.address, 1, 1)
        return memory


class ClaimsAnyMemory(Broken):
    @property
    def capabilities(self) -> MoverCapabilities:
        return msgspec.structs.replace(super().capabilities, registers_any_memory=True)


class OwnMemoryOnly(Broken):
    def register(self, memory: Memory) -> Region:
        if not isinstance(memory.owner, memoryview):
            raise refusal("this is not my memory")
        return super().register(memory)


class DropsBadSources(Broken):
    def submit(self, peer: Peer, writes: Writes) -> Transfer:
        try:
            return super().submit(peer, writes)
        except MoverError as error:
            if "registered memory" not in error.reason:
                raise
            return super().submit(peer, Writes.of())


class ClipsAtTheEnd(Broken):
    def submit(self, peer: Peer, writes: Writes) -> Transfer:
        try:
            return super().submit(peer, writes)
        except MoverError as error:
            if "grant" not in error.reason or not isinstance(peer, LoopbackPeer):
                raise
            if not peer.granted.covers(writes.destination[-1], 1):
                raise
            return super().submit(peer, Writes.of())


class AddsGrantsUp(Broken):
    def submit(self, peer: Peer, writes: Writes) -> Transfer:
        try:
            return super().submit(peer, writes)
        except MoverError:
            for other in self.peers:
                if other.key == peer.key and other.granted.first_outside(writes.destination, writes.length) is None:
                    return super().submit(other, writes)
            raise


class IgnoresEmptyExtents(Broken):
    def describe(self, extents: Sequence[Extent]) -> bytes:
        return super().describe([extent for extent in extents if extent.length])


class RoundsExtents(Broken):
    def describe(self, extents: Sequence[Extent]) -> bytes:
        rounded = []
        for address, length in extents:
            start, end = address // PAGE * PAGE, -(-(address + length) // PAGE) * PAGE
            rounded.append(Extent(start, end - start))
        return super().describe(rounded)


class CutsLongBatches(Broken):
    def change(self, writes: Writes) -> Writes:
        most = self.capabilities.max_writes
        return Writes(*(column[:most] for column in writes)) if len(writes.length) > most else writes


class TripsOverNothing(Broken):
    def connect(self, description: bytes) -> Peer:
        if description[0] == 0xFF:
            raise refusal("garbage")
        return super().connect(description)


class BelievesImpostors(Broken):
    def __init__(self) -> None:
        super().__init__()
        self.claims: dict[bytes, set[int]] = {}

    def connect(self, description: bytes) -> Peer:
        claim = wire.decode(description)
        self.claims.setdefault(claim.incarnation, set()).add(claim.pid)
        if len(self.claims[claim.incarnation]) > 1:
            raise refusal("two processes claim to be one")
        return super().connect(description)


class TrustsHandles(Broken):
    def poll(self, transfer: Transfer) -> TransferStatus:
        status: TransferStatus = transfer.status  # type: ignore[attr-defined]
        return status


class DoneTooSoon(Broken):
    """Starts a write only when the next one comes, and calls it done before."""

    def __init__(self) -> None:
        super().__init__()
        self.late: list[tuple[Peer, Writes]] = []
        self.registered = 0

    def register(self, memory: Memory) -> Region:
        self.registered += memory.length
        return super().register(memory)

    def submit(self, peer: Peer, writes: Writes) -> Transfer:
        for late in self.late:
            super().submit(*late)
        self.late.clear()
        if self.registered != 4 * PAGE or writes.nbytes != 3 * PAGE:
            return super().submit(peer, writes)
        self.late.append((peer, writes))
        return super().submit(peer, Writes.of())


class RoundsLengths(Broken):
    def change(self, writes: Writes) -> Writes:
        lengths = array("q", (length + 1 if length > 32 and length % 2 else length for length in writes.length))
        return writes._replace(length=lengths)


class RoundsSources(Broken):
    def change(self, writes: Writes) -> Writes:
        pairs = zip(writes.source, writes.length, strict=True) if len(writes.source) == len(writes.length) else ()
        sources = array("q", (source - source % 2 if 0 < length < 8 else source for source, length in pairs))
        return writes._replace(source=sources) if len(sources) else writes


class ChecksEmptyWrites(Broken):
    def change(self, writes: Writes) -> Writes:
        if any(address and not length for address, length in zip(writes.destination, writes.length, strict=False)):
            raise refusal("a write of no bytes lies outside")
        return writes


class CutsLargeWrites(Broken):
    def change(self, writes: Writes) -> Writes:
        return writes._replace(length=array("q", (min(length, BIG) for length in writes.length)))


class CutsManyWrites(Broken):
    def change(self, writes: Writes) -> Writes:
        return Writes(*(column[:4096] for column in writes)) if len(writes.length) == 5000 else writes


class OneThreadOnly(Broken):
    def __init__(self) -> None:
        super().__init__()
        self.thread = threading.get_ident()

    def change(self, writes: Writes) -> Writes:
        if threading.get_ident() == self.thread:
            return writes
        return writes._replace(length=array("q", (length // 2 for length in writes.length)))


class TakesAnswersBack(Broken):
    def poll(self, transfer: Transfer) -> TransferStatus:
        peer = self.peer_of.get(transfer)
        if peer is not None and dead(peer):
            return TransferStatus(state=TransferState.FAILED, reason="the peer has died")
        return super().poll(transfer)


class ReleasesOnce(Broken):
    def __init__(self) -> None:
        super().__init__()
        self.released: weakref.WeakSet[Any] = weakref.WeakSet()

    def release(self, transfer: Transfer) -> None:
        if transfer in self.released:
            raise refusal("this handle is not known")
        self.released.add(transfer)
        super().release(transfer)


class WaitsForPeers(Broken):
    def submit(self, peer: Peer, writes: Writes) -> Transfer:
        deadline = time.monotonic() + 0.8
        while isinstance(peer, LoopbackPeer) and self.stands_still(peer.remote.pid) and time.monotonic() < deadline:
            threading.Event().wait(0.01)
        return super().submit(peer, writes)

    @staticmethod
    def stands_still(pid: int) -> bool:
        path = Path(f"/proc/{pid}/stat")
        return path.exists() and path.read_text().rpartition(")")[2].split()[0] == "T"


class OneKeyForAll(Broken):
    def connect(self, description: bytes) -> Peer:
        peer = super().connect(description)
        self.peers[-1].remote.incarnation = Incarnation(bytes(ID_BYTES))
        return peer


class HangsOnDead(Broken):
    def poll(self, transfer: Transfer) -> TransferStatus:
        status = super().poll(transfer)
        peer = self.peer_of.get(transfer)
        alone = len({other.key for other in self.peers}) == 1
        if status.state is TransferState.FAILED and self.size_of[transfer] == 64 and peer and alone and dead(peer):
            return TransferStatus(state=TransferState.PENDING)
        return status


class HangsOnDying(Broken):
    def poll(self, transfer: Transfer) -> TransferStatus:
        status = super().poll(transfer)
        peer = self.peer_of.get(transfer)
        if status.state is TransferState.FAILED and self.size_of[transfer] == BIG and peer and dead(peer):
            return TransferStatus(state=TransferState.PENDING)
        return status


class MournsForEver(Broken):
    def __init__(self) -> None:
        super().__init__()
        self.mourning = False

    def submit(self, peer: Peer, writes: Writes) -> Transfer:
        if self.mourning:
            raise refusal("a peer has died")
        return super().submit(peer, writes)

    def poll(self, transfer: Transfer) -> TransferStatus:
        status = super().poll(transfer)
        self.mourning |= status.state is TransferState.FAILED and dead(self.peer_of[transfer])
        return status


class GrantsNothingAfterADeath(Broken):
    def describe(self, extents: Sequence[Extent]) -> bytes:
        if any(extent.length == 4 * PAGE for extent in extents) and any(dead(peer) for peer in self.peers):
            raise refusal("a writer has died")
        return super().describe(extents)


class WritesToSuccessors(Broken):
    def __init__(self) -> None:
        super().__init__()
        self.start_of: dict[str, int] = {}

    def connect(self, description: bytes) -> Peer:
        peer = super().connect(description)
        segments = wire.decode(description).segments
        if segments:
            self.start_of[peer.key] = segments[0].address
        return peer

    def submit(self, peer: Peer, writes: Writes) -> Transfer:
        newest = self.peers[-1] if self.peers else peer
        if isinstance(peer, LoopbackPeer) and dead(peer) and newest.key != peer.key:
            shift = self.start_of[newest.key] - self.start_of[peer.key]
            moved = array("q", (address + shift for address in writes.destination))
            return super().submit(newest, writes._replace(destination=moved))
        return super().submit(peer, writes)


class AlwaysQuiet(Broken):
    def quiesce(self, peer: Peer, deadline: float) -> bool:
        self._mover.quiesce(peer, 0.0)
        return deadline > 0 or super().quiesce(peer, deadline)


class NeverQuiet(Broken):
    def quiesce(self, peer: Peer, deadline: float) -> bool:
        super().quiesce(peer, min(deadline, time.monotonic() + 0.01))
        return False


class FencesNothing(Broken):
    def fence(self, peer: Peer, extents: Sequence[Extent], deadline: float) -> None:
        if sum(extent.length for extent in extents) < BIG:
            super().fence(peer, extents, deadline)


class FencesInSilence(Broken):
    def poll(self, transfer: Transfer) -> TransferStatus:
        status = super().poll(transfer)
        return TransferStatus(state=TransferState.DONE) if "fenced" in status.reason else status


class FencesEverything(Broken):
    def __init__(self) -> None:
        super().__init__()
        self.memory: list[Memory] = []

    def allocate(self, nbytes: int, kind: MemoryKind = MemoryKind.CPU, device: int = 0) -> Memory:
        self.memory.append(super().allocate(nbytes, kind, device))
        return self.memory[-1]

    def fence(self, peer: Peer, extents: Sequence[Extent], deadline: float) -> None:
        super().fence(peer, extents, deadline)
        super().fence(peer, [Extent(memory.address, memory.length) for memory in self.memory], deadline)


class CannotMixGrants(Broken):
    def __init__(self) -> None:
        super().__init__()
        self.fenced: list[tuple[int, int]] = []

    def fence(self, peer: Peer, extents: Sequence[Extent], deadline: float) -> None:
        super().fence(peer, extents, deadline)
        self.fenced.extend(extents)

    def describe(self, extents: Sequence[Extent]) -> bytes:
        fenced = Runs(self.fenced)
        for address, length in extents:
            touched = any(fenced.covers(page, 1) for page in range(address, address + length, PAGE))
            if touched and not fenced.covers(address, length):
                raise refusal("part of this extent was fenced")
        return super().describe(extents)


class FencesAsFarAsItCan(Broken):
    def fence(self, peer: Peer, extents: Sequence[Extent], deadline: float) -> None:
        try:
            super().fence(peer, extents, deadline)
        except MoverError as error:
            if error.code is not ErrorCode.OUT_OF_RANGE:
                raise


class NamedByProcess(Broken):
    @property
    def name(self) -> str:
        return f"loopback-{os.getpid()}"


class WritesOnAfterClose(Broken):
    def __init__(self) -> None:
        super().__init__()
        self.last: tuple[Peer, Writes] | None = None

    def submit(self, peer: Peer, writes: Writes) -> Transfer:
        self.last = (peer, writes)
        return super().submit(peer, writes)

    def close(self) -> None:
        if self.last is None or self.last[1].nbytes != BIG:
            super().close()
        else:
            threading.Thread(target=self.linger, args=self.last).start()

    def linger(self, peer: Peer, writes: Writes) -> None:
        deadline = time.monotonic() + 0.15
        while time.monotonic() < deadline:
            self._mover.submit(peer, writes)
            threading.Event().wait(0.005)
        self._mover.close()


class DoneAtClosedPeers(Broken):
    def poll(self, transfer: Transfer) -> TransferStatus:
        status = super().poll(transfer)
        peer = self.peer_of.get(transfer)
        if status.state is TransferState.FAILED and peer and peer.remote.ended and not dead(peer):
            return TransferStatus(state=TransferState.DONE)
        return status


class ClosesOnce(Broken):
    def __init__(self) -> None:
        super().__init__()
        self.closed = False

    def close(self) -> None:
        if self.closed:
            raise refusal("this mover is closed")
        self.closed = True
        super().close()


class LeaksDescriptors(Broken):
    def __init__(self) -> None:
        super().__init__()
        os.open(os.devnull, os.O_RDONLY)


BROKEN: dict[str, Callable[[], Mover]] = {
    "M-01": DirtyMemory,
    "M-02": ClaimsAnyMemory,
    "M-03": OwnMemoryOnly,
    "M-04": DropsBadSources,
    "M-05": ClipsAtTheEnd,
    "M-06": AddsGrantsUp,
    "M-07": IgnoresEmptyExtents,
    "M-08": RoundsExtents,
    "M-09": CutsLongBatches,
    "M-10": TripsOverNothing,
    "M-11": TrustsHandles,
    "M-12": DoneTooSoon,
    "M-13": RoundsLengths,
    "M-14": RoundsSources,
    "M-15": ChecksEmptyWrites,
    "M-16": CutsLargeWrites,
    "M-17": CutsManyWrites,
    "M-18": OneThreadOnly,
    "M-19": TakesAnswersBack,
    "M-20": ReleasesOnce,
    "M-21": WaitsForPeers,
    "M-22": OneKeyForAll,
    "M-23": HangsOnDead,
    "M-24": HangsOnDying,
    "M-25": MournsForEver,
    "M-26": GrantsNothingAfterADeath,
    "M-27": WritesToSuccessors,
    "M-28": AlwaysQuiet,
    "M-29": NeverQuiet,
    "M-30": FencesNothing,
    "M-31": FencesInSilence,
    "M-32": FencesEverything,
    "M-33": CannotMixGrants,
    "M-34": FencesAsFarAsItCan,
    "M-35": NamedByProcess,
    "M-36": WritesOnAfterClose,
    "M-37": DoneAtClosedPeers,
    "M-38": ClosesOnce,
    "M-39": LeaksDescriptors,
    "M-40": BelievesImpostors,
}


def make(rule: str = "") -> Mover:
    """A mover that breaks a rule; loopback itself without one."""
    return BROKEN[rule]() if rule else create()
