"""Memory that peers write into: a mapping whose parts may come from different shared files.

A new allocation is one file. A fence takes a part of the mapping away from its file and puts a new file there: a writer
that still holds the old file writes into pages that nobody reads.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import NamedTuple, final

from pdhandoff.engines.base import Extent, Memory
from pdhandoff.engines.loopback.files import SharedFile, round_up
from pdhandoff.engines.loopback.syscalls import map_anonymous, map_file, punch_hole, unmap
from pdhandoff.errors import ErrorCode, MoverError
from pdhandoff.ids import Incarnation

__all__ = ["Arena", "Span"]


class Span(NamedTuple):
    """A run of an arena that one part of one file backs."""

    address: int
    length: int
    file: SharedFile
    offset: int
    "bytes into the file's data"

    def cut(self, start: int, end: int) -> Span:
        """The part of this span inside `[start, end)`."""
        low = max(start, self.address)
        high = min(end, self.address + self.length)
        return Span(low, high - low, self.file, self.offset + low - self.address)


def _new_file(data_bytes: int) -> SharedFile:
    return SharedFile(data_bytes, bytes(Incarnation.mint()))


@final
class Arena:
    """One allocation. Its memory lasts until its view is garbage; its files last until `close`."""

    def __init__(self, nbytes: int) -> None:
        """Allocate zeros, rounded up to whole pages. Raises MoverError when the host has none."""
        self._lock = threading.Lock()
        self.length = round_up(nbytes)
        file = _new_file(self.length)
        try:
            self.address = map_file(file.fd, self.length)
        except BaseException:
            file.close()
            raise
        self._spans = [Span(self.address, self.length, file, 0)]
        self._described = False
        "whether any writer was ever told of it"
        self._view: Callable[[], object] = lambda: None
        self.alive = True
        "False once the memory is unmapped"

    def memory(self, nbytes: int) -> Memory:
        """The handle to give out, once. Its owner is a memoryview; the arena is freed when no view of it is left."""
        view = (ctypes.c_ubyte * nbytes).from_address(self.address)
        weakref.finalize(view, self._free).atexit = False
        self._view = weakref.ref(view)
        return Memory(self.address, nbytes, owner=memoryview(view).cast("B"))

    def covers(self, extent: Extent) -> bool:
        """Whether an extent lies inside, and the arena still exists."""
        return (
            self.alive
            and self.address <= extent.address
            and extent.address + extent.length <= self.address + self.length
        )

    def spans(self, extent: Extent) -> Iterator[Span]:
        """What backs an extent, in address order."""
        end = extent.address + extent.length
        with self._lock:
            self._described = True
            spans = list(self._spans)
        for span in spans:
            if span.address < end and extent.address < span.address + span.length:
                yield span.cut(extent.address, end)

    def fence(self, extents: list[Extent]) -> None:
        """Put a new file under `extents` (whole pages, disjoint). They read as zeros afterwards.

        Raises:
            MoverError: MOVER_FAILED, when the host has no more descriptors. Each extent is then fenced or untouched.
        """
        view = self._view()  # must not be collected, and so unmapped, by this thread while it holds the lock
        if view is None:
            return  # nobody can read it any more
        file = _new_file(sum(extent.length for extent in extents))
        offset = 0
        try:
            for extent in extents:
                with self._lock:
                    self._replace(Span(extent.address, extent.length, file, offset))
                offset += extent.length
        finally:
            self._release(file, file.data_bytes - offset)

    def _replace(self, fresh: Span) -> None:
        """Map `fresh` over what is there. Marks come first, so that a writer that sees none has written in time."""
        if not self._spans:
            raise MoverError(
                ErrorCode.MISUSE, "this mover was closed while it fenced: nobody can write into its memory"
            )
        end = fresh.address + fresh.length
        old = [
            span.cut(fresh.address, end)
            for span in self._spans
            if span.address < end and fresh.address < span.address + span.length
        ]
        for span in old:
            span.file.mark(span.offset, span.length, fenced=True)
        try:
            map_file(fresh.file.fd, fresh.length, offset=fresh.offset, at=fresh.address)
        except MoverError:
            for span in old:
                span.file.mark(span.offset, span.length, fenced=False)
            raise
        self._spans = sorted([*self._without(fresh.address, end), fresh])
        for span in old:
            punch_hole(span.file.fd, span.offset, span.length)
            self._release(span.file, span.length)

    def _without(self, start: int, end: int) -> Iterator[Span]:
        for span in self._spans:
            span_end = span.address + span.length
            if span.address < start:
                yield span.cut(span.address, start)
            if span_end > end:
                yield span.cut(max(end, span.address), span_end)

    @staticmethod
    def _release(file: SharedFile, nbytes: int) -> None:
        """Count data that no mapping of ours uses any more; close the file after the last of it."""
        file.live_bytes -= nbytes
        if file.live_bytes <= 0:
            file.close()

    def close(self) -> None:
        """Cut every peer off and close the files. What still views the memory reads zeros. Idempotent."""
        view = self._view()
        with self._lock:
            spans, self._spans = self._spans, []
            for span in spans if self._described else ():
                span.file.mark(span.offset, span.length, fenced=True)
            if spans and view is not None:
                map_anonymous(self.length, at=self.address)
            for span in spans:
                self._release(span.file, span.length)

    def _free(self) -> None:
        """Runs when the view is garbage, on whichever thread noticed."""
        self.alive = False
        self.close()
        unmap(self.address, self.length)
