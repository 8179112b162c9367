"""The producer's writes in flight: submitted to the mover chunk by chunk, and asked about until they are over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, final

from pdhandoff.engines.base import Mover, Transfer, TransferState, TransferStatus, Writes
from pdhandoff.errors import MoverError, PdHandoffError
from pdhandoff.protocol.producer import ProducerCore
from pdhandoff.runtime.chunks import Chunk, ChunkState
from pdhandoff.runtime.outgoing import Outgoing
from pdhandoff.runtime.routes import chunk_spans
from pdhandoff.runtime.ways import Way

__all__ = ["Write", "Writer"]

_ASKED: Final = 16
"writes that are asked about in one round"
_SMALL_BYTES: Final = 1 << 20
"writes of fewer bytes end so soon that it pays to look again at once"


@final
class Write:
    """A chunk's transfers in flight."""

    __slots__ = ("chunk", "failed", "number", "outgoing", "small", "started", "tokens", "transfers")

    def __init__(self, number: int, outgoing: Outgoing, chunk: Chunk, tokens: range, started: float) -> None:
        self.number = number
        self.outgoing = outgoing
        self.chunk = chunk
        self.tokens = tokens
        "what of the chunk moves"
        self.started = started
        self.small = False
        self.transfers: list[Transfer] = []
        self.failed = False


@final
class Writer:
    """See the module's text. `over` is called when a chunk's write has ended, however it went."""

    def __init__(
        self, *, core: ProducerCore, mover: Mover, clock: Callable[[], float], over: Callable[[Write], None]
    ) -> None:
        self._core = core
        self._mover = mover
        self._clock = clock
        self._over = over
        self._writes: list[Write] = []
        self._numbers = 0

    @property
    def polling(self) -> bool:
        """Whether the mover must be asked."""
        return bool(self._writes)

    @property
    def hasty(self) -> bool:
        """Whether all that is in flight is small: it will end within microseconds."""
        return all(write.small for write in self._writes)

    def reading(self) -> set[bytes]:
        """Handoffs of which the mover may still read rows."""
        return {write.outgoing.handoff for write in self._writes}

    def submit(self, way: Way, chunk: Chunk, tokens: range) -> None:
        """Write rows `tokens` of a chunk to every consumer rank that needs some of them."""
        outgoing = way.outgoing
        chunk.state = ChunkState.WRITING
        self._numbers += 1
        write = Write(self._numbers, outgoing, chunk, tokens, self._clock())
        most = self._mover.capabilities.max_writes
        nbytes = len(tokens) * way.routes.row_bytes
        write.small = nbytes < _SMALL_BYTES
        self._core.write_started(outgoing.handoff, write.number, nbytes, write.started)
        try:
            for destination, landing in way.landing.items():
                for columns in way.routes.writes(chunk, tokens, landing, most):
                    write.transfers.append(self._mover.submit(way.peers[destination], Writes(*columns)))
        except PdHandoffError as error:
            write.failed = True
            self._core.write_failed(outgoing.handoff, write.number, error.reason, quiet=not write.transfers)
            if not write.transfers:
                self._over(write)
                return
        if not self._poll_write(write):
            self._writes.append(write)

    def poll(self) -> bool:
        """Ask the mover about some of what is in flight, and about others next time. True: something has ended."""
        asked, self._writes = self._writes[:_ASKED], self._writes[_ASKED:]
        still = [write for write in asked if not self._poll_write(write)]
        self._writes += still
        return len(still) < len(asked)

    def _poll_write(self, write: Write) -> bool:
        """Whether the write is over, as the mover says. One that failed stays until it is quiet."""
        statuses = [self._status(transfer) for transfer in write.transfers]
        if any(status.state is TransferState.FAILED for status in statuses) and not write.failed:
            write.failed = True
            reason = next(status.reason for status in statuses if status.state is TransferState.FAILED)
            quiet = all(status.state is not TransferState.PENDING and status.quiet for status in statuses)
            self._core.write_failed(write.outgoing.handoff, write.number, reason, quiet=quiet)
        if any(status.state is TransferState.PENDING or not status.quiet for status in statuses):
            return False
        for transfer in write.transfers:
            self._mover.release(transfer)
        handoff, manifest = write.outgoing.handoff, write.outgoing.manifest
        if write.failed:
            self._core.write_quiet(handoff, write.number)
        else:
            spans = chunk_spans(() if manifest is None else manifest.entries, write.tokens)
            self._core.write_done(handoff, write.number, spans, self._clock())
        self._over(write)
        return True

    def _status(self, transfer: Transfer) -> TransferStatus:
        """What the mover says. One that cannot say is not believed to be quiet."""
        try:
            return self._mover.poll(transfer)
        except MoverError as error:
            return TransferStatus(state=TransferState.FAILED, reason=error.reason, quiet=False)
