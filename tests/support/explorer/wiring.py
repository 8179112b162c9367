"""The cores of one world, wired together: what a step of a core does to the rest, and what must hold everywhere."""

from __future__ import annotations

import itertools
from typing import Any, Final, NamedTuple

from pdhandoff.ids import HandoffId, Incarnation
from pdhandoff.protocol.book import Arena, ExtentBook
from pdhandoff.protocol.consumer import ConsumerCore, Unannounced
from pdhandoff.protocol.consumer_table import ConsumerState
from pdhandoff.protocol.effects import Ended, FenceWriter, GrantShard, ProveEnded, Send, Settled, SourceFree, Verify
from pdhandoff.protocol.messages import Commit, Grant, GrantedRank, Message
from pdhandoff.protocol.producer import ProducerCore
from pdhandoff.protocol.producer_shard import ProducerShard
from pdhandoff.protocol.producer_table import ProducerState
from support.explorer.automaton import Automaton
from support.explorer.world import (
    SHARDS,
    Budget,
    Link,
    Violation,
    World,
    Write,
    handoff_id,
    incarnation_id,
    manifest,
)

__all__ = ["ROW", "Wiring", "look_deadline", "look_idle", "look_shards", "look_states", "name"]

ALIGNMENT: Final = 4096
ROW: Final = 64
"bytes"
CONSUMER: Final = Incarnation(b"\xcc" * 16)


class BookView(NamedTuple):
    """Ownership of landing memory, as the consumer sees it."""

    free: tuple[tuple[int, int], ...]
    records: dict[int, tuple[HandoffId, dict[int, tuple[int, ...]], frozenset[int]]]
    "generation -> (handoff, shard -> addresses, writers)"


def _look_book(core: ConsumerCore) -> BookView:
    records = {
        generation: (
            record.handoff,
            {shard: tuple(run.address for run in record.of_shard(shard)) for shard in range(SHARDS)},
            frozenset(record.writers),
        )
        for generation, record in core.book.records.items()
    }
    runs = [(run.address, run.length) for run in core.book._free[0]]
    return BookView(tuple(runs), records)


def _look_overlap(core: ConsumerCore) -> str:
    taken = [run for record in core.book.records.values() for runs in record.extents.values() for run in runs]
    runs = sorted((*taken, *core.book._free[0]))
    for before, after in itertools.pairwise(runs):
        if before.address + before.length > after.address:
            return f"{before} and {after} overlap: granted twice, or granted and free"
    total = sum(run.length for run in runs)
    return "" if total == core.book.statistics().total_bytes else f"{total} bytes are accounted for"


def look_states(core: ConsumerCore) -> dict[HandoffId, ConsumerState]:
    return {handoff: item.machine.state for handoff, item in core._r.handoffs.items()}


def look_idle(core: ConsumerCore) -> bool:
    return not core.book.records and not core._r.handoffs


def look_shards(core: ProducerCore) -> dict[HandoffId, tuple[ProducerState, int, tuple[int, ...]]]:
    """Handoff -> (state, generation, tokens that are neither written nor on their way)."""
    return {
        handoff: (shard.machine.state, shard.generation, _missing(shard)) for handoff, shard in core._shards.items()
    }


def _missing(shard: ProducerShard) -> tuple[int, ...]:
    landed = shard.ledger._all_layers[0]
    tokens = range(shard.manifest.prompt_tokens)
    return tuple(at for at in tokens if at not in shard.in_flight and landed.first_gap(at, at + 1) is not None)


def look_deadline(core: ConsumerCore | ProducerCore) -> float | None:
    return core.next_deadline()


