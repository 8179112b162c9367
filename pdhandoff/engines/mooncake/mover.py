"""The Mooncake mover: one-sided writes through Mooncake's transfer engine, over TCP, RDMA or NVLink.

Peers find each other by Mooncake's own handshake between two engines; there is no metadata server. See `receiver` for
what peers are shown and how they are fenced, and `sender` for how writes are awaited.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
from collections.abc import Callable, Collection, Sequence
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
from pdhandoff.engines.bounds import Runs, check_columns, check_inside, check_memory
from pdhandoff.engines.handles import own_peer, own_transfer
from pdhandoff.engines.mooncake.engine import Engine
from pdhandoff.engines.mooncake.library import Protocol, Settings, load
from pdhandoff.engines.mooncake.options import choose
from pdhandoff.engines.mooncake.receiver import Receiver
from pdhandoff.engines.mooncake.sender import Sender
from pdhandoff.engines.mooncake.transfer import MooncakeTransfer
from pdhandoff.engines.mooncake.wire import Description, ExtentWire, decode, encode, split_segment
from pdhandoff.errors import ErrorCode, MoverError
from pdhandoff.ids import Incarnation

__all__ = ["MooncakeMover", "MooncakePeer", "MooncakeRegion", "create"]


@final
class MooncakeRegion:
    """Registered memory."""

    __slots__ = ("memory",)

    def __init__(self, memory: Memory) -> None:
        self.memory = memory


@final
class MooncakePeer:
    """A peer and one grant of it."""

    __slots__ = ("granted", "incarnation", "segment")

    def __init__(self, description: Description) -> None:
        self.incarnation: Final = Incarnation(description.incarnation)
        self.segment: Final = description.segment
        self.granted: Final = Runs((extent.address, extent.length) for extent in description.extents)

    @property
    def key(self) -> str:
        """Same for every grant of one life of one mover, fences included."""
        return str(self.incarnation)


@final
class MooncakeMover:
    """See the module. Every method may be called from any thread; none waits for a peer."""

    name: Final = "mooncake"

    def __init__(
        self,
        settings: Settings,
        *,
        host: str,
        devices: tuple[str, ...],
        allowed_hosts: frozenset[str] | None,
        idle_s: float,
        clock: Callable[[], float],
    ) -> None:
        """As `create`, which checks the options."""
        module = load(settings, devices)
        self._settings = settings
        self._host = host
        self._devices = devices
        self._allowed_hosts = allowed_hosts
        self._idle_s = idle_s
        self._clock = clock
        tcp = settings.protocol is Protocol.TCP
        self._eager = not tcp
        kinds = {MemoryKind.CPU} if settings.protocol is not Protocol.NVLINK_INTRA else set()
        self.capabilities: Final = MoverCapabilities(
            memory_kinds=frozenset(kinds | ({MemoryKind.CUDA} if module.SUPPORT_CUDA else set())),
            fence=tcp,
            reports_peer_death=tcp,
            thread_safe=True,
        )
        self._incarnation = Incarnation.mint()
        self._lock = threading.Lock()
        # Replaced as a whole and never changed in place: a transfer keeps the tuple, and by it the memory it reads.
        self._regions: tuple[MooncakeRegion, ...] = ()
        self._registered = Runs()
        self._receiver = Receiver(self._start_engine)
        self._senders: dict[tuple[bytes, str], Sender] = {}
        self._met: dict[Incarnation, None] = {}
        self._closed = False

    def _start_engine(self) -> Engine:
        return Engine(self._settings, host=self._host, devices=self._devices)

    def allocate(self, nbytes: int, kind: MemoryKind = MemoryKind.CPU, device: int = 0) -> Memory:
        """Zeroed, page-aligned memory. `owner` is a memoryview of it and keeps it alive.

        Raises:
            MoverError: OUT_OF_RANGE for a size below one byte, MOVER_FAILED when the host has none, CONFIG for
                memory of a GPU, which the caller allocates by cudaMalloc and registers.
        """
        del device
        self._check_open()
        if kind is not MemoryKind.CPU:
            raise MoverError(
                ErrorCode.CONFIG,
                "the Mooncake mover allocates CPU memory only: register memory from cudaMalloc instead",
            )
        if nbytes <= 0:
            raise MoverError(ErrorCode.OUT_OF_RANGE, f"{nbytes} bytes cannot be allocated: ask for at least one")
        try:
            mapping = mmap.mmap(-1, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)
        except OSError as error:
            raise MoverError(ErrorCode.MOVER_FAILED, f"{nbytes} bytes could not be allocated: {error}") from error
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        return Memory(address, nbytes, owner=memoryview(mapping)[:nbytes])

    def register(self, memory: Memory) -> Region:
        """Allow writes from this memory, and grants of it. Over RDMA and NVLink it is pinned now, over TCP not at all.

        Raises:
            MoverError: OUT_OF_RANGE for an empty range, CONFIG for a kind of memory that cannot be moved, MOVER_FAILED
                when Mooncake cannot register it.
        """
        if memory.kind not in self.capabilities.memory_kinds:
            raise MoverError(
                ErrorCode.CONFIG,
                f"{memory.kind.value} memory cannot be moved by protocol {self._settings.protocol.value} of this "
                "Mooncake wheel: take a CUDA wheel for GPU memory, or another protocol",
            )
        check_memory(memory)
        self._check_open()
        if self._eager:
            self._receiver.register(memory)
        region = MooncakeRegion(memory)
        with self._lock:
            self._set_regions((*self._regions, region))
        return region

    def deregister(self, region: Region) -> None:
        """Forbid new writes from and into this memory. Writes that have begun go on, and are reported as done."""
        with self._lock:
            kept = tuple(other for other in self._regions if other is not region)
            known = len(kept) < len(self._regions)
            self._set_regions(kept)
        if known:
            self._receiver.hide(region.memory)

    def _set_regions(self, regions: tuple[MooncakeRegion, ...]) -> None:
        self._regions = regions
        self._registered = Runs((region.memory.address, region.memory.length) for region in regions)

    def describe(self, extents: Sequence[Extent]) -> bytes:
        """Grant these extents. The first one of a region shows the whole region to whoever reaches this host's ports.

        Raises:
            MoverError: OUT_OF_RANGE for an extent that is empty or outside registered memory, OVERSIZED for too many,
                MOVER_FAILED when Mooncake cannot be started or cannot register the memory.
        """
        self._check_open()
        memories = [self._memory_of(extent) for extent in extents]
        segment = self._receiver.grant(extents, memories) if memories else ""
        granted = tuple(ExtentWire(extent.address, extent.length) for extent in extents)
        return encode(Description(bytes(self._incarnation), self._settings.protocol, segment, granted))

    def _memory_of(self, extent: Extent) -> Memory:
        """The region's memory that holds an extent."""
        for region in self._regions:
            memory = region.memory
            if extent.length > 0 and Runs([(memory.address, memory.length)]).covers(*extent):
                return memory
        raise MoverError(
            ErrorCode.OUT_OF_RANGE, f"{extent} is empty, or does not lie in one registered region: register it first"
        )

    def connect(self, description: bytes) -> Peer:
        """The peer, and what it granted by this description. Nothing is sent before the first write.

        Raises:
            MoverError: MALFORMED or OVERSIZED for garbage, MOVER_MISMATCH when the peer moves by another protocol,
                NOT_ALLOWED for a host that is not among `allowed_hosts`.
        """
        parsed = decode(description)
        if parsed.protocol is not self._settings.protocol:
            raise MoverError(
                ErrorCode.MOVER_MISMATCH,
                f"the peer's Mooncake moves by {parsed.protocol.value}, this one by {self._settings.protocol.value}: "
                "give both the same protocol",
            )
        if parsed.segment and self._allowed_hosts is not None:
            host, _ = split_segment(parsed.segment)
            if host not in self._allowed_hosts:
                raise MoverError(
                    ErrorCode.NOT_ALLOWED,
                    f"the grant names the host {host}, which is not among `allowed_hosts`: add it",
                )
        peer = MooncakePeer(parsed)
        with self._lock:
            self._check_open()
            if peer.incarnation not in self._met:
                self._met[peer.incarnation] = None
                self._receiver.renew()
                if len(self._met) > _REMEMBERED:
                    del self._met[next(iter(self._met))]
            for (incarnation, segment), sender in self._senders.items():
                if segment == peer.segment and incarnation != peer.incarnation:
                    sender.supersede()
        return peer

    def submit(self, peer: Peer, writes: Writes) -> Transfer:
        """Start one-sided writes.

        Raises:
            MoverError: OUT_OF_RANGE, with nothing written, for a source outside registered memory or a destination
                outside the grant; MISUSE and OVERSIZED for a bad batch; BUSY when too many transfers are queued.
        """
        target = own_peer(peer, MooncakePeer)
        check_columns(writes, max_writes=self.capabilities.max_writes)
        with self._lock:
            self._check_open()
            regions, registered = self._regions, self._registered
        check_inside(registered, writes.source, writes.length, "registered memory")
        check_inside(target.granted, writes.destination, writes.length, "the grant of this peer")
        transfer = MooncakeTransfer(writes, tuple(region.memory for region in regions))
        if any(writes.length):
            with self._lock:
                self._check_open()
                self._sender_of(target).put(transfer)
        else:
            transfer.settle(quiet=True)
        return transfer

    def _sender_of(self, peer: MooncakePeer) -> Sender:
        key = (bytes(peer.incarnation), peer.segment)
        sender = self._senders.get(key)
        if sender is None:
            self._senders = {other: known for other, known in self._senders.items() if not known.retired}
            sender = Sender(
                peer.segment,
                self._start_engine,
                registers_sources=self._eager,
                clock=self._clock,
                stall_s=self._settings.stall_s,
                idle_s=self._idle_s,
            )
            self._senders[key] = sender
        return sender

    def poll(self, transfer: Transfer) -> TransferStatus:
        """How it stands. One that failed becomes quiet when the peer's engine is known to be gone."""
        return own_transfer(transfer, MooncakeTransfer).status

    def release(self, transfer: Transfer) -> None:
        """Forget a handle. A queued write goes on."""
        own_transfer(transfer, MooncakeTransfer)

    def quiesce(self, peer: Peer, deadline: float) -> bool:
        """Prove nothing: Mooncake does not say which writes come from whom, nor whether a peer has ended."""
        own_peer(peer, MooncakePeer)
        del deadline
        return False

    def fence(self, peer: Peer, extents: Sequence[Extent], deadline: float) -> None:
        """Destroy the engines that these extents were granted with. All grants given with them end; their writes fail.

        It takes some 20 milliseconds an engine. Peers that were met later have their grants with other engines.

        Raises:
            MoverError: OUT_OF_RANGE for an extent that is not ours, CONFIG for a protocol that cannot be fenced,
                MOVER_FAILED when the engine is busy until `deadline` (of the injected clock).
        """
        own_peer(peer, MooncakePeer)
        self._check_open()
        for extent in extents:
            self._memory_of(extent)
        if not self.capabilities.fence:
            raise MoverError(
                ErrorCode.CONFIG,
                f"protocol {self._settings.protocol.value} cannot be fenced: end the writers, then this process",
            )
        self._receiver.fence(extents, deadline - self._clock())

    def close(self) -> None:
        """Destroy all engines: nothing of this process is read or written by Mooncake afterwards.

        What is not final fails. It is not quiet if some of it was under way, since the network may still hold bytes.
        """
        with self._lock:
            self._closed = True
            senders, self._senders = self._senders, {}
        for sender in senders.values():
            sender.close()
        self._receiver.close(_CLOSE_S)
        with self._lock:
            self._set_regions(())

    def _check_open(self) -> None:
        if self._closed:
            raise MoverError(ErrorCode.MISUSE, "this mover is closed: make another one")


