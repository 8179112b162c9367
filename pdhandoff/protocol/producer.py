"""The producer's side of all handoffs of one endpoint: sans-IO, one shard per (handoff, link).

The runtime reports messages, writes and time; this tells it what to send, when it may write and when source memory is
free. Outcomes come at once (`Settled`); source memory only when no write reads it any more (`SourceFree`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, final

import msgspec

from pdhandoff.errors import ErrorCode, LocalError
from pdhandoff.ids import HandoffId, Incarnation
from pdhandoff.limits import DEFAULT_LIMITS, Limits
from pdhandoff.protocol.deadlines import Deadlines
from pdhandoff.protocol.effects import Granted, ProducerEffect, Restarted, Send, Settled, SourceFree
from pdhandoff.protocol.manifest import Manifest
from pdhandoff.protocol.messages import (
    Attachment,
    AttachmentSpec,
    Cancel,
    Commit,
    Drained,
    Draining,
    Failed,
    Grant,
    Message,
    Offer,
    Queued,
    Ready,
    Refuse,
)
from pdhandoff.protocol.owed import OWED_DRAINS, OwedDrains
from pdhandoff.protocol.producer_shard import ProducerShard
from pdhandoff.protocol.producer_table import TABLE, ProducerInput, ProducerState
from pdhandoff.protocol.spans import Ledger, Span
from pdhandoff.protocol.table import Name

__all__ = ["OWED_DRAINS", "TABLE", "ProducerCore", "ProducerStatistics"]

MIN_RENEW_S: Final = 0.05
"a producer renews no more often, however short a lease the consumer grants"

_I, _S = ProducerInput, ProducerState


class _Kind(Name):
    OFFER = "offer"
    RENEW = "renew"
    WRITE = "write"
    READY = "ready"


_Key = tuple[_Kind, HandoffId, int]


@final
class ProducerStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Counts since the start, and what is under way."""

    active: int
    ready: int
    failed: int
    writes_in_flight: int
    ignored: int
    "late, repeated and unknown messages"
    owed_drains: int


