"""The node without HTTP: a consumer, an engine and the line between them, started and ended together."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from typing import Final, final

import msgspec

from pdhandoff.engines.base import MemoryKind, Mover
from pdhandoff.engines.registry import create
from pdhandoff.errors import LocalError, PdHandoffError
from pdhandoff.layouts import layout_digest
from pdhandoff.limits import DEFAULT_LIMITS
from pdhandoff.protocol.attachments import Expected
from pdhandoff.protocol.consumer import ConsumerStatistics, Unannounced
from pdhandoff.runtime.consumer import Consumer
from pdhandoff.runtime.tls import TlsConfig
from pdhandoff_tilert.engine import DecodeEngine
from pdhandoff_tilert.node.decoder import Decoder
from pdhandoff_tilert.node.job import Ending, Job, Sink
from pdhandoff_tilert.node.landing import Landing
from pdhandoff_tilert.node.line import Line
from pdhandoff_tilert.node.metrics import Gauges, Metrics
from pdhandoff_tilert.node.refusals import Refusal, bad_request
from pdhandoff_tilert.node.schema import Wanted, read_request

__all__ = ["Failure", "NodeSettings", "Service"]

_LOG: Final = logging.getLogger("pdhandoff.node")
_EXPECTED: Final = {"first_token": Expected(dtype="i64"), "last_token": Expected(dtype="i64")}
_ANSWER_S: Final = 1.0
"a consumer that does not answer within this is not well"
_FAILURES: Final = 32
_BODY_BASE: Final = 1 << 20
_BODY_PER_TOKEN: Final = 48
"bytes of JSON: a token id, and its place in the text"


@final
class NodeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a node is set up."""

    mover: str = "loopback"
    mover_options: Mapping[str, object] = {}
    arena_bytes: int = 1 << 30
    "landing memory in all"
    memory: MemoryKind = MemoryKind.CPU
    "kind of the landing memory"
    listen: str = "127.0.0.1:0"
    "control address"
    advertise: str | None = None
    "control address as producers reach it; None: the one that is listened on"
    secret: bytes | None = None
    tls: TlsConfig | None = None
    allow: tuple[str, ...] | None = None
    "addresses and networks of producers; None: any"
    unannounced: Unannounced = Unannounced.ACCEPT
    max_queue: int = 32
    "requests that may wait"
    parking: int = 1
    "requests that may be parked at once"
    announce_s: float = 300.0
    "how long a request waits for the first offer of its handoff, unless it says how long"
    ready_s: float = 60.0
    "how long a complete handoff waits for its request"
    request_s: float = 1800.0
    "from admission to the last token"
    stall_s: float = 120.0
    "an engine that has been in one call for longer is not well"


@final
class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """One of the last failures, for the status page."""

    request_id: str
    status: int
    code: str
    reason: str
    at_s: float
    "monotonic"