_REMEMBERED: Final = 4096
"peers that are known to have been met"
_CLOSE_S: Final = 15.0
"bound on waiting for a call that holds the receiving engine"


def create(
    *,
    protocol: str = "tcp",
    host: str = "127.0.0.1",
    devices: Collection[str] = (),
    allowed_hosts: Collection[str] | None = None,
    lanes: int = 4,
    stall_s: int = 30,
    connect_s: int = 5,
    idle_s: float = 60.0,
    log_level: str = "error",
    clock: Callable[[], float] = time.monotonic,
) -> MooncakeMover:
    """What the registry calls.

    Arguments:
        protocol: `tcp`, `rdma` or `nvlink_intra`; both sides must have the same.
        host: the address, or name, that peers reach this process at. Nothing is probed. An IPv6 address makes the
            whole process speak IPv6.
        devices: RDMA devices that may be used; empty: all.
        allowed_hosts: hosts that a grant may name; None: any.
        lanes: TCP connections to one peer.
        stall_s: a write without progress for so many seconds has failed (not: has stopped).
        connect_s: bound on one handshake, in seconds.
        idle_s: what serves a peer ends after so many seconds without a write, and starts again with the next.
        log_level: `info`, `warning`, `error` or `silent`: what Mooncake writes to standard error.
        clock: monotonic seconds.

    Raises:
        MoverError: CONFIG, when an option is wrong, or the wheel, a system library or the hardware is missing.
    """
    settings = choose(
        protocol=protocol, host=host, lanes=lanes, stall_s=stall_s, connect_s=connect_s, log_level=log_level
    )
    return MooncakeMover(
        settings,
        host=host,
        devices=tuple(devices),
        allowed_hosts=None if allowed_hosts is None else frozenset(allowed_hosts),
        idle_s=idle_s,
        clock=clock,
    )