@final
class ProducerCore:
    """All shards that one endpoint hands off. Not thread-safe: one thread owns it."""

    def __init__(self, *, limits: Limits = DEFAULT_LIMITS) -> None:
        self._limits = limits
        self._shards: dict[HandoffId, ProducerShard] = {}
        self._deadlines: Deadlines[_Key] = Deadlines()
        self._effects: list[ProducerEffect] = []
        self._peers: dict[int, Incarnation] = {}
        self._draining: set[int] = set()
        self._owed = OwedDrains()
        self._ready = self._failed = self._ignored = 0

    # ---- what the engine wants

    def offer(
        self,
        link: int,
        handoff: HandoffId,
        manifest: Manifest,
        now: float,
        *,
        attachments: Sequence[Attachment] = (),
        declares: Sequence[AttachmentSpec] = (),
        queue_ms: int = 0,
        digest: bool = False,
        traceparent: str = "",
    ) -> None:
        """Offer a shard over an open link. Raises LocalError for an id in use or a link that takes no more."""
        if handoff in self._shards:
            raise LocalError(ErrorCode.DUPLICATE, f"handoff {handoff} is under way: mint a new id for another attempt")
        if link not in self._peers:
            raise LocalError(ErrorCode.LINK_LOST, f"link {link} is not open: connect to the consumer first")
        if link in self._draining:
            raise LocalError(ErrorCode.DRAINING, "the consumer takes no new handoffs: use another one")
        if len(self._shards) >= self._limits.max_handoffs_per_link:
            raise LocalError(ErrorCode.BUSY, f"{len(self._shards)} handoffs are under way: wait for some to end")
        shard = ProducerShard(handoff, link, self._peers[link], manifest.validate(self._limits), self._owed.mark())
        self._shards[handoff] = shard
        self._send(
            shard,
            Offer(
                handoff=handoff,
                manifest=manifest,
                attachments=tuple(attachments),
                declares=tuple(declares),
                queue_ms=queue_ms,
                digest=digest,
                traceparent=traceparent,
            ),
        )
        wait = self._limits.assemble_s + self._limits.unannounced_s + queue_ms / 1000
        self._deadlines.set((_Kind.OFFER, handoff, 0), now + wait)

    def restart(self, handoff: HandoffId) -> bool:
        """The source rows are lost; they come anew once nothing is in flight. False: no such shard is moving."""
        shard = self._shards.get(handoff)
        if shard is None or shard.machine.feed(_I.RESTART) is None:
            return False
        self._quiet(shard)
        return True

    def commit(
        self, handoff: HandoffId, now: float, *, payload_digest: bytes = b"", attachments: Sequence[Attachment] = ()
    ) -> bool:
        """All rows are written or in flight; say so once nothing is. False: no such shard is moving.

        Raises LocalError(INCOMPLETE) that names the first rows missing, when rows were neither written nor submitted.
        """
        shard = self._shards.get(handoff)
        if shard is None or not shard.machine.allows(_I.COMMIT):
            return False
        if not shard.in_flight:
            hole = shard.ledger.first_hole()
            if hole is not None:
                raise LocalError(
                    ErrorCode.INCOMPLETE,
                    f"commit before all rows were pushed: {hole.component}, layer {hole.layer}, "
                    f"tokens {hole.token_start}..{hole.token_stop} are missing",
                )
        shard.pending_commit = Commit(
            handoff=handoff,
            generation=shard.generation,
            shard=shard.manifest.shard,
            manifest_digest=shard.manifest.digest(),
            nbytes=shard.manifest.nbytes,
            payload_digest=payload_digest,
            attachments=tuple(attachments),
        )
        shard.machine.feed(_I.COMMIT)
        self._deadlines.set((_Kind.READY, handoff, 0), now + self._limits.handoff_s)
        self._quiet(shard)
        return True

    def cancel(self, handoff: HandoffId, reason: str, code: int = ErrorCode.CANCELLED) -> bool:
        """End a shard. What is in flight drains. False when it had its outcome already, or is unknown."""
        shard = self._shards.get(handoff)
        if shard is None or shard.outcome is not None:
            return False
        self._end(shard, code, reason, tell=True)
        return True

    # ---- what the mover reports

    def may_write(self, handoff: HandoffId, generation: int) -> bool:
        """Whether a parked write may be submitted now (rule 10): asked again right before every submission."""
        shard = self._shards.get(handoff)
        return shard is not None and shard.machine.state is _S.MOVING and shard.generation == generation

    def write_started(self, handoff: HandoffId, write: int, nbytes: int, now: float) -> None:
        """A write was, or is about to be, submitted. Its time budget depends on its bytes.

        Raises LocalError for a shard that is over: the consumer may have been told that it is drained.
        """
        shard = self._shards.get(handoff)
        if shard is None:
            raise LocalError(
                ErrorCode.MISUSE, f"handoff {handoff} is over: ask may_write before submitting, or memory is corrupted"
            )
        shard.in_flight.add(write)
        budget = self._limits.transfer_base_s + nbytes / self._limits.transfer_floor_bytes_per_s
        self._deadlines.set((_Kind.WRITE, handoff, write), now + budget)

    def write_done(self, handoff: HandoffId, write: int, spans: Sequence[Span], now: float) -> None:
        """The mover reported completion: these rows have landed."""
        shard = self._writing(handoff, write)
        if shard is None:
            return
        if shard.machine.state in {_S.MOVING, _S.COMMITTING}:
            for span in spans:
                shard.ledger.add(span)
            for progress in shard.progress(spans, self._limits):
                self._send(shard, progress)
            self._renew_later(shard, now)
        self._forget_write(shard, write)
        self._quiet(shard)

    def write_failed(self, handoff: HandoffId, write: int, reason: str, *, quiet: bool) -> None:
        """The mover reported a failure. Not quiet: it may still touch memory; the writer stays until `write_quiet`."""
        shard = self._writing(handoff, write)
        if shard is None:
            return
        if quiet:
            self._forget_write(shard, write)
        else:
            self._deadlines.clear((_Kind.WRITE, handoff, write))
        self._end(shard, ErrorCode.MOVER_FAILED, reason, tell=True)
        self._quiet(shard)  # it may have ended before, and this was its last write

    def write_quiet(self, handoff: HandoffId, write: int) -> None:
        """A failed write is now known to touch nothing any more."""
        shard = self._writing(handoff, write)
        if shard is not None:
            self._forget_write(shard, write)
            self._quiet(shard)

    # ---- links, messages, time

    def link_up(self, link: int, incarnation: Incarnation) -> None:
        """A link is open. Whatever this consumer may not have heard to be drained is said again first."""
        self._peers[link] = incarnation
        self._say_owed(link)

    def link_lost(self, link: int, code: int, reason: str) -> None:
        """A link has ended: its handoffs fail at once, their writes drain."""
        peer = self._peers.pop(link, None)
        self._draining.discard(link)
        self._owed.lost(link)
        for shard in [shard for shard in self._shards.values() if shard.link == link]:
            self._end(shard, code or ErrorCode.LINK_LOST, reason, tell=False)
        other = None if peer is None else self._link_to(peer)
        if other is not None:
            self._say_owed(other)

    def receive(self, link: int, message: Message, now: float) -> None:
        """Take a message that belongs to a producer; anything late, repeated or unknown is counted and dropped."""
        if isinstance(message, Draining):
            self._draining.add(link)
            return
        handoff = getattr(message, "handoff", None)
        shard = None if handoff is None else self._shards.get(HandoffId(handoff))
        if shard is None or shard.link != link:
            self._unknown(link, message)
            return
        self._owed.heard(shard.peer, link, shard.mark)
        if isinstance(message, Grant):
            self._granted(shard, message, now)
        elif isinstance(message, Queued):
            self._queued(shard, message)
        elif isinstance(message, Refuse):
            self._refused(shard, message)
        elif isinstance(message, Ready):
            self._settle_ready(shard, message)
        elif isinstance(message, Failed | Cancel):
            self._ended_by_peer(shard, message)
        else:
            self._ignored += 1

    def next_deadline(self) -> float | None:
        """When `tick` wants to be called, in monotonic seconds."""
        return self._deadlines.next()

    def tick(self, now: float) -> None:
        """Let time pass."""
        for kind, handoff, write in self._deadlines.due(now):
            shard = self._shards.get(handoff)
            if shard is None:
                continue
            if kind is _Kind.RENEW:
                self._renew(shard, now)
            elif kind is _Kind.OFFER:
                self._end(shard, ErrorCode.QUEUE_TIMEOUT, "the consumer did not grant memory in time", tell=True)
            elif kind is _Kind.READY:
                self._end(shard, ErrorCode.EXPIRED, "the consumer never confirmed the commit", tell=True)
            else:
                self._end(
                    shard, ErrorCode.TRANSFER_TIMEOUT, f"write {write} outlasted the budget for its bytes", tell=True
                )

    def take_effects(self) -> list[ProducerEffect]:
        """What the runtime has to do, in order; each handed out once."""
        effects, self._effects = self._effects, []
        return effects

    def position(self, handoff: HandoffId) -> int | None:
        """Place in the consumer's queue (0: next), None when not queued."""
        shard = self._shards.get(handoff)
        return None if shard is None or shard.machine.state is not _S.QUEUED else shard.position

    def state(self, handoff: HandoffId) -> ProducerState | None:
        """State of a shard under way, None when it is over or unknown."""
        shard = self._shards.get(handoff)
        return None if shard is None else shard.machine.state

    def statistics(self) -> ProducerStatistics:
        """Counts so far."""
        return ProducerStatistics(
            active=len(self._shards),
            ready=self._ready,
            failed=self._failed,
            writes_in_flight=sum(len(shard.in_flight) for shard in self._shards.values()),
            ignored=self._ignored,
            owed_drains=len(self._owed),
        )

    def owes(self) -> bool:
        """Whether a consumer must hear DRAINED over another link: now, or when what is in flight has become quiet."""
        return len(self._owed) > 0 or any(shard.link not in self._peers for shard in self._shards.values())

    # ---- inside

    def _granted(self, shard: ProducerShard, grant: Grant, now: float) -> None:
        if not shard.machine.allows(_I.GRANT):
            self._unknown(shard.link, grant, other=grant.generation != shard.generation)
            return
        if grant.shard != shard.manifest.shard:
            reason = f"shard {shard.manifest.shard} was offered, shard {grant.shard} was granted"
            self._end(shard, ErrorCode.UNEXPECTED, reason, tell=True)
            return
        try:
            shard.manifest = shard.manifest.starting_at(grant.start_token)
        except LocalError as error:
            self._end(shard, error.code, error.reason, tell=True)
            return
        self._deadlines.clear((_Kind.OFFER, shard.handoff, 0))
        shard.machine.feed(_I.GRANT)
        shard.grant = grant
        shard.ledger = Ledger(shard.manifest)
        self._renew_later(shard, now)
        self._effects.append(Granted(shard.handoff, grant))

    def _queued(self, shard: ProducerShard, message: Queued) -> None:
        if shard.machine.feed(_I.QUEUED) is None:
            self._ignored += 1
        else:
            shard.position = message.position

    def _refused(self, shard: ProducerShard, message: Refuse) -> None:
        """Before a grant, a consumer that refuses has no memory waiting for this shard."""
        if shard.grant is None:
            self._end(shard, message.code, message.reason, tell=False, owed=False)
        else:
            self._ignored += 1

    def _settle_ready(self, shard: ProducerShard, message: Ready) -> None:
        if message.generation != shard.generation or shard.machine.feed(_I.READY) is None:
            self._ignored += 1
            return
        self._ready += 1
        shard.outcome = (0, "")
        self._effects.append(Settled(shard.handoff, 0, ""))
        self._bury(shard, owed=False)

    def _ended_by_peer(self, shard: ProducerShard, message: Failed | Cancel) -> None:
        if shard.grant is not None and message.generation not in {0, shard.generation}:
            self._ignored += 1
            return
        if shard.outcome is not None:  # the two ends have crossed; what is in flight drains, and DRAINED is due already
            self._ignored += 1
            return
        never_granted = shard.grant is None
        shard.tell_drained = not never_granted
        code = message.code if isinstance(message, Failed) else ErrorCode.CANCELLED
        self._end(shard, code, message.reason, tell=False)
        if never_granted and message.generation:  # granted, but the GRANT itself could not be sent
            self._send(shard, shard.drained())

    def _end(self, shard: ProducerShard, code: int, reason: str, *, tell: bool, owed: bool = True) -> None:
        """Give the shard its outcome, if it has none; what is in flight goes on until it is quiet."""
        if shard.machine.feed(_I.END) is None:
            return
        self._failed += 1
        shard.outcome = (code, reason)
        for kind in (_Kind.OFFER, _Kind.RENEW, _Kind.READY):
            self._deadlines.clear((kind, shard.handoff, 0))
        if tell:
            text = reason[: self._limits.max_string]
            self._send(shard, shard.cancelled(text) if code == ErrorCode.CANCELLED else shard.failed(code, text))
            shard.tell_drained = bool(shard.in_flight)
        self._effects.append(Settled(shard.handoff, code, reason))
        if shard.machine.ended:
            self._bury(shard, owed=owed)
        else:
            self._quiet(shard)

    def _quiet(self, shard: ProducerShard) -> None:
        """Feed QUIET if nothing is in flight, and do what the table says."""
        if shard.in_flight:
            return
        action = shard.machine.feed(_I.QUIET)
        if action == "say RESTART":
            shard.ledger.clear()
            self._send(shard, shard.restart())
            self._effects.append(Restarted(shard.handoff))
        elif action == "say COMMIT":
            self._say_commit(shard)
        elif action == "say DRAINED":
            if shard.tell_drained:
                self._send(shard, shard.drained())
            self._bury(shard, owed=True)

    def _say_commit(self, shard: ProducerShard) -> None:
        self._deadlines.clear((_Kind.RENEW, shard.handoff, 0))
        hole = shard.ledger.first_hole()
        if hole is not None or shard.pending_commit is None:
            self._end(shard, ErrorCode.INCOMPLETE, f"rows were committed and never written: {hole}", tell=True)
        else:
            self._send(shard, shard.pending_commit)

    def _writing(self, handoff: HandoffId, write: int) -> ProducerShard | None:
        """The shard with this write in flight; anything else is counted."""
        shard = self._shards.get(handoff)
        if shard is None or write not in shard.in_flight:
            self._ignored += 1
            return None
        return shard

    def _forget_write(self, shard: ProducerShard, write: int) -> None:
        shard.in_flight.discard(write)
        self._deadlines.clear((_Kind.WRITE, shard.handoff, write))

    def _renew_later(self, shard: ProducerShard, now: float) -> None:
        wait = max(shard.lease_s / 3, MIN_RENEW_S)
        self._deadlines.set((_Kind.RENEW, shard.handoff, 0), now + wait)

    def _renew(self, shard: ProducerShard, now: float) -> None:
        self._send(shard, shard.renew())
        self._renew_later(shard, now)

    def _unknown(self, link: int, message: Message, *, other: bool = True) -> None:
        """Late word of a handoff that is over here. A GRANT must not leave its memory waiting for a writer."""
        self._ignored += 1
        if isinstance(message, Grant) and other and link in self._peers:
            drained = Drained(handoff=message.handoff, generation=message.generation, shard=message.shard)
            self._effects.append(Send(link, drained))

    def _send(self, shard: ProducerShard, message: Message) -> None:
        if shard.link in self._peers:
            self._effects.append(Send(shard.link, message))

    def _link_to(self, peer: Incarnation) -> int | None:
        """An open link to this incarnation of a consumer."""
        return next((link for link, other in self._peers.items() if other == peer), None)

    def _say_owed(self, link: int) -> None:
        self._effects += [Send(link, drained) for drained in self._owed.say(self._peers[link], link)]

    def _bury(self, shard: ProducerShard, *, owed: bool) -> None:
        """The shard is over and quiet. The consumer may have missed the last word: keep it."""
        self._shards.pop(shard.handoff, None)
        for kind in (_Kind.OFFER, _Kind.RENEW, _Kind.READY):
            self._deadlines.clear((kind, shard.handoff, 0))
        if owed:
            own = shard.link if shard.link in self._peers else None
            self._owed.add(shard.peer, shard.drained(), own)
            other = self._link_to(shard.peer)
            if own is None and other is not None:
                self._say_owed(other)
        self._effects.append(SourceFree(shard.handoff))
