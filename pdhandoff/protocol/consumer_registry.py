"""What the parts of one consumer share: its handoffs, queue, links, book, deadlines, effects and counts."""

from __future__ import annotations

from collections import Counter
from typing import Final, final

from pdhandoff.errors import ErrorCode
from pdhandoff.ids import HandoffId, Incarnation
from pdhandoff.limits import Limits
from pdhandoff.protocol.book import ExtentBook
from pdhandoff.protocol.consumer_handoff import Handoff, HandoffShard
from pdhandoff.protocol.deadlines import Deadlines
from pdhandoff.protocol.effects import ConsumerEffect, Send
from pdhandoff.protocol.messages import Commit, Message, Progress, Refuse, Renew, Restart
from pdhandoff.protocol.table import Name
from pdhandoff.protocol.tombstones import Tombstones

__all__ = ["RETRY_AFTER_MS", "Registry", "Timer"]

RETRY_AFTER_MS: Final = 1000
"what a refusal for want of memory advises"


@final
class Timer(Name):
    """What a deadline is about."""

    PHASE = "phase"
    LEASE = "lease"
    DRAIN = "drain"
    POSITIONS = "positions"


@final
class Registry:
    """Plain state with the small acts that all parts need."""

    def __init__(self, book: ExtentBook, limits: Limits) -> None:
        self.book = book
        self.limits = limits
        self.handoffs: dict[HandoffId, Handoff] = {}
        self.queue: list[Handoff] = []
        self.links: dict[int, Incarnation] = {}
        self.deadlines: Deadlines[tuple[Timer, bytes, int]] = Deadlines()
        "(timer, handoff or nothing, shard or generation)"
        self.tombstones = Tombstones()
        self.effects: list[ConsumerEffect] = []
        self.failed: Counter[int] = Counter()
        self.ignored: Counter[str] = Counter()

    def new(self, handoff: HandoffId) -> Handoff:
        """Keep a handoff that is not known yet."""
        item = self.handoffs[handoff] = Handoff(handoff)
        return item

    def forget(self, item: Handoff, code: int) -> None:
        """The handoff is over, with this code, and leaves a tombstone."""
        self.handoffs.pop(item.handoff, None)
        self.tombstones.bury(item.handoff, code)
        self.deadlines.clear((Timer.PHASE, item.handoff, 0))
        for rank in item.shards:
            self.deadlines.clear((Timer.LEASE, item.handoff, rank))

    def phase(self, item: Handoff, at: float) -> None:
        """The present phase of a handoff must be over by then."""
        self.deadlines.set((Timer.PHASE, item.handoff, 0), at)

    def renew(self, item: Handoff, rank: int, now: float) -> None:
        """A granted shard is alive."""
        self.deadlines.set((Timer.LEASE, item.handoff, rank), now + self.limits.lease_s)

    def landing(self, link: int, message: Progress | Renew | Restart | Commit) -> tuple[Handoff, HandoffShard] | None:
        """The landing handoff and shard that a message speaks of, if link and generation agree."""
        item = self.handoffs.get(HandoffId(message.handoff))
        if item is None or not item.landing or item.generation != message.generation:
            return None
        shard = item.shards.get(message.shard)
        return None if shard is None or shard.link != link else (item, shard)

    def refuse(self, link: int, handoff: HandoffId, code: int, reason: str) -> None:
        """Say that this handoff will not be granted."""
        retry = RETRY_AFTER_MS if code == ErrorCode.BUSY else 0
        text = reason[: self.limits.max_string]
        self.send(link, Refuse(handoff=handoff, code=code, reason=text, retry_after_ms=retry))

    def send(self, link: int, message: Message) -> None:
        """Over an open link; a lost one takes nothing."""
        if link in self.links:
            self.effects.append(Send(link, message))
