"""What every wrapper around a mover has in common: the verbs that it does not change go to the wrapped mover."""

from __future__ import annotations

from collections.abc import Sequence

from pdhandoff.engines.base import (
    Extent,
    Memory,
    MemoryKind,
    Mover,
    MoverCapabilities,
    Peer,
    Region,
    Transfer,
    TransferStatus,
    Writes,
)

__all__ = ["Forwarding"]


class Forwarding:
    """A mover that does exactly what the wrapped one does. Wrappers override the verbs that they add to."""

    def __init__(self, mover: Mover) -> None:
        self._mover = mover

    @property
    def name(self) -> str:
        """As the wrapped mover: a peer cannot tell the difference."""
        return self._mover.name

    @property
    def capabilities(self) -> MoverCapabilities:
        """As the wrapped mover's."""
        return self._mover.capabilities

    def allocate(self, nbytes: int, kind: MemoryKind = MemoryKind.CPU, device: int = 0) -> Memory:
        """See `Mover.allocate`."""
        return self._mover.allocate(nbytes, kind, device)

    def register(self, memory: Memory) -> Region:
        """See `Mover.register`."""
        return self._mover.register(memory)

    def deregister(self, region: Region) -> None:
        """See `Mover.deregister`."""
        self._mover.deregister(region)

    def describe(self, extents: Sequence[Extent]) -> bytes:
        """See `Mover.describe`."""
        return self._mover.describe(extents)

    def connect(self, description: bytes) -> Peer:
        """See `Mover.connect`."""
        return self._mover.connect(description)

    def submit(self, peer: Peer, writes: Writes) -> Transfer:
        """See `Mover.submit`."""
        return self._mover.submit(peer, writes)

    def poll(self, transfer: Transfer) -> TransferStatus:
        """See `Mover.poll`."""
        return self._mover.poll(transfer)

    def release(self, transfer: Transfer) -> None:
        """See `Mover.release`."""
        self._mover.release(transfer)

    def quiesce(self, peer: Peer, deadline: float) -> bool:
        """See `Mover.quiesce`."""
        return self._mover.quiesce(peer, deadline)

    def fence(self, peer: Peer, extents: Sequence[Extent], deadline: float) -> None:
        """See `Mover.fence`."""
        self._mover.fence(peer, extents, deadline)

    def close(self) -> None:
        """See `Mover.close`."""
        self._mover.close()
