"""One thread that waits for sockets, deadlines, posted calls and movers, and owns everything that it calls."""

from __future__ import annotations

import logging
import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final, Protocol, TypeVar, final

from pdhandoff.errors import ErrorCode, LocalError

__all__ = ["Loop", "Timed"]

T = TypeVar("T")

_LOG: Final = logging.getLogger("pdhandoff.runtime")

_SPIN_S: Final = 0.0005
"after a small write was begun or has ended, poll without sleeping for this long"
_REST_S: Final = 0.001
"then between polls"


class Timed(Protocol):
    """Something with deadlines and, perhaps, transfers to poll."""

    def next_deadline(self) -> float | None:
        """When `tick` wants to be called, monotonic seconds."""

    def tick(self, now: float) -> None:
        """Let time pass."""

    def turned(self) -> None:
        """Posted calls were made: act on what came of all of them."""

    def poll(self) -> bool:
        """Look at transfers in flight. True: there was progress. Called only while `polling`."""

    @property
    def polling(self) -> bool:
        """Whether anything is in flight that only polling finds out about."""

    @property
    def hasty(self) -> bool:
        """Whether all of that will end within microseconds, so that it pays to look again at once after progress."""

    def failed(self, error: BaseException) -> None:
        """The loop broke on a fault of the library; end everything."""


@final
class Loop:
    """The thread. `post` and `call` may be used from any thread; all else only from the loop's own."""

    def __init__(self, name: str, owner: Timed, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._name = name
        self._owner = owner
        self._selector = selectors.DefaultSelector()
        self._posted: deque[Callable[[], None]] = deque()
        self._asleep = False
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._waking = threading.Lock()
        "held while the descriptor is written to or closed: its number may be another file's afterwards"
        self._selector.register(self._wake_fd, selectors.EVENT_READ, None)
        self._stopping = False
        self._ended = threading.Event()
        self._spin_until = 0.0
        self._polled = False
        "in the turn before"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        """End the thread after what has been posted. Idempotent; raises LocalError if it does not end in time."""
        if self._ended.is_set():
            return
        if self._thread.ident is None:
            self._end()
            return

        def end() -> None:
            self._stopping = True

        self.post(end)
        if threading.current_thread() is self._thread:
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise LocalError(ErrorCode.INTERNAL, f"thread {self._name} did not end within {timeout_s} s")

    @property
    def ended(self) -> bool:
        """Whether the thread is over."""
        return self._ended.is_set()

    def post(self, function: Callable[[], None]) -> bool:
        """Have the loop call a function soon. Never blocks. False: the loop has ended and may never call it."""
        self._posted.append(function)
        if self._asleep:
            self._wake()
        return not self._ended.is_set()

    def call(self, function: Callable[[], T], timeout_s: float = 30.0) -> T:
        """Have the loop call a function and return its result, or raise what it raised."""
        if threading.current_thread() is self._thread:
            return function()
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except Exception as error:  # noqa: BLE001 - handed to the caller, whole
                future.set_exception(error)

        if not self.post(run) and not future.done():
            raise LocalError(ErrorCode.MISUSE, f"{self._name} is closed")
        return future.result(timeout_s)

    def watch(self, sock: socket.socket, events: int, callback: Callable[[int], None]) -> None:
        """Call `callback(events)` when a socket is ready; replaces an earlier watch of it."""
        try:
            self._selector.modify(sock, events, callback)
        except KeyError:
            self._selector.register(sock, events, callback)

    def unwatch(self, sock: socket.socket) -> None:
        """Forget a socket. Idempotent."""
        try:
            self._selector.unregister(sock)
        except (KeyError, ValueError):
            return

    # ---- inside

    def _run(self) -> None:
        """The one place that catches every fault of the library: it ends this endpoint's handoffs, not the process."""
        try:
            while not self._stopping:
                self._turn()
        except Exception as error:  # noqa: BLE001 - the one named boundary: turned into an end of this endpoint
            _LOG.exception("%s: fault in the loop; every handoff of this endpoint ends", self._name)
            self._owner.failed(error)
        finally:
            self._end()

    def _end(self) -> None:
        """Release everything, and still call what was posted too late: somebody may wait for it."""
        self._ended.set()
        while self._posted:
            try:
                self._posted.popleft()()
            except Exception:  # noqa: BLE001 - the same boundary
                _LOG.exception("%s: fault in a call after the end", self._name)
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._selector.close()
        with self._waking:
            os.close(self._wake_fd)
            self._wake_fd = -1

    def _turn(self) -> None:
        deadline = self._owner.next_deadline()
        for key, events in self._selector.select(self._timeout(deadline)):
            if key.data is None:
                os.eventfd_read(self._wake_fd)
            else:
                key.data(events)
        self._asleep = False
        posted = len(self._posted)
        for _ in range(posted):
            self._posted.popleft()()
        if posted:
            self._owner.turned()
        if self._owner.polling:
            begun, self._polled = not self._polled, True
            if (self._owner.poll() or begun) and self._owner.hasty:
                self._spin_until = self.clock() + _SPIN_S
        else:
            self._polled = False
        now = self.clock()
        if deadline is not None and deadline <= now:
            self._owner.tick(now)

    def _timeout(self, deadline: float | None) -> float | None:
        """How long `select` may sleep. `_asleep` is set before the last look at the posted, so no wake-up is lost."""
        self._asleep = True
        if self._posted:
            return 0.0
        now = self.clock()
        timeout = None if deadline is None else max(0.0, deadline - now)
        if self._owner.polling:
            rest = 0.0 if now < self._spin_until else _REST_S
            timeout = rest if timeout is None else min(rest, timeout)
        return timeout

    def _wake(self) -> None:
        with self._waking:
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)
