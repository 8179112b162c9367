"""Movers for tests: one side of a transfer with memory, the wrappers that must not change anything, and waiting."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event

from pdhandoff.engines.base import Extent, Memory, Mover, Peer, Transfer, TransferState, TransferStatus, Writes
from pdhandoff.engines.checked import Checked
from pdhandoff.engines.faults import Faulty
from pdhandoff.engines.loopback import create
from pdhandoff.engines.metered import Metered

__all__ = ["MAKERS", "PAGE", "MakeSide", "Side", "descriptors", "mappings", "settle", "sides", "soon"]

PAGE = 4096
DEADLINE_S = 30.0

MAKERS: dict[str, Callable[[], Mover]] = {
    "loopback": create,
    "faulty": lambda: Faulty(create()),
    "metered": lambda: Metered(create()),
    "checked": lambda: Checked(create()),
    "all": lambda: Metered(Checked(Faulty(create()))),
}


def soon() -> float:
    """A deadline that a correct mover never reaches."""
    return time.monotonic() + DEADLINE_S


def settle(mover: Mover, transfer: Transfer) -> TransferStatus:
    """Poll until it is final."""
    deadline = soon()
    while (status := mover.poll(transfer)).state is TransferState.PENDING:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{transfer} is still pending after {DEADLINE_S} s")
        Event().wait(0.0005)
    return status


def descriptors() -> int:
    """Open descriptors of this process."""
    return len(list(Path("/proc/self/fd").iterdir()))


def mappings() -> int:
    """Mappings of shared loopback memory in this process."""
    return Path("/proc/self/maps").read_text(encoding="utf-8").count("memfd:pdhandoff")


def _checked(mover: object) -> Checked | None:
    """The `Checked` among nested wrappers."""
    while not isinstance(mover, Checked):
        mover = getattr(mover, "_mover", None)
        if mover is None:
            return None
    return mover


class Side:
    """One end: a mover and some registered memory of it."""

    def __init__(self, mover: Mover, pages: int = 8) -> None:
        self.mover = mover
        self.memory: Memory = mover.allocate(pages * PAGE)
        self.region = mover.register(self.memory)

    @property
    def address(self) -> int:
        return self.memory.address

    def extent(self, page: int, pages: int = 1) -> Extent:
        return Extent(self.address + page * PAGE, pages * PAGE)

    def fill(self, value: int, start: int = 0, length: int | None = None) -> None:
        ctypes.memset(self.address + start, value, self.memory.length - start if length is None else length)

    def put(self, data: bytes, start: int = 0) -> None:
        ctypes.memmove(self.address + start, data, len(data))

    def bytes(self, start: int = 0, length: int | None = None) -> bytes:
        return ctypes.string_at(self.address + start, self.memory.length - start if length is None else length)

    def connect(self, owner: Side, *extents: Extent) -> Peer:
        """Let `owner` grant extents to us."""
        peer = self.mover.connect(owner.mover.describe(extents))
        checked = _checked(self.mover)
        if checked is not None:
            checked.allow(peer, extents)
        return peer

    def write(self, peer: Peer, *writes: tuple[int, int, int]) -> TransferStatus:
        """Write (source, destination, length) triples and wait."""
        return settle(self.mover, self.mover.submit(peer, Writes.of(*writes)))

    @staticmethod
    def store(address: int, source: int, length: int) -> None:
        """Copy as a writer does that looks at nothing any more."""
        ctypes.memmove(address, source, length)


MakeSide = Callable[..., Side]
"takes the number of pages, and options of the mover"


def sides(create: Callable[..., Mover]) -> Iterator[MakeSide]:
    """For fixtures: what makes sides on such movers, which are closed when the test is over."""
    made: list[Mover] = []

    def side(pages: int = 8, **options: object) -> Side:
        mover = create(**options)
        made.append(mover)
        return Side(mover, pages)

    yield side
    for mover in made:
        mover.close()
