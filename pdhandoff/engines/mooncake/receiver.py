"""The engines that peers write through: which memory they show, and how they are replaced.

Mooncake lets a peer write into everything that is registered with an engine, so memory is registered when the first
extent of it is granted and not before: what is only a source is never shown over TCP.

Deregistering is no fence: a write that has begun goes on to its end, and is then reported as done. Destroying the
engine is one: its threads are joined and its connections closed, so no byte lands afterwards. It ends all grants that
were given with that engine, so that other peers' writes fail. To spare some of them, grants that follow the first sight
of a peer are given with another engine than those before, up to a number of engines: so a process that died and its
successor do not share one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Final, final

from pdhandoff.engines.base import Extent, Memory
from pdhandoff.engines.mooncake.engine import Engine
from pdhandoff.engines.mooncake.ranges import Ranges
from pdhandoff.errors import ErrorCode, MoverError

__all__ = ["MAX_ENGINES", "Receiver"]

MAX_ENGINES: Final = 4
"engines that serve at a time: each takes two threads and five descriptors, and more for each connection"


@final
class _Shown:
    """Memory that is registered with an engine, and which of the mover's regions need it."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.users: list[Memory] = []

    def contains(self, memory: Memory) -> bool:
        start, end = self.memory.address, self.memory.address + self.memory.length
        return start <= memory.address and memory.address + memory.length <= end


@final
class _Serving:
    """An engine, what it shows, and what was granted with it and not granted anew since."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.granted = Ranges()
        self._shown: list[_Shown] = []
        # What was shown stays alive until no write can reach it, whatever happens to its region.
        self._kept: list[Memory] = []

    def show(self, memory: Memory) -> None:
        shown = next((shown for shown in self._shown if shown.contains(memory)), None)
        if shown is None:
            self.engine.register(memory)
            self._kept.append(memory)
            shown = _Shown(memory)
            self._shown.append(shown)
        if not any(user is memory for user in shown.users):
            shown.users.append(memory)

    def hide(self, memory: Memory) -> None:
        for shown in list(self._shown):
            shown.users = [user for user in shown.users if user is not memory]
            if not shown.users:
                self._shown.remove(shown)
                self.engine.unregister(shown.memory.address)

    def end(self) -> None:
        self.engine.close()
        self._kept.clear()


@final
class Receiver:
    """See the module. Thread-safe."""

    def __init__(self, start: Callable[[], Engine]) -> None:
        """Start nothing yet: an endpoint that never grants needs no engine. `start` makes one."""
        self._start = start
        self._lock = threading.Lock()
        self._serving: list[_Serving] = []
        self._renew = False
        self._closed = False

    def renew(self) -> None:
        """Give the next grants with another engine than those before, if there is room for one."""
        self._renew = True

    def register(self, memory: Memory) -> None:
        """Register memory before it is granted, for protocols that pin it. Raises MoverError as `grant` does."""
        with self._lock:
            self._current().show(memory)

    def grant(self, extents: Sequence[Extent], memories: Sequence[Memory]) -> str:
        """Let peers write into extents. Returns the name that they call the engine by.

        Arguments:
            extents: what is granted. Whoever grants it anew knows that nothing of an earlier grant is under way.
            memories: the registered memory that holds them; the engine shows it whole.

        Raises:
            MoverError: MOVER_FAILED, when the engine cannot be started or memory cannot be registered; MISUSE after
                `close`.
        """
        with self._lock:
            serving = self._current()
            for memory in memories:
                serving.show(memory)
            serving.granted.add(extents)
            for other in self._serving[:-1]:
                other.granted.remove(extents)
                if not other.granted:
                    self._end(other)
            return serving.engine.segment

    def _current(self) -> _Serving:
        if self._closed:
            raise MoverError(ErrorCode.MISUSE, "this mover is closed: make another one")
        fresh = (
            self._renew and len(self._serving) < MAX_ENGINES and bool(self._serving[-1:] and self._serving[-1].granted)
        )
        if not self._serving or fresh:
            self._serving.append(_Serving(self._start()))
        self._renew = False
        return self._serving[-1]

    def _end(self, serving: _Serving) -> None:
        self._serving.remove(serving)
        serving.end()

    def hide(self, memory: Memory) -> None:
        """Refuse new writes into memory, unless another region still shows it. Not a fence."""
        with self._lock:
            for serving in self._serving:
                serving.hide(memory)

    def fence(self, extents: Sequence[Extent], timeout_s: float) -> None:
        """Destroy every engine that any of these extents was granted with: no write into them lands after this.

        Extents whose engine is destroyed already cost nothing.

        Raises:
            MoverError: MOVER_FAILED, when other calls hold the engines for longer than `timeout_s`.
        """
        self._end_those(lambda serving: serving.granted.touch(extents), timeout_s)

    def close(self, timeout_s: float) -> None:
        """Destroy all engines, for good. Idempotent. Raises MoverError as `fence` does."""
        self._closed = True
        self._end_those(lambda _: True, timeout_s)

    def _end_those(self, ends: Callable[[_Serving], bool], timeout_s: float) -> None:
        if not self._lock.acquire(timeout=min(max(0.0, timeout_s), threading.TIMEOUT_MAX)):
            raise MoverError(
                ErrorCode.MOVER_FAILED,
                f"Mooncake's engine was busy for {timeout_s:.3f} s, so nothing is fenced: allow more time",
            )
        try:
            for serving in [serving for serving in self._serving if ends(serving)]:
                self._end(serving)
        finally:
            self._lock.release()
