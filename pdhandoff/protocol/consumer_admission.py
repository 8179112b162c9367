"""How offers become grants on the consumer: checks, assembling of shards, the queue, memory for all shards or none."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import final

import msgspec

from pdhandoff.errors import ErrorCode, LocalError, PdHandoffError
from pdhandoff.ids import HandoffId
from pdhandoff.protocol.attachments import Expected, check_attachments, check_values
from pdhandoff.protocol.book import Record
from pdhandoff.protocol.consumer_ends import Ends
from pdhandoff.protocol.consumer_handoff import Handoff, HandoffShard
from pdhandoff.protocol.consumer_registry import Registry, Timer
from pdhandoff.protocol.consumer_table import ConsumerInput, ConsumerState
from pdhandoff.protocol.effects import GrantShard
from pdhandoff.protocol.manifest import Manifest
from pdhandoff.protocol.messages import Offer, Queued

__all__ = ["Admission", "CoverCheck", "OfferCheck", "Unannounced"]

_I, _S = ConsumerInput, ConsumerState

OfferCheck = Callable[[int, Offer], None]
"(link, offer): raises PdHandoffError when this consumer cannot take it"
CoverCheck = Callable[[HandoffId, Sequence[Manifest]], None]
"(handoff, manifests of all shards): raises PdHandoffError when they do not cover what the consumer needs exactly once"


@final
class Unannounced(enum.Enum):
    """What to do with an offer that nobody on this side announced."""

    REFUSE = "refuse"
    WAIT = "wait"  # briefly: Limits.unannounced_s
    ACCEPT = "accept"


@final
class Admission:
    """Takes offers, grants memory in the order of the queue."""

    def __init__(
        self,
        registry: Registry,
        ends: Ends,
        *,
        unannounced: Unannounced,
        admit: OfferCheck | None,
        cover: CoverCheck | None,
        expected: Mapping[str, Expected],
    ) -> None:
        self._r = registry
        self._ends = ends
        self._unannounced = unannounced
        self._admit = admit
        self._cover = cover
        self._expected = dict(expected)
        self._optional = {
            name: msgspec.structs.replace(known, required=False) for name, known in self._expected.items()
        }
        self.draining = False

    def announce(self, handoff: HandoffId, now: float, *, wait_s: float | None, start_token: int) -> None:
        """See `ConsumerCore.announce`."""
        r = self._r
        if self.draining:
            raise LocalError(ErrorCode.DRAINING, "this consumer takes no new handoffs")
        known = r.handoffs.get(handoff)
        if handoff in r.tombstones or (known is not None and known.machine.state is not _S.UNANNOUNCED):
            raise LocalError(ErrorCode.DUPLICATE, f"handoff {handoff} was announced before: mint a new id")
        item = known or r.new(handoff)
        item.start_token = start_token
        item.machine.feed(_I.ANNOUNCE)
        if item.machine.state is _S.ANNOUNCED:
            r.phase(item, now + (r.limits.announce_s if wait_s is None else wait_s))
        else:
            self._assembling(item, now)

    def offered(self, link: int, offer: Offer, now: float) -> None:
        """A producer offers a shard."""
        r = self._r
        handoff = HandoffId(offer.handoff)
        incarnation = r.links.get(link)
        item = r.handoffs.get(handoff)
        if incarnation is None:
            r.ignored["offer over a closed link"] += 1
        elif handoff in r.tombstones:
            code = r.tombstones.code(handoff) or ErrorCode.DUPLICATE
            r.refuse(link, handoff, code, "this handoff is over here: mint a new id for another attempt")
        elif item is not None and offer.manifest.shard in item.shards:
            self._repeated(link, item, offer)
        elif item is not None and item.machine.state not in {_S.ANNOUNCED, _S.UNANNOUNCED, _S.ASSEMBLING}:
            r.ignored["offer after assembly"] += 1
            r.refuse(link, handoff, ErrorCode.DUPLICATE, "all shards of this handoff have been offered already")
        elif item is None and not self._may_begin(link, handoff):
            pass
        else:
            self._take(HandoffShard(link, incarnation, offer), item or r.new(handoff), now)

    def pump(self, now: float) -> None:
        """Grant from the head of the queue, in order, as long as memory lasts."""
        queue = self._r.queue
        while queue:
            item = queue[0]
            record = self._r.book.reserve(item.handoff, item.wants, item.writers)
            if record is None:
                return
            del queue[0]
            self._grant(item, record, now)

    def say_positions(self, now: float) -> None:
        """Tell those in the queue whose place has changed; do so again after a while."""
        for position, item in enumerate(self._r.queue):
            if item.position != position:
                self._say_position(item, position)
        if self._r.queue:
            self._r.deadlines.set((Timer.POSITIONS, b"", 0), now + self._r.limits.heartbeat_s)

    # ---- inside

    def _may_begin(self, link: int, handoff: HandoffId) -> bool:
        """Whether a handoff that nobody here knows may begin; refuses it otherwise."""
        r = self._r
        if self.draining:
            r.refuse(link, handoff, ErrorCode.DRAINING, "this consumer takes no new handoffs")
        elif self._unannounced is Unannounced.REFUSE:
            r.refuse(link, handoff, ErrorCode.NOT_ANNOUNCED, "nobody here waits for this handoff")
        elif len(r.handoffs) >= r.limits.max_handoffs_per_link:
            r.refuse(link, handoff, ErrorCode.BUSY, f"{len(r.handoffs)} handoffs are under way here")
        else:
            return True
        return False

    def _repeated(self, link: int, item: Handoff, offer: Offer) -> None:
        self._r.ignored["repeated offer"] += 1
        if item.shards[offer.manifest.shard].link != link:
            reason = f"shard {offer.manifest.shard} of this handoff was offered by somebody else"
            self._r.refuse(link, item.handoff, ErrorCode.DUPLICATE, reason)

    def _take(self, shard: HandoffShard, item: Handoff, now: float) -> None:
        try:
            self._check(shard, item)
        except PdHandoffError as error:
            self._r.refuse(shard.link, item.handoff, error.code, error.reason)
            self._ends.fail(item, error.code, error.reason, now, shard=shard.manifest.shard)
            return
        item.shards[shard.manifest.shard] = shard
        item.queue_ms = shard.offer.queue_ms if len(item.shards) == 1 else min(item.queue_ms, shard.offer.queue_ms)
        fresh = item.machine.state in {_S.NEW, _S.ANNOUNCED}
        item.machine.feed(_I.OFFER)
        if item.machine.state is _S.UNANNOUNCED and self._unannounced is Unannounced.ACCEPT:
            item.machine.feed(_I.ANNOUNCE)
        if item.machine.state is _S.UNANNOUNCED:
            if fresh:
                self._r.phase(item, now + self._r.limits.unannounced_s)
        elif fresh:
            self._assembling(item, now)
        else:
            self._maybe_queue(item, now)

    def _check(self, shard: HandoffShard, item: Handoff) -> None:
        manifest, offer = shard.manifest.validate(self._r.limits), shard.offer
        if manifest.start_token:
            raise LocalError(
                ErrorCode.MANIFEST_MISMATCH, "an offer starts at token 0: the grant says what is held already"
            )
        item.check_agrees(shard)
        specs = [value.spec for value in offer.attachments]
        expected = self._expected if manifest.shard == 0 else self._optional
        check_attachments((*specs, *offer.declares), expected, self._r.limits)
        check_values(offer.attachments, specs)
        shard.required = frozenset(name for name, known in expected.items() if known.required)
        if self._admit is not None:
            self._admit(shard.link, offer)

    def _assembling(self, item: Handoff, now: float) -> None:
        self._r.phase(item, now + self._r.limits.assemble_s)
        self._maybe_queue(item, now)

    def _maybe_queue(self, item: Handoff, now: float) -> None:
        if len(item.shards) < item.wanted:
            return
        try:
            self._settle_wants(item)
        except PdHandoffError as error:
            self._ends.fail(item, error.code, error.reason, now)
            return
        item.machine.feed(_I.ALL_OFFERED)
        behind = self._r.queue and any(map(any, item.wants.values()))  # what needs no memory waits for none
        record = None if behind else self._r.book.reserve(item.handoff, item.wants, item.writers)
        if record is None:
            self._wait_in_queue(item, now)
        else:
            self._grant(item, record, now)

    def _settle_wants(self, item: Handoff) -> None:
        """Raise PdHandoffError when the shards together are not what is needed, or can never fit."""
        if self._cover is not None:
            self._cover(item.handoff, [shard.manifest for shard in item.shards.values()])
        for shard in item.shards.values():
            shard.start_at(item.start_token)
        need = sum(shard.landing_bytes for shard in item.shards.values())
        total = self._r.book.statistics().total_bytes
        fits = need <= total  # what cannot fit is not cut into pieces: a long prompt has many
        if fits:
            item.count_wants()
            fits = self._r.book.fits_when_empty(item.wants)
        if not fits:
            raise LocalError(
                ErrorCode.TOO_LARGE, f"needs {need} bytes of landing memory, this consumer has {total} in all"
            )

    def _wait_in_queue(self, item: Handoff, now: float) -> None:
        r = self._r
        r.queue.append(item)
        if item.queue_ms == 0 or len(r.queue) > r.limits.max_queue:
            reason = "no landing memory is free now: try again, or another consumer"
            self._ends.fail(item, ErrorCode.BUSY, reason, now)
            return
        r.phase(item, now + min(item.queue_ms / 1000, r.limits.queue_s))
        self._say_position(item, len(r.queue) - 1)
        if len(r.queue) == 1:
            r.deadlines.set((Timer.POSITIONS, b"", 0), now + r.limits.heartbeat_s)

    def _grant(self, item: Handoff, record: Record, now: float) -> None:
        r = self._r
        item.machine.feed(_I.RESERVED)
        item.record = record
        item.wants = {}
        r.phase(item, now + r.limits.handoff_s)
        for rank, shard in item.shards.items():
            extents = {slot.destination: landing for slot, landing in record.extents.items() if slot.shard == rank}
            r.renew(item, rank, now)
            lease_ms = int(r.limits.lease_s * 1000)
            r.effects.append(
                GrantShard(shard.link, item.handoff, record.generation, rank, item.start_token, lease_ms, extents)
            )

    def _say_position(self, item: Handoff, position: int) -> None:
        item.position = position
        for shard in item.shards.values():
            message = Queued(handoff=item.handoff, position=position, waiting=len(self._r.queue))
            self._r.send(shard.link, message)
