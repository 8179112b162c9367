"""What the consumer keeps of one handoff while it is under way, and what it must hold against a COMMIT."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, final

from pdhandoff.errors import ErrorCode, LocalError
from pdhandoff.ids import HandoffId, Incarnation
from pdhandoff.protocol.attachments import check_values
from pdhandoff.protocol.book import Landing, Record, Slot
from pdhandoff.protocol.consumer_table import TABLE, ConsumerState
from pdhandoff.protocol.manifest import Manifest
from pdhandoff.protocol.messages import Attachment, Commit, Offer
from pdhandoff.protocol.spans import Ledger
from pdhandoff.protocol.table import Machine

__all__ = ["Claim", "Handoff", "HandoffShard", "SoFar", "check_commit", "overdue"]

_S = ConsumerState


class Claim(NamedTuple):
    """A complete handoff in the hands of its reader."""

    handoff: HandoffId
    generation: int
    manifests: Mapping[int, Manifest]
    "shard -> what landed"
    extents: Mapping[Slot, tuple[Landing, ...]]
    attachments: Mapping[str, Attachment]
    "by name; of several shards that send one name, the lowest shard's"
    traceparent: str


class SoFar(NamedTuple):
    """What has landed of a handoff under a grant."""

    generation: int
    prompt_tokens: int
    digest: bool
    "some shard has promised a payload digest"
    rows: Mapping[int, Sequence[Sequence[range]]]
    "shard -> for each entry of its manifest, tokens of which all layers have landed together"


@final
class HandoffShard:
    """What is known of one shard."""

    __slots__ = ("committed", "digest", "incarnation", "ledger", "link", "manifest", "offer", "required", "values")

    def __init__(self, link: int, incarnation: Incarnation, offer: Offer) -> None:
        self.link = link
        self.incarnation = incarnation
        self.offer = offer
        self.manifest = offer.manifest
        self.ledger = Ledger(offer.manifest)
        self.committed = False
        self.digest = b""
        self.required: frozenset[str] = frozenset()
        "attachments that this consumer cannot do without"
        self.values: tuple[Attachment, ...] = offer.attachments

    @property
    def landing_bytes(self) -> int:
        """Landing memory that its rows take, in bytes, on all ranks."""
        return sum(map(self.manifest.landing_bytes, self.manifest.destinations))

    def start_at(self, token: int) -> None:
        """Only rows from this token on will move. Raises PlanError when it lies outside the prompt."""
        self.manifest = self.manifest.starting_at(token)
        self.ledger = Ledger(self.manifest)


@final
class Handoff:
    """One handoff under way."""

    __slots__ = ("handoff", "machine", "position", "queue_ms", "record", "shards", "start_token", "wants")

    def __init__(self, handoff: HandoffId) -> None:
        self.handoff = handoff
        self.machine = Machine(TABLE)
        self.shards: dict[int, HandoffShard] = {}
        self.record: Record | None = None
        self.start_token = 0
        self.queue_ms = 0
        self.position = -1
        self.wants: dict[Slot, Sequence[int]] = {}
        "pieces to find memory for, in bytes, while it waits for memory"

    @property
    def wanted(self) -> int:
        """Shards that the handoff has, as the first offer said."""
        return next(iter(self.shards.values())).manifest.shards

    @property
    def generation(self) -> int:
        """Of its grant; 0 before any."""
        return 0 if self.record is None else self.record.generation

    @property
    def landing(self) -> bool:
        """Whether rows may land under its grant."""
        return self.machine.state is _S.LANDING

    @property
    def writers(self) -> dict[int, Incarnation]:
        """Who will write each shard."""
        return {rank: shard.incarnation for rank, shard in self.shards.items()}

    def count_wants(self) -> None:
        """Work out what memory it needs."""
        self.wants = {
            Slot(rank, destination): [piece.nbytes for piece in shard.manifest.pieces(destination)]
            for rank, shard in self.shards.items()
            for destination in shard.manifest.destinations
        }

    def check_agrees(self, shard: HandoffShard) -> None:
        """Raise LocalError when this shard's offer contradicts those that are here already."""
        manifest = shard.manifest
        for other in self.shards.values():
            if (other.manifest.shards, other.manifest.prompt_tokens) != (manifest.shards, manifest.prompt_tokens):
                raise LocalError(
                    ErrorCode.MANIFEST_MISMATCH,
                    f"shard {manifest.shard} says {manifest.shards} shards of {manifest.prompt_tokens} tokens, "
                    f"shard {other.manifest.shard} said {other.manifest.shards} of {other.manifest.prompt_tokens}",
                )
            if other.link == shard.link:
                raise LocalError(ErrorCode.MANIFEST_MISMATCH, "one link offers two shards of one handoff")

    def so_far(self) -> SoFar | None:
        """What has landed, while it may be read under `begin_read`."""
        if self.machine.state not in {_S.LANDING, _S.VERIFYING, _S.READY}:
            return None
        shards = self.shards.items()
        return SoFar(
            generation=self.generation,
            prompt_tokens=next(iter(self.shards.values())).manifest.prompt_tokens,
            digest=any(shard.offer.digest for _, shard in shards),
            rows={rank: shard.ledger.whole_rows() for rank, shard in shards},
        )

    def claim(self, record: Record) -> Claim:
        """Everything that its reader gets."""
        ranks = sorted(self.shards, reverse=True)
        return Claim(
            handoff=self.handoff,
            generation=record.generation,
            manifests={rank: shard.manifest for rank, shard in self.shards.items()},
            extents=record.extents,
            attachments={value.spec.name: value for rank in ranks for value in self.shards[rank].values},
            traceparent=self.shards[min(self.shards)].offer.traceparent,
        )


