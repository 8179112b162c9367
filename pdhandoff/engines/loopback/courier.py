"""Copying: at once for small batches, by one thread for large ones, a slice at a time so that none starves another."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from typing import Final, final

from pdhandoff.engines.base import TransferState, TransferStatus, Writes
from pdhandoff.engines.loopback.remote import LoopbackPeer, touched
from pdhandoff.engines.loopback.syscalls import copy
from pdhandoff.errors import ErrorCode, MoverError

__all__ = ["INLINE_BYTES", "INLINE_WRITES", "MAX_QUEUED", "Courier", "LoopbackTransfer"]

INLINE_BYTES: Final = 256 << 10
"batches up to this size are copied before `submit` returns: that takes some ten microseconds"
INLINE_WRITES: Final = 256
MAX_QUEUED: Final = 4096
"transfers that wait for the thread"
_SLICE_BYTES: Final = 4 << 20
_SLICE_WRITES: Final = 4096

_PENDING: Final = TransferStatus(state=TransferState.PENDING, quiet=False)
_DONE: Final = TransferStatus(state=TransferState.DONE)


def _failed(reason: str) -> TransferStatus:
    return TransferStatus(state=TransferState.FAILED, reason=reason)


@final
class LoopbackTransfer:
    """Submitted writes. Holds on to everything they touch until they are final."""

    def __init__(self, peer: LoopbackPeer, writes: Writes, sources: object) -> None:
        self.status = _PENDING
        self._peer = peer
        self._sources = sources
        self._range = touched(writes.destination, writes.length)
        self._slices = self._copy(peer, writes)

    @staticmethod
    def _copy(peer: LoopbackPeer, writes: Writes) -> Iterator[None]:
        """Copy everything, pausing after every slice."""
        nbytes = count = 0
        for destination, source, length in peer.localise(writes):
            done = 0
            while done < length:
                part = min(length - done, _SLICE_BYTES - nbytes)
                copy(destination + done, source + done, part)
                done += part
                nbytes += part
                count += 1
                if nbytes >= _SLICE_BYTES or count >= _SLICE_WRITES:
                    yield
                    nbytes = count = 0

    def step(self) -> bool:
        """Copy one slice. True when the transfer is final."""
        problem = self._problem()
        if problem:
            self.end(_failed(problem))
            return True
        for _ in self._slices:
            return False
        # A peer that ended, or fenced its memory, before now may not have got these bytes; one that does so later has.
        problem = self._problem()
        self.end(_failed(problem) if problem else _DONE)
        return True

    def _problem(self) -> str:
        if self._peer.remote.ended:
            return f"the mover of process {self._peer.remote.pid} has ended: its memory is gone"
        if self._peer.fenced(*self._range):
            return f"process {self._peer.remote.pid} has fenced this memory: ask it for a new grant"
        return ""

    def end(self, status: TransferStatus) -> None:
        """Make it final, and let go of the memory. No copy runs after this."""
        self._slices = iter(())
        self._sources = None
        self.status = status


@final
class Courier:
    """One thread, started with the first large batch."""

    def __init__(self) -> None:
        self._wake = threading.Condition()
        self._queue: deque[LoopbackTransfer] = deque()
        self._thread: threading.Thread | None = None
        self._running = 0
        self._closed = False

    def run(self, transfer: LoopbackTransfer) -> None:
        """Copy a small transfer now. Raises MoverError (MISUSE) after `close`."""
        with self._wake:
            self._check_open()
            self._running += 1
        try:
            while not transfer.step():
                pass
        finally:
            with self._wake:
                self._running -= 1
                self._wake.notify_all()

    def put(self, transfer: LoopbackTransfer) -> None:
        """Queue a transfer. Raises MoverError: BUSY when MAX_QUEUED wait already, MISUSE after `close`."""
        with self._wake:
            self._check_open()
            if len(self._queue) >= MAX_QUEUED:
                raise MoverError(ErrorCode.BUSY, f"{MAX_QUEUED} transfers are queued: poll some of them first")
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="pdhandoff-loopback", daemon=True)
                self._thread.start()
            self._queue.append(transfer)
            self._wake.notify_all()

    def _check_open(self) -> None:
        if self._closed:
            raise MoverError(ErrorCode.MISUSE, "this mover is closed: nothing can be submitted")

    def _run(self) -> None:
        while (transfer := self._next()) is not None:
            if not transfer.step():
                with self._wake:
                    self._queue.append(transfer)

    def _next(self) -> LoopbackTransfer | None:
        with self._wake:
            self._wake.wait_for(lambda: bool(self._queue) or self._closed)
            return None if self._closed else self._queue.popleft()

    def close(self) -> None:
        """Stop copying: what is not final fails. Waits for at most one slice. Idempotent."""
        with self._wake:
            self._closed = True
            self._wake.notify_all()
            self._wake.wait_for(lambda: not self._running)
        if self._thread is not None:
            self._thread.join()
        for transfer in self._queue:
            transfer.end(_failed("this mover was closed before the write had finished"))
        self._queue.clear()
