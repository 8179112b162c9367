"""The loopback mover: one-sided writes between processes of one Linux host, through shared memory.

It is the reference: it does everything that the interface offers, including both proofs, and needs neither a network
nor a driver. Memory that peers write into must come from `allocate`; any memory can be written from.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, final

from pdhandoff.engines.base import (
    Extent,
    Memory,
    MemoryKind,
    MoverCapabilities,
    Peer,
    Region,
    Transfer,
    TransferStatus,
    Writes,
)
from pdhandoff.engines.bounds import Runs, check_columns, check_inside, check_memory, disjoint
from pdhandoff.engines.handles import own_peer, own_transfer
from pdhandoff.engines.loopback.arena import Arena
from pdhandoff.engines.loopback.control import Life
from pdhandoff.engines.loopback.courier import INLINE_BYTES, INLINE_WRITES, Courier, LoopbackTransfer
from pdhandoff.engines.loopback.remote import LoopbackPeer, Remote
from pdhandoff.engines.loopback.syscalls import PAGE
from pdhandoff.engines.loopback.wire import MAX_BYTES, Description, FileWire, SegmentWire, decode, encode
from pdhandoff.errors import ErrorCode, MoverError

__all__ = ["LoopbackMover", "LoopbackRegion", "create"]

_POLL_S: Final = 0.002
"how often `quiesce` looks whether the peer has ended"


@final
class LoopbackRegion:
    """Registered memory."""

    __slots__ = ("memory",)

    def __init__(self, memory: Memory) -> None:
        self.memory = memory


@final
class LoopbackMover:
    """See the module. Every method may be called from any thread."""

    name: Final = "loopback"
    capabilities: Final = MoverCapabilities(
        registers_any_memory=False,
        quiesce=True,
        fence=True,
        reports_peer_death=True,
        thread_safe=True,
        alignment=PAGE,
    )

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Make a mover.

        Arguments:
            clock: monotonic seconds, in which the deadline of `quiesce` is given.

        Raises:
            MoverError: MOVER_FAILED, when the host has no more descriptors.
        """
        self._clock = clock
        self._lock = threading.Lock()
        self._life = Life()
        self._courier = Courier()
        self._arenas: list[Arena] = []
        # Replaced as a whole and never changed in place: a transfer keeps the tuple, and by it the memory it reads.
        self._regions: tuple[LoopbackRegion, ...] = ()
        self._registered = Runs()
        self._remotes: dict[bytes, Remote] = {}
        self._closing = threading.Event()

    def allocate(self, nbytes: int, kind: MemoryKind = MemoryKind.CPU, device: int = 0) -> Memory:
        """Zeroed memory that peers can write into. `owner` is a memoryview of it and keeps it alive.

        Raises:
            MoverError: OUT_OF_RANGE for an impossible size, MOVER_FAILED when the host has none, CONFIG for memory of a
                GPU.
        """
        del device
        _check_kind(kind)
        if not 0 < nbytes < MAX_BYTES:
            raise MoverError(ErrorCode.OUT_OF_RANGE, f"{nbytes} bytes cannot be allocated, only 1 to {MAX_BYTES - 1}")
        with self._lock:
            self._check_open()
            arena = Arena(nbytes)
            self._arenas = [other for other in self._arenas if other.alive]
            self._arenas.append(arena)
            return arena.memory(nbytes)

    def register(self, memory: Memory) -> Region:
        """Allow writes from this memory, and into it if it came from `allocate`. Nothing is pinned."""
        _check_kind(memory.kind)
        check_memory(memory)
        region = LoopbackRegion(memory)
        with self._lock:
            self._check_open()
            self._set_regions((*self._regions, region))
        return region

    def deregister(self, region: Region) -> None:
        """Forbid new writes from and grants of this memory. Grants that were given keep working: fence them."""
        with self._lock:
            self._set_regions(tuple(other for other in self._regions if other is not region))

    def _set_regions(self, regions: tuple[LoopbackRegion, ...]) -> None:
        self._regions = regions
        self._registered = Runs((region.memory.address, region.memory.length) for region in regions)

    def describe(self, extents: Sequence[Extent]) -> bytes:
        """Grant these extents: whole pages inside registered memory from `allocate`.

        Raises:
            MoverError: OUT_OF_RANGE for any other extent, OVERSIZED for too many.
        """
        files: dict[bytes, FileWire] = {}
        segments: list[SegmentWire] = []
        with self._lock:
            self._check_open()
            order: dict[bytes, int] = {}
            for extent in disjoint(extents, PAGE):
                for span in self._arena_of(extent).spans(extent):
                    cookie = span.file.cookie
                    files[cookie] = FileWire(span.file.fd, cookie, span.file.data_bytes)
                    index = order.setdefault(cookie, len(order))
                    segments.append(SegmentWire(span.address, span.length, index, span.offset))
            life = self._life
            return encode(
                Description(life.pid, life.fd, bytes(life.incarnation), tuple(files.values()), tuple(segments))
            )

    def _arena_of(self, extent: Extent) -> Arena:
        arena = next((arena for arena in self._arenas if arena.covers(extent)), None)
        if arena is None:
            raise MoverError(
                ErrorCode.OUT_OF_RANGE,
                f"{extent} does not lie in memory of this mover's `allocate`: no other process can reach it",
            )
        if not self._registered.covers(extent.address, extent.length):
            raise MoverError(ErrorCode.OUT_OF_RANGE, f"{extent} does not lie in registered memory: register it first")
        return arena

    def connect(self, description: bytes) -> Peer:
        """The peer, and what it granted by this description.

        Raises:
            MoverError: MALFORMED or OVERSIZED for garbage, STALE_INCARNATION when the peer or its memory is gone.
        """
        parsed = decode(description)
        with self._lock:
            self._check_open()
            remote = self._remotes.get(parsed.incarnation)
            if remote is None:
                remote = Remote(parsed)
                self._remotes = {key: other for key, other in self._remotes.items() if not other.ended}
                self._remotes[parsed.incarnation] = remote
        return LoopbackPeer(remote, parsed)

    def submit(self, peer: Peer, writes: Writes) -> Transfer:
        """Start one-sided writes. Up to INLINE_BYTES are copied before this returns.

        Raises:
            MoverError: OUT_OF_RANGE, with nothing written, for a source outside registered memory or a destination
                outside the grant; MISUSE and OVERSIZED for a bad batch; BUSY when too many transfers are queued.
        """
        target = own_peer(peer, LoopbackPeer)
        check_columns(writes, max_writes=self.capabilities.max_writes)
        with self._lock:
            self._check_open()
            regions, registered = self._regions, self._registered
        check_inside(registered, writes.source, writes.length, "registered memory")
        check_inside(target.granted, writes.destination, writes.length, "the grant of this peer")
        transfer = LoopbackTransfer(target, writes, regions)
        if len(writes.length) <= INLINE_WRITES and writes.nbytes <= INLINE_BYTES:
            self._courier.run(transfer)
        else:
            self._courier.put(transfer)
        return transfer

    def poll(self, transfer: Transfer) -> TransferStatus:
        """How it stands."""
        return own_transfer(transfer, LoopbackTransfer).status

    def release(self, transfer: Transfer) -> None:
        """Forget a handle. A queued write goes on."""
        own_transfer(transfer, LoopbackTransfer)

    def quiesce(self, peer: Peer, deadline: float) -> bool:
        """Whether the peer's mover was closed, or its process ended, by the deadline (of the injected clock)."""
        remote = own_peer(peer, LoopbackPeer).remote
        while not remote.ended:
            left = deadline - self._clock()
            if left <= 0:
                return False
            self._closing.wait(min(left, _POLL_S))
        return True

    def fence(self, peer: Peer, extents: Sequence[Extent], deadline: float) -> None:
        """Put new memory under `extents`: whole pages from `allocate`. They read as zeros afterwards.

        Every grant of these pages ends, whoever holds it; its writes fail. Grants of other pages are untouched. It
        takes microseconds, so `deadline` is not looked at.

        Raises:
            MoverError: OUT_OF_RANGE for an extent that is not ours, MOVER_FAILED when the host has no more descriptors.
        """
        own_peer(peer, LoopbackPeer)
        del deadline
        with self._lock:
            self._check_open()
            by_arena: dict[Arena, list[Extent]] = {}
            for extent in disjoint(extents, PAGE):
                by_arena.setdefault(self._arena_of(extent), []).append(extent)
        for arena, parts in by_arena.items():
            arena.fence(parts)

    def close(self) -> None:
        """Finish or fail what is in flight, let peers know that nothing more will come, give all memory back.

        Memory from `allocate` reads as zeros from now on, and goes when its owner does.
        """
        with self._lock:
            self._closing.set()
            arenas, self._arenas = self._arenas, []
            remotes, self._remotes = self._remotes, {}
            self._set_regions(())
        self._courier.close()
        self._life.end()
        for arena in arenas:
            arena.close()
        for remote in remotes.values():
            remote.close()

    def _check_open(self) -> None:
        if self._closing.is_set():
            raise MoverError(ErrorCode.MISUSE, "this mover is closed: make another one")


def _check_kind(kind: MemoryKind) -> None:
    if kind is not MemoryKind.CPU:
        raise MoverError(ErrorCode.CONFIG, f"loopback moves CPU memory only, not {kind.value}: choose another mover")


def create(*, clock: Callable[[], float] = time.monotonic) -> LoopbackMover:
    """What the registry calls."""
    return LoopbackMover(clock=clock)
