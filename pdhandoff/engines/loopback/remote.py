"""The writer's view of a peer: whether it lives, its files mapped here, and where a granted address is in them."""

from __future__ import annotations

import bisect
import ctypes
import os
import threading
import weakref
from array import array
from collections.abc import Iterable, Iterator
from operator import add
from typing import Final, NamedTuple, final

from pdhandoff.engines.base import Writes
from pdhandoff.engines.bounds import Runs
from pdhandoff.engines.loopback.control import Pulse
from pdhandoff.engines.loopback.files import marks_bytes, open_shared
from pdhandoff.engines.loopback.syscalls import PAGE, map_file, unmap
from pdhandoff.engines.loopback.wire import Description, FileWire
from pdhandoff.ids import Incarnation

__all__ = ["LoopbackPeer", "Remote", "touched"]

_KEPT_MAPPINGS: Final = 64
"files of one peer that stay mapped without a grant: mapping one again costs a fault for every page"


@final
class _Mapping:
    """A peer's file, mapped as long as somebody holds this object."""

    def __init__(self, pid: int, file: FileWire) -> None:
        fd = open_shared(pid, file.fd, file.cookie, file.data_bytes)
        nbytes = file.data_bytes + marks_bytes(file.data_bytes)
        try:
            self.base = map_file(fd, nbytes)
        finally:
            os.close(fd)
        self._marks = self.base + file.data_bytes
        weakref.finalize(self, unmap, self.base, nbytes).atexit = False

    def fenced(self, offset: int, length: int) -> bool:
        """Whether the peer has fenced any page of this part."""
        return b"\1" in ctypes.string_at(self._marks + offset // PAGE, length // PAGE)


@final
class Remote:
    """One incarnation of one peer."""

    def __init__(self, description: Description) -> None:
        """Raises MoverError (STALE_INCARNATION) when it has ended."""
        self.incarnation = Incarnation(description.incarnation)
        self.pid = description.pid
        self._pulse = Pulse(description.pid, description.control_fd, description.incarnation)
        self._lock = threading.Lock()
        self._mappings: dict[bytes, _Mapping] = {}

    @property
    def ended(self) -> bool:
        """Whether the peer's mover has ended: proven, and final."""
        with self._lock:
            return self._pulse.ended

    def mapping(self, file: FileWire) -> _Mapping:
        """The file, mapped. Raises MoverError (STALE_INCARNATION) when the peer does not have it any more."""
        with self._lock:
            mapping = self._mappings.pop(file.cookie, None) or _Mapping(self.pid, file)
            self._mappings[file.cookie] = mapping
            if len(self._mappings) > _KEPT_MAPPINGS:
                del self._mappings[next(iter(self._mappings))]
            return mapping

    def close(self) -> None:
        """Stop watching the peer, and unmap what no grant uses. Idempotent."""
        with self._lock:
            self._pulse.close()
            self._mappings.clear()


class _Segment(NamedTuple):
    address: int
    end: int
    delta: int
    "local address minus the peer's"
    offset: int
    mapping: _Mapping


@final
class LoopbackPeer:
    """A peer and one grant of it."""

    def __init__(self, remote: Remote, description: Description) -> None:
        """Map what was granted. Raises MoverError (STALE_INCARNATION) when it is gone."""
        self.remote = remote
        self._segments = list(self._map(remote, description))
        self._starts = [segment.address for segment in self._segments]
        self.granted: Final = Runs((segment.address, segment.end - segment.address) for segment in self._segments)
        "addresses that may be written"
        deltas = {segment.delta for segment in self._segments}
        self._delta = deltas.pop() if len(deltas) == 1 else None

    @staticmethod
    def _map(remote: Remote, description: Description) -> Iterator[_Segment]:
        mappings = [remote.mapping(file) for file in description.files]
        for segment in description.segments:
            mapping = mappings[segment.file]
            local = mapping.base + segment.offset
            yield _Segment(
                segment.address, segment.address + segment.length, local - segment.address, segment.offset, mapping
            )

    @property
    def key(self) -> str:
        """Same for every grant of one incarnation of one peer."""
        return str(self.remote.incarnation)

    def fenced(self, low: int, high: int) -> bool:
        """Whether the peer has fenced a granted page between two of its addresses."""
        return any(
            segment.mapping.fenced(segment.offset, segment.end - segment.address)
            for segment in self._segments
            if segment.address < high and low < segment.end
        )

    def localise(self, writes: Writes) -> Iterable[tuple[int, int, int]]:
        """(destination here, source, length) of granted writes, cut where neighbours are in different files."""
        columns = zip(writes.destination, writes.source, writes.length, strict=True)
        if self._delta is not None:
            delta = self._delta
            return ((destination + delta, source, length) for destination, source, length in columns)
        return self._cut(columns)

    def _cut(self, columns: Iterable[tuple[int, int, int]]) -> Iterator[tuple[int, int, int]]:
        for first, source, length in columns:
            address, end = first, first + length
            while address < end:
                segment = self._segments[bisect.bisect_right(self._starts, address) - 1]
                part = min(end, segment.end) - address
                yield address + segment.delta, source + address - first, part
                address += part


def touched(destination: array[int], length: array[int]) -> tuple[int, int]:
    """Lowest and highest address of a batch; equal when it moves nothing."""
    if len(length) and min(length):
        low = min(destination)
        return low, max(map(add, destination, length))
    moved = [(start, start + nbytes) for start, nbytes in zip(destination, length, strict=True) if nbytes]
    if not moved:
        return 0, 0
    return min(start for start, _ in moved), max(end for _, end in moved)
