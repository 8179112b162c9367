"""Submitted writes, as their sender counts them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple, final

from pdhandoff.engines.base import Memory, TransferState, TransferStatus, Writes

__all__ = ["MooncakeTransfer", "Piece", "merged"]

_PENDING: Final = TransferStatus(state=TransferState.PENDING, quiet=False)
_DONE: Final = TransferStatus(state=TransferState.DONE)


class Piece(NamedTuple):
    """One write of the engine."""

    source: int
    destination: int
    length: int


def merged(writes: Writes) -> Iterator[Piece]:
    """The writes, without empty ones, and those that continue their predecessor on both sides joined to it."""
    first = into = end = 0
    for source, destination, length in zip(writes.source, writes.destination, writes.length, strict=True):
        if not length:
            continue
        nbytes = end - first
        if nbytes and source == end and destination == into + nbytes:
            end += length
            continue
        if nbytes:
            yield Piece(first, into, nbytes)
        first, into, end = source, destination, source + length
    if end > first:
        yield Piece(first, into, end - first)


@final
class MooncakeTransfer:
    """A batch. Holds on to what it reads until the engine cannot read it any more.

    Only the sender's thread changes it; `status` is replaced as a whole, so any thread may read it.
    """

    def __init__(self, writes: Writes, sources: tuple[Memory, ...]) -> None:
        self.status: TransferStatus = _PENDING
        self._pieces = merged(writes)
        self.sources = sources
        self._in_flight = 0
        self._ended = False
        "nothing more will be submitted"
        self.doubtful = False
        "a write that was started has failed, so the network may still hold bytes of it"

    @property
    def idle(self) -> bool:
        """Whether nothing is in flight and nothing more will be submitted."""
        return self._ended and not self._in_flight

    def next(self) -> Piece | None:
        """What to submit next; None when that was all, or after a failure."""
        piece = None if self._ended else next(self._pieces, None)
        self._ended = piece is None
        return piece

    def started(self) -> None:
        """The piece that `next` gave is in flight."""
        self._in_flight += 1

    def landed(self) -> None:
        """One piece is in the peer's memory."""
        self._in_flight -= 1

    def lost(self) -> None:
        """One piece that was in flight has failed."""
        self._in_flight -= 1
        self.doubtful = True

    def fail(self, reason: str, *, quiet: bool = False) -> None:
        """It will not succeed. The first reason stays. `quiet`: its failed writes cannot land any more."""
        self._ended = True
        if self.status.state is TransferState.PENDING:
            self.status = TransferStatus(state=TransferState.FAILED, reason=reason, quiet=quiet and self.idle)

    def settle(self, *, quiet: bool) -> None:
        """Nothing is in flight any more, for this engine. `quiet`: nor anywhere else."""
        self.sources = ()
        self._pieces = iter(())
        if self.status.state is TransferState.PENDING:
            self.status = _DONE
        elif quiet:
            self.status = TransferStatus(state=TransferState.FAILED, reason=self.status.reason)
