"""The engine thread: makes the engine, and is the only one that decodes with it. One request at a time."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final, TypeVar, final

from pdhandoff.errors import ErrorCode, LocalError, PdHandoffError
from pdhandoff_tilert.engine import DecodeEngine, DecodeStep
from pdhandoff_tilert.node.job import Ending, Job, Tokens
from pdhandoff_tilert.node.line import Line
from pdhandoff_tilert.node.metrics import Metrics
from pdhandoff_tilert.node.refusals import Refusal, from_error

__all__ = ["Decoder"]

R = TypeVar("R")

_LOG: Final = logging.getLogger("pdhandoff.node")
_TURN_S: Final = 5.0
"how long the thread waits for a request before it looks whether it is to end"
_STRIKES: Final = 3
"requests in a row that the engine fails before it is taken for broken"


@final
class Decoder:
    """See the module.

    Args:
        create: makes the engine; called on the engine thread.
        line: where requests come from.
        metrics: what is counted.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        *,
        create: Callable[[], DecodeEngine],
        line: Line,
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._create = create
        self._line = line
        self._metrics = metrics
        self._clock = clock
        self._made: Future[DecodeEngine] = Future()
        self._stopping = threading.Event()
        self._strikes = 0
        self._call_s: float | None = None
        "since when the engine has been busy with one call"
        self.broken = ""
        "why the engine decodes nothing any more; empty: it does"
        self._thread = threading.Thread(target=self._run, name="pdhandoff-engine", daemon=True)

    def start(self) -> DecodeEngine:
        """Start the thread, and wait until the engine is made: that may take as long as its weights take.

        Raises what its factory raised.
        """
        self._thread.start()
        return self._made.result()

    def stop(self, timeout_s: float) -> None:
        """End the thread after the call it is in, and close the engine. Raises LocalError when that takes too long."""
        self._stopping.set()
        self._line.wake()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                raise LocalError(ErrorCode.INTERNAL, f"the engine did not return from a call within {timeout_s} s")

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def busy_s(self) -> float:
        """For how long the engine has been in its present call; 0: in none."""
        since = self._call_s
        return 0.0 if since is None else self._clock() - since

    # ---- the thread

    def _run(self) -> None:
        try:
            engine = self._create()
        except BaseException as error:  # noqa: BLE001 - handed to the caller of `start`, whole
            self._made.set_exception(error)
            return
        self._made.set_result(engine)
        try:
            while not self._stopping.is_set():
                taken = self._line.take(_TURN_S)
                if taken is not None:
                    self._serve(engine, *taken)
        except Exception as error:  # noqa: BLE001 - the engine thread's boundary: the node turns unhealthy
            self._break(f"fault in the engine thread: {type(error).__name__}: {error}")
        finally:
            self._close(engine)

    def _serve(self, engine: DecodeEngine, job: Job, parked: object) -> None:
        """Decode one request to its end, whoever brings that about; afterwards the engine is free."""
        started = self._clock()
        try:
            self._decode(engine, job, parked)
            self._strikes = 0
        except PdHandoffError as error:
            self._strikes += 1
            _LOG.warning("request %s: the engine failed: %s", job.wanted.request_id, error)
            self._line.end(job, Ending(refusal=from_error(error)))
            if self._strikes >= _STRIKES:
                self._break(f"the engine has failed {self._strikes} requests in a row, this one last: {error.reason}")
        except Exception as error:  # noqa: BLE001 - the engine's boundary: its fault turns the node unhealthy
            _LOG.exception("request %s: fault in the engine", job.wanted.request_id)
            reason = f"fault in the engine: {type(error).__name__}: {error}"[:512]
            self._line.end(job, Ending(refusal=Refusal(500, reason, code="INTERNAL", retryable=True)))
            self._break(reason)
        finally:
            self._call_s = None
            self._line.leave(job)
            self._metrics.decoded(self._clock() - started)

    def _decode(self, engine: DecodeEngine, job: Job, parked: object) -> None:
        request = job.decode
        if self.broken or job.over:
            self._line.place_free()
            engine.drop(parked)
            return
        try:
            self._timed(lambda: engine.inject(parked))
        finally:
            self._line.place_free()
        try:
            if not self._goes_on(job):
                return
            self._timed(lambda: engine.begin(request))
            job.emit(Tokens(tokens=(request.first_token,)))
            self._metrics.first_token(self._clock() - job.admitted_s)
            left = request.max_tokens - 1
            while self._goes_on(job):
                step = self._timed(engine.step)
                left -= self._hand_out(job, step, left)
        finally:
            self._timed(engine.end)

    def _goes_on(self, job: Job) -> bool:
        return not job.over and not self._stopping.is_set()

    def _hand_out(self, job: Job, step: DecodeStep, left: int) -> int:
        """Pass a step's tokens on, never more than were asked for. Returns how many."""
        new = Tokens(tokens=step.tokens[:left], drafted=step.drafted, accepted=step.accepted)
        self._metrics.step(step.drafted, step.accepted)
        if step.finish_reason or len(new.tokens) == left:
            cut = len(step.tokens) > left
            self._line.end(job, Ending(finish_reason="length" if cut else step.finish_reason or "length"), new)
        elif new.tokens or new.drafted:
            job.emit(new)
        return len(new.tokens)

    def _timed(self, call: Callable[[], R]) -> R:
        self._call_s = self._clock()
        try:
            return call()
        finally:
            self._call_s = None

    def _break(self, reason: str) -> None:
        """From now on nothing is decoded here: say so to everybody who waits, and to the health page."""
        _LOG.error("%s; the node refuses requests from now on: restart it", reason)
        self.broken = self.broken or reason
        refusal = Refusal(503, f"{reason}; this node has to be restarted", code="ENGINE_BROKEN", retryable=True)
        self._line.refuse_all(refusal)
        self._line.end_all(Ending(refusal=refusal))

    def _close(self, engine: DecodeEngine) -> None:
        try:
            engine.close()
        except Exception:  # noqa: BLE001 - the engine's boundary
            _LOG.exception("fault in the engine while it was closed")
