"""How handoffs end on the consumer, and who still owns their memory afterwards (rules 1 and 2).

An end of a handoff never ends a writer. A writer ends by COMMIT, by DRAINED from the incarnation that was granted, by a
proof that its process has ended, or by a fence.
"""

from __future__ import annotations

from typing import final

from pdhandoff.errors import ErrorCode
from pdhandoff.ids import HandoffId, Incarnation
from pdhandoff.protocol.book import Record
from pdhandoff.protocol.consumer_handoff import Handoff, HandoffShard
from pdhandoff.protocol.consumer_registry import Registry, Timer
from pdhandoff.protocol.consumer_table import ConsumerInput
from pdhandoff.protocol.effects import Ended, FenceWriter, Freed, ProveEnded
from pdhandoff.protocol.messages import Cancel, Commit, Drained, Failed

__all__ = ["Ends"]

_I = ConsumerInput


@final
class Ends:
    """Ends handoffs and writers. Whoever calls it grants what became free afterwards."""

    def __init__(self, registry: Registry, *, can_fence: bool) -> None:
        self._r = registry
        self._can_fence = can_fence

    # ---- handoffs

    def fail(
        self,
        item: Handoff,
        code: int,
        reason: str,
        now: float,
        *,
        shard: int | None = None,
        silent: int | None = None,
    ) -> bool:
        """End a handoff, tell every producer but `silent`, and let writers drain. False when it had ended."""
        r = self._r
        if item.machine.feed(_I.FAIL) is None:
            return False
        r.failed[int(code)] += 1
        if item in r.queue:
            r.queue.remove(item)
        text = reason[: r.limits.max_string]
        for rank, each in item.shards.items():
            if rank != silent:
                guilty = shard is None or rank == shard or code == ErrorCode.CANCELLED
                self._tell(item, rank, each, code if guilty else ErrorCode.SHARD_FAILED, text)
        r.forget(item, code)
        if item.record is not None:
            r.deadlines.set((Timer.DRAIN, b"", item.generation), now + r.limits.drain_s)
            self.freed(item.generation, free=r.book.end(item.generation))
        r.effects.append(Ended(item.handoff, code, text, shard))
        return True

    def ended_by_peer(self, link: int, message: Failed | Cancel, now: float) -> None:
        """A producer ended its shard, and with it the handoff."""
        r = self._r
        if message.drained:
            self._writer_drained(link, message)
        item = r.handoffs.get(HandoffId(message.handoff))
        shard = None if item is None else item.shards.get(message.shard)
        stale = shard is None or shard.link != link
        if item is None or stale or message.generation not in {0, item.generation}:
            r.ignored[f"stale {type(message).__name__}"] += 1
            return
        code = message.code if isinstance(message, Failed) else ErrorCode.CANCELLED
        if not self.fail(item, code, message.reason, now, shard=message.shard, silent=message.shard):
            r.ignored[f"late {type(message).__name__}"] += 1

    # ---- writers

    def stale_commit(self, link: int, message: Commit) -> None:
        """A COMMIT that comes too late still ends its writer."""
        self._writer_drained(link, message)

    def drained(self, link: int, message: Drained, now: float) -> None:
        """A producer writes no more of a shard. If its handoff was still under way here, it has ended there."""
        r = self._r
        handoff = HandoffId(message.handoff)
        known = self._writer_drained(link, message)
        item = r.handoffs.get(handoff)
        ungranted = item is None or item.record is None
        if message.generation == 0 and ungranted and link in r.links:
            # the producer never saw a GRANT and will take none: an OFFER that comes later, over a link that it has
            # given up, must not be granted either
            known = known or item is not None
            r.tombstones.bury(handoff, ErrorCode.SHARD_FAILED)
        if known and item is not None:
            reason = f"shard {message.shard} drained before it was complete"
            self.fail(item, ErrorCode.SHARD_FAILED, reason, now, shard=message.shard, silent=message.shard)
        elif not known:
            r.ignored["stale Drained"] += 1

    def proven_ended(self, incarnation: Incarnation, now: float) -> None:
        """A peer is gone for good: its writers are, and what still waits for it fails."""
        for record in list(self._r.book.records.values()):
            for shard in [shard for shard, writer in record.writers.items() if writer == incarnation]:
                self.writer_done(record.generation, shard)
                item = self._r.handoffs.get(record.handoff)
                if item is not None:
                    reason = f"the producer of shard {shard} has ended"
                    self.fail(item, ErrorCode.STALE_INCARNATION, reason, now, shard=shard)

    def writer_done(self, generation: int, shard: int) -> None:
        """This writer is known to write no more."""
        if generation in self._r.book.records:
            self.freed(generation, free=self._r.book.writer_done(generation, shard))

    def freed(self, generation: int, *, free: bool) -> None:
        """Take the book's answer; `free` must be true once only for each generation."""
        if free:
            self._r.deadlines.clear((Timer.DRAIN, b"", generation))
            self._r.effects.append(Freed(generation))

    def quarantine(self, generation: int, now: float) -> None:
        """Writers did not drain in time. Ask for proof, and for a fence where the mover has one; ask again later."""
        r = self._r
        record = r.book.records.get(generation)
        if record is None or not record.writers:
            return
        r.book.quarantine(generation)
        r.effects += [ProveEnded(incarnation) for incarnation in dict.fromkeys(record.writers.values())]
        if self._can_fence:
            r.effects += [
                FenceWriter(generation, shard, incarnation, record.of_shard(shard))
                for shard, incarnation in record.writers.items()
            ]
        r.deadlines.set((Timer.DRAIN, b"", generation), now + r.limits.drain_s)

    def ask_for_proof(self, incarnation: Incarnation) -> None:
        """The link to this peer is gone: if it still writes, it may have ended."""
        if any(incarnation in record.writers.values() for record in self._r.book.records.values()):
            self._r.effects.append(ProveEnded(incarnation))

    # ---- inside

    def _writer_drained(self, link: int, message: Drained | Commit | Failed | Cancel) -> bool:
        """End the writers that a message speaks of: believed from the incarnation that was granted, no other."""
        found = [record for record in self._r.book.records.values() if self._speaks_of(link, message, record)]
        for record in found:
            self.writer_done(record.generation, message.shard)
        return bool(found)

    def _speaks_of(self, link: int, message: Drained | Commit | Failed | Cancel, record: Record) -> bool:
        incarnation = self._r.links.get(link)
        return (
            record.handoff == message.handoff
            and message.generation in {0, record.generation}
            and incarnation is not None
            and record.writers.get(message.shard) == incarnation
        )

    def _tell(self, item: Handoff, rank: int, shard: HandoffShard, code: int, reason: str) -> None:
        r, handoff, generation = self._r, item.handoff, item.generation
        if item.record is None:
            r.refuse(shard.link, handoff, code, reason)
        elif code == ErrorCode.CANCELLED:
            r.send(shard.link, Cancel(handoff=handoff, generation=generation, shard=rank, reason=reason))
        else:
            r.send(shard.link, Failed(handoff=handoff, generation=generation, shard=rank, code=code, reason=reason))
