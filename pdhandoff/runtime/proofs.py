"""What a consumer asks its mover about writers that may not have stopped: proof of their end, and fences."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final, final

from pdhandoff.engines.base import Extent, Mover, Peer
from pdhandoff.errors import PdHandoffError
from pdhandoff.ids import Incarnation
from pdhandoff.protocol.book import Landing
from pdhandoff.protocol.consumer import ConsumerCore
from pdhandoff.protocol.effects import FenceWriter
from pdhandoff.runtime.worker import Worker

__all__ = ["Proofs"]

_LOG: Final = logging.getLogger("pdhandoff.consumer")


@final
class Proofs:
    """Asks on a thread that may wait, one question about one peer at a time. All methods belong to the loop.

    Args:
        core: is told the answers.
        mover: is asked.
        worker: asks.
        drain_s: how long an answer may take.
        clock: monotonic seconds.
        act: called after the core was told something.
    """

    def __init__(
        self,
        *,
        core: ConsumerCore,
        mover: Mover,
        worker: Worker,
        drain_s: float,
        clock: Callable[[], float],
        act: Callable[[], None],
    ) -> None:
        self._core = core
        self._mover = mover
        self._worker = worker
        self._drain_s = drain_s
        self._clock = clock
        self._act = act
        self._peers: dict[Incarnation, Peer] = {}
        self._proving: set[Incarnation] = set()
        self._fencing: set[tuple[int, int]] = set()
        self._closing = False

    def meet(self, incarnation: Incarnation, description: bytes) -> None:
        """A producer's link is open. Raises MoverError when its mover cannot be reached."""
        self._peers[incarnation] = self._mover.connect(description)

    def forget(self, linked: set[Incarnation]) -> None:
        """Keep only peers that are linked, or that may still write."""
        unlinked = self._peers.keys() - linked
        if not unlinked:
            return
        writing = {peer for record in self._core.book.records.values() for peer in record.writers.values()}
        for incarnation in unlinked - writing:
            del self._peers[incarnation]

    def close(self) -> None:
        """Ask no more: what is queued is answered at once."""
        self._closing = True

    def prove(self, incarnation: Incarnation) -> None:
        """Ask whether a peer has ended."""
        peer = self._peers.get(incarnation)
        if peer is None or incarnation in self._proving or not self._mover.capabilities.quiesce:
            return
        self._proving.add(incarnation)

        def ask() -> bool:
            return not self._closing and self._mover.quiesce(peer, self._clock() + self._drain_s / 2)

        def answer(result: bool | PdHandoffError) -> None:  # noqa: FBT001 - a worker's result
            self._proving.discard(incarnation)
            if result is True:
                self._core.proven_ended(incarnation, self._clock())
                self._act()

        self._worker.run(ask, answer)

    def fence(self, effect: FenceWriter) -> None:
        """Make late writes of a peer impossible."""
        key = (effect.generation, effect.shard)
        peer = self._peers.get(effect.incarnation)
        if peer is None or key in self._fencing:
            return
        self._fencing.add(key)

        def done(result: PdHandoffError | None) -> None:
            self._fencing.discard(key)
            if isinstance(result, PdHandoffError):
                _LOG.error("fence of %s failed, its memory stays in quarantine: %s", effect.incarnation, result.reason)
                return
            self._core.fenced(effect.generation, effect.shard, self._clock())
            self._act()

        self._worker.run(lambda: self._fence(peer, effect.extents), done)

    def _fence(self, peer: Peer, extents: Sequence[Landing]) -> None:
        self._mover.fence(peer, [Extent(*extent) for extent in extents], self._clock() + self._drain_s)
