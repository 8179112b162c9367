"""What the consumer counts while rows land: PROGRESS, RENEW, RESTART and COMMIT, by identity (rule 3)."""

from __future__ import annotations

from typing import final

from pdhandoff.errors import ErrorCode, PdHandoffError
from pdhandoff.ids import HandoffId
from pdhandoff.protocol.consumer_ends import Ends
from pdhandoff.protocol.consumer_handoff import Handoff, check_commit
from pdhandoff.protocol.consumer_registry import Registry, Timer
from pdhandoff.protocol.consumer_table import ConsumerInput
from pdhandoff.protocol.effects import Landed, RowsVoid, Verify
from pdhandoff.protocol.messages import Commit, Failed, Progress, Renew, Restart

__all__ = ["Moving"]

_I = ConsumerInput


@final
class Moving:
    """Counts rows until every shard has committed, and holds their memory while they are verified."""

    def __init__(self, registry: Registry, ends: Ends) -> None:
        self._r = registry
        self._ends = ends
        self._verifying: set[int] = set()

    def moving(self, link: int, message: Progress | Renew | Restart, now: float) -> None:
        """A sign of life, with or without rows."""
        r = self._r
        found = r.landing(link, message)
        if found is None:
            self._answer_unknown(link, message)
            return
        item, shard = found
        if shard.committed:
            r.ignored[f"{type(message).__name__} after commit"] += 1
            return
        r.renew(item, message.shard, now)
        if isinstance(message, Restart):
            shard.ledger.clear()
            r.effects.append(RowsVoid(item.handoff, item.generation, message.shard))
        elif isinstance(message, Progress):
            try:
                shard.ledger.add_all(message.spans, r.limits)
            except PdHandoffError as error:
                self._ends.fail(item, error.code, error.reason, now, shard=message.shard)
                return
            r.effects.append(Landed(item.handoff, item.generation, message.shard, message.spans))

    def committed(self, link: int, message: Commit, now: float) -> None:
        """A shard says that every row has landed. Whatever else is true, its writer has ended."""
        r = self._r
        found = r.landing(link, message)
        if found is None:
            r.ignored["stale Commit"] += 1
            self._ends.stale_commit(link, message)
            return
        item, shard = found
        if shard.committed:
            r.ignored["repeated Commit"] += 1
            return
        self._ends.writer_done(message.generation, message.shard)
        r.deadlines.clear((Timer.LEASE, item.handoff, message.shard))
        try:
            check_commit(shard, message)
        except PdHandoffError as error:
            self._ends.fail(item, error.code, error.reason, now, shard=message.shard)
            return
        shard.committed = True
        shard.digest = message.payload_digest
        shard.values += message.attachments
        if all(other.committed for other in item.shards.values()):
            self._verify(item)

    def end_verification(self, handoff: HandoffId, generation: int) -> Handoff | None:
        """Whoever verified has stopped reading. The handoff, if it still waits for the verdict."""
        r = self._r
        if generation in self._verifying:
            self._verifying.discard(generation)
            self._ends.freed(generation, free=r.book.remove_reader(generation))
        item = r.handoffs.get(handoff)
        if item is None or item.generation != generation or not item.machine.allows(_I.VERIFIED):
            r.ignored["late verification"] += 1
            return None
        return item

    def _verify(self, item: Handoff) -> None:
        r = self._r
        item.machine.feed(_I.ALL_COMMITTED)
        r.deadlines.clear((Timer.PHASE, item.handoff, 0))
        r.book.add_reader(item.generation)
        self._verifying.add(item.generation)
        digests = {rank: shard.digest for rank, shard in item.shards.items() if shard.digest}
        r.effects.append(Verify(item.handoff, item.generation, digests))

    def _answer_unknown(self, link: int, message: Progress | Renew | Restart) -> None:
        """A producer that renews what does not exist here must learn that (never silence)."""
        self._r.ignored[f"stale {type(message).__name__}"] += 1
        if isinstance(message, Renew):
            self._r.send(
                link,
                Failed(
                    handoff=message.handoff,
                    generation=message.generation,
                    shard=message.shard,
                    code=ErrorCode.UNKNOWN_HANDOFF,
                    reason="no such handoff, or no such generation of it",
                ),
            )
