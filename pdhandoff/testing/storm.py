"""A writer that does not stop by itself."""

from __future__ import annotations

from threading import Event
from typing import Final, final

from pdhandoff.engines.base import Peer, Transfer, TransferState, Writes
from pdhandoff.errors import MoverError
from pdhandoff.testing.side import Side

__all__ = ["Storm"]

_DEPTH: Final = 4
"writes under way at the same time"
_BREATH_S: Final = 0.0005
_MOST_FORGOTTEN: Final = 64
"handles that are released while pending, at most: nobody sees when such a write ends, so they could pile up"


@final
class Storm:
    """Keeps a few writes of a side's first bytes under way.

    Arguments:
        side: writes.
        peer: is written to.
        destination: address at the peer.
        nbytes: of each write.
        forget: release every handle as soon as it is given, without waiting for its end.
    """

    def __init__(self, side: Side, peer: Peer, destination: int, nbytes: int, *, forget: bool) -> None:
        self._side = side
        self._peer = peer
        self._writes = Writes.of((side.address, destination, nbytes))
        self._forget = forget
        self._pending: list[Transfer] = []
        self._forgotten = 0
        self.attempts = 0
        "writes that were begun or refused"
        self.done = 0

    def step(self) -> None:
        """Look after what is under way, begin what is missing, and let others run for a moment."""
        mover = self._side.mover
        kept: list[Transfer] = []
        for transfer in self._pending:
            state = mover.poll(transfer).state
            if state is TransferState.PENDING:
                kept.append(transfer)
            else:
                self.done += state is TransferState.DONE
                mover.release(transfer)
        self._pending = kept
        while len(self._pending) < _DEPTH:
            self.attempts += 1
            try:
                transfer = mover.submit(self._peer, self._writes)
            except MoverError:
                break
            if self._forget and self._forgotten < _MOST_FORGOTTEN:
                self._forgotten += 1
                mover.release(transfer)
                break
            self._pending.append(transfer)
        Event().wait(_BREATH_S)
