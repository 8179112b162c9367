"""One thread for work on bytes, in order: gathers, digests, conversions, proofs. Results go back to a loop."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import TypeVar, final

from pdhandoff.errors import ErrorCode, PdHandoffError
from pdhandoff.runtime.loop import Loop

__all__ = ["Worker"]

T = TypeVar("T")


@final
class Worker:
    """Runs jobs one after another and posts each result, or the PdHandoffError it raised, to the loop."""

    def __init__(self, name: str, loop: Loop) -> None:
        self._loop = loop
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        """End after the jobs that were given. Idempotent."""
        self._jobs.put(None)
        if self._thread.ident is not None and threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    def run(self, job: Callable[[], T], done: Callable[[T | PdHandoffError], None]) -> None:
        """Do a job, then have the loop call `done` with its result or error. Never blocks."""

        def both() -> None:
            try:
                result: T | PdHandoffError = job()
            except PdHandoffError as error:
                result = error
            except Exception as error:  # noqa: BLE001 - this thread's boundary: turned into the job's result
                result = PdHandoffError(ErrorCode.INTERNAL, f"{type(error).__name__}: {error}")
            self._loop.post(lambda: done(result))

        self._jobs.put(both)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
