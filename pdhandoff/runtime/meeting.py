"""What two endpoints check when they meet: movers, layouts, and which entries their handoffs will have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, final

import msgspec

from pdhandoff.errors import ErrorCode, LayoutError, LocalError, PlanError, RemoteError
from pdhandoff.ids import Incarnation
from pdhandoff.layouts import Bridge, Layout, Policy, bridge, decode_layout, encode_layout, joint_landing
from pdhandoff.limits import Limits
from pdhandoff.planner import Shard, check_cover, entry_component, shard_manifest
from pdhandoff.protocol.link import LinkOpened
from pdhandoff.protocol.manifest import Entry, Manifest
from pdhandoff.protocol.messages import Offer

__all__ = [
    "ConsumerLink",
    "Covers",
    "ProducerLink",
    "decode_layouts",
    "encode_layouts",
    "meet_consumer",
    "meet_producer",
]

_REMEMBERED_COVERS: Final = 256

_LIST = msgspec.msgpack.Decoder(list[bytes])


def encode_layouts(layouts: Sequence[Layout], limits: Limits) -> bytes:
    """Layouts of all destination ranks, for WELCOME."""
    return msgspec.msgpack.encode([encode_layout(layout, limits) for layout in layouts])


def decode_layouts(data: bytes, limits: Limits) -> list[Layout]:
    """Read what `encode_layouts` wrote. Raises RemoteError or LayoutError."""
    try:
        items = _LIST.decode(data) if data else []
    except msgspec.MsgspecError as error:
        raise RemoteError(ErrorCode.MALFORMED, f"the peer's layouts are no list: {error}") from error
    if len(items) > limits.max_ranks:
        raise RemoteError(ErrorCode.OVERSIZED, f"the peer has {len(items)} ranks, {limits.max_ranks} are allowed")
    return [decode_layout(item, limits) for item in items]


@final
class ConsumerLink(msgspec.Struct, frozen=True, kw_only=True):
    """A consumer as a producer knows it."""

    incarnation: Incarnation
    layouts: tuple[Layout, ...]
    "of its ranks"
    template: Manifest
    "what this producer's shard moves for a prompt of one token"

    def manifest(self, prompt_tokens: int, limits: Limits) -> Manifest:
        """The manifest of a handoff. Raises PlanError for a length out of bounds."""
        return msgspec.structs.replace(self.template, prompt_tokens=prompt_tokens).validate(limits)


def meet_consumer(
    layout: Layout,
    shard: Shard,
    opened: LinkOpened,
    *,
    replicas: Shard | None,
    mover: str,
    policy: Policy,
    limits: Limits,
) -> ConsumerLink:
    """Check a consumer that answered. Raises LayoutError that names the field when its layouts cannot be served."""
    _same_mover(opened, mover)
    layouts = decode_layouts(opened.welcome.consumes, limits)
    if not layouts:
        raise LocalError(ErrorCode.UNEXPECTED, "the peer takes no handoffs: connect to a consumer")
    if shard.of > 1:
        policy = msgspec.structs.replace(policy, partial=True)
    bridges = [bridge(layout, destination, policy) for destination in layouts]
    destinations = [each.landing for each in bridges]
    template = shard_manifest(layout, shard, destinations, prompt_tokens=1, replicas=replicas, limits=limits)
    return ConsumerLink(incarnation=opened.incarnation, layouts=tuple(layouts), template=template)


@final
class ProducerLink:
    """A producer as a consumer knows it."""

    def __init__(self, incarnation: Incarnation, shard: Shard, layout: Layout, bridges: Sequence[Bridge]) -> None:
        self.incarnation = incarnation
        self.shard = shard
        self.layout = layout
        self.bridges = tuple(bridges)
        "one per rank of the consumer"
        self._good: set[tuple[Entry, ...]] = set()

    def check_offer(self, offer: Offer) -> None:
        """Check that an offer's entries are what this producer's layout gives. Raises PlanError."""
        said = Shard(offer.manifest.shard, offer.manifest.shards)
        if said != self.shard:
            raise PlanError(
                ErrorCode.MANIFEST_MISMATCH,
                f"the offer is for shard {said.rank} of {said.of}, its producer is shard {self.shard.rank} of "
                f"{self.shard.of}: shards of other counts do not fit together",
            )
        entries = offer.manifest.entries
        if entries in self._good:
            return
        for entry in entries:
            if entry.destination >= len(self.bridges):
                raise PlanError(ErrorCode.MANIFEST_MISMATCH, f"there is no consumer rank {entry.destination}")
            entry_component(self.layout.component(entry.component), entry)
        if len(self._good) < 64:
            self._good.add(entries)


@final
class Covers:
    """Checks that all shards of a handoff bring what is needed. Offers repeat, so what was found good is remembered."""

    def __init__(self) -> None:
        self._good: set[tuple[tuple[Incarnation, ...], tuple[tuple[Entry, ...], ...]]] = set()

    def check(self, links: Sequence[ProducerLink], manifests: Sequence[Manifest]) -> None:
        """Raise PlanError or LayoutError when something is missing, or comes twice."""
        key = (tuple(link.incarnation for link in links), tuple(manifest.entries for manifest in manifests))
        if key in self._good:
            return
        ranks = range(len(links[0].bridges))
        check_cover(manifests, [joint_landing([link.bridges[rank] for link in links]) for rank in ranks])
        if len(self._good) >= _REMEMBERED_COVERS:
            self._good.clear()
        self._good.add(key)


def meet_producer(
    layouts: Sequence[Layout], opened: LinkOpened, *, mover: str, policy: Policy, limits: Limits
) -> ProducerLink:
    """Check a producer that connected. Raises LayoutError that names the field when its state cannot be used here."""
    _same_mover(opened, mover)
    welcome = opened.welcome
    if not welcome.produces:
        raise LocalError(ErrorCode.UNEXPECTED, "the peer hands nothing off: it is no producer")
    shard = Shard(welcome.shard, welcome.shards)
    if shard.rank >= shard.of or shard.of > limits.max_shards:
        raise LayoutError(
            ErrorCode.LAYOUT_MISMATCH,
            f"shards: the peer is shard {shard.rank} of {shard.of}, at most {limits.max_shards} are allowed: its rows "
            "would never be all of a handoff's; start it with the rank and count that it has",
            field="shards",
        )
    layout = decode_layout(welcome.produces, limits)
    if welcome.shards > 1:
        policy = msgspec.structs.replace(policy, partial=True)
    bridges = [bridge(layout, destination, policy) for destination in layouts]
    return ProducerLink(opened.incarnation, shard, layout, bridges)


def _same_mover(opened: LinkOpened, mover: str) -> None:
    theirs = opened.welcome.mover
    if theirs != mover:
        raise LayoutError(
            ErrorCode.MOVER_MISMATCH,
            f"the peer moves bytes by {theirs!r}, this side by {mover!r}: configure the same mover on both",
            field="mover",
        )
