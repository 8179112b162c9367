"""The producer: hands off what a prefill engine has computed, in the background."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Final, Self, final

from pdhandoff.engines.base import Memory, MemoryKind, Mover, Region
from pdhandoff.engines.registry import create
from pdhandoff.errors import ErrorCode, LocalError, PdHandoffError
from pdhandoff.ids import HandoffId, Incarnation
from pdhandoff.layouts import Layout, Policy, encode_layout, layout_digest
from pdhandoff.limits import DEFAULT_LIMITS, Limits
from pdhandoff.native import Native
from pdhandoff.planner import PageTable, Placement, Shard
from pdhandoff.protocol.effects import Granted, ProducerEffect, Restarted, Send, SourceFree
from pdhandoff.protocol.link import LinkClosed, LinkOpened
from pdhandoff.protocol.messages import Attachment, AttachmentSpec, Commit, Message, Offer, Welcome
from pdhandoff.protocol.producer import ProducerCore, ProducerStatistics
from pdhandoff.runtime.address import Address, parse_address
from pdhandoff.runtime.allow import Destinations
from pdhandoff.runtime.chunks import Chunk, ChunkState
from pdhandoff.runtime.connections import Connections, Guard, Identity
from pdhandoff.runtime.dialler import Dialler
from pdhandoff.runtime.gathering import Gatherer
from pdhandoff.runtime.loop import Loop
from pdhandoff.runtime.meeting import ConsumerLink, meet_consumer
from pdhandoff.runtime.natives import native_for, plain_native_for
from pdhandoff.runtime.numbers import whole_number
from pdhandoff.runtime.observer import Observer
from pdhandoff.runtime.outgoing import STANDARD_VALUES, Outgoing, check_specs
from pdhandoff.runtime.registering import register_whole
from pdhandoff.runtime.ring import Ring
from pdhandoff.runtime.sender import Sender, Staging
from pdhandoff.runtime.tables import BlockTable, page_tables
from pdhandoff.runtime.tls import TlsConfig
from pdhandoff.runtime.worker import Worker

__all__ = ["Producer"]

_LOG: Final = logging.getLogger("pdhandoff.producer")

_MOST_QUEUE_S: Final = 86_400
_MOST_TRACEPARENT: Final = 64
"as the messages of the protocol allow"


@final
class Producer:
    """One prefill rank's end. Use as a context manager, or call `close`.

    Args:
        mover: a name in the registry, or a mover (which the caller then closes).
        layout: what this rank holds.
        placements: component name -> where it lives.
        memory: the caches' memory, registered with the mover where writes read it directly.
        shard: which rank of how many this is.
        replicas: this rank among those that hold the same rows, which are divided over them. Default: all ranks do
            (tensor parallelism over replicated state). `Shard(0, 1)` for a pipeline stage, or for sharded heads.
        policy: what it accepts of layouts that differ.
        staging_bytes: size of the ring.
        ring_kind: where the ring is: with the caches, or rows would have to cross to it.
        ring_device: CUDA device ordinal; 0 for CPU memory.
        native: what copies and sums up. Default: what there is for the ring's memory.
        staging: whether rows pass through the ring.
        digest: compute a payload digest of every handoff.
        secret: shared with the consumers; None: no authentication by secret.
        tls: certificates of the control link; None: it is not encrypted.
        allow: consumers that a request may name (hosts, addresses, networks, with or without a port); None: any.
    """

    def __init__(
        self,
        *,
        mover: str | Mover,
        layout: Layout,
        placements: Mapping[str, Placement],
        memory: Sequence[Memory] = (),
        shard: Shard = Shard(0, 1),  # noqa: B008 - a tuple of numbers
        replicas: Shard | None = None,
        policy: Policy | None = None,
        staging_bytes: int = 256 << 20,
        ring_kind: MemoryKind = MemoryKind.CPU,
        ring_device: int = 0,
        native: Native | None = None,
        staging: Staging = Staging.STAGED,
        digest: bool = False,
        secret: bytes | None = None,
        tls: TlsConfig | None = None,
        allow: Sequence[str] | None = None,
        name: str = "producer",
        limits: Limits = DEFAULT_LIMITS,
        recorder: Observer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.layout = layout.validate(limits)
        self.shard = shard
        self.digest = digest
        self._replicas = replicas
        self._policy = policy or Policy()
        self.incarnation = Incarnation.mint()
        self._limits = limits
        self._clock = clock
        self._recorder = recorder
        self._placements = placements
        self._components = {component.name: component for component in layout.components}
        if native is None:
            native = native_for(ring_kind) if digest else plain_native_for(ring_kind)
        self._destinations = None if allow is None else Destinations(allow)
        guard = Guard.of(secret, tls)
        self._owns_mover = isinstance(mover, str)
        self._mover: Mover = create(mover) if isinstance(mover, str) else mover
        self._core = ProducerCore(limits=limits)
        self._outgoing: dict[HandoffId, Outgoing] = {}
        self._links: dict[int, ConsumerLink] = {}
        self._acting = False
        self._closing = threading.Lock()
        self._closed = False
        self._broken = False
        "by a fault of the library"
        self._loop = Loop(f"pdhandoff-{name}", self, clock=clock)
        self._worker = Worker(f"pdhandoff-{name}-bytes", self._loop)
        self._resolver = Worker(f"pdhandoff-{name}-names", self._loop)
        self._regions: list[Region] = []
        with ExitStack() as undo:
            undo.callback(self._give_back)
            ring = self._mover.allocate(staging_bytes, ring_kind, ring_device)
            for piece in (ring, *memory):
                self._regions.append(register_whole(self._mover, piece))
            self._ring = ring
            "an engine's thread may still copy into it while this producer closes"
            self._gatherer = Gatherer(Ring(ring.address, ring.length), native, digest=digest, kind=ring_kind)
            self._prepare(placements, staging, guard, name)
            undo.pop_all()
        for thread in (self._loop, self._worker, self._resolver):
            thread.start()

    def _prepare(
        self,
        placements: Mapping[str, Placement],
        staging: Staging,
        guard: Guard,
        name: str,
    ) -> None:
        layout, shard, limits = self.layout, self.shard, self._limits
        self._sender = Sender(
            core=self._core,
            mover=self._mover,
            worker=self._worker,
            gatherer=self._gatherer,
            digest=self.digest,
            components=self._components,
            placements=placements,
            staging=staging,
            recorder=self._recorder,
            clock=self._clock,
            act=self._act,
        )
        identity = Identity(
            incarnation=self.incarnation,
            welcome=Welcome(
                name=name,
                mover=self._mover.name,
                description=self._mover.describe(()),
                produces=encode_layout(layout, limits),
                shard=shard.rank,
                shards=shard.of,
                liveness_ms=int(limits.liveness_s * 1000),
            ),
            digest=layout_digest(layout),
            guard=guard,
        )
        self._connections = Connections(self._loop, self, identity, limits)
        self._dialler = Dialler(
            connections=self._connections,
            resolver=self._resolver,
            allowed=self._destinations,
            owed=self._core.owes,
            lose=self._lose,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- for the engine, from any thread

    def offer(
        self,
        consumer: str | Address,
        handoff: HandoffId,
        *,
        prompt_tokens: int,
        attachments: Sequence[Attachment] = (),
        declares: Sequence[AttachmentSpec] = STANDARD_VALUES,
        queue_s: float = 0.0,
        traceparent: str = "",
    ) -> Outgoing:
        """Offer a handoff to a consumer ("host:port") and return at once; problems settle it as failed.

        Args:
            consumer: its control address.
            handoff: a new id, known to the consumer's front end.
            prompt_tokens: length of the prompt.
            attachments: values known now.
            declares: values that may come with `commit`. Default: last_token and first_token.
            queue_s: how long to wait for landing memory; 0: not at all.
            traceparent: W3C trace context.

        Raises:
            LocalError: the address is malformed, an argument is out of bounds, or this producer is closed.
        """
        address = parse_address(consumer) if isinstance(consumer, str) else consumer
        if self._closed:
            raise LocalError(ErrorCode.MISUSE, "this producer is closed")
        if not 0 <= queue_s <= _MOST_QUEUE_S or len(traceparent) > _MOST_TRACEPARENT:
            raise LocalError(
                ErrorCode.MISUSE,
                f"queue_s must lie in 0..{_MOST_QUEUE_S} and is {queue_s}, traceparent may have {_MOST_TRACEPARENT} "
                f"characters and has {len(traceparent)}: the consumer would end the link",
            )
        check_specs([*(attachment.spec for attachment in attachments), *declares], self._limits)
        outgoing = Outgoing(self, handoff, whole_number("prompt_tokens", prompt_tokens), digest=self.digest)
        outgoing.attachments, outgoing.declares = tuple(attachments), tuple(declares)
        outgoing.queue_ms, outgoing.traceparent = int(queue_s * 1000), traceparent
        if not self._loop.post(lambda: self._offer(address, outgoing)):
            self._refuse(outgoing, ErrorCode.MISUSE, "this producer is closed")
        return outgoing

    def push(self, outgoing: Outgoing, chunk: Chunk) -> None:
        """See `Outgoing.push`."""
        if not self._loop.post(lambda: self._sender.push(outgoing, chunk)) and chunk.state is not ChunkState.GATHERING:
            chunk.free_source()

    def stage(self, outgoing: Outgoing, chunk: Chunk, stream: int) -> None:
        """See `Outgoing.stage`."""
        if not self._closed:
            self._sender.stage(outgoing, chunk, stream)
        self.push(outgoing, chunk)

    def commit(self, outgoing: Outgoing, values: tuple[Attachment, ...]) -> None:
        """See `Outgoing.commit`."""
        epoch = outgoing.epoch
        self._loop.post(lambda: self._sender.commit(outgoing, values, epoch))

    def restart(self, outgoing: Outgoing) -> None:
        """See `Outgoing.restart`."""
        outgoing.epoch += 1
        self._loop.post(lambda: self._sender.restart(outgoing))

    def cancel(self, outgoing: Outgoing, reason: str) -> None:
        """See `Outgoing.cancel`."""
        self._loop.post(lambda: self._cancel(outgoing, reason))

    def page_tables(self, block_table: BlockTable, tokens: range) -> dict[str, PageTable]:
        """One page table per component, copied, checked to reach the tokens. Raises LocalError."""
        return page_tables(block_table, tokens, components=self._components, placements=self._placements)

    def statistics(self) -> ProducerStatistics:
        """Counts of the protocol."""
        return self._loop.call(self._core.statistics)

    def close(self, drain_s: float = 5.0) -> None:
        """Cancel what is under way, wait until the mover is quiet, and release everything. Idempotent.

        What a mover of the caller's own still reads after `drain_s` is logged, and its `source_free` is not set: close
        that mover before the pages are used again.
        """
        with self._closing:
            if self._closed:
                return
            self._closed = True
        self._loop.post(self._cancel_all)
        deadline = self._clock() + drain_s
        for outgoing in list(self._outgoing.values()):
            if not self._loop.ended:
                outgoing.source_free.wait(max(0.0, deadline - self._clock()))
        self._loop.post(self._say_goodbye)
        self._worker.stop()
        self._resolver.stop()
        self._give_back()
        self._free_sources(closed=self._owns_mover)

    def _give_back(self) -> None:
        """End the loop, and let go of the mover."""
        self._loop.stop()
        for region in self._regions:
            self._mover.deregister(region)
        if self._owns_mover:
            self._mover.close()

    # ---- the loop's side

    def link_opened(self, link: int, opened: LinkOpened) -> None:
        """A consumer answered: check that its layout can be served."""
        self._links[link] = meet_consumer(
            self.layout,
            self.shard,
            opened,
            replicas=self._replicas,
            mover=self._mover.name,
            policy=self._policy,
            limits=self._limits,
        )
        self._core.link_up(link, opened.incarnation)
        for outgoing in self._dialler.opened(link):
            self._open(link, outgoing)
        self._act()

    def link_message(self, link: int, message: Message, now: float) -> None:
        """A message of a consumer."""
        self._core.receive(link, message, now)
        self._act()

    def link_closed(self, link: int, closed: LinkClosed, now: float) -> None:
        """A link has ended: its handoffs fail now, its writes drain."""
        self._links.pop(link, None)
        self._core.link_lost(link, closed.code, closed.reason)
        self._dialler.ended(link, closed, now)
        self._act()

    def turned(self) -> None:
        """The engine's calls were made."""
        self._act()

    @property
    def polling(self) -> bool:
        """Whether the mover must be asked."""
        return self._sender.polling

    @property
    def hasty(self) -> bool:
        """Whether what is in flight will end at once."""
        return self._sender.hasty

    def poll(self) -> bool:
        """Ask the mover."""
        progress = self._sender.poll()
        self._act()
        return progress

    def next_deadline(self) -> float | None:
        """The earliest deadline of links and handoffs."""
        deadlines = (
            self._connections.next_deadline(),
            self._core.next_deadline(),
            *self._dialler.deadlines(),
        )
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def tick(self, now: float) -> None:
        """Let time pass."""
        self._core.tick(now)
        self._connections.tick(now)
        self._dialler.tick(now)
        self._act()

    def failed(self, error: BaseException) -> None:
        """The loop broke: nobody may wait for ever."""
        self._broken = True
        for outgoing in list(self._outgoing.values()):
            outgoing.fail(ErrorCode.INTERNAL, f"fault in the producer: {error}")
        self._free_sources(closed=False)

    # ---- inside

    @staticmethod
    def _refuse(outgoing: Outgoing, code: int, reason: str) -> None:
        """It never began, so none of its pages was read."""
        outgoing.source_free.set()
        outgoing.fail(code, reason)

    def _offer(self, address: Address, outgoing: Outgoing) -> None:
        if self._closed or self._broken:
            self._refuse(outgoing, ErrorCode.MISUSE, "this producer is closed")
            return
        if outgoing.handoff in self._outgoing:
            self._refuse(outgoing, ErrorCode.DUPLICATE, f"handoff {outgoing.handoff} is under way: mint a new id")
            return
        self._outgoing[outgoing.handoff] = outgoing
        link = self._dialler.reach(address, outgoing)
        if link is not None:
            self._open(link, outgoing)
            self._act()  # at once: the consumer answers while the first chunk is copied

    def _open(self, link: int, outgoing: Outgoing) -> None:
        """Offer over an open link."""
        consumer = self._links[link]
        try:
            outgoing.manifest = consumer.manifest(outgoing.prompt_tokens, self._limits)
            self._core.offer(
                link,
                outgoing.handoff,
                outgoing.manifest,
                self._clock(),
                attachments=outgoing.attachments,
                declares=outgoing.declares,
                queue_ms=outgoing.queue_ms,
                digest=outgoing.digest,
                traceparent=outgoing.traceparent,
            )
        except PdHandoffError as error:
            self._lose(outgoing, error.code, error.reason)
            return
        outgoing.offered = True
        self._sender.opened(outgoing, consumer)

    def _lose(self, outgoing: Outgoing, code: int, reason: str) -> None:
        """It never got as far as an offer."""
        self._outgoing.pop(outgoing.handoff, None)
        self._sender.drop(outgoing)
        self._refuse(outgoing, code, reason)

    def _cancel(self, outgoing: Outgoing, reason: str) -> None:
        if self._outgoing.get(outgoing.handoff) is not outgoing:
            return
        if outgoing.offered:
            self._core.cancel(outgoing.handoff, reason)
            return
        self._dialler.cancel(outgoing)
        self._lose(outgoing, ErrorCode.CANCELLED, reason)

    def _say_goodbye(self) -> None:
        self._act()
        self._connections.close_all("the producer is closing")

    def _cancel_all(self) -> None:
        self._dialler.close()
        for outgoing in list(self._outgoing.values()):
            self._cancel(outgoing, "the producer is closing")

    def _act(self) -> None:
        """Do what the machine asks, in order, and hand bytes to the sockets, until neither brings anything new.

        Both may end links, and so come back here: what is asked for then waits until what came before is done.
        """
        if self._acting:
            return
        self._acting = True
        try:
            self._sender.settle()
            while effects := self._core.take_effects() or self._flush():
                for effect in effects:
                    self._do(effect)
                self._sender.settle()
        finally:
            self._acting = False

    def _flush(self) -> list[ProducerEffect]:
        self._connections.flush()
        return self._core.take_effects()

    def _send(self, link: int, message: Message) -> None:
        """Send a message. One that the peer does not take for its size ends its handoff; a short one ends the link."""
        try:
            self._connections.send(link, message, self._clock())
        except LocalError as error:
            if not isinstance(message, Offer | Commit):
                self._connections.close(link, error.code, error.reason)
            else:
                self._core.cancel(HandoffId(message.handoff), error.reason, error.code)

    def _do(self, effect: ProducerEffect) -> None:
        if isinstance(effect, Send):
            self._send(effect.link, effect.message)
            return
        outgoing = self._outgoing.get(effect.handoff)
        if outgoing is None:
            return
        if isinstance(effect, Granted):
            self._sender.granted(outgoing, effect.grant)
        elif isinstance(effect, Restarted):
            self._sender.restarted(outgoing)
        elif isinstance(effect, SourceFree):
            del self._outgoing[effect.handoff]
            self._sender.drop(outgoing)
            outgoing.quiet = True
            outgoing.settle_source()
        elif effect.code == 0:
            outgoing.succeed()
        else:
            self._sender.drop(outgoing)
            outgoing.fail(effect.code, effect.reason)

    def _free_sources(self, *, closed: bool) -> None:
        """The loop has ended: say of every source that nobody reads any more that it is free. Closed: the mover is."""
        reading = set() if closed else self._sender.reading()
        for outgoing in list(self._outgoing.values()):
            if outgoing.handoff not in reading:
                outgoing.free_source()
        if reading:
            _LOG.warning(
                "the mover still reads the pages of %d handoffs: close it before they are reused", len(reading)
            )
