"""Moves the chunks of all outgoing handoffs through their states, on the producer's loop; copies run on its worker."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Mapping
from typing import Final, final

from pdhandoff.engines.base import Mover, Peer, Transfer, TransferState, TransferStatus, Writes
from pdhandoff.errors import ErrorCode, LocalError, MoverError, PdHandoffError
from pdhandoff.layouts import Component
from pdhandoff.native import Native
from pdhandoff.native.memmove import copy_plan
from pdhandoff.observe.steps import HANDOFF, Step
from pdhandoff.planner import Placement, landing_placement
from pdhandoff.protocol.messages import Attachment, Grant
from pdhandoff.protocol.producer import ProducerCore
from pdhandoff.protocol.spans import IntervalSet
from pdhandoff.runtime.chunks import Chunk, ChunkState, Routes, chunk_spans
from pdhandoff.runtime.meeting import ConsumerLink
from pdhandoff.runtime.observer import Observer
from pdhandoff.runtime.outgoing import Outgoing
from pdhandoff.runtime.ring import Ring, Stretch
from pdhandoff.runtime.worker import Worker

__all__ = ["Sender", "Staging"]

_INLINE_BYTES: Final = 256 << 10
"work on fewer bytes than this is done on the loop: a thread switch costs more"
_MANY_CHUNKS: Final = 32
"of one handoff: those that are done are forgotten, so that each step looks at few"


@final
class Staging(enum.Enum):
    """How rows leave the source pages."""

    STAGED = "staged"  # copied into the ring at once; pages are free when that is done
    DIRECT = "direct"  # written from the pages; they are held until the mover is done
    AUTO = "auto"  # staged, and direct while the ring is full


class _Way:
    """What the sender knows of one outgoing handoff once its link is open."""

    __slots__ = (
        "advancing",
        "again",
        "generation",
        "granted",
        "landing",
        "outgoing",
        "peers",
        "pushed",
        "routes",
        "row_bytes",
        "start",
    )

    def __init__(self, outgoing: Outgoing, routes: Routes) -> None:
        self.outgoing = outgoing
        self.routes = routes
        self.generation = 0
        self.granted = False
        self.advancing = False
        self.again = False
        "something has moved on while its chunks were looked at: look again"
        self.start = 0
        self.row_bytes = sum(entry.row_bytes * len(entry.layers) for entry in routes.entries)
        "bytes of one token of this shard"
        self.peers: dict[int, Peer] = {}
        self.landing: dict[int, Mapping[int, Placement]] = {}
        self.pushed = IntervalSet()


class _Write:
    """A chunk's transfers in flight."""

    __slots__ = ("chunk", "failed", "number", "outgoing", "started_ns", "transfers")

    def __init__(self, number: int, outgoing: Outgoing, chunk: Chunk, started_ns: int) -> None:
        self.number = number
        self.outgoing = outgoing
        self.chunk = chunk
        self.started_ns = started_ns
        self.transfers: list[Transfer] = []
        self.failed = False


