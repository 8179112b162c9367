"""The line of requests: bounded, visible, and the only place where a request changes hands.

A request belongs to one thread at a time: to its landing thread until the engine thread takes it. Both let go of what
they hold when the request has ended, whoever ended it; then it leaves the line.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final, final

import msgspec

from pdhandoff_tilert.node.job import Ending, Job, Sink, Stage, Tokens
from pdhandoff_tilert.node.refusals import Refusal
from pdhandoff_tilert.node.schema import Wanted

__all__ = ["Line", "Waiting"]

_USED: Final = 65536
"handoffs that are remembered as used"
_MOST_RETRY_S: Final = 30.0


@final
class Waiting(msgspec.Struct, frozen=True, kw_only=True):
    """One request as the status page shows it."""

    request_id: str
    handoff: str
    stage: str
    position: int
    "requests ahead of it; the one that decodes counts"
    prompt_tokens: int
    output_tokens: int
    max_tokens: int
    waited_s: float
    "since its admission"


@final
class Line:
    """See the module. Any method from any thread.

    Args:
        most: requests that may wait, besides the one that decodes.
        parking: requests that may be parked at once.
        clock: monotonic seconds.
    """

    def __init__(self, *, most: int, parking: int, clock: Callable[[], float]) -> None:
        self.most = most
        self._clock = clock
        self._changed = threading.Condition()
        self._jobs: dict[int, Job] = {}
        "in order of admission"
        self._free_places = parking
        self._used: dict[bytes, None] = {}
        self._number = 0
        self._awake = False
        "the engine thread is to look up"
        self._closed: Refusal | None = None
        self._decode_s = 1.0
        "running mean of how long a request holds the engine"

    # ---- admission

    def admit(self, wanted: Wanted, sink: Sink) -> Job:
        """Take a request in. Raises Refusal: draining or broken, the handoff was named before, or the line is full."""
        with self._changed:
            if self._closed is not None:
                raise self._closed
            if wanted.handoff in self._used:
                raise Refusal(
                    409,
                    f"handoff {wanted.handoff} was named by another request: it can be used once",
                    code="DUPLICATE",
                )
            waiting = sum(job.stage is not Stage.DECODING for job in self._jobs.values())
            if waiting >= self.most:
                raise Refusal(
                    429,
                    f"{waiting} requests wait here, which is all that may: try again, or another decode node",
                    code="QUEUE_FULL",
                    retryable=True,
                    retry_after_s=min(_MOST_RETRY_S, max(1.0, self._decode_s)),
                )
            self._number += 1
            job = Job(self._number, wanted, self._clock(), sink)
            job.position = len(self._jobs)
            self._jobs[job.number] = job
            self._remember(wanted.handoff)
            return job

    def refuse_all(self, refusal: Refusal) -> None:
        """Take nothing in from now on; the first word stands."""
        with self._changed:
            self._closed = self._closed or refusal

    # ---- changing hands

    def end(self, job: Job, ending: Ending, last: Tokens | None = None) -> bool:
        """End a request, with its last tokens, and have whoever holds it let go. False: it had ended."""
        ended = job.end(ending, last)
        ticket = job.ticket
        if ticket is not None:
            ticket.cancel("the request has ended")
        with self._changed:
            self._changed.notify_all()
        return ended

    def end_all(self, ending: Ending) -> None:
        """End every request."""
        for job in self.jobs():
            self.end(job, ending)

    def landed(self, job: Job, timeout_s: float) -> bool:
        """The landing thread: wait for a parking place, in order of admission. False: the request has ended."""
        with self._changed:
            self._move(job, Stage.LANDED)
            self._changed.wait_for(lambda: job.over or (self._free_places > 0 and self._is_next(job)), timeout_s)
            if job.over or not (self._free_places > 0 and self._is_next(job)):
                return False
            self._free_places -= 1
            self._move(job, Stage.PARKED)
            return True

    def parked(self, job: Job, parked: object, timeout_s: float) -> bool:
        """The landing thread: wait until the engine takes it. False: it ended before; the place is the caller's."""
        with self._changed:
            job.parked = (parked,)
            self._changed.notify_all()
            # by the time this thread is woken, the request may have been decoded to its end: its stage says nothing
            self._changed.wait_for(lambda: job.over or _taken(job), timeout_s)
            taken = _taken(job)
            job.parked = None
            return taken

    def take(self, timeout_s: float) -> tuple[Job, object] | None:
        """The engine thread: the next parked request, and what was parked. None: there is none yet, or `wake`."""
        with self._changed:
            self._changed.wait_for(lambda: self._awake or self._parked() is not None, timeout_s)
            self._awake = False
            job = self._parked()
            if job is None:
                return None
            (parked,), job.parked = job.parked or (None,), None
            self._move(job, Stage.DECODING)
            self._changed.notify_all()
            return job, parked

    def wake(self) -> None:
        """Have `take` return now."""
        with self._changed:
            self._awake = True
            self._changed.notify_all()

    def place_free(self) -> None:
        """A parking place is free again."""
        with self._changed:
            self._free_places += 1
            self._changed.notify_all()

    def leave(self, job: Job) -> None:
        """Nobody holds anything of it any more."""
        with self._changed:
            if job.stage is Stage.DECODING:
                self._decode_s += 0.2 * (self._clock() - job.stage_s - self._decode_s)
            self._move(job, Stage.OVER)
            self._jobs.pop(job.number, None)
            self._changed.notify_all()

    def abandon(self) -> None:
        """The node ends: whatever is still held, by an engine that does not come back, goes with its process."""
        with self._changed:
            self._jobs.clear()
            self._changed.notify_all()

    # ---- looking

    def jobs(self) -> list[Job]:
        """Everything in the line, in order of admission."""
        with self._changed:
            return list(self._jobs.values())

    def empty(self, timeout_s: float) -> bool:
        """Wait until the line is empty, or until then."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._jobs, timeout_s)

    def show(self) -> list[Waiting]:
        """The line as it stands, in order of admission."""
        now = self._clock()
        return [
            Waiting(
                request_id=job.wanted.request_id,
                handoff=str(job.wanted.handoff),
                stage=job.stage.value,
                position=position,
                prompt_tokens=len(job.decode.prompt),
                output_tokens=job.output_tokens,
                max_tokens=job.decode.max_tokens,
                waited_s=round(now - job.admitted_s, 3),
            )
            for position, job in enumerate(self.jobs())
        ]

    # ---- inside, with the lock

    def _is_next(self, job: Job) -> bool:
        landed = (each for each in self._jobs.values() if each.stage is Stage.LANDED and not each.over)
        return next(landed, None) is job

    def _parked(self) -> Job | None:
        parked = (each for each in self._jobs.values() if each.parked is not None and not each.over)
        return min(parked, key=lambda each: each.stage_s, default=None)

    def _move(self, job: Job, stage: Stage) -> None:
        job.stage = stage
        job.stage_s = self._clock()

    def _remember(self, handoff: bytes) -> None:
        if len(self._used) >= _USED:
            del self._used[next(iter(self._used))]
        self._used[handoff] = None


def _taken(job: Job) -> bool:
    return job.parked is None
