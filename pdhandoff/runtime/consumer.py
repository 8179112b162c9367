"""The consumer: takes handoffs into its landing memory and lends them to a decode engine."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Final, Self, final

from pdhandoff.engines.base import Memory, MemoryKind, Mover
from pdhandoff.engines.registry import create
from pdhandoff.errors import ErrorCode, LocalError, PdHandoffError
from pdhandoff.ids import HandoffId, Incarnation
from pdhandoff.layouts import Layout, Policy, layout_digest
from pdhandoff.limits import DEFAULT_LIMITS, Limits
from pdhandoff.native import Native
from pdhandoff.observe.steps import HANDOFF, Step
from pdhandoff.planner import admit_length
from pdhandoff.protocol.attachments import Expected
from pdhandoff.protocol.book import Arena, ExtentBook
from pdhandoff.protocol.consumer import ConsumerCore, ConsumerStatistics, Unannounced
from pdhandoff.protocol.consumer_table import ConsumerState
from pdhandoff.protocol.effects import (
    Arrived,
    ConsumerEffect,
    Ended,
    FenceWriter,
    Freed,
    GrantShard,
    Landed,
    ProveEnded,
    RowsVoid,
    Send,
    Verify,
)
from pdhandoff.protocol.link import LinkClosed, LinkOpened
from pdhandoff.protocol.manifest import Manifest
from pdhandoff.protocol.messages import Message, Offer, Welcome
from pdhandoff.runtime.address import Address, parse_address
from pdhandoff.runtime.address import listen as open_listener
from pdhandoff.runtime.arrival import Arrival, Ticket
from pdhandoff.runtime.connections import Connections, Guard, Identity
from pdhandoff.runtime.early import Early
from pdhandoff.runtime.granting import describe_grant
from pdhandoff.runtime.landed import Target
from pdhandoff.runtime.loop import Loop
from pdhandoff.runtime.meeting import Covers, ProducerLink, encode_layouts, meet_producer
from pdhandoff.runtime.natives import native_for
from pdhandoff.runtime.numbers import whole_number
from pdhandoff.runtime.observer import Observer
from pdhandoff.runtime.proofs import Proofs
from pdhandoff.runtime.registering import register_whole
from pdhandoff.runtime.tls import TlsConfig
from pdhandoff.runtime.verify import Verifier
from pdhandoff.runtime.worker import Worker

__all__ = ["Consumer"]

_LOG: Final = logging.getLogger("pdhandoff.consumer")
_MIN_ALIGNMENT: Final = 4096


@final
class Consumer:
    """One decode engine's end. Use as a context manager, or call `close`.

    Args:
        mover: a name in the registry, or a mover (which the caller then closes).
        layout: what the decode engine holds: rows are converted into it.
        arena_bytes: landing memory in all.
        max_seq_len: tokens of one request, prompt and output, that the decode engine can hold; longer prompts are
            refused at the offer. Default: only the landing memory is a limit.
        listen: control address; port 0 takes any, `[::]:5556` all addresses of both families.
        secret: shared with the producers; None: no authentication by secret.
        tls: certificates of the control link; None: it is not encrypted.
        allow: addresses and networks that may connect; None: any.
        unannounced: what becomes of offers that nobody announced.
        expected: attachments that this consumer knows.
        policy: what it accepts of layouts that differ.
        memory: kind of the landing memory.
    """

    def __init__(
        self,
        *,
        mover: str | Mover,
        layout: Layout,
        arena_bytes: int,
        max_seq_len: int | None = None,
        listen: str = "127.0.0.1:0",
        secret: bytes | None = None,
        tls: TlsConfig | None = None,
        allow: Sequence[str] | None = None,
        unannounced: Unannounced = Unannounced.WAIT,
        expected: Mapping[str, Expected] | None = None,
        policy: Policy | None = None,
        memory: MemoryKind = MemoryKind.CPU,
        name: str = "consumer",
        limits: Limits = DEFAULT_LIMITS,
        recorder: Observer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.layouts = (layout.validate(limits),)
        self.incarnation = Incarnation.mint()
        self._limits = limits
        self._policy = policy or Policy()
        self._unannounced = unannounced
        self._max_seq_len = max_seq_len
        self._clock = clock
        self._recorder = recorder
        self._native: Native | None = None
        self._memory = memory
        guard = Guard.of(secret, tls, allow)
        self._owns_mover = isinstance(mover, str)
        with ExitStack() as undo:  # of what a failure further down would leave behind
            self._listener = undo.enter_context(open_listener(parse_address(listen)))
            self._mover: Mover = create(mover) if isinstance(mover, str) else mover
            if self._owns_mover:
                undo.callback(self._mover.close)
            arena = self._mover.allocate(arena_bytes, memory)
            self._region = register_whole(self._mover, arena)
            undo.callback(self._mover.deregister, self._region)
            self._prepare(arena, layout, guard, expected, name)
            undo.pop_all()
        for thread in (self._loop, self._worker, self._janitor):
            thread.start()

    def _prepare(
        self,
        arena: Memory,
        layout: Layout,
        guard: Guard,
        expected: Mapping[str, Expected] | None,
        name: str,
    ) -> None:
        limits, clock = self._limits, self._clock
        alignment = max(_MIN_ALIGNMENT, self._mover.capabilities.alignment)
        self._core = ConsumerCore(
            ExtentBook([Arena(0, arena.address, arena.length)], alignment=alignment),
            limits=limits,
            unannounced=self._unannounced,
            admit=self._admit,
            cover=self._cover,
            expected=expected,
            can_fence=self._mover.capabilities.fence,
        )
        self._links: dict[int, ProducerLink] = {}
        self._layouts_of: dict[HandoffId, dict[int, ProducerLink]] = {}
        self._tickets: dict[HandoffId, Ticket] = {}
        self._covers = Covers()
        self._acting = False
        self._closing = threading.Lock()
        self._closed = False
        self._broken = False
        "by a fault of the library"
        self._gone = False
        "the landing memory is not ours any more"
        self._quiet = threading.Event()
        "closing, and no memory has a writer or reader any more"
        self._loop = Loop(f"pdhandoff-{name}", self, clock=clock)
        self._worker = Worker(f"pdhandoff-{name}-bytes", self._loop)
        self._janitor = Worker(f"pdhandoff-{name}-proofs", self._loop)
        self._early = Early(core=self._core, worker=self._worker, links=self._layouts_of, clock=clock, act=self._act)
        self._verifier = Verifier(
            core=self._core,
            worker=self._worker,
            native=lambda: self.native,
            links=self._layouts_of,
            early=self._early,
            clock=clock,
            act=self._act,
        )
        self._proofs = Proofs(
            core=self._core,
            mover=self._mover,
            worker=self._janitor,
            drain_s=limits.drain_s,
            clock=clock,
            act=self._act,
        )
        identity = Identity(
            incarnation=self.incarnation,
            welcome=Welcome(
                name=name,
                mover=self._mover.name,
                description=self._mover.describe(()),
                consumes=encode_layouts(self.layouts, limits),
                liveness_ms=int(limits.liveness_s * 1000),
            ),
            digest=layout_digest(layout),
            guard=guard,
        )
        self._connections = Connections(self._loop, self, identity, limits)
        self._connections.listen(self._listener)
        self.address = Address(*self._listener.getsockname()[:2])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- for the engine, from any thread

    @property
    def native(self) -> Native:
        """What converts and digests. Raises LocalError when nothing that does is installed."""
        if self._native is None:
            self._native = native_for(self._memory)
        return self._native

    @property
    def closed(self) -> bool:
        """Whether the landing memory is gone."""
        return self._gone

    def announce(self, handoff: HandoffId, *, deadline_s: float | None = None, start_token: int = 0) -> Ticket:
        """Wait for a handoff from now on. Returns at once; a problem shows when the ticket is waited for.

        Args:
            handoff: its id.
            deadline_s: how long until its first offer. Default: `Limits.announce_s`.
            start_token: rows before it are held here already and need not move.
        """
        ticket, start = Ticket(self, handoff), whole_number("start_token", start_token)
        if not self._loop.post(lambda: self._announce(ticket, deadline_s, start)):
            ticket.fail(ErrorCode.DRAINING, "this consumer is closed: announce to another one")
        return ticket

    def want(self, ticket: Ticket) -> None:
        """Somebody waits for this ticket: claim it once it is ready."""
        if not ticket.outcome.done():
            self._loop.post(lambda: self._want(ticket))

    def convert_early(self, ticket: Ticket, target: Target, native: Native) -> None:
        """See `Ticket.convert_early`."""
        self._loop.post(lambda: self._convert_early(ticket, target, native))

    def cancel(self, ticket: Ticket, reason: str) -> None:
        """See `Ticket.cancel`."""
        self._loop.post(lambda: self._cancel(ticket, reason))

    def release(self, handoff: HandoffId) -> None:
        """A reader is done. Never blocks."""
        self._loop.post(lambda: self._release(handoff))

    def statistics(self, timeout_s: float = 30.0) -> ConsumerStatistics:
        """How it stands. Raises TimeoutError when the consumer's thread does not answer in time."""
        return self._loop.call(self._core.statistics, timeout_s)

    def drain(self) -> None:
        """Take no new handoffs; those under way go on."""
        self._loop.post(self._core.drain)

    def close(self, drain_s: float = 1.0) -> None:
        """End what is under way and release everything. Idempotent.

        Writers are asked to stop and given `drain_s`; then the mover is closed, so that later writes land nowhere.
        """
        with self._closing:
            if self._closed:
                return
            self._closed = True
        if self._loop.post(self._cancel_all):
            self._quiet.wait(max(0.0, drain_s))
        self._proofs.close()
        self._loop.post(self._say_goodbye)
        self._worker.stop()
        self._janitor.stop()
        self._loop.stop()
        self._gone = True
        self._mover.deregister(self._region)
        if self._owns_mover:
            self._mover.close()

    # ---- the loop's side

    def link_opened(self, link: int, opened: LinkOpened) -> None:
        """A producer connected: check that its state can be used here."""
        producer = meet_producer(self.layouts, opened, mover=self._mover.name, policy=self._policy, limits=self._limits)
        self._proofs.meet(opened.incarnation, opened.welcome.description)
        self._links[link] = producer
        self._core.link_up(link, opened.incarnation)
        self._act()

    def link_message(self, link: int, message: Message, now: float) -> None:
        """A message of a producer."""
        self._core.receive(link, message, now)
        self._act()

    def link_closed(self, link: int, closed: LinkClosed, now: float) -> None:
        """A link has ended: its handoffs fail now, its writers are asked about."""
        self._links.pop(link, None)
        self._core.link_lost(link, closed.reason, now, closed.code)
        self._act()
        self._proofs.forget(self._linked())

    def turned(self) -> None:
        """The engine's calls were made."""
        self._act()

    @property
    def polling(self) -> bool:
        """The consumer polls nothing: others write."""
        return False

    @property
    def hasty(self) -> bool:
        """See `polling`."""
        return False

    def poll(self) -> bool:
        """Never called."""
        return False

    def next_deadline(self) -> float | None:
        """The earliest deadline of links and handoffs."""
        deadlines = (self._connections.next_deadline(), self._core.next_deadline())
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def tick(self, now: float) -> None:
        """Let time pass."""
        self._core.tick(now)
        self._connections.tick(now)
        self._act()

    def failed(self, error: BaseException) -> None:
        """The loop broke: nobody may wait for ever."""
        self._broken = True
        self._quiet.set()
        for ticket in list(self._tickets.values()):  # behind whatever still writes to their caches
            fail = partial(ticket.fail, ErrorCode.INTERNAL, f"fault in the consumer: {error}")
            self._worker.run(fail, lambda _: None)

    # ---- inside

    def _admit(self, link: int, offer: Offer) -> None:
        """The last of the checks that an offer has to pass: from here on the shard belongs to its handoff."""
        if self._max_seq_len is not None:
            admit_length(offer.manifest.prompt_tokens, self._max_seq_len)
        self._links[link].check_offer(offer)
        self._layouts_of.setdefault(HandoffId(offer.handoff), {})[offer.manifest.shard] = self._links[link]

    def _cover(self, handoff: HandoffId, manifests: Sequence[Manifest]) -> None:
        """All shards have offered: what they bring together must be what is needed, exactly once."""
        self._covers.check(list(self._layouts_of[handoff].values()), manifests)

    def _announce(self, ticket: Ticket, deadline_s: float | None, start_token: int) -> None:
        if self._closed or self._broken:
            ticket.fail(ErrorCode.DRAINING, "this consumer is closed: announce to another one")
            return
        if ticket.handoff in self._tickets:
            ticket.fail(ErrorCode.DUPLICATE, f"handoff {ticket.handoff} was announced before: mint a new id")
            return
        try:
            self._core.announce(ticket.handoff, self._clock(), wait_s=deadline_s, start_token=start_token)
        except LocalError as error:
            if self._unannounced is not Unannounced.ACCEPT or self._core.state(ticket.handoff) is None:
                ticket.fail(error.code, error.reason)
                return
        self._tickets[ticket.handoff] = ticket

    def _want(self, ticket: Ticket) -> None:
        if self._tickets.get(ticket.handoff) is ticket:
            ticket.give(lambda: self._claim(ticket.handoff))

    def _convert_early(self, ticket: Ticket, target: Target, native: Native) -> None:
        if self._tickets.get(ticket.handoff) is ticket:
            self._early.begin(ticket.handoff, target, native)

    def _claim(self, handoff: HandoffId) -> Arrival | None:
        """Claim a handoff, if it is ready."""
        if self._core.state(handoff) is not ConsumerState.READY or self._early.busy(handoff):
            return None
        claim = self._core.claim(handoff)
        early = self._early.done(handoff)
        self._early.forget(handoff)
        links = self._layouts_of[handoff]
        sources = {
            shard: {component.name: component for component in link.layout.components} for shard, link in links.items()
        }
        return Arrival(self, claim, sources, {shard: link.bridges for shard, link in links.items()}, early)

    def _cancel(self, ticket: Ticket, reason: str) -> None:
        if self._tickets.get(ticket.handoff) is not ticket:
            ticket.fail(ErrorCode.CANCELLED, reason)
        elif not self._core.cancel(ticket.handoff, reason, self._clock()):
            ticket.take_back(reason)

    def _say_goodbye(self) -> None:
        self._act()
        self._connections.close_all("the consumer is closing")

    def _cancel_all(self) -> None:
        """End everything, what nobody announced too; arrivals that nobody took are given back."""
        self._core.drain()
        for ticket in list(self._tickets.values()):
            self._cancel(ticket, "the consumer is closing")
        for handoff in list(self._layouts_of):
            self._core.cancel(handoff, "the consumer is closing", self._clock())

    def _release(self, handoff: HandoffId) -> None:
        self._core.release(handoff, self._clock())
        self._forget(handoff)

    def _linked(self) -> set[Incarnation]:
        return {producer.incarnation for producer in self._links.values()}

    def _forget(self, handoff: HandoffId) -> None:
        self._tickets.pop(handoff, None)
        self._layouts_of.pop(handoff, None)
        self._early.forget(handoff)

    def _act(self) -> None:
        """Do what the machine asks, in order, and hand bytes to the sockets, until neither brings anything new.

        Both may end links, and so come back here: what is asked for then waits until what came before is done.
        """
        if self._acting:
            return
        self._acting = True
        try:
            while effects := self._core.take_effects() or self._flush():
                for effect in effects:
                    self._do(effect)
        finally:
            self._acting = False
        if self._closed and not self._core.book.records:
            self._quiet.set()

    def _flush(self) -> list[ConsumerEffect]:
        self._connections.flush()
        return self._core.take_effects()

    def _do(self, effect: ConsumerEffect) -> None:
        if isinstance(effect, Send):
            self._send(effect.link, effect.message)
        elif isinstance(effect, GrantShard):
            self._grant(effect)
        elif isinstance(effect, Verify):
            self._verifier.verify(effect)
        elif isinstance(effect, Arrived):
            self._arrived(effect)
        elif isinstance(effect, Ended):
            self._ended(effect)
        elif isinstance(effect, ProveEnded):
            self._proofs.prove(effect.incarnation)
        elif isinstance(effect, FenceWriter):
            self._proofs.fence(effect)
        elif isinstance(effect, Landed | RowsVoid):
            self._moved(effect)
        elif isinstance(effect, Freed):
            self._proofs.forget(self._linked())

    def _moved(self, effect: Landed | RowsVoid) -> None:
        if isinstance(effect, RowsVoid):
            self._early.void(effect.handoff, effect.shard)
        else:
            self._instant(Step.LANDED, effect.handoff)
            self._early.landed(effect.handoff)

    def _send(self, link: int, message: Message) -> None:
        """Send a short message. A peer that does not take even that cannot be worked with."""
        try:
            self._connections.send(link, message, self._clock())
        except LocalError as error:
            self._connections.close(link, error.code, error.reason)

    def _grant(self, effect: GrantShard) -> None:
        try:
            self._connections.send(effect.link, describe_grant(self._mover, effect), self._clock())
        except PdHandoffError as error:
            self._core.grant_failed(effect.handoff, effect.generation, error.reason, self._clock())

    def _arrived(self, effect: Arrived) -> None:
        self._instant(Step.READY, effect.handoff)
        self._early.when_idle(effect.handoff, lambda: self._give(effect.handoff))

    def _give(self, handoff: HandoffId) -> None:
        ticket = self._tickets.get(handoff)
        if ticket is not None:
            ticket.give(lambda: self._claim(handoff))

    def _ended(self, effect: Ended) -> None:
        """Its caches are the engine's again when it hears of this: no row may be on its way into them."""
        self._early.when_idle(effect.handoff, lambda: self._tell_end(effect))

    def _tell_end(self, effect: Ended) -> None:
        ticket = self._tickets.get(effect.handoff)
        self._forget(effect.handoff)
        if ticket is not None:
            ticket.fail(effect.code, effect.reason, effect.shard)

    def _instant(self, step: Step, handoff: HandoffId) -> None:
        if self._recorder is not None:
            self._recorder.instant(step, step.value, **{HANDOFF: str(handoff)[:8]})
