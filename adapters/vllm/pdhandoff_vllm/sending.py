"""One request's handoff on one worker: what it has pushed, and when its blocks may go."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, final

from pdhandoff.errors import ErrorCode, HandoffFailed, PdHandoffError
from pdhandoff.ids import HandoffId
from pdhandoff_vllm.notes import Postbox

if TYPE_CHECKING:
    from pdhandoff.runtime.chunks import Chunk
    from pdhandoff.runtime.outgoing import Outgoing

__all__ = ["Outcome", "Sending"]


@final
class Outcome:
    """How a handoff ended on this rank, with its times in seconds from the offer."""

    __slots__ = ("code", "committed_s", "nbytes", "reason", "request", "settled_s", "tokens")

    def __init__(self, sending: Sending, now: float, error: PdHandoffError | None) -> None:
        self.request = sending.request
        self.tokens = sending.prompt_tokens
        self.nbytes = sending.nbytes
        self.code = 0 if error is None else int(error.code)
        self.reason = "" if error is None else error.reason
        self.settled_s = now - sending.offered
        committed = sending.committed_at
        self.committed_s = None if committed is None else committed - sending.offered


@final
class Sending:
    """See the module's text. Everything but `settled` is called by vLLM's worker thread.

    Args:
        request: vLLM's id.
        handoff: its id.
        consumer: where it goes, for people.
        prompt_tokens: length of the prompt.
        now: monotonic seconds.
        ended: called once, from any thread, with the outcome.
        postbox: where bad news goes.
    """

    def __init__(
        self,
        *,
        request: str,
        handoff: HandoffId,
        consumer: str,
        prompt_tokens: int,
        now: Callable[[], float],
        ended: Callable[[Sending, Outcome], None],
        postbox: Postbox = Postbox(),  # noqa: B008 - a tuple
    ) -> None:
        self.request = request
        self.handoff = handoff
        self.consumer = consumer
        self.prompt_tokens = prompt_tokens
        self.postbox = postbox
        self.offered = now()
        self.committed_at: float | None = None
        self.released_at: float | None = None
        "when vLLM left the blocks to us"
        self.finished = False
        "vLLM's scheduler has said that the request is over"
        self.expired_at: float | None = None
        "when the handoff was ended because it kept its blocks for too long"
        self.sealed = False
        "all rows are out of the blocks, and the first token is known: nothing that happens to the request matters"
        self.nbytes = 0
        "of rows pushed"
        self.block_bytes = 0
        "of the blocks that hold them"
        self._now = now
        self._ended = ended
        self._over = False
        self._once = threading.Lock()
        "taken by whoever tells the outcome; nobody waits for it"
        self._outgoing: Outgoing | None = None
        self._chunks: list[Chunk] = []

    @property
    def over(self) -> bool:
        """It has its outcome: nothing more is pushed."""
        return self._over

    @property
    def quiet(self) -> bool:
        """Whether its blocks are not read any more, and will not be."""
        while self._chunks and self._chunks[-1].source_free.is_set():
            self._chunks.pop()
        return not self._chunks

    def start(self, outgoing: Outgoing) -> None:
        """The library has taken the offer."""
        self._outgoing = outgoing
        outgoing.settled.add_done_callback(self._settled)

    def push(self, give: Callable[[Outgoing], Chunk]) -> None:
        """Hand a chunk to the library. `give` pushes, or stages."""
        if self._outgoing is None or self._over or self.sealed:
            return
        try:
            self._chunks.append(give(self._outgoing))
        except PdHandoffError as error:
            self.fail(error)

    def commit(self, last_token: int, first_token: int) -> None:
        """Every chunk has been pushed, and the first token is known."""
        if self._outgoing is None or self._over or self.sealed:
            return
        self.committed_at = self._now()
        try:
            self._outgoing.commit(last_token=last_token, first_token=first_token)
        except PdHandoffError as error:
            self.fail(error)

    def restart(self) -> None:
        """The request was preempted: its blocks are gone."""
        if self._outgoing is None or self._over:
            return
        if self.committed_at is not None and self.quiet:
            self.sealed = True
            return
        self.committed_at = None
        self.nbytes = self.block_bytes = 0
        self._outgoing.restart()

    def fail(self, error: PdHandoffError) -> None:
        """End it without success. What still reads its blocks drains: `quiet` says when."""
        if self._outgoing is not None:
            self._outgoing.cancel(error.reason)
        self._end(error)

    def _settled(self, future: Future[None]) -> None:
        """Called by the library, on a thread of its own."""
        error = future.exception()
        if error is None or isinstance(error, PdHandoffError):
            self._end(error)
        else:
            self._end(HandoffFailed(ErrorCode.INTERNAL, f"{type(error).__name__}: {error}"))

    def _end(self, error: PdHandoffError | None) -> None:
        if self._once.acquire(blocking=False):
            self._over = True
            self._ended(self, Outcome(self, self._now(), error))
