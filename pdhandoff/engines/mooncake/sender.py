"""Writing to one engine of one peer: an engine and a thread that owns it.

An engine for each peer, because Mooncake's binding holds a lock while it opens a peer: one that does not answer would
delay all others. And because what an engine knows of a peer is fixed when it first opens it, so that a peer that
restarted on the same address would be written to at its predecessor's ports.

Every write is submitted and asked for by itself. The binding's batches can only be waited for, by a busy loop that
gives up after a time-out and forgets the batch while its bytes are still under way.
"""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple, final

from pdhandoff.engines.base import Memory
from pdhandoff.engines.mooncake.engine import Engine, Outcome
from pdhandoff.engines.mooncake.transfer import MooncakeTransfer
from pdhandoff.engines.mooncake.wire import split_segment
from pdhandoff.errors import ErrorCode, MoverError

__all__ = ["MAX_QUEUED", "Sender"]

MAX_QUEUED: Final = 4096
"transfers that wait for the thread"
_WINDOW: Final = 128
"writes in flight: enough to keep all connections busy, and far below the 1,024 that Mooncake queues for a peer"
_LOOKED_AT: Final = 16
"oldest writes that are asked for in one round: later ones seldom end before them"
_FIRST_PAUSE_S: Final = 0.00005
_LONGEST_PAUSE_S: Final = 0.001
_SLOWER: Final = 1.25
"the pause between two rounds grows by this factor as long as nothing ends: small writes are noticed soon"
_PROBE_S: Final = 0.25
_PROBE_EVERY_S: Final = 0.5
_GRACE_S: Final = 10.0
"beyond Mooncake's own time-out, before a transfer is called stuck"
_JOIN_S: Final = 15.0
_FAULT: Final = "the thread that writes has ended by a fault: report it, with what the process wrote about it"


class _InFlight(NamedTuple):
    handle: int
    transfer: MooncakeTransfer


