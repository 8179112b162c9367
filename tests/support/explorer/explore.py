"""Every interleaving of one small world, depth first, with the invariants checked in every state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from pdhandoff.protocol.consumer_table import ConsumerState
from pdhandoff.protocol.messages import Message
from pdhandoff.protocol.producer_table import ProducerState
from pdhandoff.protocol.spans import Span
from support.explorer.wiring import ROW, Wiring, look_deadline, look_idle, look_shards, look_states, name
from support.explorer.world import SHARDS, Link, Violation, World, Write, WriteState, incarnation_id

__all__ = ["Explorer", "Report"]

Step = tuple[str, World]
MAX_SETTLING: Final = 400


class Report(NamedTuple):
    """What was visited."""

    states: int
    transitions: int
    settled: int
    "states in which only misfortunes can still happen; from each, time alone freed everything"
    capped: bool


class Explorer(Wiring):
    """Explores one world."""

    # ---- the search

    def run(self) -> Report:
        """Visit everything that can be reached. Raises Violation, with the way to it, when an invariant fails."""
        parents: dict[World, tuple[World, str] | None] = {self.start: None}
        stack = [self.start]
        transitions = settled = 0
        while stack:
            world = stack.pop()
            try:
                self._check(world)
                free = list(self._free_steps(world))
                if not free:
                    settled += 1
                    self._settle(world)
                steps = [*free, *self._misfortunes(world)]
            except Violation as violation:
                raise Violation(f"{violation}\n{self._way(parents, world)}") from None
            for label, after in steps:
                transitions += 1
                if after not in parents:
                    parents[after] = (world, label)
                    stack.append(after)
            if self.cap is not None and len(parents) >= self.cap:
                return Report(len(parents), transitions, settled, capped=True)
        return Report(len(parents), transitions, settled, capped=False)

    @staticmethod
    def _way(parents: dict[World, tuple[World, str] | None], world: World) -> str:
        labels: list[str] = []
        step = parents[world]
        while step is not None:
            labels.append(step[1])
            step = parents[step[0]]
        return "\n".join(f"{number:3} {label}" for number, label in enumerate(reversed(labels), 1))

    def _settle(self, world: World) -> None:
        """Fair completion: let every deadline come, do everything else first; all memory must become free."""
        for _ in range(MAX_SETTLING):
            self._check(world)
            step = next(self._free_steps(world), None) or next(self._expiries(world), None)
            if step is None:
                break
            world = step[1]
        if not self.consumers.view(world.consumer, look_idle):
            raise Violation(f"landing memory or handoffs are left: {self.consumers.cores[world.consumer].statistics()}")
        for rank, state in enumerate(world.producers):
            if state is not None and self.producers.view(state, look_shards):
                raise Violation(f"source memory of producer {rank} is never free")
        for rank, life in enumerate(world.lives):
            never_crashed = life == 0 and world.producers[rank] is not None
            for handoff in self.ids if never_crashed else ():
                if (rank, incarnation_id(rank, 0), handoff) not in world.released:
                    raise Violation(f"{name(handoff)} never ended on producer {rank}")

    # ---- what happens by itself

    def _free_steps(self, world: World) -> Iterator[Step]:
        """Everything but misfortunes: these steps alone always come to an end."""
        for link in world.links:
            yield from self._link_steps(world, link)
        for rank, state in enumerate(world.producers):
            if state is not None:
                yield from self._producer_steps(world, rank, state)
        for write in sorted(world.writes):
            yield from self._write_steps(world, write)
        yield from self._consumer_steps(world)
        yield from self._mover_steps(world)

    def _link_steps(self, world: World, link: Link) -> Iterator[Step]:
        if link.at_consumer and link.to_consumer:
            message = self.messages[link.to_consumer[0]]
            after = self._update(world, link._replace(to_consumer=link.to_consumer[1:]))
            after, _ = self._consumer(after, "receive", link.number, message, world.consumer_time)
            yield f"consumer takes {_short(message)} over link {link.number}", after
        if link.at_producer and link.to_producer:
            message = self.messages[link.to_producer[0]]
            after = self._update(world, link._replace(to_producer=link.to_producer[1:]))
            now = world.producer_times[link.rank]
            after = self._producer(after, link.rank, "receive", link.number, message, now)
            yield f"producer {link.rank} takes {_short(message)} over link {link.number}", after
        if link.at_consumer and not link.at_producer:
            yield f"consumer notices the loss of link {link.number}", self._lose_at_consumer(world, link)
        if link.at_producer and not link.at_consumer:
            yield f"producer {link.rank} notices the loss of link {link.number}", self._lose_at_producer(world, link)

    def _lose_at_consumer(self, world: World, link: Link) -> World:
        world = self._update(world, link._replace(at_consumer=False, to_consumer=()))
        world, _ = self._consumer(world, "link_lost", link.number, "lost", world.consumer_time)
        return world

    def _lose_at_producer(self, world: World, link: Link) -> World:
        world = self._update(world, link._replace(at_producer=False, to_producer=()))
        return self._producer(world, link.rank, "link_lost", link.number, 0, "lost")

    def _producer_steps(self, world: World, rank: int, state: int) -> Iterator[Step]:
        life = incarnation_id(rank, world.lives[rank])
        now = world.producer_times[rank]
        shards = self.producers.view(state, look_shards)
        for handoff, (phase, generation, missing) in shards.items():
            if phase is not ProducerState.MOVING:
                continue
            if not missing:
                yield f"producer {rank} commits {name(handoff)}", self._producer(world, rank, "commit", handoff, now)
                continue
            write = Write(rank, life, handoff, generation, missing[0])
            after = self._producer(world, rank, "write_started", handoff, write.token, ROW, now)
            yield f"producer {rank} writes {name(handoff)}", after._replace(writes=after.writes | {write})
        if not any(link.rank == rank and link.at_producer for link in world.links):
            yield f"producer {rank} connects again", self._connect(world, rank)
        elif not self.offered and world.lives[rank] == 0:
            known = set(shards) | {handoff for at, _, handoff in world.settled if at == rank}
            for handoff in [each for each in self.ids if each not in known][:1]:
                yield f"producer {rank} offers {name(handoff)}", self._offer(world, rank, handoff)

    def _write_steps(self, world: World, write: Write) -> Iterator[Step]:
        gone = world._replace(writes=world.writes - {write})
        rank, handoff, token = write.rank, write.handoff, write.token
        label = f"{name(handoff)} of producer {rank}, generation {write.generation}"
        alive = world.producers[rank] is not None and write.incarnation == incarnation_id(rank, world.lives[rank])
        fenced = (write.generation, write.rank) in world.fenced
        if not alive:
            yield f"late write lands: {label}", self._land(gone, write)
            yield f"late write is lost: {label}", gone
        elif write.state is WriteState.LOUD:
            yield (
                f"failed write lands: {label}",
                self._producer(self._land(gone, write), rank, "write_quiet", handoff, token),
            )
            yield f"failed write is quiet: {label}", self._producer(gone, rank, "write_quiet", handoff, token)
        elif fenced:
            after = self._producer(gone, rank, "write_failed", handoff, token, "fenced", quiet=True)
            yield f"fenced write fails: {label}", after
        else:
            now = world.producer_times[rank]
            span = Span(0, 0, 1, token, token + 1)
            after = self._producer(self._land(gone, write), rank, "write_done", handoff, token, (span,), now)
            yield f"write lands: {label}", after

    def _consumer_steps(self, world: World) -> Iterator[Step]:
        now = world.consumer_time
        for handoff, generation in sorted(world.verifying):
            after = world._replace(verifying=world.verifying - {(handoff, generation)})
            after, _ = self._consumer(after, "verified", handoff, generation, now)
            yield f"{name(handoff)} is verified", after
        for handoff, state in self.consumers.view(world.consumer, look_states).items():
            if state is ConsumerState.READY:
                after, claim = self._consumer(world, "claim", handoff)
                yield (
                    f"{name(handoff)} is claimed",
                    after._replace(reading=after.reading | {(handoff, claim.generation)}),
                )
        for handoff, generation in sorted(world.reading):
            after = world._replace(reading=world.reading - {(handoff, generation)})
            after = self._ended(after, handoff)
            after, released = self._consumer(after, "release", handoff, now)
            if not released:
                raise Violation(f"{handoff} could not be released")
            yield f"{name(handoff)} is released", after

    def _mover_steps(self, world: World) -> Iterator[Step]:
        now = world.consumer_time
        alive = {incarnation_id(rank, world.lives[rank]) for rank in range(SHARDS) if world.producers[rank] is not None}
        flying = {write.incarnation for write in world.writes}
        for incarnation in sorted(world.proofs - alive - flying):
            after = world._replace(proofs=world.proofs - {incarnation})
            after, _ = self._consumer(after, "proven_ended", incarnation, now)
            yield f"producer {incarnation[0]}, life {incarnation[1]}, is proven to have ended", after
        for generation, shard in sorted(world.fences):
            after = world._replace(
                fences=world.fences - {(generation, shard)}, fenced=world.fenced | {(generation, shard)}
            )
            after, _ = self._consumer(after, "fenced", generation, shard, now)
            yield f"shard {shard} of generation {generation} is fenced", after

    # ---- what goes wrong

    def _misfortunes(self, world: World) -> Iterator[Step]:
        kinds: dict[str, Callable[[World], Iterator[Step]]] = {
            "cancels": self._cancels,
            "crashes": self._crashes,
            "losses": self._losses,
            "expiries": self._expiries,
            "quiet_failures": self._quiet_failures,
            "loud_failures": self._loud_failures,
            "restarts": self._restarts,
            "bad_digests": self._bad_digests,
        }
        for kind, happen in kinds.items():
            if getattr(world.budget, kind):
                yield from happen(_spend(world, kind))
        for rank, state in enumerate(world.producers):
            if state is None:
                yield f"producer {rank} starts anew", self._revive(world, rank)

    def _cancels(self, world: World) -> Iterator[Step]:
        for handoff in self.ids:
            after, done = self._consumer(world, "cancel", handoff, "test", world.consumer_time)
            if done:
                yield f"consumer cancels {name(handoff)}", after
            for rank, state in enumerate(world.producers):
                if state is not None and handoff in self.producers.view(state, look_shards):
                    after = self._producer(world, rank, "cancel", handoff, "test")
                    if after.producers != world.producers:
                        yield f"producer {rank} cancels {name(handoff)}", after

    def _crashes(self, world: World) -> Iterator[Step]:
        for rank, state in enumerate(world.producers):
            if state is not None:
                producers = list(world.producers)
                producers[rank] = None
                after = world._replace(producers=tuple(producers))
                for link in world.links:
                    if link.rank == rank:
                        after = self._update(after, link._replace(at_producer=False, to_producer=()))
                yield f"producer {rank} crashes", after

    def _revive(self, world: World, rank: int) -> World:
        producers, lives, times = list(world.producers), list(world.lives), list(world.producer_times)
        producers[rank], times[rank] = 0, 0.0
        lives[rank] += 1
        world = world._replace(producers=tuple(producers), lives=tuple(lives), producer_times=tuple(times))
        return self._connect(world, rank)

    def _losses(self, world: World) -> Iterator[Step]:
        for link in world.links:
            if link.at_consumer and link.at_producer:
                yield f"consumer loses link {link.number}", self._lose_at_consumer(world, link)
                yield f"producer {link.rank} loses link {link.number}", self._lose_at_producer(world, link)

    def _expiries(self, world: World) -> Iterator[Step]:
        """One side's next deadline comes; the other side's clock may stand still meanwhile."""
        at = self.consumers.view(world.consumer, look_deadline)
        if at is not None:
            now = max(at, world.consumer_time)
            after, _ = self._consumer(world._replace(consumer_time=now), "tick", now)
            yield f"a deadline of the consumer comes: {now:.3f}", after
        for rank, state in enumerate(world.producers):
            at = None if state is None else self.producers.view(state, look_deadline)
            if at is not None:
                times = list(world.producer_times)
                times[rank] = max(at, times[rank])
                after = self._producer(world._replace(producer_times=tuple(times)), rank, "tick", times[rank])
                yield f"a deadline of producer {rank} comes: {times[rank]:.3f}", after

    def _quiet_failures(self, world: World) -> Iterator[Step]:
        yield from self._failures(world, quiet=True)

    def _loud_failures(self, world: World) -> Iterator[Step]:
        yield from self._failures(world, quiet=False)

    def _failures(self, world: World, *, quiet: bool) -> Iterator[Step]:
        for write in sorted(world.writes):
            alive = write.incarnation == incarnation_id(write.rank, world.lives[write.rank])
            if write.state is WriteState.FLYING and alive and world.producers[write.rank] is not None:
                after = world._replace(writes=world.writes - {write})
                if not quiet:
                    after = after._replace(writes=after.writes | {write._replace(state=WriteState.LOUD)})
                after = self._producer(
                    after, write.rank, "write_failed", write.handoff, write.token, "test", quiet=quiet
                )
                yield f"a write of {name(write.handoff)} by producer {write.rank} fails, quiet: {quiet}", after

    def _restarts(self, world: World) -> Iterator[Step]:
        for rank, state in enumerate(world.producers):
            if state is not None:
                for handoff, (phase, _, _) in self.producers.view(state, look_shards).items():
                    if phase is ProducerState.MOVING:
                        yield (
                            f"producer {rank} starts {name(handoff)} over",
                            self._producer(world, rank, "restart", handoff),
                        )

    def _bad_digests(self, world: World) -> Iterator[Step]:
        for handoff, generation in sorted(world.verifying):
            after = world._replace(verifying=world.verifying - {(handoff, generation)})
            after, _ = self._consumer(
                after, "verification_failed", handoff, generation, 1, "bad digest", world.consumer_time
            )
            yield f"{name(handoff)} fails its check", after


def _spend(world: World, kind: str) -> World:
    left = {kind: getattr(world.budget, kind) - 1}
    return world._replace(budget=world.budget._replace(**left))


def _short(message: Message) -> str:
    kind = type(message).__name__
    return f"{kind}({name(message.handoff)})" if hasattr(message, "handoff") else kind
