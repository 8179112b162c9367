"""Moves the chunks of all outgoing handoffs through their states, on the producer's loop; copies run on its worker."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Mapping
from typing import Final, final

from pdhandoff.engines.base import Mover
from pdhandoff.errors import ErrorCode, LocalError, PdHandoffError
from pdhandoff.layouts import Component
from pdhandoff.observe.steps import HANDOFF, Step
from pdhandoff.planner import Placement, landing_runs
from pdhandoff.protocol.messages import Attachment, Grant
from pdhandoff.protocol.producer import ProducerCore
from pdhandoff.protocol.spans import IntervalSet
from pdhandoff.runtime.chunks import Chunk, ChunkState
from pdhandoff.runtime.gathering import Gatherer
from pdhandoff.runtime.meeting import ConsumerLink
from pdhandoff.runtime.observer import Observer
from pdhandoff.runtime.outgoing import Outgoing
from pdhandoff.runtime.ring import Stretch
from pdhandoff.runtime.routes import Routes
from pdhandoff.runtime.ways import Way
from pdhandoff.runtime.worker import Worker
from pdhandoff.runtime.writing import Write, Writer

__all__ = ["Sender", "Staging"]

_INLINE_BYTES: Final = 256 << 10
"work on fewer bytes than this is done on the loop: a thread switch costs more"
_PART_BYTES: Final = 32 << 20
"larger chunks are staged in parts of about so many, so that one is copied while the one before it is written"
_FIRST_PART_BYTES: Final = 4 << 20
"of a chunk that finds nothing to be written, and twice as many of each that follows: the mover soon has work"
_MANY_CHUNKS: Final = 32
"of one handoff: those that are done are forgotten, so that each step looks at few"


@final
class Staging(enum.Enum):
    """How rows leave the source pages."""

    STAGED = "staged"  # copied into the ring at once; pages are free when that is done
    DIRECT = "direct"  # written from the pages; they are held until the mover is done
    AUTO = "auto"  # staged, and direct while the ring is full


@final
class Sender:
    """See the module's text."""

    def __init__(
        self,
        *,
        core: ProducerCore,
        mover: Mover,
        worker: Worker,
        gatherer: Gatherer,
        digest: bool,
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
        self._gatherer = gatherer
        self._ring = gatherer.ring
        self._native = gatherer.native if digest else None
        self._components = components
        self._placements = placements
        self._staging = staging
        self._recorder = recorder
        self._clock = clock
        self._act = act
        self._ways: dict[bytes, Way] = {}
        self._routes: dict[object, Routes] = {}
        self._writer = Writer(core=core, mover=mover, clock=clock, over=self._written)
        self._gathering: list[tuple[Outgoing, Chunk]] = []
        "chunks that a device copies into the ring, dropped ones too"
        self._unready: set[bytes] = set()
        "handoffs with a chunk whose event has not happened"
        self._parked: dict[bytes, None] = {}
        "handoffs with a chunk that waits for room in the ring, oldest first"
        self._ready: deque[bytes] = deque()
        "handoffs that waited for what has become free"

    @property
    def polling(self) -> bool:
        """Whether the mover, or a device's events, must be asked."""
        return bool(self._writer.polling or self._unready or self._gathering)

    @property
    def hasty(self) -> bool:
        """Whether what is in flight will end within microseconds."""
        return self._writer.hasty

    def reading(self) -> set[bytes]:
        """Handoffs whose pages, or staged rows, the mover, a device or the worker may still read."""
        busy = {ChunkState.GATHERING, ChunkState.DIGESTING}
        working = {
            each for each, way in self._ways.items() if any(chunk.state in busy for chunk in way.outgoing.chunks)
        }
        return working | self._writer.reading() | {outgoing.handoff for outgoing, _ in self._gathering}

    # ---- from the engine's thread

    def stage(self, outgoing: Outgoing, chunk: Chunk, stream: int) -> None:
        """Start the gather of a chunk that the loop has not seen yet, if there is room for it now. Never waits.

        Whoever comes when others wait for room waits behind them. What cannot be gathered here is left as it is: the
        loop finds out why.
        """
        routes = outgoing.routes
        if self._staging is Staging.DIRECT or routes is None or self._parked or not chunk.tokens:
            return
        try:
            stretch = self._ring.take(routes.ring_bytes(chunk.tokens), granted=outgoing.granted)
        except LocalError:
            return  # too large for one stretch
        if stretch is None:
            return
        try:
            last = chunk.tokens.stop == outgoing.prompt_tokens
            self._gatherer.gather(routes, chunk, stretch, last=last, stream=stream)
            copied = self._gatherer.gathered(chunk)
        except PdHandoffError:
            self._ring.free(stretch)
            return
        chunk.stretch, chunk.staged = stretch, True
        chunk.state = ChunkState.STAGED if copied else ChunkState.GATHERING
        if copied:
            chunk.free_source()

    # ---- inputs

    def opened(self, outgoing: Outgoing, link: ConsumerLink) -> None:
        """The offer went out over this link: routes are known."""
        entries = link.template.entries
        routes = self._routes.get(entries)
        if routes is None:
            routes = self._routes[entries] = Routes(self._components, self._placements, entries)
        way = self._ways[outgoing.handoff] = Way(outgoing, routes)
        self._instant(Step.OFFER, outgoing)
        pushed, outgoing.chunks = outgoing.chunks, []
        for chunk in pushed:
            if chunk.over:
                outgoing.chunks.append(chunk)
            else:
                self._take_in(way, chunk)
        outgoing.routes = routes
        self.advance(outgoing)

    def push(self, outgoing: Outgoing, chunk: Chunk) -> None:
        """A chunk from the engine, which may have been staged already."""
        outgoing.handed.remove(chunk)
        if chunk.state is ChunkState.GATHERING:
            self._gathering.append((outgoing, chunk))
        if outgoing.settled.done() or chunk.epoch != outgoing.epoch:
            outgoing.chunks.append(chunk)
            self._drop_chunk(outgoing, chunk)
            return
        way = self._way(outgoing)
        if way is None:
            outgoing.chunks.append(chunk)
        else:
            self._take_in(way, chunk)
            self.advance(outgoing)

    def commit(self, outgoing: Outgoing, values: tuple[Attachment, ...], epoch: int) -> None:
        """The engine has pushed everything, unless it has restarted since: then what it meant was dropped."""
        if epoch == outgoing.epoch:
            outgoing.commit_with = values
            self.advance(outgoing)

    def restart(self, outgoing: Outgoing) -> None:
        """The engine lost its rows: drop what is not in flight and tell the consumer when nothing is."""
        way = self._way(outgoing)
        for chunk in outgoing.chunks:
            if chunk.state is not ChunkState.WRITING:
                self._drop_chunk(outgoing, chunk)
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
                way.landing[rank.destination] = landing_runs(manifest, rank.destination, rank.extents)
            missing = set(manifest.destinations) - set(way.landing) if manifest.tokens else set()
            if missing:
                raise LocalError(
                    ErrorCode.MANIFEST_MISMATCH, f"the grant has no memory on consumer ranks {sorted(missing)}"
                )
        except PdHandoffError as error:
            self._core.cancel(outgoing.handoff, error.reason, error.code)
            return
        way.granted = outgoing.granted = True
        self._parked.pop(outgoing.handoff, None)
        self._instant(Step.GRANT, outgoing)
        self.advance(outgoing)

    def restarted(self, outgoing: Outgoing) -> None:
        """The consumer was told: rows may be written anew."""
        self.advance(outgoing)

    def drop(self, outgoing: Outgoing) -> None:
        """The handoff has its outcome: nothing of it is submitted any more."""
        self._ways.pop(outgoing.handoff, None)
        outgoing.routes = None
        self._unready.discard(outgoing.handoff)
        self._parked.pop(outgoing.handoff, None)
        for chunk in outgoing.chunks:
            if chunk.state is not ChunkState.WRITING:
                self._drop_chunk(outgoing, chunk)

    def settle(self) -> None:
        """Let those go on that waited for room in the ring."""
        while self._ready:
            way = self._ways.get(self._ready.popleft())
            if way is not None:
                self.advance(way.outgoing)

    def poll(self) -> bool:
        """Ask the mover about everything in flight, and devices about their events. True: something moved on."""
        progress = self._writer.poll()
        gathering, self._gathering = self._gathering, []
        for outgoing, chunk in gathering:
            progress |= self._poll_gather(outgoing, chunk)
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

    def _way(self, outgoing: Outgoing) -> Way | None:
        """Its way, once its link is open. A second offer with an id that is under way has none."""
        way = self._ways.get(outgoing.handoff)
        return way if way is not None and way.outgoing is outgoing else None

    def _take_in(self, way: Way, chunk: Chunk) -> None:
        """Count a chunk's rows, and cut it. Rows pushed twice would be counted twice by the digest: refuse them."""
        start, stop = chunk.tokens.start, chunk.tokens.stop
        if chunk.tokens and way.pushed.first_gap(start, stop) != (start, stop):
            reason = f"tokens {chunk.tokens} were pushed before: push each row once"
            self._core.cancel(way.outgoing.handoff, reason, ErrorCode.MISUSE)
        way.pushed.add(start, stop)
        routes = way.routes
        if chunk.state is not ChunkState.WAITING or self._staging is Staging.DIRECT or not routes.row_bytes:
            way.outgoing.chunks.append(chunk)
            return
        most = min(_PART_BYTES, self._ring.largest) // routes.row_bytes
        busy = self._writer.polling or any(not each.over for each in way.outgoing.chunks)
        first = most if busy else _FIRST_PART_BYTES // routes.row_bytes
        way.outgoing.chunks += chunk.cut(min(first, most), most, routes.page_tokens)

    def _say_commit(self, outgoing: Outgoing, values: tuple[Attachment, ...]) -> None:
        digest = (outgoing.digest_sum % (1 << 64)).to_bytes(8, "little") if outgoing.digest else b""
        if self._core.commit(outgoing.handoff, self._clock(), payload_digest=digest, attachments=values):
            outgoing.commit_with = None
            self._instant(Step.COMMIT, outgoing)

    def _advance_chunk(self, way: Way, chunk: Chunk) -> None:
        if chunk.state is ChunkState.WAITING and self._may_start(way, chunk):
            self._start(way, chunk)
        if chunk.state is ChunkState.STAGED and way.granted:
            self._move(way, chunk)

    def _may_start(self, way: Way, chunk: Chunk) -> bool:
        try:
            ready = chunk.after is None or chunk.after.query()
        except Exception as error:  # the engine's own code: whatever it raises ends this handoff only
            raise LocalError(ErrorCode.SOURCE_LOST, f"the event of {chunk.tokens} cannot be asked: {error}") from error
        if not ready:
            self._unready.add(way.outgoing.handoff)
        return ready

    def _start(self, way: Way, chunk: Chunk) -> None:
        """Take the chunk into the ring, or leave it in its pages. Granted handoffs get room in the order they asked."""
        if self._staging is Staging.DIRECT or not chunk.tokens:
            chunk.state = ChunkState.STAGED
            return
        handoff = way.outgoing.handoff
        behind = handoff in self._parked or (way.granted and any(self._ways[other].granted for other in self._parked))
        stretch = None if behind else self._take(way, way.routes.ring_bytes(chunk.tokens))
        if stretch is None:
            if self._staging is Staging.AUTO and way.granted:
                chunk.state = ChunkState.STAGED
            else:
                self._parked[handoff] = None
            return
        chunk.stretch = stretch
        chunk.state = ChunkState.GATHERING
        started = self._clock()
        last = chunk.tokens.stop == way.outgoing.prompt_tokens
        self._work(
            way,
            chunk,
            lambda: self._gatherer.gather(way.routes, chunk, stretch, last=last),
            lambda: self._copied(way.outgoing, chunk, started),
        )

    def _take(self, way: Way, need: int) -> Stretch | None:
        try:
            return self._ring.take(need, granted=way.granted)
        except LocalError:
            if self._staging is Staging.AUTO:
                return None
            raise

    def _copied(self, outgoing: Outgoing, chunk: Chunk, started: float) -> None:
        """The worker is done with it; a device may not be."""
        self._span(Step.GATHER, outgoing, chunk, started)
        self._poll_gather(outgoing, chunk)

    def _poll_gather(self, outgoing: Outgoing, chunk: Chunk) -> bool:
        """Whether a gather is over. A device that has failed reads nothing any more."""
        try:
            if not self._gatherer.gathered(chunk):
                self._gathering.append((outgoing, chunk))
                return False
        except PdHandoffError as error:
            chunk.state = ChunkState.DROPPED
            self._core.cancel(outgoing.handoff, error.reason, error.code)
        self._gathered(outgoing, chunk)
        return True

    def _gathered(self, outgoing: Outgoing, chunk: Chunk) -> None:
        outgoing.free_chunk(chunk)
        if chunk.state is ChunkState.GATHERING:
            chunk.state = ChunkState.STAGED
            self.advance(outgoing)
        else:
            self._free_stretch(chunk)

    def _move(self, way: Way, chunk: Chunk) -> None:
        """Digest the rows that move, then write them."""
        tokens = range(max(chunk.tokens.start, way.start), chunk.tokens.stop)
        if not tokens or not way.routes.entries:
            self._landed(way.outgoing, chunk)
            return
        if not self._core.may_write(way.outgoing.handoff, way.generation):
            return
        native = self._native
        if native is None:
            self._writer.submit(way, chunk, tokens)
            return
        if chunk.digest is not None and tokens == chunk.tokens:
            way.outgoing.digest_sum += chunk.digest
            self._writer.submit(way, chunk, tokens)
            return
        chunk.state = ChunkState.DIGESTING

        def digest() -> None:
            chunk.digest = way.routes.digest(native, chunk, tokens)

        self._work(way, chunk, digest, lambda: self._digested(way, chunk, tokens))

    def _digested(self, way: Way, chunk: Chunk, tokens: range) -> None:
        if chunk.state is not ChunkState.DIGESTING:
            self._free_stretch(chunk)
            way.outgoing.free_chunk(chunk)
        elif self._core.may_write(way.outgoing.handoff, way.generation):
            way.outgoing.digest_sum += chunk.digest or 0
            self._writer.submit(way, chunk, tokens)
        else:
            chunk.state = ChunkState.STAGED  # restarting: asked again when the consumer has been told
            chunk.digest = None

    def _written(self, write: Write) -> None:
        if write.transfers or not write.failed:
            self._span(Step.WRITE, write.outgoing, write.chunk, write.started)
        self._landed(write.outgoing, write.chunk)
        self.advance(write.outgoing)

    # ---- small things

    def _work(self, way: Way, chunk: Chunk, job: Callable[[], None], done: Callable[[], None]) -> None:
        """Do a job on a chunk on the worker, or here when it is small; an error of it ends the handoff."""

        def finish(result: PdHandoffError | None) -> None:
            if result is None:
                done()
                return
            chunk.state = ChunkState.DROPPED
            way.outgoing.free_chunk(chunk)
            self._free_stretch(chunk)
            self._core.cancel(way.outgoing.handoff, result.reason, result.code)

        def finish_later(result: PdHandoffError | None) -> None:
            finish(result)
            self._act()

        if way.routes.ring_bytes(chunk.tokens) > _INLINE_BYTES:
            self._worker.run(job, finish_later)
            return
        try:
            job()
        except PdHandoffError as error:
            finish(error)
        else:
            finish(None)

    def _landed(self, outgoing: Outgoing, chunk: Chunk) -> None:
        chunk.state = ChunkState.LANDED
        outgoing.free_chunk(chunk)
        self._free_stretch(chunk)

    def _drop_chunk(self, outgoing: Outgoing, chunk: Chunk) -> None:
        """Forget a chunk that is not in flight. One that is being copied or read is freed when that is done."""
        if chunk.over:
            return
        busy = chunk.state in {ChunkState.GATHERING, ChunkState.DIGESTING}
        chunk.state = ChunkState.DROPPED
        if not busy:
            outgoing.free_chunk(chunk)
            self._free_stretch(chunk)

    def _free_stretch(self, chunk: Chunk) -> None:
        if chunk.stretch is None:
            return
        self._ring.free(chunk.stretch)
        chunk.stretch = None
        self._ready.extend(self._parked)
        self._parked.clear()

    def _instant(self, step: Step, outgoing: Outgoing) -> None:
        if self._recorder is not None:
            self._recorder.instant(step, step.value, **{HANDOFF: str(outgoing.handoff)[:8]})

    def _span(self, step: Step, outgoing: Outgoing, chunk: Chunk, started: float) -> None:
        if self._recorder is not None:
            label = str(outgoing.handoff)[:8]
            args = {HANDOFF: label, "tokens": f"{chunk.tokens.start}..{chunk.tokens.stop}"}
            self._recorder.add(step, step.value, int(started * 1e9), int(self._clock() * 1e9), **args)
