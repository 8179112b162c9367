"""One end of a transfer: a mover, some registered memory of it, and looking at that memory."""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections.abc import Sequence
from threading import Event
from typing import Final, final

from pdhandoff.engines.base import (
    Extent,
    Memory,
    Mover,
    MoverCapabilities,
    Peer,
    Transfer,
    TransferState,
    TransferStatus,
    Writes,
)
from pdhandoff.engines.checked import Checked
from pdhandoff.testing.bytes_at import fill_bytes, put_bytes, read_bytes
from pdhandoff.testing.place import IN_CPU_MEMORY, Place
from pdhandoff.testing.rule import Violation

__all__ = ["Side", "settle", "unit_of"]

_POLL_S: Final = 0.0005


def unit_of(capabilities: MoverCapabilities) -> int:
    """Bytes of the pieces that memory is counted in: whole pages that keep the mover's alignment."""
    return math.lcm(os.sysconf("SC_PAGESIZE"), max(1, capabilities.alignment))


def settle(mover: Mover, transfer: Transfer, within_s: float) -> TransferStatus:
    """Poll until the answer is final. Raises Violation when that takes too long."""
    deadline = time.monotonic() + within_s
    while (status := mover.poll(transfer)).state is TransferState.PENDING:
        if time.monotonic() > deadline:
            raise Violation(f"a transfer is still pending after {within_s:g} s")
        Event().wait(_POLL_S)
    return status


@final
class Side:
    """A mover with zeroed, registered memory of `units` units.

    Arguments:
        mover: belongs to the side, which closes it.
        units: pieces of `unit_of` bytes.
        settle_s: within which a write must be final.
        place: where the memory is.
    """

    def __init__(self, mover: Mover, units: int, settle_s: float, place: Place = IN_CPU_MEMORY) -> None:
        self.mover = mover
        self.settle_s = settle_s
        self.unit = unit_of(mover.capabilities)
        self.memory: Memory = mover.allocate(units * self.unit, place.kind, place.device)
        self.fill(0)
        self.region = mover.register(self.memory)
        self.closed = False

    @property
    def address(self) -> int:
        """Where its memory starts."""
        return self.memory.address

    @property
    def length(self) -> int:
        """Bytes of its memory."""
        return self.memory.length

    def extent(self, first: int = 0, units: int = 1) -> Extent:
        """Some units of its memory."""
        return Extent(self.address + first * self.unit, units * self.unit)

    def whole(self) -> Extent:
        """All of its memory."""
        return Extent(self.address, self.length)

    def fill(self, value: int, start: int = 0, length: int | None = None) -> None:
        """Set bytes to one value."""
        fill_bytes(self.memory, value, start, self.length - start if length is None else length)

    def put(self, data: bytes, start: int = 0) -> None:
        """Set bytes."""
        put_bytes(self.memory, start, data)

    def read(self, start: int = 0, length: int | None = None) -> bytes:
        """What is there now."""
        return read_bytes(self.memory, start, self.length - start if length is None else length)

    def digest(self, start: int = 0, length: int | None = None) -> str:
        """Of what is there now."""
        return hashlib.blake2b(self.read(start, length), digest_size=16).hexdigest()

    def describe(self, *extents: Extent) -> bytes:
        """A grant of some of its memory."""
        return self.mover.describe(extents)

    def connect(self, description: bytes, extents: Sequence[Extent] = ()) -> Peer:
        """The peer behind a description, which granted these extents of its memory."""
        peer = self.mover.connect(description)
        if isinstance(self.mover, Checked):
            self.mover.allow(peer, extents)
        return peer

    def finish(self, transfer: Transfer) -> TransferStatus:
        """Wait for the final answer, and forget the handle."""
        status = settle(self.mover, transfer, self.settle_s)
        self.mover.release(transfer)
        return status

    def write(self, peer: Peer, *writes: tuple[int, int, int]) -> TransferStatus:
        """Write (source, destination, length) triples and wait."""
        return self.finish(self.mover.submit(peer, Writes.of(*writes)))

    def close(self) -> None:
        """Close the mover, once."""
        if not self.closed:
            self.closed = True
            self.mover.close()