@final
class Sender:
    """See the module. `put` and `close` may be called from any thread; all else runs on the sender's own."""

    def __init__(
        self,
        segment: str,
        start: Callable[[], Engine],
        *,
        registers_sources: bool,
        clock: Callable[[], float],
        stall_s: float,
        idle_s: float,
    ) -> None:
        """Start nothing yet.

        Arguments:
            segment: the peer's engine, as `host:port`.
            start: makes an engine.
            registers_sources: whether the engine can only read what is registered with it. TCP reads any memory, so
                that nothing is shown to peers.
            clock: monotonic seconds.
            stall_s: Mooncake's own bound on a write without progress.
            idle_s: engine and thread end after so long without a transfer, and start again with the next.
        """
        self.segment = segment
        self._start = start
        self._registers_sources = registers_sources
        self._clock = clock
        self._stuck_s = stall_s + _GRACE_S
        self._idle_s = idle_s
        self._wake = threading.Condition()
        self._queue: deque[MooncakeTransfer] = deque()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._gone = False
        # what follows belongs to the thread
        self._engine: Engine | None = None
        self._registered: dict[int, Memory] = {}
        self._active: deque[MooncakeTransfer] = deque()
        self._flight: deque[_InFlight] = deque()
        self._doubtful: list[MooncakeTransfer] = []
        self._progress_at = 0.0
        self._probe_at = 0.0

    @property
    def gone(self) -> bool:
        """Whether the peer's engine is known to be destroyed. Once True it stays True."""
        return self._gone

    def supersede(self) -> None:
        """Another engine has this one's address now, so the one that was written to is gone."""
        self._gone = True

    @property
    def retired(self) -> bool:
        """Whether it holds nothing: neither thread nor engine."""
        return self._thread is None

    def put(self, transfer: MooncakeTransfer) -> None:
        """Queue a transfer. Raises MoverError: BUSY when MAX_QUEUED wait already, MISUSE after `close`."""
        with self._wake:
            if self._closed:
                raise MoverError(ErrorCode.MISUSE, "this mover is closed: nothing can be submitted")
            if len(self._queue) >= MAX_QUEUED:
                raise MoverError(ErrorCode.BUSY, f"{MAX_QUEUED} transfers are queued: poll some of them first")
            self._queue.append(transfer)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name=f"pdhandoff-mooncake-{self.segment}", daemon=True
                )
                self._thread.start()
            self._wake.notify_all()

    def close(self) -> None:
        """End the engine; what is not final fails. Waits for the thread, with a bound. Idempotent."""
        with self._wake:
            self._closed = True
            thread = self._thread
            self._wake.notify_all()
        if thread is not None:
            thread.join(_JOIN_S)

    def _run(self) -> None:
        try:
            pause = _FIRST_PAUSE_S
            while self._wait(pause):
                pause = _FIRST_PAUSE_S if self._round() else min(_SLOWER * pause, _LONGEST_PAUSE_S)
        finally:
            if self._thread is threading.current_thread():
                self._end()

    def _wait(self, pause: float) -> bool:
        """Wait for something to do, and take what is queued. False: end."""
        with self._wake:
            if self._flight or self._active:
                if not self._queue and not self._closed:
                    self._wake.wait(pause)
            else:
                timeout = _PROBE_EVERY_S if self._doubtful else self._idle_s
                awake = self._wake.wait_for(lambda: bool(self._queue) or self._closed, timeout)
                if not awake and not self._doubtful:
                    self._close_engine()
                    self._thread = None  # under the lock: the next `put` starts another one
                    return False
            self._active.extend(self._queue)
            self._queue.clear()
            return not self._closed

    def _round(self) -> bool:
        """Submit what fits, ask for what is oldest. Whether anything came of it."""
        submitted = self._submit()
        ended = self._collect()
        now = self._clock()
        if submitted or ended or not self._flight:
            self._progress_at = now
        elif now - self._progress_at > self._stuck_s:
            for flying in self._flight:
                flying.transfer.fail(
                    f"{self.segment} has not taken a byte for {self._stuck_s:.0f} s. What is in flight goes on: "
                    "ask the peer to fence its memory"
                )
        if self._doubtful:
            self._probe()
        return submitted or ended

    def _submit(self) -> bool:
        some = False
        while self._active and len(self._flight) < _WINDOW:
            transfer = self._active[0]
            piece = transfer.next()
            if piece is None:
                self._active.popleft()
                some = True
                if transfer.idle:
                    self._settle(transfer)
                continue
            handle = self._open_engine(transfer)
            if handle is None:
                continue
            some = True
            task = handle.write(self.segment, piece.source, piece.destination, piece.length)
            if task is None:
                self._fail(
                    transfer, f"{self.segment} cannot be reached, or another engine is there now: get a new grant"
                )
                continue
            transfer.started()
            self._flight.append(_InFlight(task, transfer))
        return some

    def _open_engine(self, transfer: MooncakeTransfer) -> Engine | None:
        """The engine, started if need be. None when the transfer has failed for want of one."""
        if self._gone:
            self._fail(transfer, f"the engine at {self.segment} has ended: get a new grant from its successor")
            return None
        try:
            if self._engine is None:
                self._engine = self._start()
            if self._registers_sources:
                self._register(self._engine, transfer.sources)
        except MoverError as error:
            self._fail(transfer, error.reason)
            return None
        return self._engine

    def _register(self, engine: Engine, sources: tuple[Memory, ...]) -> None:
        """Register what is not registered yet, and let go of the rest when nothing reads it."""
        wanted = {memory.address: memory for memory in sources}
        if not self._flight:
            for address in self._registered.keys() - wanted.keys():
                engine.unregister(address)
                del self._registered[address]
        for address in wanted.keys() - self._registered.keys():
            engine.register(wanted[address])
            self._registered[address] = wanted[address]

    def _close_engine(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()
        self._registered.clear()

    def _collect(self) -> bool:
        """Ask for the oldest writes in flight. Whether any has ended."""
        engine = self._engine
        if engine is None:
            return False
        ended = False
        index = 0
        while index < min(len(self._flight), _LOOKED_AT):
            outcome = engine.check(self._flight[index].handle)
            if outcome is Outcome.PENDING:
                index += 1
                continue
            ended = True
            transfer = self._flight[index].transfer
            del self._flight[index]
            self._note(transfer, outcome)
        return ended

    def _note(self, transfer: MooncakeTransfer, outcome: Outcome) -> None:
        if outcome is Outcome.DONE:
            transfer.landed()
        else:
            transfer.lost()
            self._probe()
            self._fail(
                transfer,
                f"{self.segment} did not take a write: its memory is deregistered or fenced, its process has ended, or "
                "the connection broke. Get a new grant",
            )
        if transfer.idle:
            self._settle(transfer)

    def _fail(self, transfer: MooncakeTransfer, reason: str) -> None:
        transfer.fail(reason, quiet=self._gone or not transfer.doubtful)

    def _settle(self, transfer: MooncakeTransfer) -> None:
        """All of it has ended here. If some of it failed under way, it is quiet only when the peer's engine is gone."""
        transfer.settle(quiet=not transfer.doubtful or self._gone)
        if transfer.doubtful and not self._gone:
            self._doubtful.append(transfer)

    def _probe(self) -> None:
        """Look, now and then, whether the peer's port refuses connections.

        If so there is no engine any more, and nothing can land in its memory.
        """
        now = self._clock()
        if not self._gone and now >= self._probe_at:
            self._probe_at = now + _PROBE_EVERY_S
            try:
                socket.create_connection(split_segment(self.segment), timeout=_PROBE_S).close()
            except ConnectionRefusedError:
                self._gone = True
            except OSError:
                return
        if self._gone:
            for transfer in self._doubtful:
                transfer.settle(quiet=True)
            self._doubtful.clear()

    def _end(self) -> None:
        """Destroy the engine, then fail what is left: nothing here is read after that."""
        self._close_engine()
        with self._wake:
            left = [*self._active, *self._queue]
            self._queue.clear()
            self._thread = None  # after a fault, the next `put` starts another one
            reason = "this mover was closed before the write had finished" if self._closed else _FAULT
        self._active.clear()
        while self._flight:
            transfer = self._flight.popleft().transfer
            transfer.lost()
            left.append(transfer)
        for transfer in left:
            self._fail(transfer, reason)
            if transfer.idle:
                self._settle(transfer)
        if self._doubtful:
            self._probe_at = self._clock()
            self._probe()
