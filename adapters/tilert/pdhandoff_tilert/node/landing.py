"""The way of one request up to the engine, on a thread of its own: wait for the handoff, check it, park it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Final, final

import msgspec

from pdhandoff.errors import ErrorCode, PdHandoffError
from pdhandoff.runtime.arrival import Arrival
from pdhandoff.runtime.consumer import Consumer
from pdhandoff_tilert.engine import DecodeEngine, DecodeRequest
from pdhandoff_tilert.node.job import Ending, Job, Tokens
from pdhandoff_tilert.node.line import Line
from pdhandoff_tilert.node.metrics import Metrics
from pdhandoff_tilert.node.refusals import Refusal, from_error

__all__ = ["Landing", "ends_at_once", "first_token_of"]

_LOG: Final = logging.getLogger("pdhandoff.node")
_GRACE_S: Final = 5.0
"beyond a request's own deadline, which its HTTP side watches"


def first_token_of(arrival: Arrival, wanted: int | None) -> int:
    """The first output token: the arrival's, or the request's, which must agree.

    Raises:
        Refusal: they differ, or nobody says.
    """
    came = arrival.value("first_token") if "first_token" in arrival.attachments else None
    if came is None and wanted is None:
        raise Refusal(
            409,
            "nobody says which token prefill sampled first: the producer has to attach first_token, or the request to "
            "carry kv_transfer_params.pdhandoff.first_token",
            code="FIRST_TOKEN_MISSING",
            param="kv_transfer_params.pdhandoff.first_token",
        )
    if came is not None and wanted is not None and came != wanted:
        raise Refusal(
            409,
            f"the request says that the first token is {wanted}, the handoff brought {came}: requests were mixed up",
            code="FIRST_TOKEN_MISMATCH",
            param="kv_transfer_params.pdhandoff.first_token",
        )
    token = wanted if came is None else came
    if token is None or token < 0:
        raise Refusal(502, f"the producer attached the first token {token}, which is none", code="ATTACHMENT")
    return token


def check_prompt(arrival: Arrival, request: DecodeRequest) -> None:
    """The landed rows must be those of the request's prompt, as far as one can tell. Raises Refusal."""
    if arrival.prompt_tokens != len(request.prompt):
        raise Refusal(
            409,
            f"token_ids has {len(request.prompt)} tokens, {arrival.prompt_tokens} were handed off: send the tokens "
            "that were prefilled",
            code="PROMPT_MISMATCH",
            param="token_ids",
        )
    if "last_token" in arrival.attachments and arrival.value("last_token") != request.prompt[-1]:
        raise Refusal(
            409,
            f"token_ids ends with {request.prompt[-1]}, the prompt that was handed off with "
            f"{arrival.value('last_token')}: send the tokens that were prefilled",
            code="PROMPT_MISMATCH",
            param="token_ids",
        )


def ends_at_once(request: DecodeRequest, end_token_ids: frozenset[int]) -> str:
    """The finish reason of a request that its first token ends; empty: it goes on."""
    stops = request.stop_token_ids | (frozenset() if request.ignore_eos else end_token_ids)
    if request.first_token in stops and request.min_tokens <= 1:
        return "stop"
    return "length" if request.max_tokens == 1 else ""


@final
class Landing:
    """Starts the threads. `land` never blocks."""

    def __init__(
        self,
        *,
        consumer: Consumer,
        engine: DecodeEngine,
        line: Line,
        metrics: Metrics,
        announce_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._consumer = consumer
        self._engine = engine
        self._line = line
        self._metrics = metrics
        self._announce_s = announce_s
        self._clock = clock

    def land(self, job: Job) -> None:
        """Announce its handoff now, and see to the rest on a thread."""
        wanted = job.wanted
        wait_s = min(self._announce_s if wanted.wait_s is None else wanted.wait_s, wanted.deadline_s)
        job.ticket = self._consumer.announce(wanted.handoff, deadline_s=wait_s)
        threading.Thread(target=self._run, args=(job,), name=f"pdhandoff-land-{job.number}", daemon=True).start()

    def _run(self, job: Job) -> None:
        try:
            taken = self._bring(job)
        except Refusal as refusal:
            self._line.end(job, Ending(refusal=refusal))
        except PdHandoffError as error:
            self._line.end(job, Ending(refusal=self._failed(error)))
        except Exception as error:  # noqa: BLE001 - the thread's boundary: one request fails, and says so
            _LOG.exception("request %s: fault while its handoff landed", job.wanted.request_id)
            self._line.end(job, Ending(refusal=_fault(error)))
        else:
            if taken:
                return  # the engine thread has it now
            self._line.end(job, Ending(refusal=_late()))
        self._line.leave(job)

    def _bring(self, job: Job) -> bool:
        """True: the engine thread has taken it. False: it ended before, and nothing of it is held."""
        ticket = job.ticket
        if ticket is None or job.over:
            return False
        try:
            arrival = ticket.wait(self._left(job))
        except TimeoutError:
            ticket.cancel("nobody waits for it any more")
            return False
        self._metrics.landed(self._clock() - job.admitted_s, arrival.nbytes)
        with ExitStack() as held:
            held.callback(arrival.release)
            check_prompt(arrival, job.decode)
            first = first_token_of(arrival, job.wanted.first_token)
            job.decode = msgspec.structs.replace(job.decode, first_token=first)
            at_once = ends_at_once(job.decode, self._engine.end_token_ids)
            if at_once:
                self._line.end(job, Ending(finish_reason=at_once), Tokens(tokens=(first,)))
                return False
            if not self._line.landed(job, self._left(job)):
                return False
            held.pop_all()
        return self._park(job, arrival)

    def _park(self, job: Job, arrival: Arrival) -> bool:
        """Park it, and hold it until the engine takes it. The place is free again if it does not come to that."""
        with ExitStack() as held:
            held.callback(self._line.place_free)
            undo = held.enter_context(ExitStack())
            undo.callback(arrival.release)
            parked = self._engine.park(arrival)
            undo.pop_all()
            undo.callback(self._engine.drop, parked)
            if self._line.parked(job, parked, self._left(job)):
                undo.pop_all()
                held.pop_all()
                return True
        return False

    def _left(self, job: Job) -> float:
        return max(0.0, job.admitted_s + job.wanted.deadline_s - self._clock()) + _GRACE_S

    def _failed(self, error: PdHandoffError) -> Refusal:
        self._metrics.handoff_failed(error.code)
        if error.code == ErrorCode.DUPLICATE:
            reason = "this handoff was over before the request came: its rows are gone; start again with a new handoff"
            return Refusal(410, reason, code="GONE", retryable=True)
        return from_error(error)


def _fault(error: BaseException) -> Refusal:
    return Refusal(500, f"fault in the decode node: {type(error).__name__}: {error}"[:512], code="INTERNAL")


def _late() -> Refusal:
    return Refusal(504, "the request's deadline has passed", code="DEADLINE", retryable=True)
