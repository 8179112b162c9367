"""The consumer's side of all handoffs: sans-IO. This is its face; the parts behind it each hold one idea.

Shards of one handoff come over different links, one per producer rank. Memory is granted for all of them or none. The
outcome of a handoff comes at once; its memory is free when the book says that no writer and no reader is left.

`consumer_admission` turns offers into grants, `consumer_moving` counts rows, `consumer_ends` ends handoffs and writers,
`consumer_registry` and `consumer_handoff` are what they share.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import final

import msgspec

from pdhandoff.errors import ErrorCode, LocalError
from pdhandoff.ids import HandoffId, Incarnation
from pdhandoff.limits import DEFAULT_LIMITS, Limits
from pdhandoff.protocol.attachments import Expected
from pdhandoff.protocol.book import BookStatistics, ExtentBook
from pdhandoff.protocol.consumer_admission import Admission, CoverCheck, OfferCheck, Unannounced
from pdhandoff.protocol.consumer_ends import Ends
from pdhandoff.protocol.consumer_handoff import Claim, SoFar, overdue
from pdhandoff.protocol.consumer_moving import Moving
from pdhandoff.protocol.consumer_registry import RETRY_AFTER_MS, Registry, Timer
from pdhandoff.protocol.consumer_table import TABLE, ConsumerInput, ConsumerState
from pdhandoff.protocol.effects import Arrived, ConsumerEffect, Send
from pdhandoff.protocol.manifest import Manifest
from pdhandoff.protocol.messages import (
    Cancel,
    Commit,
    Drained,
    Draining,
    Failed,
    Message,
    Offer,
    Progress,
    Ready,
    Renew,
    Restart,
)

__all__ = [
    "RETRY_AFTER_MS",
    "TABLE",
    "Claim",
    "ConsumerCore",
    "ConsumerStatistics",
    "CoverCheck",
    "OfferCheck",
    "SoFar",
    "Unannounced",
]

_I, _S = ConsumerInput, ConsumerState


@final
class ConsumerStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """How this consumer stands, and counts since the start."""

    states: dict[str, int]
    "state name -> handoffs in it"
    queue: int
    ready: int
    failed: dict[int, int]
    "error code -> handoffs that ended with it"
    ignored: dict[str, int]
    "why -> late, repeated, stale and unknown messages"
    book: BookStatistics


@final
class ConsumerCore:
    """All handoffs that one consumer takes. Not thread-safe: one thread owns it.

    Args:
        book: the landing memory; its state is this core's from now on.
        limits: bounds and time-outs.
        unannounced: what to do with offers that nobody announced.
        admit: looks at each offer; raises PdHandoffError to refuse it.
        cover: looks at the manifests of all shards; raises PdHandoffError when they are not what is needed.
        expected: attachment name -> what this consumer knows of it.
        can_fence: whether the mover has a fence, so that FenceWriter is worth asking for.
    """

    def __init__(
        self,
        book: ExtentBook,
        *,
        limits: Limits = DEFAULT_LIMITS,
        unannounced: Unannounced = Unannounced.WAIT,
        admit: OfferCheck | None = None,
        cover: CoverCheck | None = None,
        expected: Mapping[str, Expected] | None = None,
        can_fence: bool = False,
    ) -> None:
        self.book = book
        self._r = Registry(book, limits)
        self._ends = Ends(self._r, can_fence=can_fence)
        self._moving = Moving(self._r, self._ends)
        self._admission = Admission(
            self._r, self._ends, unannounced=unannounced, admit=admit, cover=cover, expected=expected or {}
        )
        self._ready = 0

    # ---- what the front end wants

    def announce(self, handoff: HandoffId, now: float, *, wait_s: float | None = None, start_token: int = 0) -> None:
        """Somebody waits for this handoff, at most `wait_s`, and holds the rows before `start_token` already.

        Raises LocalError for an id that was announced or used before, and while draining.
        """
        self._admission.announce(handoff, now, wait_s=wait_s, start_token=start_token)
        self._admission.pump(now)

    def cancel(self, handoff: HandoffId, reason: str, now: float, code: int = ErrorCode.CANCELLED) -> bool:
        """End a handoff that nobody reads yet. False when it is over, being read, or unknown."""
        item = self._r.handoffs.get(handoff)
        ended = item is not None and self._ends.fail(item, code, reason, now)
        self._admission.pump(now)
        return ended

    def claim(self, handoff: HandoffId) -> Claim:
        """Take a READY handoff for reading. Raises LocalError when it is not READY, or was claimed before."""
        item = self._r.handoffs.get(handoff)
        if item is None:
            code = ErrorCode.DUPLICATE if handoff in self._r.tombstones else ErrorCode.UNKNOWN_HANDOFF
            raise LocalError(code, f"handoff {handoff} is over or was never announced: a reference can be used once")
        if item.machine.state is _S.READING:
            raise LocalError(ErrorCode.DUPLICATE, f"handoff {handoff} is being read: a reference can be used once")
        if item.record is None or item.machine.feed(_I.CLAIM) is None:
            raise LocalError(
                ErrorCode.MISUSE, f"handoff {handoff} is {item.machine.state.value}: wait until it is ready"
            )
        self._r.deadlines.clear((Timer.PHASE, handoff, 0))
        self.book.add_reader(item.generation)
        return item.claim(item.record)

    def release(self, handoff: HandoffId, now: float) -> bool:
        """The reader is done. Idempotent: False when it did not hold the handoff."""
        item = self._r.handoffs.get(handoff)
        if item is None or item.machine.feed(_I.RELEASE) is None:
            return False
        self._r.forget(item, 0)
        self.book.end(item.generation)
        self.end_read(item.generation, now)
        return True

    def begin_read(self, generation: int) -> bool:
        """Read landed rows of a handoff that is still landing. False when it has ended."""
        return self.book.add_reader(generation)

    def end_read(self, generation: int, now: float) -> None:
        """Done with what `begin_read` allowed."""
        if generation in self.book.records:
            self._ends.freed(generation, free=self.book.remove_reader(generation))
            self._admission.pump(now)

    def drain(self) -> None:
        """Take no new handoffs; those under way go on."""
        if not self._admission.draining:
            self._admission.draining = True
            self._r.effects += [Send(link, Draining()) for link in self._r.links]

    # ---- what the runtime reports

    def verified(self, handoff: HandoffId, generation: int, now: float) -> None:
        """The payload is what was sent. Every Verify must be answered, even when its handoff has ended since."""
        item = self._moving.end_verification(handoff, generation)
        if item is not None:
            item.machine.feed(_I.VERIFIED)
            self._ready += 1
            for shard in item.shards.values():
                self._r.send(shard.link, Ready(handoff=handoff, generation=generation))
            self._r.phase(item, now + self._r.limits.ready_s)
            self._r.effects.append(Arrived(handoff, generation))
        self._admission.pump(now)

    def verification_failed(self, handoff: HandoffId, generation: int, shard: int, reason: str, now: float) -> None:
        """The payload of a shard is not what the producer sent."""
        item = self._moving.end_verification(handoff, generation)
        if item is not None:
            self._ends.fail(item, ErrorCode.DIGEST_MISMATCH, reason, now, shard=shard)
        self._admission.pump(now)

    def proven_ended(self, incarnation: Incarnation, now: float) -> None:
        """The mover proved that this peer has ended: none of its writes is in flight and none will come."""
        self._ends.proven_ended(incarnation, now)
        self._admission.pump(now)

    def fenced(self, generation: int, shard: int, now: float) -> None:
        """The mover has made late writes of this shard impossible."""
        self._ends.writer_done(generation, shard)
        self._admission.pump(now)

    def grant_failed(self, handoff: HandoffId, generation: int, reason: str, now: float) -> None:
        """The extents could not be described to a producer, so that it never learnt of them."""
        item = self._r.handoffs.get(handoff)
        if item is not None and item.generation == generation:
            self._ends.fail(item, ErrorCode.MOVER_FAILED, reason, now)
        self._admission.pump(now)

    def link_up(self, link: int, incarnation: Incarnation) -> None:
        """A link is open."""
        self._r.links[link] = incarnation
        if self._admission.draining:
            self._r.effects.append(Send(link, Draining()))

    def link_lost(self, link: int, reason: str, now: float, code: int = ErrorCode.LINK_LOST) -> None:
        """A link has ended. Handoffs that still need it fail at once; its writers stay until they are proven quiet."""
        incarnation = self._r.links.pop(link, None)
        for item in list(self._r.handoffs.values()):
            for rank, shard in item.shards.items():
                if shard.link == link and not shard.committed:
                    self._ends.fail(item, code or ErrorCode.LINK_LOST, reason, now, shard=rank)
                    break
        if incarnation is not None:
            self._ends.ask_for_proof(incarnation)
        self._admission.pump(now)  # only now: memory must not go to a handoff that lost this link too

    def receive(self, link: int, message: Message, now: float) -> None:
        """Take a message that belongs to a consumer; anything late, repeated or unknown is counted and dropped."""
        if isinstance(message, Offer):
            self._admission.offered(link, message, now)
        elif isinstance(message, Drained):
            self._ends.drained(link, message, now)
        elif isinstance(message, Commit):
            self._moving.committed(link, message, now)
        elif isinstance(message, Progress | Renew | Restart):
            self._moving.moving(link, message, now)
        elif isinstance(message, Failed | Cancel):
            self._ends.ended_by_peer(link, message, now)
        else:
            self._r.ignored[f"unexpected {type(message).__name__}"] += 1
        self._admission.pump(now)

    def next_deadline(self) -> float | None:
        """When `tick` wants to be called, in monotonic seconds."""
        return self._r.deadlines.next()

    def tick(self, now: float) -> None:
        """Let time pass."""
        for timer, ident, number in self._r.deadlines.due(now):
            if timer is Timer.DRAIN:
                self._ends.quarantine(number, now)
            elif timer is Timer.POSITIONS:
                self._admission.say_positions(now)
            else:
                self._expire(timer, HandoffId(ident), number, now)
        self._admission.pump(now)

    def take_effects(self) -> list[ConsumerEffect]:
        """What the runtime has to do, in order; each handed out once."""
        effects, self._r.effects = self._r.effects, []
        return effects

    def state(self, handoff: HandoffId) -> ConsumerState | None:
        """State of a handoff under way, None when it is over or unknown."""
        item = self._r.handoffs.get(handoff)
        return None if item is None else item.machine.state

    def landed(self, handoff: HandoffId) -> SoFar | None:
        """What has landed of a handoff that is moving, being verified or ready; None of any other."""
        item = self._r.handoffs.get(handoff)
        return None if item is None else item.so_far()

    def manifests(self, handoff: HandoffId) -> dict[int, Manifest]:
        """Shard -> what lands, of a handoff under way; empty when it is over or unknown."""
        item = self._r.handoffs.get(handoff)
        return {} if item is None else {rank: shard.manifest for rank, shard in item.shards.items()}

    def statistics(self) -> ConsumerStatistics:
        """How it stands."""
        return ConsumerStatistics(
            states=dict(Counter(item.machine.state.value for item in self._r.handoffs.values())),
            queue=len(self._r.queue),
            ready=self._ready,
            failed=dict(self._r.failed),
            ignored=dict(self._r.ignored),
            book=self.book.statistics(),
        )

    # ---- inside

    def _expire(self, timer: Timer, handoff: HandoffId, number: int, now: float) -> None:
        item = self._r.handoffs.get(handoff)
        if item is None:  # it ended within the same tick
            return
        if timer is Timer.LEASE:
            reason = f"shard {number} of {item.wanted} gave no sign of life within its lease"
            self._ends.fail(item, ErrorCode.LEASE_EXPIRED, reason, now, shard=number)
        else:
            self._ends.fail(item, *overdue(item), now)
