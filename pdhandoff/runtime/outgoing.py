"""What an engine holds of a handoff that it sends: push chunks, commit, and wait for the outcome if it wants to."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Final, final

from pdhandoff.errors import ErrorCode, HandoffFailed, LocalError
from pdhandoff.ids import HandoffId
from pdhandoff.limits import DEFAULT_LIMITS, Limits
from pdhandoff.protocol.attachments import DTYPES, attach_int
from pdhandoff.protocol.manifest import Manifest
from pdhandoff.protocol.messages import Attachment, AttachmentSpec
from pdhandoff.runtime.chunks import Chunk, Event
from pdhandoff.runtime.numbers import whole_number
from pdhandoff.runtime.tables import BlockTable

if TYPE_CHECKING:
    from pdhandoff.runtime.producer import Producer
    from pdhandoff.runtime.routes import Routes

__all__ = ["STANDARD_VALUES", "Outgoing", "check_specs"]

_MOST_NAME: Final = 64
_MOST_AXES: Final = 8
"as the messages of the protocol allow"

STANDARD_VALUES: Final = (
    AttachmentSpec(name="last_token", dtype="i64"),
    AttachmentSpec(name="first_token", dtype="i64"),
)
"what `commit` may attach unless the offer declares otherwise"


def check_specs(specs: Sequence[AttachmentSpec], limits: Limits) -> None:
    """Refuse attachments that no consumer could read. Raises LocalError(ATTACHMENT) that names the first."""
    if len(specs) > limits.max_attachments:
        raise LocalError(
            ErrorCode.ATTACHMENT,
            f"{len(specs)} attachments exceed {limits.max_attachments}: pack some of them together",
        )
    for spec in specs:
        if not 0 < len(spec.name) <= _MOST_NAME or len(spec.shape) > _MOST_AXES or spec.dtype not in DTYPES:
            raise LocalError(
                ErrorCode.ATTACHMENT,
                f"attachment {spec.name[:_MOST_NAME]!r} needs a name of 1 to {_MOST_NAME} characters, at most "
                f"{_MOST_AXES} axes, and one of the dtypes {', '.join(DTYPES)}",
            )


@final
class Outgoing:
    """One shard of one handoff on its way out. Its methods may be called from any thread and never block.

    Attributes:
        handoff: its id.
        settled: a future: None when the consumer is READY; HandoffFailed otherwise.
        source_free: set when no source page is read any more; only then may pages be reused, unless a chunk's own
            `source_free` says so earlier.
    """

    def __init__(self, producer: Producer, handoff: HandoffId, prompt_tokens: int, *, digest: bool) -> None:
        self._producer = producer
        self.handoff = handoff
        self.prompt_tokens = prompt_tokens
        self.digest = digest
        self.settled: Future[None] = Future()
        self.settled.set_running_or_notify_cancel()  # only `cancel` below ends a handoff
        self.source_free = threading.Event()
        # everything below belongs to the producer's loop
        self.offered = False
        self.queue_ms = 0
        self.traceparent = ""
        self.manifest: Manifest | None = None
        self.attachments: tuple[Attachment, ...] = ()
        self.declares: tuple[AttachmentSpec, ...] = ()
        self.chunks: list[Chunk] = []
        self.epoch = 0
        self.commit_with: tuple[Attachment, ...] | None = None
        self.digest_sum = 0
        self.quiet = False
        "no write of it reads anything any more, and none will"
        self.handed: deque[Chunk] = deque()
        "chunks that the engine has handed over and the loop has not seen: a device may copy them already"
        # these two are set by the loop and read by the engine's thread
        self.granted = False
        self.routes: Routes | None = None

    def push(self, block_table: BlockTable, *, tokens: range, after: Event | None = None) -> Chunk:
        """Hand over rows `tokens` of every component.

        Args:
            block_table: the pages that hold the request's tokens, from token 0. It is copied; ids of look-ahead pages
                do no harm.
            tokens: positions in the prompt; ranges of successive pushes may come in any order.
            after: the rows may be read once it has happened. Default: now.

        Returns:
            The chunk; its `source_free` is set when its pages are not read any more.

        Raises:
            LocalError: tokens lie outside the prompt, or the table is too short for them.
        """
        chunk = self._chunk(block_table, tokens, after)
        self.handed.append(chunk)
        self._producer.push(self, chunk)
        return chunk

    def stage(self, block_table: BlockTable, *, tokens: range, stream: int = 0, after: Event | None = None) -> Chunk:
        """Copy rows `tokens` of every component into the ring now, from the engine's own thread, if there is room.

        It never waits. In GPU memory it launches one gather on `stream`; in CPU memory it copies before it returns.
        Where that is not possible at once (no room in the ring, or the consumer has not answered yet), it is `push`.

        Args:
            block_table: as for `push`.
            tokens: as for `push`.
            stream: GPU memory: the CUDA stream (its handle) on which the rows were computed.
            after: only asked for a chunk that could not be staged: its rows may be read once it has happened. In GPU
                memory an event that was recorded on `stream`; leaving it out means that the rows are there now.

        Returns:
            The chunk. `staged` is True: work that is launched on `stream` from now on may overwrite its pages.
            False: they are held until its `source_free` is set.

        Raises:
            LocalError: as `push`.
        """
        chunk = self._chunk(block_table, tokens, after)
        self.handed.append(chunk)
        self._producer.stage(self, chunk, stream)
        return chunk

    def _chunk(self, block_table: BlockTable, tokens: range, after: Event | None) -> Chunk:
        if tokens.step != 1 or not 0 <= tokens.start <= tokens.stop <= self.prompt_tokens:
            raise LocalError(
                ErrorCode.OUT_OF_RANGE, f"tokens {tokens} lie outside the prompt of {self.prompt_tokens} tokens"
            )
        if after is not None and not callable(getattr(after, "query", None)):
            raise LocalError(
                ErrorCode.MISUSE, f"after must have a query() that says whether it has happened, not {after!r}"
            )
        return Chunk(tokens, self._producer.page_tables(block_table, tokens), after, self.epoch)

    def commit(
        self,
        *,
        last_token: int | None = None,
        first_token: int | None = None,
        attachments: Sequence[Attachment] = (),
    ) -> None:
        """Say that every row has been pushed. Values that the engine learns only now may be attached, if declared."""
        values = list(attachments)
        if last_token is not None:
            values.append(attach_int("last_token", whole_number("last_token", last_token)))
        if first_token is not None:
            values.append(attach_int("first_token", whole_number("first_token", first_token)))
        check_specs([value.spec for value in values], DEFAULT_LIMITS)
        self._producer.commit(self, tuple(values))

    def restart(self) -> None:
        """The source rows are lost (preemption): everything will be pushed again, under the same grant."""
        self._producer.restart(self)

    def cancel(self, reason: str = "cancelled by the engine") -> None:
        """End it. Idempotent; what is in flight drains, and `source_free` says when."""
        self._producer.cancel(self, reason)

    def wait(self, timeout_s: float | None = None) -> None:
        """Block until READY. Raises HandoffFailed, or TimeoutError. Not for an engine's thread."""
        self.settled.result(timeout_s)

    # ---- called by the producer

    def free_chunk(self, chunk: Chunk) -> None:
        """Nobody reads this chunk's pages any more."""
        chunk.free_source()
        self.settle_source()

    def settle_source(self) -> None:
        """Say that all pages are free, if that is so: the mover is quiet, and no copy of a chunk is under way."""
        chunks = (*self.handed, *self.chunks)
        if self.quiet and all(chunk.source_free.is_set() for chunk in chunks):
            self.source_free.set()

    def free_source(self) -> None:
        """Nobody reads source pages any more."""
        for chunk in (*self.handed, *self.chunks):
            chunk.free_source()
        self.source_free.set()

    def succeed(self) -> None:
        """READY."""
        if not self.settled.done():
            self.settled.set_result(None)

    def fail(self, code: int, reason: str) -> None:
        """It has ended without success."""
        if not self.settled.done():
            self.settled.set_exception(HandoffFailed(code, reason))
