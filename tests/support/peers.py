"""Producer cores and a consumer core, joined by real links that encode and decode, under one fake clock."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, final

from pdhandoff.ids import HandoffId, Incarnation
from pdhandoff.limits import DEFAULT_LIMITS, Limits
from pdhandoff.protocol.book import Arena, ExtentBook
from pdhandoff.protocol.consumer import ConsumerCore, Unannounced
from pdhandoff.protocol.effects import (
    Arrived,
    ConsumerEffect,
    Ended,
    Granted,
    GrantShard,
    ProducerEffect,
    Send,
    Settled,
    Verify,
)
from pdhandoff.protocol.link import Link, LinkClosed, LinkEvent, LinkOpened, MessageReceived, Side
from pdhandoff.protocol.manifest import Entry, Manifest
from pdhandoff.protocol.messages import Grant, GrantedRank, Message, Welcome
from pdhandoff.protocol.producer import ProducerCore
from pdhandoff.protocol.spans import Span

__all__ = ["PAGE", "ConsumerPeer", "Pipe", "ProducerPeer", "Scene", "handoff_id", "make_manifest"]

PAGE = 4096
"bytes; one token of one shard fills it"


def handoff_id(number: int) -> HandoffId:
    """An id that a test can tell from others."""
    return HandoffId(number.to_bytes(16, "big"))


def make_manifest(shard: int = 0, shards: int = 1, *, tokens: int = 1, components: int = 1) -> Manifest:
    """One page of landing memory per token and component."""
    entries = tuple(
        Entry(component=f"component-{number}", layers=(0,), row_bytes=PAGE, page_tokens=1, page_bytes=PAGE)
        for number in range(components)
    )
    return Manifest(prompt_tokens=tokens, shard=shard, shards=shards, entries=entries)


@final
class Pipe:
    """Two links joined back to back."""

    def __init__(self, scene: Scene, number: int, producer: ProducerPeer) -> None:
        self.number = number
        self.producer = producer
        limits = scene.limits
        nonces = [bytes([side, number]) * 8 for side in (1, 2)]
        self.near = Link(
            Side.DIALLER,
            now=scene.now,
            incarnation=producer.incarnation,
            nonce=nonces[0],
            welcome=Welcome(mover="loopback"),
            limits=limits,
        )
        self.far = Link(
            Side.LISTENER,
            now=scene.now,
            incarnation=scene.consumer.incarnation,
            nonce=nonces[1],
            welcome=Welcome(mover="loopback"),
            limits=limits,
        )
        self.cut = False


class _Peer:
    """Keeps every effect that its core gave."""

    def __init__(self, scene: Scene, incarnation: Incarnation) -> None:
        self.scene = scene
        self.incarnation = incarnation
        self.effects: list[Any] = []

    def of(self, kind: type) -> list[Any]:
        """The effects of one kind so far."""
        return [effect for effect in self.effects if isinstance(effect, kind)]


@final
class ProducerPeer(_Peer):
    """One producer rank."""

    def __init__(self, scene: Scene, incarnation: Incarnation) -> None:
        super().__init__(scene, incarnation)
        self.core = ProducerCore(limits=scene.limits)
        self.sent: list[Message] = []

    def offer(self, handoff: HandoffId, manifest: Manifest, *, queue_ms: int = 0, **more: Any) -> None:
        """Offer over the newest pipe."""
        pipe = [pipe for pipe in self.scene.pipes if pipe.producer is self and not pipe.cut][-1]
        self.core.offer(pipe.number, handoff, manifest, self.scene.now, queue_ms=queue_ms, **more)
        self.scene.run()

    def grant(self, handoff: HandoffId) -> Grant | None:
        """The grant that this rank got."""
        grants: list[Grant] = [effect.grant for effect in self.of(Granted) if effect.handoff == handoff]
        return grants[-1] if grants else None

    def start(self, handoff: HandoffId, write: int = 1, nbytes: int = PAGE) -> None:
        """Submit a write."""
        self.core.write_started(handoff, write, nbytes, self.scene.now)
        self.scene.run()

    def finish(self, handoff: HandoffId, write: int = 1, spans: Sequence[Span] = (Span(0, 0, 1, 0, 1),)) -> None:
        """A write has landed."""
        self.core.write_done(handoff, write, spans, self.scene.now)
        self.scene.run()

    def commit(self, handoff: HandoffId, **more: Any) -> bool:
        """Say that all rows are there."""
        done = self.core.commit(handoff, self.scene.now, **more)
        self.scene.run()
        return done

    def move(self, handoff: HandoffId, **more: Any) -> None:
        """Write the only row, and commit."""
        self.start(handoff)
        self.finish(handoff)
        self.commit(handoff, **more)

    def cancel(self, handoff: HandoffId) -> bool:
        """End it."""
        done = self.core.cancel(handoff, "test")
        self.scene.run()
        return done

    def outcome(self, handoff: HandoffId) -> int | None:
        """The code it settled with, 0 for READY; None: not yet. Fails when it settled twice."""
        codes: list[int] = [effect.code for effect in self.of(Settled) if effect.handoff == handoff]
        assert len(codes) <= 1
        return codes[0] if codes else None


@final
class ConsumerPeer(_Peer):
    """The consumer."""

    def __init__(self, scene: Scene, incarnation: Incarnation, core: ConsumerCore) -> None:
        super().__init__(scene, incarnation)
        self.core = core
        self.verify = True
        "answer Verify at once"
        self.lost_grants = False
        "GRANT is never sent"

    def ended(self, handoff: HandoffId) -> Ended | None:
        """How it ended; None: it has not. Fails when it ended twice."""
        ends: list[Ended] = [effect for effect in self.of(Ended) if effect.handoff == handoff]
        assert len(ends) <= 1
        return ends[0] if ends else None

    def arrived(self, handoff: HandoffId) -> bool:
        """Whether it is complete and checked."""
        return any(effect.handoff == handoff for effect in self.of(Arrived))

    def ignored(self, why: str) -> int:
        """How often something was counted and dropped."""
        return self.core.statistics().ignored.get(why, 0)

    @property
    def free(self) -> int:
        """Pages of landing memory that are free."""
        return self.core.book.statistics().free_bytes // PAGE


@final
class Scene:
    """One consumer with `pages` of landing memory, and producer ranks."""

    def __init__(
        self,
        *,
        pages: int = 2,
        ranks: int = 1,
        limits: Limits = DEFAULT_LIMITS,
        unannounced: Unannounced = Unannounced.ACCEPT,
        **more: Any,
    ) -> None:
        self.now = 100.0
        self.limits = limits
        self.pipes: list[Pipe] = []
        self._numbers = itertools.count(1)
        self._lives = itertools.count(1)
        book = ExtentBook([Arena(0, PAGE, pages * PAGE)])
        core = ConsumerCore(book, limits=limits, unannounced=unannounced, **more)
        self.consumer = ConsumerPeer(self, Incarnation(b"\xcc" * 16), core)
        self.producers: list[ProducerPeer] = []
        for _ in range(ranks):
            self.add_producer()

    def add_producer(self) -> ProducerPeer:
        """A new producer rank (or a new life of one), connected."""
        producer = ProducerPeer(self, Incarnation(bytes([next(self._lives)]) * 16))
        self.producers.append(producer)
        self.connect(producer)
        return producer

    def connect(self, producer: ProducerPeer) -> Pipe:
        """A new link between this producer and the consumer."""
        pipe = Pipe(self, next(self._numbers), producer)
        self.pipes.append(pipe)
        self.run()
        return pipe

    def lose(self, pipe: Pipe) -> None:
        """The connection breaks; both ends notice."""
        pipe.cut = True
        self._events(pipe, pipe.near.lost("cut"), near=True)
        self._events(pipe, pipe.far.lost("cut"), near=False)
        self.run()

    def advance(self, seconds: float, step: float = 0.5) -> None:
        """Let time pass on all clocks, with every deadline at its time or up to `step` late."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(self.now + step, end)
            for pipe in [pipe for pipe in self.pipes if not pipe.cut]:
                self._events(pipe, pipe.near.tick(self.now), near=True)
                self._events(pipe, pipe.far.tick(self.now), near=False)
            for producer in self.producers:
                producer.core.tick(self.now)
            self.consumer.core.tick(self.now)
            self.run()

    def say(self, producer: ProducerPeer, message: Message) -> None:
        """Send a message that no core would send, as a faulty or late producer."""
        pipe = [pipe for pipe in self.pipes if pipe.producer is producer and not pipe.cut][-1]
        pipe.near.send(message, self.now)
        self.run()

    def run(self) -> None:
        """Deliver everything, and do what the cores ask for, until nothing is left to do."""
        while self._effects() or self._bytes():
            pass

    # ---- inside

    def _bytes(self) -> bool:
        moved = False
        for pipe in [pipe for pipe in self.pipes if not pipe.cut]:
            for source, target, near in ((pipe.near, pipe.far, False), (pipe.far, pipe.near, True)):
                data = source.data_to_send()
                if data:
                    moved = True
                    self._events(pipe, target.receive(data, self.now), near=near)
        return moved

    def _events(self, pipe: Pipe, events: Sequence[LinkEvent], *, near: bool) -> None:
        for event in events:
            self._producer_event(pipe, event) if near else self._consumer_event(pipe, event)

    def _producer_event(self, pipe: Pipe, event: LinkEvent) -> None:
        core = pipe.producer.core
        if isinstance(event, LinkOpened):
            core.link_up(pipe.number, event.incarnation)
        elif isinstance(event, MessageReceived):
            core.receive(pipe.number, event.message, self.now)
        elif isinstance(event, LinkClosed):
            core.link_lost(pipe.number, event.code, event.reason)

    def _consumer_event(self, pipe: Pipe, event: LinkEvent) -> None:
        core = self.consumer.core
        if isinstance(event, LinkOpened):
            core.link_up(pipe.number, event.incarnation)
        elif isinstance(event, MessageReceived):
            core.receive(pipe.number, event.message, self.now)
        elif isinstance(event, LinkClosed):
            core.link_lost(pipe.number, event.reason, self.now, event.code)

    def _effects(self) -> bool:
        did = False
        for producer in self.producers:
            for produced in producer.core.take_effects():
                did = True
                producer.effects.append(produced)
                self._do_produced(producer, produced)
        for consumed in self.consumer.core.take_effects():
            did = True
            self.consumer.effects.append(consumed)
            self._do_consumed(consumed)
        return did

    def _do_produced(self, producer: ProducerPeer, effect: ProducerEffect) -> None:
        if isinstance(effect, Send):
            producer.sent.append(effect.message)
            self._send(effect, lambda pipe: pipe.near)

    def _do_consumed(self, effect: ConsumerEffect) -> None:
        if isinstance(effect, Send):
            self._send(effect, lambda pipe: pipe.far)
        elif isinstance(effect, GrantShard) and not self.consumer.lost_grants:
            ranks = tuple(
                GrantedRank(rank, tuple((run.address, run.length) for run in runs), b"")
                for rank, runs in effect.extents.items()
            )
            grant = Grant(
                handoff=effect.handoff,
                generation=effect.generation,
                shard=effect.shard,
                lease_ms=effect.lease_ms,
                start_token=effect.start_token,
                ranks=ranks,
            )
            self._send(Send(effect.link, grant), lambda pipe: pipe.far)
        elif isinstance(effect, Verify) and self.consumer.verify:
            self.consumer.core.verified(effect.handoff, effect.generation, self.now)

    def _send(self, effect: Send, end: Callable[[Pipe], Link]) -> None:
        for pipe in self.pipes:
            if pipe.number == effect.link and not pipe.cut:
                end(pipe).send(effect.message, self.now)