@final
class Service:
    """See the module. `start` takes as long as the engine's weights take; `close` is bounded.

    Args:
        create_engine: makes the engine; called on the engine thread.
        settings: see there.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        create_engine: Callable[[], DecodeEngine],
        settings: NodeSettings,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self.clock = clock
        self.started_s = clock()
        self.metrics = Metrics()
        self.line = Line(most=settings.max_queue, parking=settings.parking, clock=clock)
        self.failures: deque[Failure] = deque(maxlen=_FAILURES)
        self.draining = threading.Event()
        self._decoder = Decoder(create=create_engine, line=self.line, metrics=self.metrics, clock=clock)
        self._closing = threading.Lock()
        self._closed = False
        with ExitStack() as undo:
            self._mover: Mover = create(settings.mover, **settings.mover_options)
            undo.callback(self._mover.close)
            undo.callback(self._give_up_engine)
            self.engine = self._decoder.start()
            self.consumer = self._make_consumer()
            undo.pop_all()
        self._landing = Landing(
            consumer=self.consumer,
            engine=self.engine,
            line=self.line,
            metrics=self.metrics,
            announce_s=settings.announce_s,
            clock=clock,
        )
        self.control = settings.advertise or str(self.consumer.address)
        self.digest = layout_digest(self.engine.layout).hex()
        self.body_limit = _BODY_BASE + _BODY_PER_TOKEN * self.engine.max_seq_len
        self.metrics.registry.register(
            Gauges(line=self.line, healthy=lambda: not self.problem(), landing=self.landing_statistics)
        )

    def _give_up_engine(self) -> None:
        """What went wrong matters more than an engine that is still loading its weights."""
        with suppress(LocalError):
            self._decoder.stop(1.0)

    def _make_consumer(self) -> Consumer:
        settings = self.settings
        return Consumer(
            mover=self._mover,
            layout=self.engine.layout,
            arena_bytes=settings.arena_bytes,
            max_seq_len=self.engine.max_seq_len,
            listen=settings.listen,
            secret=settings.secret,
            tls=settings.tls,
            allow=settings.allow,
            unannounced=settings.unannounced,
            expected=_EXPECTED,
            memory=settings.memory,
            name="node",
            limits=msgspec.structs.replace(DEFAULT_LIMITS, ready_s=settings.ready_s),
            clock=self.clock,
        )

    # ---- requests

    def read(self, data: bytes, header_id: str | None) -> Wanted:
        """Read a body, and ask the engine whether it can. Raises Refusal."""
        wanted = read_request(
            data,
            model=self.engine.model,
            max_seq_len=self.engine.max_seq_len,
            deadline_s=self.settings.request_s,
            header_id=header_id,
        )
        problem = self.engine.unsupported(wanted.decode)
        if problem:
            raise bad_request("sampling_params", f"not supported by this engine: {problem}")
        return wanted

    def submit(self, wanted: Wanted, sink: Sink) -> Job:
        """Admit a request and announce its handoff. Never blocks. Raises Refusal.

        Args:
            wanted: what `read` returned.
            sink: takes its events from any thread, without blocking.
        """
        job = self.line.admit(wanted, sink)
        try:
            self._landing.land(job)
        except RuntimeError as error:  # the process may have no more threads
            refusal = Refusal(503, f"no thread can be started: {error}", code="NO_THREADS", retryable=True)
            self.line.end(job, Ending(refusal=refusal))
            self.line.leave(job)
            raise refusal from error
        return job

    def end(self, job: Job, ending: Ending) -> bool:
        """End a request early. False: it had ended."""
        return self.line.end(job, ending)

    def abort(self, request_ids: frozenset[str]) -> int:
        """End every request that has one of these ids, as `abort`. Returns how many there were."""
        found = [job for job in self.line.jobs() if job.wanted.request_id in request_ids]
        return sum(self.end(job, Ending(finish_reason="abort")) for job in found)

    def note(self, job: Job, ending: Ending) -> None:
        """Count how a request ended, and keep a failure for the status page."""
        prompt = len(job.decode.prompt)
        self.metrics.ended(ending, prompt_tokens=prompt, output_tokens=job.output_tokens)
        took = self.clock() - job.admitted_s
        refusal = ending.refusal
        _LOG.info(
            "request %s: %s after %.3f s, %d + %d tokens, handoff %s%s",
            job.wanted.request_id,
            ending.finish_reason or "failed",
            took,
            prompt,
            job.output_tokens,
            job.wanted.handoff,
            "" if refusal is None else f": {refusal.status} {refusal.code}: {refusal.reason}",
        )
        if refusal is not None:
            self.failures.append(
                Failure(
                    request_id=job.wanted.request_id,
                    status=refusal.status,
                    code=refusal.code,
                    reason=refusal.reason,
                    at_s=self.clock(),
                )
            )

    # ---- health

    def problem(self) -> str:
        """Why this node takes no requests; empty: it does."""
        if self._decoder.broken:
            return self._decoder.broken
        if not self._decoder.alive:
            return "the engine thread has ended"
        busy = self._decoder.busy_s()
        if busy > self.settings.stall_s:
            return f"the engine has been in one call for {busy:.0f} s"
        if self.consumer.closed or self.landing_statistics() is None:
            return "the consumer does not answer: nothing lands here"
        return "draining" if self.draining.is_set() else ""

    def landing_statistics(self) -> ConsumerStatistics | None:
        """The consumer's; None when its loop does not answer in time."""
        try:
            return self.consumer.statistics(_ANSWER_S)
        except (PdHandoffError, TimeoutError):
            return None

    # ---- the end

    def drain(self) -> None:
        """Take no new requests and no new handoffs; what is under way goes on."""
        if not self.draining.is_set():
            self.draining.set()
            _LOG.info("draining: %d requests under way", len(self.line.jobs()))
            self.line.refuse_all(
                Refusal(
                    503,
                    "this decode node is draining: send requests to another one",
                    code="DRAINING",
                    retryable=True,
                    retry_after_s=1.0,
                )
            )
            self.consumer.drain()

    def close(self, engine_s: float = 5.0) -> None:
        """End everything: requests, handoffs, engine, memory. Idempotent.

        Raises:
            LocalError: the engine did not come back from a call within `engine_s`; all else has ended.
        """
        with self._closing:
            if self._closed:
                return
            self._closed = True
        refusal = Refusal(503, "this decode node has been stopped", code="DRAINING", retryable=True)
        self.line.refuse_all(refusal)
        self.line.end_all(Ending(refusal=refusal))
        stuck: LocalError | None = None
        try:
            self._decoder.stop(engine_s)
        except LocalError as error:
            stuck = error
        self.line.empty(1.0)
        self.line.abandon()
        self.consumer.close()
        self._mover.close()
        if stuck is not None:
            raise stuck
