"""A wrapper that counts what a mover moves and how long it takes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import final

import msgspec

from pdhandoff.engines.base import Mover, Peer, Transfer, TransferState, TransferStatus, Writes
from pdhandoff.engines.forwarding import Forwarding
from pdhandoff.errors import ErrorCode, MoverError

__all__ = ["Metered", "MeteredStatistics", "MeteredTransfer"]


@final
class MeteredStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Counts since the wrapper was made. Times are seconds of the injected clock."""

    submitted: int
    "transfers that the mover accepted"
    refused: int
    "transfers that it refused when they were submitted"
    done: int
    failed: int
    in_flight: int
    "accepted, and not yet seen final"
    released_unseen: int
    "released before they were seen final: how they ended is not known"
    writes: int
    "entries of all accepted transfers"
    bytes_submitted: int
    bytes_done: int
    in_flight_s: float
    "from submit until first seen final, summed over transfers"
    longest_s: float
    "the longest of them"


@final
class MeteredTransfer:
    """A transfer with its start time. Counted once."""

    __slots__ = ("inner", "nbytes", "open", "started_s")

    def __init__(self, inner: Transfer, nbytes: int, started_s: float) -> None:
        self.inner = inner
        self.nbytes = nbytes
        self.started_s = started_s
        self.open = True


@final
class Metered(Forwarding):
    """See the module. As thread-safe as the wrapped mover."""

    def __init__(self, mover: Mover, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Wrap a mover. `clock` gives monotonic seconds."""
        super().__init__(mover)
        self._clock = clock
        self._lock = threading.Lock()
        self._counts = MeteredStatistics(
            submitted=0,
            refused=0,
            done=0,
            failed=0,
            in_flight=0,
            released_unseen=0,
            writes=0,
            bytes_submitted=0,
            bytes_done=0,
            in_flight_s=0.0,
            longest_s=0.0,
        )

    def statistics(self) -> MeteredStatistics:
        """A snapshot."""
        return self._counts

    def submit(self, peer: Peer, writes: Writes) -> Transfer:
        """See `Mover.submit`."""
        started_s = self._clock()
        try:
            inner = self._mover.submit(peer, writes)
        except MoverError:
            with self._lock:
                self._counts = msgspec.structs.replace(self._counts, refused=self._counts.refused + 1)
            raise
        transfer = MeteredTransfer(inner, writes.nbytes, started_s)
        with self._lock:
            counts = self._counts
            self._counts = msgspec.structs.replace(
                counts,
                submitted=counts.submitted + 1,
                in_flight=counts.in_flight + 1,
                writes=counts.writes + len(writes.length),
                bytes_submitted=counts.bytes_submitted + transfer.nbytes,
            )
        return transfer

    def poll(self, transfer: Transfer) -> TransferStatus:
        """See `Mover.poll`."""
        metered = _own(transfer)
        status = self._mover.poll(metered.inner)
        if status.state is not TransferState.PENDING and metered.open:
            self._finish(metered, done=status.state is TransferState.DONE)
        return status

    def _finish(self, transfer: MeteredTransfer, *, done: bool) -> None:
        took_s = self._clock() - transfer.started_s
        with self._lock:
            if not transfer.open:
                return
            transfer.open = False
            counts = self._counts
            self._counts = msgspec.structs.replace(
                counts,
                in_flight=counts.in_flight - 1,
                done=counts.done + done,
                failed=counts.failed + (not done),
                bytes_done=counts.bytes_done + (transfer.nbytes if done else 0),
                in_flight_s=counts.in_flight_s + took_s,
                longest_s=max(counts.longest_s, took_s),
            )

    def release(self, transfer: Transfer) -> None:
        """See `Mover.release`."""
        metered = _own(transfer)
        with self._lock:
            if metered.open:
                metered.open = False
                counts = self._counts
                self._counts = msgspec.structs.replace(
                    counts, in_flight=counts.in_flight - 1, released_unseen=counts.released_unseen + 1
                )
        self._mover.release(metered.inner)


def _own(transfer: Transfer) -> MeteredTransfer:
    if not isinstance(transfer, MeteredTransfer):
        raise MoverError(ErrorCode.MISUSE, f"{type(transfer).__name__} is no transfer of this wrapper")
    return transfer
