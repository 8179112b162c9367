"""One state of a small world: two producer ranks, one consumer, their links, the mover's writes, and landing memory."""

from __future__ import annotations

import enum
from typing import Final, NamedTuple

from pdhandoff.ids import HandoffId, Incarnation
from pdhandoff.protocol.manifest import Entry, Manifest

__all__ = [
    "SHARDS",
    "Budget",
    "Link",
    "Violation",
    "World",
    "Write",
    "WriteState",
    "handoff_id",
    "incarnation_id",
    "manifest",
]

SHARDS: Final = 2
"producer ranks; each handoff has one shard from each"


class Violation(AssertionError):
    """An invariant does not hold in some reachable state."""


class WriteState(enum.IntEnum):
    """How a one-sided write stands."""

    FLYING = 0
    LOUD = 1  # reported as failed, and may land all the same


class Write(NamedTuple):
    """A write that the mover has been given and has not finished."""

    rank: int
    incarnation: Incarnation
    handoff: HandoffId
    generation: int
    token: int
    "the one row that it moves; also its number"
    state: WriteState = WriteState.FLYING


class Link(NamedTuple):
    """One connection between a producer rank and the consumer. Each end learns of its loss by itself."""

    number: int
    rank: int
    incarnation: Incarnation
    at_consumer: bool = True
    "the consumer takes it for open"
    at_producer: bool = True
    to_consumer: tuple[int, ...] = ()
    "messages on the way, by number"
    to_producer: tuple[int, ...] = ()


class Budget(NamedTuple):
    """How many of each misfortune may still happen."""

    cancels: int = 0
    "by either side"
    crashes: int = 0
    "of a producer"
    losses: int = 0
    "of a link, while both ends live on"
    expiries: int = 0
    "deadlines that come, on one side's clock, while other things could have happened"
    quiet_failures: int = 0
    "writes that fail and touch nothing any more"
    loud_failures: int = 0
    "writes that are reported as failed and may land later"
    restarts: int = 0
    "of a shard whose source rows are lost"
    bad_digests: int = 0


class World(NamedTuple):
    """All of it, hashable: two worlds that are equal have the same future."""

    consumer: int
    "state of the consumer's core, as interned"
    consumer_time: float
    producers: tuple[int | None, ...]
    "state of each rank's core; None: crashed"
    producer_times: tuple[float, ...]
    lives: tuple[int, ...]
    "rank -> how often it has started"
    links: tuple[Link, ...]
    writes: frozenset[Write]
    memory: frozenset[tuple[int, tuple[HandoffId, int, int]]]
    "(address, (handoff, generation, shard) that was written there last)"
    budget: Budget
    verifying: frozenset[tuple[HandoffId, int]] = frozenset()
    reading: frozenset[tuple[HandoffId, int]] = frozenset()
    proofs: frozenset[Incarnation] = frozenset()
    "asked for"
    fences: frozenset[tuple[int, int]] = frozenset()
    "asked for: (generation, shard)"
    fenced: frozenset[tuple[int, int]] = frozenset()
    committed: frozenset[tuple[HandoffId, int, int]] = frozenset()
    "(handoff, generation, shard) that a producer said COMMIT of"
    ended: frozenset[HandoffId] = frozenset()
    "on the consumer: with an error, or read to the end"
    settled: frozenset[tuple[int, Incarnation, HandoffId]] = frozenset()
    released: frozenset[tuple[int, Incarnation, HandoffId]] = frozenset()
    "source memory"
    next_link: int = 0


def handoff_id(number: int) -> HandoffId:
    """The id of a handoff in these worlds."""
    return HandoffId(bytes([0xA0 + number]) * 16)


def incarnation_id(rank: int, life: int) -> Incarnation:
    """The id of one life of a producer rank."""
    return Incarnation(bytes([rank, life]) * 8)


def manifest(shard: int, tokens: int = 1) -> Manifest:
    """One row of 64 bytes per token."""
    entry = Entry(component="k", layers=(0,), row_bytes=64, page_tokens=1, page_bytes=64)
    return Manifest(prompt_tokens=tokens, shard=shard, shards=SHARDS, entries=(entry,))
