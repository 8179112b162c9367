"""What the producer keeps of one shard of one handoff while it is under way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import final

from pdhandoff.ids import HandoffId, Incarnation
from pdhandoff.limits import Limits
from pdhandoff.protocol.manifest import Manifest
from pdhandoff.protocol.messages import Cancel, Commit, Drained, Failed, Grant, Progress, Renew, Restart
from pdhandoff.protocol.producer_table import TABLE
from pdhandoff.protocol.spans import Ledger, Span
from pdhandoff.protocol.table import Machine

__all__ = ["ProducerShard"]


@final
class ProducerShard:
    """One shard under way, and the messages that speak of it."""

    __slots__ = (
        "grant",
        "handoff",
        "in_flight",
        "ledger",
        "link",
        "machine",
        "manifest",
        "mark",
        "outcome",
        "peer",
        "pending_commit",
        "position",
        "tell_drained",
    )

    def __init__(self, handoff: HandoffId, link: int, peer: Incarnation, manifest: Manifest, mark: int) -> None:
        self.handoff = handoff
        self.link = link
        self.peer = peer
        self.manifest = manifest
        self.mark = mark
        "orders its OFFER among the last words of other shards"
        self.machine = Machine(TABLE)
        self.ledger = Ledger(manifest)
        self.grant: Grant | None = None
        self.in_flight: set[int] = set()
        self.position: int | None = None
        self.pending_commit: Commit | None = None
        self.outcome: tuple[int, str] | None = None
        self.tell_drained = False
        "DRAINED is due when nothing is in flight any more"

    @property
    def generation(self) -> int:
        """Of its grant; 0 before any."""
        return 0 if self.grant is None else self.grant.generation

    @property
    def lease_s(self) -> float:
        """How often it must give a sign of life."""
        return 0.0 if self.grant is None else self.grant.lease_ms / 1000

    def progress(self, spans: Sequence[Span], limits: Limits) -> Iterator[Progress]:
        """These rows have landed: as many PROGRESS as a consumer's limits ask for, one at least."""
        said: list[Span] = []
        layers = 0
        for span in spans:
            more = self.ledger.layers(span)
            if len(said) == limits.max_entries or layers + more > limits.max_progress_layers:
                yield self._progress(said)
                said, layers = [], 0
            said.append(span)
            layers += more
        yield self._progress(said)

    def _progress(self, spans: Sequence[Span]) -> Progress:
        return Progress(handoff=self.handoff, generation=self.generation, shard=self.manifest.shard, spans=tuple(spans))

    def renew(self) -> Renew:
        """It is alive."""
        return Renew(handoff=self.handoff, generation=self.generation, shard=self.manifest.shard)

    def restart(self) -> Restart:
        """Its rows come anew."""
        return Restart(handoff=self.handoff, generation=self.generation, shard=self.manifest.shard)

    def drained(self) -> Drained:
        """It will be written no more."""
        return Drained(handoff=self.handoff, generation=self.generation, shard=self.manifest.shard)

    def cancelled(self, reason: str) -> Cancel:
        """It ended on purpose."""
        return Cancel(
            handoff=self.handoff,
            generation=self.generation,
            shard=self.manifest.shard,
            reason=reason,
            drained=not self.in_flight,
        )

    def failed(self, code: int, reason: str) -> Failed:
        """It went wrong."""
        return Failed(
            handoff=self.handoff,
            generation=self.generation,
            shard=self.manifest.shard,
            code=code,
            reason=reason,
            drained=not self.in_flight,
        )
