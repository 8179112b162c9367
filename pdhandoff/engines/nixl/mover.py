"""The NIXL mover: one-sided writes through UCX, between CPU and GPU memory of any two processes.

A mover has two NIXL agents: one writes, one is written through. See `sender` and `receiver` for why.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, final

import msgspec

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
from pdhandoff.engines.bounds import Runs, check_columns, check_memory, disjoint
from pdhandoff.engines.handles import own_peer, own_transfer
from pdhandoff.engines.loopback.control import Life as OwnLife
from pdhandoff.engines.nixl.binding import Descriptor
from pdhandoff.engines.nixl.host import host_cookie, machine_cookie
from pdhandoff.engines.nixl.locking import held
from pdhandoff.engines.nixl.memory import ALIGNMENT, allocate
from pdhandoff.engines.nixl.options import NixlOptions
from pdhandoff.engines.nixl.receiver import Receiver
from pdhandoff.engines.nixl.remote import NixlPeer, Remote
from pdhandoff.engines.nixl.sender import NixlTransfer, Sender
from pdhandoff.engines.nixl.tiles import Tiles, batches
from pdhandoff.engines.nixl.transports import direct
from pdhandoff.engines.nixl.wire import Description, PartWire, decode, encode
from pdhandoff.errors import ErrorCode, MoverError

__all__ = ["NixlMover", "NixlRegion", "create"]

_POLL_S: Final = 0.002
"how often `fence` looks whether a peer has ended"


@final
class NixlRegion:
    """Registered memory."""

    __slots__ = ("memory",)

    def __init__(self, memory: Memory) -> None:
        self.memory = memory

    @property
    def descriptor(self) -> Descriptor:
        """As NIXL has it."""
        return Descriptor(self.memory.address, self.memory.length, self.memory.device, self.memory.kind)


@final
class NixlMover:
    """See the module. Every method may be called from any thread."""

    name: Final = "nixl"

    def __init__(self, options: NixlOptions, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Make a mover.

        Arguments:
            options: see there.
            clock: monotonic seconds, in which deadlines are given.

        Raises:
            MoverError: CONFIG for an option or a missing wheel, MOVER_FAILED when UCX does not start.
        """
        options.check()
        kinds = {MemoryKind.CPU} | ({MemoryKind.CUDA} if Path("/dev/nvidiactl").exists() else set())
        self._capabilities = MoverCapabilities(
            memory_kinds=frozenset(kinds),
            fence=True,
            reports_peer_death=True,
            thread_safe=True,
            alignment=ALIGNMENT,
        )
        self._options = options
        self._clock = clock
        self._lock = threading.Lock()
        "around what is below; never held during a call into NIXL"
        self._registering = threading.Lock()
        "around a registration or its end, which may take seconds"
        self._regions: tuple[NixlRegion, ...] = ()
        self._tiles = Tiles()
        self._registered = Runs()
        self._remotes: dict[bytes, Remote] = {}
        self._closing = threading.Event()
        self._life = OwnLife()
        try:
            self._host, self._machine = host_cookie(), machine_cookie()
            self._sender = Sender(self._life.incarnation, options)
        except BaseException:
            self._life.end()
            raise
        self._receiver = Receiver(self._life.incarnation, options)

    @property
    def capabilities(self) -> MoverCapabilities:
        """What it can do. `fence` of memory that a peer may write directly needs that peer's end: see there."""
        return self._capabilities

    def allocate(self, nbytes: int, kind: MemoryKind = MemoryKind.CPU, device: int = 0) -> Memory:
        """Zeroed memory, freed with its `owner`: a memoryview, or a torch tensor. Raises MoverError."""
        self._check_open()
        return allocate(nbytes, kind, device)

    def register(self, memory: Memory) -> Region:
        """Allow writes from this memory, and grants of it.

        Raises:
            MoverError: OUT_OF_RANGE for no memory, or for memory that overlaps what is registered; MOVER_FAILED when
                UCX refuses, naming the limit.
        """
        self._check_open()
        check_memory(memory)
        region = NixlRegion(memory)
        with held(self._registering, self._options.call_s):
            if self._tiles.overlapping(memory.address, memory.length):
                raise MoverError(
                    ErrorCode.OUT_OF_RANGE,
                    f"{memory.length} bytes at {memory.address:#x} overlap registered memory, which NIXL cannot tell "
                    "apart: deregister that first, or register both as one",
                )
            self._sender.register(region.descriptor)
            with self._lock:
                self._check_open()
                self._set_regions((*self._regions, region))
        return region

    def deregister(self, region: Region) -> None:
        """Forbid new writes from and grants of this memory. Not a fence: what is under way may still land."""
        with held(self._registering, self._options.call_s):
            with self._lock:
                own = next((other for other in self._regions if other is region), None)
                self._set_regions(tuple(other for other in self._regions if other is not region))
            if own is None:
                return
            self._sender.deregister(own.descriptor, own.memory.owner)
            self._receiver.forget(own.descriptor)

    def _set_regions(self, regions: tuple[NixlRegion, ...]) -> None:
        self._regions = regions
        self._tiles = Tiles(region.descriptor for region in regions)
        self._registered = Runs((region.memory.address, region.memory.length) for region in regions)

    def describe(self, extents: Sequence[Extent]) -> bytes:
        """Grant these extents: whole pages inside registered memory.

        Raises:
            MoverError: OUT_OF_RANGE for any other extent, OVERSIZED for too many, MOVER_FAILED when UCX refuses.
        """
        self._check_open()
        described = Description(bytes(self._life.incarnation), self._machine, self._host, self._life.pid, self._life.fd)
        descriptors = self._descriptors(extents)
        if descriptors:
            life, metadata, parts = self._receiver.grant(descriptors)
            wire = tuple(PartWire(p.address, p.length, p.kind is MemoryKind.CUDA, p.device) for p in parts)
            described = msgspec.structs.replace(described, life=life, metadata=metadata, parts=wire)
        return encode(described)

    def _descriptors(self, extents: Sequence[Extent]) -> list[Descriptor]:
        """The extents in address order, cut at the edges of regions; raises unless they are ours and disjoint."""
        with self._lock:
            tiles, registered = self._tiles, self._registered
        found: list[Descriptor] = []
        for extent in disjoint(extents, ALIGNMENT):
            if not registered.covers(extent.address, extent.length):
                raise MoverError(
                    ErrorCode.OUT_OF_RANGE, f"{extent} does not lie in registered memory: register it first"
                )
            end = extent.address + extent.length
            for run in tiles.overlapping(extent.address, extent.length):
                low, high = max(run.address, extent.address), min(run.address + run.length, end)
                found.append(run._replace(address=low, length=high - low))
        return found

    def connect(self, description: bytes) -> Peer:
        """The peer, and what it granted by this description. The first grant of an agent takes some 20 ms.

        Raises:
            MoverError: MALFORMED or OVERSIZED for garbage, STALE_INCARNATION when the peer is known to be gone.
        """
        parsed = decode(description)
        with self._lock:
            self._check_open()
            remote = self._remotes.get(parsed.incarnation)
            if remote is None or remote.ended:
                remote = Remote(parsed, host=self._host, machine=self._machine)
                self._remotes = {key: other for key, other in self._remotes.items() if not other.ended}
                self._remotes[parsed.incarnation] = remote
        life = self._sender.connect(remote, parsed) if parsed.life else None
        return NixlPeer(remote, life, parsed)

    def submit(self, peer: Peer, writes: Writes) -> Transfer:
        """Start one-sided writes.

        Raises:
            MoverError: OUT_OF_RANGE, with nothing written, for a source outside registered memory or a destination
                outside the grant; MISUSE and OVERSIZED for a bad batch; BUSY when too many transfers are queued.
        """
        target = own_peer(peer, NixlPeer)
        check_columns(writes, max_writes=self.capabilities.max_writes)
        with self._lock:
            self._check_open()
            regions, tiles = self._regions, self._tiles
        transfer = NixlTransfer(target.life, batches(writes, tiles, target.granted), regions)
        self._sender.submit(transfer)
        return transfer

    def transports(self, peer: Peer) -> tuple[str, ...]:
        """What UCX has chosen to reach a peer, as `transport/device`; empty when unknown or when nothing is granted."""
        life = own_peer(peer, NixlPeer).life
        return life.transports if life is not None else ()

    def poll(self, transfer: Transfer) -> TransferStatus:
        """How it stands. One that failed is quiet once its agent, or the peer, is proven to have ended."""
        return self._sender.poll(own_transfer(transfer, NixlTransfer))

    def release(self, transfer: Transfer) -> None:
        """Forget a handle. Its writes go on."""
        self._sender.release(own_transfer(transfer, NixlTransfer))

    def quiesce(self, peer: Peer, deadline: float) -> bool:
        """Always False: bytes of a peer that has ended may still lie in a queue that this process empties."""
        own_peer(peer, NixlPeer)
        del deadline
        return False

    def fence(self, peer: Peer, extents: Sequence[Extent], deadline: float) -> None:
        """Destroy the agent that peers write through. The next `describe` starts another.

        Every grant that anybody holds of our memory ends, also of other extents: writes fail and say to connect again.
        Our own writes to others go on. Memory that the peer may write without this agent (see `transports`) is
        safe only once the peer has ended; this waits for that.

        Raises:
            MoverError: OUT_OF_RANGE for an extent that is not ours; TRANSFER_TIMEOUT when the peer writes directly and
                has not ended by the deadline; BUSY when NIXL is stuck.
        """
        remote = own_peer(peer, NixlPeer).remote
        self._check_open()
        kinds = {descriptor.kind for descriptor in self._descriptors(extents)}
        direct_by = sorted(name for kind in kinds for name in direct(self._options.transports, kind))
        if direct_by and remote.near:
            self._await_end(remote, direct_by, deadline)
        self._receiver.renew(deadline - self._clock())

    def _await_end(self, remote: Remote, direct_by: list[str], deadline: float) -> None:
        while not remote.ended:
            left = deadline - self._clock()
            if left <= 0 or self._closing.is_set():
                raise MoverError(
                    ErrorCode.TRANSFER_TIMEOUT,
                    f"process {remote.pid} may write by {', '.join(direct_by)} without our help and is not known to "
                    f"have ended: end it, or exclude these, as in transports='^{','.join(direct_by)}'",
                )
            self._closing.wait(min(left, _POLL_S))

    def close(self) -> None:
        """End both agents. Peers' later writes fail, and so do our own that are not over. Idempotent."""
        with self._lock:
            if self._closing.is_set():
                return
            self._closing.set()
            remotes, self._remotes = self._remotes, {}
            self._set_regions(())
        try:
            self._sender.close()
            self._receiver.renew(self._options.call_s)
        finally:
            self._life.end()
            for remote in remotes.values():
                remote.close()

    def _check_open(self) -> None:
        if self._closing.is_set():
            raise MoverError(ErrorCode.MISUSE, "this mover is closed: make another one")


def create(*, clock: Callable[[], float] = time.monotonic, **options: object) -> NixlMover:
    """What the registry calls.

    Arguments:
        clock: monotonic seconds.
        options: fields of NixlOptions.

    Raises:
        MoverError: CONFIG for an unknown or wrong option and for a missing wheel, MOVER_FAILED when UCX does not start.
    """
    try:
        chosen = msgspec.convert(options, NixlOptions)
    except msgspec.ValidationError as error:
        raise MoverError(ErrorCode.CONFIG, f"an option of the nixl mover is wrong: {error}") from error
    return NixlMover(chosen, clock=clock)