@final
class Sender:
    """See the module's text."""

    def __init__(
        self,
        *,
        core: ProducerCore,
        mover: Mover,
        worker: Worker,
        native: Native | None,
        ring: Ring,
        components: Mapping[str, Component],
        placements: Mapping[str, Placement],
        staging: Staging,
        recorder: Observer | None,
        clock: Callable[[], float],
        act: Callable[[], None],
    ) -> None:
        self._core = core
        self._mover = mover
        self._worker = worker
        self._native = native
        self._ring = ring
        self._components = components
        self._placements = placements
        self._staging = staging
        self._recorder = recorder
        self._clock = clock
        self._act = act
        self._ways: dict[bytes, _Way] = {}
        self._routes: dict[object, Routes] = {}
        self._writes: list[_Write] = []
        self._unready: set[bytes] = set()
        "handoffs with a chunk whose event has not happened"
        self._parked: dict[bytes, None] = {}
        "handoffs with a chunk that waits for room in the ring, oldest first"
        self._numbers = 0
        self._ready: deque[bytes] = deque()
        "handoffs that waited for what has become free"

    @property
    def polling(self) -> bool:
        """Whether the mover, or a device's events, must be asked."""
        return bool(self._writes or self._unready)

    def reading(self) -> set[bytes]:
        """Handoffs whose pages, or staged rows, the mover or the worker may still read."""
        busy = {ChunkState.GATHERING, ChunkState.DIGESTING}
        working = {
            each for each, way in self._ways.items() if any(chunk.state in busy for chunk in way.outgoing.chunks)
        }
        return working | {write.outgoing.handoff for write in self._writes}

    # ---- inputs

    def opened(self, outgoing: Outgoing, link: ConsumerLink) -> None:
        """The offer went out over this link: routes are known."""
        entries = link.template.entries
        routes = self._routes.get(entries)
        if routes is None:
            routes = self._routes[entries] = Routes(self._components, self._placements, entries)
        self._ways[outgoing.handoff] = _Way(outgoing, routes)
        self._instant(Step.OFFER, outgoing)
        for chunk in outgoing.chunks:
            self._count(outgoing, chunk)
        self.advance(outgoing)

    def push(self, outgoing: Outgoing, chunk: Chunk) -> None:
        """A chunk from the engine."""
        if outgoing.settled.done() or chunk.epoch != outgoing.epoch:
            self._drop_chunk(chunk)
            return
        outgoing.chunks.append(chunk)
        if self._way(outgoing) is not None:
            self._count(outgoing, chunk)
            self.advance(outgoing)

    def commit(self, outgoing: Outgoing, values: tuple[Attachment, ...]) -> None:
        """The engine has pushed everything."""
        outgoing.commit_with = values
        self.advance(outgoing)

    def restart(self, outgoing: Outgoing) -> None:
        """The engine lost its rows: drop what is not in flight and tell the consumer when nothing is."""
        way = self._way(outgoing)
        for chunk in outgoing.chunks:
            if chunk.state is not ChunkState.WRITING:
                self._drop_chunk(chunk)
        outgoing.digest_sum = 0
        outgoing.commit_with = None
        if way is not None:
            way.pushed = IntervalSet()
            if way.granted:
                self._core.restart(outgoing.handoff)

    def granted(self, outgoing: Outgoing, grant: Grant) -> None:
        """Landing extents are known."""
        way = self._ways.get(outgoing.handoff)
        if way is None or outgoing.manifest is None:
            return
        manifest = outgoing.manifest = outgoing.manifest.starting_at(grant.start_token)
        way.generation, way.start = grant.generation, grant.start_token
        try:
            for rank in grant.ranks:
                way.peers[rank.destination] = self._mover.connect(rank.description)
                way.landing[rank.destination] = landing_placement(manifest, rank.destination, rank.extents)
            missing = set(manifest.destinations) - set(way.landing) if manifest.tokens else set()
            if missing:
                raise LocalError(
                    ErrorCode.MANIFEST_MISMATCH, f"the grant has no memory on consumer ranks {sorted(missing)}"
                )
        except PdHandoffError as error:
            self._core.cancel(outgoing.handoff, error.reason, error.code)
            return
        way.granted = True
        self._parked.pop(outgoing.handoff, None)
        self._instant(Step.GRANT, outgoing)
        self.advance(outgoing)

    def restarted(self, outgoing: Outgoing) -> None:
        """The consumer was told: rows may be written anew."""
        self.advance(outgoing)

    def drop(self, outgoing: Outgoing) -> None:
        """The handoff has its outcome: nothing of it is submitted any more."""
        self._ways.pop(outgoing.handoff, None)
        self._unready.discard(outgoing.handoff)
        self._parked.pop(outgoing.handoff, None)
        for chunk in outgoing.chunks:
            if chunk.state is not ChunkState.WRITING:
                self._drop_chunk(chunk)

    def settle(self) -> None:
        """Let those go on that waited for room in the ring."""
        while self._ready:
            way = self._ways.get(self._ready.popleft())
            if way is not None:
                self.advance(way.outgoing)

    def poll(self) -> bool:
        """Ask the mover about everything in flight, and devices about their events. True: something moved on."""
        writes, self._writes = self._writes, []
        still = [write for write in writes if not self._poll_write(write)]
        self._writes = still + self._writes
        progress = len(still) < len(writes)
        for handoff in list(self._unready):
            way = self._ways.get(handoff)
            self._unready.discard(handoff)
            if way is not None:
                self.advance(way.outgoing)
                progress |= handoff not in self._unready
        return progress

    # ---- moving on

    def advance(self, outgoing: Outgoing) -> None:
        """Move every chunk as far as it goes now; commit when all have landed.

        A chunk that has moved on asks for this too; then it is only noted, so that many chunks do not nest.
        """
        way = self._way(outgoing)
        if way is None:
            return
        way.again = True
        if way.advancing:
            return
        way.advancing = True
        try:
            while way.again:
                way.again = False
                for chunk in outgoing.chunks:
                    self._advance_chunk(way, chunk)
            if len(outgoing.chunks) > _MANY_CHUNKS:
                outgoing.chunks = [chunk for chunk in outgoing.chunks if not chunk.done]
            if outgoing.commit_with is not None and way.granted and all(chunk.over for chunk in outgoing.chunks):
                self._say_commit(outgoing, outgoing.commit_with)
        except PdHandoffError as error:
            self._core.cancel(outgoing.handoff, error.reason, error.code)
        finally:
            way.advancing = False

    def _way(self, outgoing: Outgoing) -> _Way | None:
        """Its way, once its link is open. A second offer with an id that is under way has none."""
        way = self._ways.get(outgoing.handoff)
        return way if way is not None and way.outgoing is outgoing else None

    def _say_commit(self, outgoing: Outgoing, values: tuple[Attachment, ...]) -> None:
        digest = (outgoing.digest_sum % (1 << 64)).to_bytes(8, "little") if outgoing.digest else b""
        if self._core.commit(outgoing.handoff, self._clock(), payload_digest=digest, attachments=values):
            outgoing.commit_with = None
            self._instant(Step.COMMIT, outgoing)

    def _advance_chunk(self, way: _Way, chunk: Chunk) -> None:
        if chunk.state is ChunkState.WAITING and self._may_start(way, chunk):
            self._start(way, chunk)
        if chunk.state is ChunkState.STAGED and way.granted:
            self._move(way, chunk)

    def _may_start(self, way: _Way, chunk: Chunk) -> bool:
        try:
            ready = chunk.after is None or chunk.after.query()
        except Exception as error:  # the engine's own code: whatever it raises ends this handoff only
            raise LocalError(ErrorCode.SOURCE_LOST, f"the event of {chunk.tokens} cannot be asked: {error}") from error
        if not ready:
            self._unready.add(way.outgoing.handoff)
        return ready

    def _start(self, way: _Way, chunk: Chunk) -> None:
        """Take the chunk into the ring, or leave it in its pages. Granted handoffs get room in the order they asked."""
        if self._staging is Staging.DIRECT or not chunk.tokens:
            chunk.state = ChunkState.STAGED
            return
        need = way.routes.ring_bytes(chunk.tokens)
        behind = way.granted and any(self._ways[other].granted for other in self._parked)
        stretch = None if behind else self._take(way, need)
        if stretch is None:
            if self._staging is Staging.AUTO and way.granted:
                chunk.state = ChunkState.STAGED
            else:
                self._parked[way.outgoing.handoff] = None
            return
        chunk.stretch = stretch
        chunk.state = ChunkState.GATHERING
        started = self._nanoseconds()
        address = stretch.address
        self._work(
            way,
            chunk,
            lambda: copy_plan(way.routes.gather(chunk, address)),
            lambda _: self._gathered(way, chunk, started),
        )

    def _take(self, way: _Way, need: int) -> Stretch | None:
        try:
            return self._ring.take(need, granted=way.granted)
        except LocalError:
            if self._staging is Staging.AUTO:
                return None
            raise

    def _gathered(self, way: _Way, chunk: Chunk, started_ns: int) -> None:
        chunk.source_free.set()
        self._span(Step.GATHER, way.outgoing, chunk, started_ns)
        if chunk.state is ChunkState.GATHERING:
            chunk.state = ChunkState.STAGED
            self.advance(way.outgoing)
        else:
            self._free_stretch(chunk)

    def _move(self, way: _Way, chunk: Chunk) -> None:
        """Digest the rows that move, then write them."""
        tokens = range(max(chunk.tokens.start, way.start), chunk.tokens.stop)
        if not tokens or not way.routes.entries:
            self._landed(chunk)
            return
        if not self._core.may_write(way.outgoing.handoff, way.generation):
            return
        native = self._native
        if native is None:
            self._submit(way, chunk, tokens)
            return
        chunk.state = ChunkState.DIGESTING
        self._work(
            way,
            chunk,
            lambda: way.routes.digest(native, chunk, tokens),
            lambda digest: self._digested(way, chunk, tokens, digest),
        )

    def _digested(self, way: _Way, chunk: Chunk, tokens: range, digest: int) -> None:
        if chunk.state is not ChunkState.DIGESTING:
            self._free_stretch(chunk)
            chunk.source_free.set()
        elif self._core.may_write(way.outgoing.handoff, way.generation):
            way.outgoing.digest_sum += digest
            self._submit(way, chunk, tokens)
        else:
            chunk.state = ChunkState.STAGED  # restarting: asked again when the consumer has been told

    def _submit(self, way: _Way, chunk: Chunk, tokens: range) -> None:
        manifest = way.outgoing.manifest
        if manifest is None:
            return
        chunk.state = ChunkState.WRITING
        self._numbers += 1
        write = _Write(self._numbers, way.outgoing, chunk, self._nanoseconds())
        most = self._mover.capabilities.max_writes
        self._core.write_started(way.outgoing.handoff, write.number, len(tokens) * way.row_bytes, self._clock())
        try:
            for destination, landing in way.landing.items():
                plan = way.routes.write(chunk, tokens, manifest, landing, destination)
                for columns in plan.writes(most):
                    write.transfers.append(self._mover.submit(way.peers[destination], Writes(*columns)))
        except PdHandoffError as error:
            write.failed = True
            self._core.write_failed(way.outgoing.handoff, write.number, error.reason, quiet=not write.transfers)
            if not write.transfers:
                self._landed(chunk)
                return
        if not self._poll_write(write):
            self._writes.append(write)

    def _poll_write(self, write: _Write) -> bool:
        """Whether the write is over, as the mover says. One that failed stays until it is quiet."""
        statuses = [self._status(transfer) for transfer in write.transfers]
        if any(status.state is TransferState.FAILED for status in statuses) and not write.failed:
            write.failed = True
            reason = next(status.reason for status in statuses if status.state is TransferState.FAILED)
            quiet = all(status.state is not TransferState.PENDING and status.quiet for status in statuses)
            self._core.write_failed(write.outgoing.handoff, write.number, reason, quiet=quiet)
        if any(status.state is TransferState.PENDING or not status.quiet for status in statuses):
            return False
        for transfer in write.transfers:
            self._mover.release(transfer)
        self._span(Step.WRITE, write.outgoing, write.chunk, write.started_ns)
        way = self._ways.get(write.outgoing.handoff)
        start = 0 if way is None else way.start
        tokens = range(max(write.chunk.tokens.start, start), write.chunk.tokens.stop)
        entries = () if write.outgoing.manifest is None else write.outgoing.manifest.entries
        if write.failed:
            self._core.write_quiet(write.outgoing.handoff, write.number)
        else:
            self._core.write_done(write.outgoing.handoff, write.number, chunk_spans(entries, tokens), self._clock())
        self._landed(write.chunk)
        self.advance(write.outgoing)
        return True

    # ---- small things

    def _work(self, way: _Way, chunk: Chunk, job: Callable[[], int], done: Callable[[int], None]) -> None:
        """Do a job on a chunk on the worker, or here when it is small; an error of it ends the handoff."""

        def finish(result: int | PdHandoffError) -> None:
            if isinstance(result, PdHandoffError):
                chunk.state = ChunkState.DROPPED
                chunk.source_free.set()
                self._free_stretch(chunk)
                self._core.cancel(way.outgoing.handoff, result.reason, result.code)
            else:
                done(result)

        def finish_later(result: int | PdHandoffError) -> None:
            finish(result)
            self._act()

        if way.routes.ring_bytes(chunk.tokens) > _INLINE_BYTES:
            self._worker.run(job, finish_later)
            return
        try:
            result: int | PdHandoffError = job()
        except PdHandoffError as error:
            result = error
        finish(result)

    def _count(self, outgoing: Outgoing, chunk: Chunk) -> None:
        """Rows pushed twice would be counted twice by the digest: refuse them."""
        way = self._ways[outgoing.handoff]
        start, stop = chunk.tokens.start, chunk.tokens.stop
        if chunk.tokens and way.pushed.first_gap(start, stop) != (start, stop):
            self._core.cancel(
                outgoing.handoff, f"tokens {chunk.tokens} were pushed before: push each row once", ErrorCode.MISUSE
            )
        way.pushed.add(start, stop)

    def _landed(self, chunk: Chunk) -> None:
        chunk.state = ChunkState.LANDED
        chunk.source_free.set()
        self._free_stretch(chunk)

    def _drop_chunk(self, chunk: Chunk) -> None:
        """Forget a chunk that is not in flight. One in the hands of the worker is freed when that is done."""
        if chunk.over:
            return
        busy = chunk.state in {ChunkState.GATHERING, ChunkState.DIGESTING}
        chunk.state = ChunkState.DROPPED
        if not busy:
            chunk.source_free.set()
            self._free_stretch(chunk)

    def _free_stretch(self, chunk: Chunk) -> None:
        if chunk.stretch is None:
            return
        self._ring.free(chunk.stretch)
        chunk.stretch = None
        self._ready.extend(self._parked)
        self._parked.clear()

    def _status(self, transfer: Transfer) -> TransferStatus:
        """What the mover says. One that cannot say is not believed to be quiet."""
        try:
            return self._mover.poll(transfer)
        except MoverError as error:
            return TransferStatus(state=TransferState.FAILED, reason=error.reason, quiet=False)

    def _nanoseconds(self) -> int:
        return int(self._clock() * 1e9)

    def _instant(self, step: Step, outgoing: Outgoing) -> None:
        if self._recorder is not None:
            self._recorder.instant(step, step.value, **{HANDOFF: str(outgoing.handoff)[:8]})

    def _span(self, step: Step, outgoing: Outgoing, chunk: Chunk, started_ns: int) -> None:
        if self._recorder is not None:
            label = str(outgoing.handoff)[:8]
            args = {HANDOFF: label, "tokens": f"{chunk.tokens.start}..{chunk.tokens.stop}"}
            self._recorder.add(step, step.value, started_ns, self._nanoseconds(), **args)