def check_commit(shard: HandoffShard, message: Commit) -> None:
    """Raise PdHandoffError when a COMMIT is not what was granted, row by row (rule 3)."""
    hole = shard.ledger.first_hole()
    if hole is not None:
        raise LocalError(
            ErrorCode.INCOMPLETE,
            f"shard {message.shard} committed, but {hole.component}, layer {hole.layer}, "
            f"tokens {hole.token_start}..{hole.token_stop} never landed",
        )
    if message.manifest_digest != shard.manifest.digest() or message.nbytes != shard.manifest.nbytes:
        raise LocalError(
            ErrorCode.MANIFEST_MISMATCH,
            f"shard {message.shard} moved {message.nbytes} bytes under another manifest than the "
            f"{shard.manifest.nbytes} bytes that were granted",
        )
    if shard.offer.digest and len(message.payload_digest) != 8:
        raise LocalError(ErrorCode.DIGEST_MISMATCH, f"shard {message.shard} promised a payload digest and sent none")
    check_values(message.attachments, shard.offer.declares, shard.required)


def overdue(item: Handoff) -> tuple[ErrorCode, str]:
    """The error of a handoff whose present phase took too long."""
    state = item.machine.state
    if state is _S.ANNOUNCED:
        return ErrorCode.EXPIRED, "announced, and no producer ever offered it"
    if state is _S.UNANNOUNCED:
        return ErrorCode.NOT_ANNOUNCED, "nobody here announced this handoff in time"
    if state is _S.ASSEMBLING:
        missing = sorted(set(range(item.wanted)) - set(item.shards))
        return ErrorCode.EXPIRED, f"shards {missing} of {item.wanted} never offered"
    if state is _S.QUEUED:
        return ErrorCode.QUEUE_TIMEOUT, "no landing memory became free in the time the producer allowed"
    if state is _S.READY:
        return ErrorCode.EXPIRED, "complete, and never claimed by a reader"
    return ErrorCode.TRANSFER_TIMEOUT, "the handoff took longer than any may"