class Wiring:
    """The parts of one world.

    Args:
        handoffs: how many compete.
        budget: which misfortunes, and how many.
        extents: how many shards fit into landing memory at once.
        fence: whether the mover has a fence.
        cap: stop after so many states.
        tokens: rows of a shard; each is a write of its own.
        offered: all offers are on the wire at the start, instead of coming at any time.
    """

    def __init__(
        self,
        *,
        handoffs: int,
        budget: Budget,
        extents: int = SHARDS,
        fence: bool = False,
        cap: int | None = None,
        tokens: int = 1,
        offered: bool = True,
    ) -> None:
        self.ids = [handoff_id(number) for number in range(handoffs)]
        self.cap = cap
        self.messages: list[Message] = []
        self._numbers: dict[Message, int] = {}
        self.tokens = tokens
        self.consumers: Automaton[ConsumerCore] = Automaton()
        self.producers: Automaton[ProducerCore] = Automaton()
        book = ExtentBook([Arena(0, ALIGNMENT, extents * ALIGNMENT)], alignment=ALIGNMENT)
        core = ConsumerCore(book, unannounced=Unannounced.ACCEPT, can_fence=fence)
        blank = self.producers.intern(ProducerCore())
        world = World(
            consumer=self.consumers.intern(core),
            consumer_time=0.0,
            producers=(blank,) * SHARDS,
            producer_times=(0.0,) * SHARDS,
            lives=(0,) * SHARDS,
            links=(),
            writes=frozenset(),
            memory=frozenset(),
            budget=budget,
        )
        for rank in range(SHARDS):
            world = self._connect(world, rank)
        if offered:
            for rank in range(SHARDS):
                for handoff in self.ids:
                    world = self._offer(world, rank, handoff)
        self.start = world
        self.offered = offered

    # ---- invariants of every state

    def _check(self, world: World) -> None:
        problem = self.consumers.view(world.consumer, _look_overlap)
        if problem:
            raise Violation(problem)
        memory = dict(world.memory)
        records = self.consumers.view(world.consumer, _look_book).records
        for handoff, generation in world.reading | world.verifying:
            owner, addresses, _ = records.get(generation, (None, {}, None))
            if owner != handoff:
                raise Violation(f"generation {generation} is being read, and its memory is not its own any more")
            for shard, runs in addresses.items():
                if (handoff, generation, shard) not in world.committed:
                    raise Violation(f"shard {shard} is read and was never committed")
                for token in range(self.tokens):
                    found = memory.get(runs[0] + token * ROW)
                    if found != (handoff, generation, shard):
                        raise Violation(f"the reader of generation {generation} sees {found}")

    def _land(self, world: World, write: Write) -> World:
        """The bytes of a write arrive: only where that very grant still allows a writer."""
        if (write.generation, write.rank) in world.fenced:
            return world
        records = self.consumers.view(world.consumer, _look_book).records
        owner, addresses, writers = records.get(write.generation, (None, {}, frozenset()))
        if owner != write.handoff or write.rank not in writers:
            raise Violation(f"{write} lands in memory that is free, or granted anew")
        memory = dict(world.memory)
        at = addresses[write.rank][0] + write.token * ROW
        memory[at] = (write.handoff, write.generation, write.rank)
        return world._replace(memory=frozenset(memory.items()))

    # ---- steps of the cores, and what follows from their effects

    def _consumer(self, world: World, method: str, *arguments: Any, **named: Any) -> tuple[World, Any]:
        state, effects, answer = self.consumers.step(world.consumer, method, *arguments, **named)
        world = world._replace(consumer=state)
        for effect in effects:
            world = self._consumer_effect(world, effect)
        return world, answer

    def _consumer_effect(self, world: World, effect: Any) -> World:
        match effect:
            case Send():
                world = self._to_producer(world, effect.link, effect.message)
            case GrantShard():
                world = self._to_producer(world, effect.link, _grant(effect))
            case Verify():
                world = world._replace(verifying=world.verifying | {(effect.handoff, effect.generation)})
            case Ended():
                world = self._ended(world, effect.handoff)
            case ProveEnded():
                world = world._replace(proofs=world.proofs | {effect.incarnation})
            case FenceWriter():
                world = world._replace(fences=world.fences | {(effect.generation, effect.shard)})
        return world  # the other effects only inform the runtime

    @staticmethod
    def _ended(world: World, handoff: HandoffId) -> World:
        if handoff in world.ended:
            raise Violation(f"{handoff} ended twice on the consumer")
        return world._replace(ended=world.ended | {handoff})

    def _producer(self, world: World, rank: int, method: str, *arguments: Any, **named: Any) -> World:
        before = world.producers[rank]
        if before is None:
            raise TypeError(rank)
        state, effects, _ = self.producers.step(before, method, *arguments, **named)
        producers = list(world.producers)
        producers[rank] = state
        world = world._replace(producers=tuple(producers))
        for effect in effects:
            world = self._producer_effect(world, rank, effect)
        return world

    def _producer_effect(self, world: World, rank: int, effect: Any) -> World:
        life = incarnation_id(rank, world.lives[rank])
        if isinstance(effect, Send):
            if isinstance(effect.message, Commit):
                commit = effect.message
                said = (HandoffId(commit.handoff), commit.generation, commit.shard)
                world = world._replace(committed=world.committed | {said})
            return self._to_consumer(world, effect.link, effect.message)
        if isinstance(effect, Settled):
            key = (rank, life, effect.handoff)
            if key in world.settled:
                raise Violation(f"{effect.handoff} settled twice on producer {rank}")
            return world._replace(settled=world.settled | {key})
        if isinstance(effect, SourceFree):
            key = (rank, life, effect.handoff)
            if key in world.released or key not in world.settled:
                raise Violation(f"source memory of {effect.handoff} is freed twice, or before its outcome")
            if any((w.rank, w.incarnation, w.handoff) == key for w in world.writes):
                raise Violation(f"source memory of {effect.handoff} is freed while a write reads it")
            return world._replace(released=world.released | {key})
        return world

    # ---- the wire

    def _connect(self, world: World, rank: int) -> World:
        life = incarnation_id(rank, world.lives[rank])
        number = world.next_link
        links = (*world.links, Link(number, rank, life))
        world = world._replace(links=links, next_link=number + 1)
        world, _ = self._consumer(world, "link_up", number, life)
        return self._producer(world, rank, "link_up", number, CONSUMER)

    def _offer(self, world: World, rank: int, handoff: HandoffId) -> World:
        link = next(link.number for link in world.links if link.rank == rank and link.at_producer)
        now = world.producer_times[rank]
        return self._producer(world, rank, "offer", link, handoff, manifest(rank, self.tokens), now, queue_ms=30_000)

    def _number(self, message: Message) -> int:
        """Messages travel as numbers, which are quick to compare."""
        number = self._numbers.setdefault(message, len(self.messages))
        if number == len(self.messages):
            self.messages.append(message)
        return number

    @staticmethod
    def _update(world: World, changed: Link) -> World:
        links = [changed if link.number == changed.number else link for link in world.links]
        return world._replace(links=tuple(link for link in links if link.at_consumer or link.at_producer))

    def _to_producer(self, world: World, number: int, message: Message) -> World:
        for link in world.links:
            if link.number == number and link.at_producer:
                return self._update(world, link._replace(to_producer=(*link.to_producer, self._number(message))))
        return world

    def _to_consumer(self, world: World, number: int, message: Message) -> World:
        for link in world.links:
            if link.number == number and link.at_consumer:
                return self._update(world, link._replace(to_consumer=(*link.to_consumer, self._number(message))))
        return world


def name(handoff: bytes) -> str:
    """As it is called in a way to a violation."""
    return f"handoff {handoff[0] - 0xA0}"


def _grant(effect: GrantShard) -> Grant:
    ranks = tuple(
        GrantedRank(rank, tuple((run.address, run.length) for run in runs), b"")
        for rank, runs in effect.extents.items()
    )
    return Grant(
        handoff=effect.handoff,
        generation=effect.generation,
        shard=effect.shard,
        lease_ms=effect.lease_ms,
        start_token=effect.start_token,
        ranks=ranks,
    )
