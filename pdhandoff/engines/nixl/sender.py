"""The agent that writes, and its one thread.

A small batch is posted by the caller itself when nobody else is inside NIXL: that saves two thread switches. All others
are posted by the thread, a batch of each transfer in turn, so that none starves another and no caller waits. A poll
asks NIXL only if it is free at that moment. Every call is made with the lock held.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import deque
from typing import Final, final

from pdhandoff.engines.base import TransferState, TransferStatus
from pdhandoff.engines.nixl.binding import Agent, Descriptor
from pdhandoff.engines.nixl.chosen import Endpoints
from pdhandoff.engines.nixl.locking import held
from pdhandoff.engines.nixl.options import NixlOptions
from pdhandoff.engines.nixl.remote import Life, Remote
from pdhandoff.engines.nixl.tiles import Batch
from pdhandoff.engines.nixl.wire import Description
from pdhandoff.errors import ErrorCode, MoverError
from pdhandoff.ids import Incarnation

__all__ = ["MAX_QUEUED", "NixlTransfer", "Sender"]

MAX_QUEUED: Final = 4096
"transfers that wait for the thread"
_INLINE_BYTES: Final = 256 << 10
_INLINE_WRITES: Final = 64
_REAP_S: Final = 0.005
"how often the thread looks at transfers that nobody polls any more"

_CLOSED: Final = "this mover was closed before the write had finished"

_SLOW: Final = frozenset({"tcp", "self", "cuda_copy"})
"transports that move GPU memory through the host"
_LOG: Final = logging.getLogger(__name__)

_PENDING: Final = TransferStatus(state=TransferState.PENDING, quiet=False)
_DONE: Final = TransferStatus(state=TransferState.DONE)


@final
class NixlTransfer:
    """Submitted writes. Holds on to the memory they read until they are over."""

    def __init__(self, life: Life | None, batches: list[Batch], sources: object) -> None:
        self.status = _PENDING if batches else _DONE
        self.life = life
        self.batches = deque(batches)
        "not yet posted"
        self.handles: list[int] = []
        "posted and not over"
        self.posted = False
        self.reason = ""
        self.released = False
        self._sources = sources

    @property
    def over(self) -> bool:
        """Whether nothing of it will change any more."""
        return self.status.state is not TransferState.PENDING and self.status.quiet

    def settle(self) -> None:
        """Set the status from what is known."""
        if self.reason:
            self.batches.clear()
            quiet = not self.handles and (not self.posted or self.life is None or self.life.over)
            self.status = TransferStatus(state=TransferState.FAILED, reason=self.reason, quiet=quiet)
        elif not self.handles and not self.batches:
            self.status = _DONE
        if self.over:
            self._sources = None


_END: Final = NixlTransfer(None, [], None)
"what the thread takes from the queue when it is to end"


@final
class Sender:
    """Thread-safe."""

    def __init__(self, incarnation: Incarnation, options: NixlOptions) -> None:
        """Start the agent. The thread starts with the first batch that needs it."""
        self._options = options
        self._agent = Agent(f"w.{incarnation.hex()}", options)
        self._faults = self._agent.faults
        self._lock = threading.Lock()
        self._endpoints = Endpoints(self._agent.name)
        self._lives: dict[str, Life] = {}
        self._warned: weakref.WeakSet[Life] = weakref.WeakSet()
        self._wake = threading.Condition()
        self._queue: deque[NixlTransfer] = deque()
        self._active: set[NixlTransfer] = set()
        "transfers with something left to post or to wait for: what they read stays registered"
        self._parting: list[tuple[Descriptor, object]] = []
        "memory to deregister once no write reads it, and what keeps it alive until then"
        self._thread: threading.Thread | None = None
        self._reaping = False
        "whether a transfer that is not over was released"
        self._closed = False
        self._pause = threading.Event()

    def register(self, memory: Descriptor) -> None:
        """Make memory readable. Raises MoverError."""
        with held(self._lock, self._options.call_s):
            self._look_at_all()
            end = memory.address + memory.length
            if any(old.address < end and memory.address < old.address + old.length for old, _ in self._parting):
                raise MoverError(
                    ErrorCode.BUSY,
                    f"memory at {memory.address:#x} was deregistered and is still being read by writes under way: "
                    "register it when they are over",
                )
            self._agent.register([memory])

    def deregister(self, memory: Descriptor, owner: object) -> None:
        """Undo `register`, as soon as no write is under way. Raises MoverError."""
        with held(self._lock, self._options.call_s):
            self._parting.append((memory, owner))
            self._look_at_all()

    def _look_at_all(self) -> None:
        """Ask after every transfer, with the lock held, and part with memory that nothing reads any more."""
        for transfer in list(self._active):
            self._look(transfer)
        if not self._active:
            parting, self._parting = self._parting, []
            for memory, _ in parting:
                self._agent.deregister([memory])

    def connect(self, remote: Remote, description: Description) -> Life:
        """The receiving agent that a grant names, connected. Raises MoverError (MALFORMED, BUSY)."""
        with held(self._lock, self._options.call_s):
            self._look_at_all()
            self._forget_dead()
            life = self._lives.get(description.agent)
            if life is not None and life.broken and not life.in_flight:
                life = None
                self._agent.forget_peer(description.agent)
            before = self._endpoints.known() if life is None else frozenset()
            self._agent.load_peer(description.agent, description.metadata, known=self._lives)
            if life is None:
                life = self._lives[description.agent] = Life(remote, description.life, description.agent)
                self._report(life, before)
            if any(part.cuda for part in description.parts):
                self._warn(life)
            remote.newest = max(remote.newest, description.life)
            return life

    def _report(self, life: Life, before: frozenset[int]) -> None:
        """Find out what UCX has chosen for a new connection."""
        fresh = self._endpoints.known() - before
        life.transports = tuple(sorted({name for end in fresh for name in self._endpoints.transports(end)}))
        _LOG.info("process %d (%s) is written to by %s", life.remote.pid, life.agent, life.transports or "unknown")

    def _warn(self, life: Life) -> None:
        names = {used.split("/")[0] for used in life.transports}
        if names and names <= _SLOW and life not in self._warned:
            self._warned.add(life)
            _LOG.warning(
                "GPU memory of process %d is written to by %s, which copies it through the host: allow cuda_ipc on one "
                "host, or name an RDMA device (options transports and devices)",
                life.remote.pid,
                ", ".join(life.transports),
            )

    def _forget_dead(self) -> None:
        for name, life in list(self._lives.items()):
            if not life.in_flight and (life.over or life.broken):
                self._agent.forget_peer(name)
                life.broken = life.broken or "its agent has ended"
                del self._lives[name]

    def submit(self, transfer: NixlTransfer) -> None:
        """Start a transfer. Raises MoverError: BUSY when MAX_QUEUED wait already, MISUSE after `close`."""
        if not transfer.batches:
            return
        small = len(transfer.batches) == 1 and _is_small(transfer.batches[0])
        if small and not self._queue and self._lock.acquire(blocking=False):
            try:
                self._check_open()
                self._post(transfer)
                self._look(transfer)
            finally:
                self._lock.release()
            return
        with self._wake:
            self._check_open()
            if len(self._queue) >= MAX_QUEUED:
                raise MoverError(ErrorCode.BUSY, f"{MAX_QUEUED} transfers are queued: poll some of them first")
            self._active.add(transfer)
            self._queue.append(transfer)
            self._run_thread()

    def _check_open(self) -> None:
        if self._closed:
            raise MoverError(ErrorCode.MISUSE, "this mover is closed: nothing can be submitted")

    def _run_thread(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="pdhandoff-nixl", daemon=True)
            self._thread.start()
        self._wake.notify_all()

    def poll(self, transfer: NixlTransfer) -> TransferStatus:
        """How it stands. Asks NIXL only if nobody else does at the moment."""
        if not transfer.over and self._lock.acquire(blocking=False):
            try:
                self._look(transfer)
                transfer.settle()
            finally:
                self._lock.release()
        return transfer.status

    def release(self, transfer: NixlTransfer) -> None:
        """Let the thread see it to its end. Nothing is cancelled: freeing an active handle stops no byte."""
        if transfer.handles or transfer.batches:
            with self._wake:
                transfer.released = True
                self._reaping = True
                self._run_thread()

    def _post(self, transfer: NixlTransfer) -> None:
        """Post the next batch, with the lock held."""
        life = transfer.life
        if life is None or transfer.reason or not transfer.batches:
            return
        self._active.add(transfer)
        batch = transfer.batches.popleft()
        if life.broken:
            transfer.reason = life.broken
        else:
            try:
                transfer.handles.append(self._agent.post(life.agent, batch.source, batch.destination, batch.kinds))
            except self._faults as error:
                self._break(transfer, life, error)
            else:
                life.in_flight += 1
            transfer.posted = True
        transfer.settle()

    def _break(self, transfer: NixlTransfer, life: Life, error: Exception) -> None:
        life.broken = life.broken or (
            f"process {life.remote.pid} ({life.agent}) cannot be written to: {error}. It has ended, has fenced its "
            "memory, or cannot be reached: ask it for a new grant"
        )
        transfer.reason = transfer.reason or life.broken

    def _look(self, transfer: NixlTransfer) -> None:
        """Ask after a transfer's handles, with the lock held."""
        life = transfer.life
        if life is None:
            return
        for handle in transfer.handles[:]:
            try:
                if not self._agent.done(handle):
                    continue
            except self._faults as error:
                self._break(transfer, life, error)
            self._agent.drop(handle)
            transfer.handles.remove(handle)
            life.in_flight -= 1
        transfer.settle()
        if not transfer.handles and not transfer.batches:
            self._active.discard(transfer)

    def _run(self) -> None:
        while (transfer := self._next()) is not _END:
            with self._lock:
                if self._closed:
                    return
                if transfer is not None:
                    self._post(transfer)
                    self._look(transfer)
                else:
                    self._look_at_all()
                    self._reaping = any(active.released for active in self._active)
            if transfer is not None and transfer.batches:
                with self._wake:
                    self._queue.append(transfer)

    def _next(self) -> NixlTransfer | None:
        """The next transfer with something to post; None when it is time to look at released ones."""
        with self._wake:
            self._wake.wait_for(lambda: bool(self._queue) or self._closed, timeout=_REAP_S if self._reaping else None)
            if self._closed:
                return _END
            return self._queue.popleft() if self._queue else None

    def close(self) -> None:
        """Let what was posted finish for a moment, then end the agent: what is not over by then fails. Idempotent.

        Raises MoverError (BUSY), with the agent left as it is, when a call does not come back from NIXL.
        """
        with self._wake:
            self._closed = True
            self._wake.notify_all()
        if self._thread is not None:
            self._thread.join(self._options.call_s)
        rounds = int(self._options.close_s / _REAP_S)
        with held(self._lock, self._options.call_s):
            for transfer in (*self._queue, *self._active):
                if transfer.batches:
                    transfer.reason = transfer.reason or _CLOSED
                    transfer.settle()
            while any(active.handles for active in self._active) and rounds:
                self._look_at_all()
                self._pause.wait(_REAP_S)
                rounds -= 1
            for transfer in self._active:
                transfer.handles.clear()
                transfer.reason = transfer.reason or _CLOSED
                transfer.settle()
            self._active.clear()
            self._parting.clear()
            self._queue.clear()
            self._agent.destroy()
            self._lives.clear()


def _is_small(batch: Batch) -> bool:
    return len(batch.source) <= _INLINE_WRITES and batch.nbytes <= _INLINE_BYTES
