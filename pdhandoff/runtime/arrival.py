"""What a decode engine holds of a handoff that it waits for, and of one that has arrived."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self, final

from pdhandoff.errors import ErrorCode, HandoffFailed, LocalError, PdHandoffError
from pdhandoff.ids import HandoffId
from pdhandoff.layouts import Bridge, Component
from pdhandoff.native import Native
from pdhandoff.planner import PageTable, Placement
from pdhandoff.protocol.attachments import read_int
from pdhandoff.protocol.consumer import Claim
from pdhandoff.protocol.manifest import Manifest
from pdhandoff.protocol.messages import Attachment
from pdhandoff.runtime.early import EarlyDone
from pdhandoff.runtime.landed import LandedRows, Target, convert_rows, landed_rows

if TYPE_CHECKING:
    from pdhandoff.runtime.consumer import Consumer

__all__ = ["Arrival", "Ticket"]


@final
class Arrival:
    """A complete, checked handoff. Use as a context manager: leaving it frees the landing memory, however it ends.

    Attributes:
        handoff: its id.
        prompt_tokens: length of the prompt.
        start_token: rows before it did not move: this side holds them already.
        attachments: name -> value as it came.
        mtp_cold: there is no draft-layer state: start without drafts.
    """

    def __init__(
        self,
        consumer: Consumer,
        claim: Claim,
        sources: Mapping[int, Mapping[str, Component]],
        bridges: Mapping[int, Sequence[Bridge]],
        early: EarlyDone | None,
    ) -> None:
        self._consumer = consumer
        self._claim = claim
        self._sources = sources
        self._bridges = bridges
        self._early = early
        self._released = False
        first: Manifest = next(iter(claim.manifests.values()))
        self.handoff = claim.handoff
        self.prompt_tokens: Final = first.prompt_tokens
        self.start_token: Final = first.start_token
        self.attachments: Mapping[str, Attachment] = claim.attachments
        self.traceparent = claim.traceparent
        self.mtp_cold = any(bridge.mtp_cold for ranks in bridges.values() for bridge in ranks)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, where: TracebackType | None
    ) -> None:
        self.release()

    @property
    def nbytes(self) -> int:
        """Bytes of rows that moved."""
        return sum(manifest.nbytes for manifest in self._claim.manifests.values())

    def value(self, name: str) -> int:
        """A scalar integer attachment, for example "first_token". Raises LocalError when it did not come."""
        attachment = self.attachments.get(name)
        if attachment is None:
            have = ", ".join(sorted(self.attachments)) or "none"
            raise LocalError(ErrorCode.ATTACHMENT, f"no attachment {name!r} came with this handoff (there are: {have})")
        try:
            (value,) = read_int(attachment)
        except ValueError as error:
            raise LocalError(
                ErrorCode.ATTACHMENT, f"attachment {name!r} is no single i64: {attachment.spec}"
            ) from error
        return value

    def rows(self, destination: int = 0) -> list[LandedRows]:
        """The landed rows for one consumer rank. Raises LocalError after release."""
        self._check_held()
        return landed_rows(self._claim.manifests, self._claim.extents, self._sources, destination)

    def convert_into(
        self,
        caches: Mapping[str, Placement],
        *,
        pages: Mapping[str, PageTable] | None = None,
        zero_until: int = 0,
        destination: int = 0,
        native: Native | None = None,
    ) -> None:
        """Convert every landed row into the decode engine's caches, but for those that `Ticket.convert_early` has done.

        Args:
            caches: component name -> where it lives, as the consumer's layout describes it.
            pages: component name -> the pages that hold this request. Default: a contiguous cache, one page.
            zero_until: zero the rows from the end of the prompt to this token; for paged caches the end of the last
                page is the least, and is zeroed anyway.
            destination: rank of this consumer.
            native: what converts. Default: the consumer's.

        Raises:
            LocalError: released already or meanwhile, the consumer was closed, or caches and pages do not fit the
                layout. What is in the caches then is no state of any request.
        """
        self._check_held()
        engine = native or self._consumer.native
        target = Target(caches, pages, zero_until, destination)
        early = self._early if self._early is not None and self._early.target == target else None
        for landed in self.rows(destination):
            missing = [landed.tokens] if early is None else early.missing(landed, landed.tokens)
            for tokens in missing:
                bridge = self._bridges[landed.shard][destination]
                convert_rows(
                    engine, bridge, landed, target, tokens=tokens, prompt_tokens=self.prompt_tokens, sum_up=False
                )
        self._check_held()

    def _check_held(self) -> None:
        """The landing memory is this arrival's, and the consumer's."""
        if self._released:
            raise LocalError(ErrorCode.MISUSE, "this arrival was released: convert inside its with block")
        if self._consumer.closed:
            raise LocalError(ErrorCode.MISUSE, "the consumer was closed and its memory is gone: convert before that")

    def release(self) -> None:
        """Free the landing memory. Idempotent."""
        if not self._released:
            self._released = True
            self._consumer.release(self.handoff)


@final
class Ticket:
    """An announced handoff. `wait` from the engine's front end; `cancel` when the request goes away."""

    def __init__(self, consumer: Consumer, handoff: HandoffId) -> None:
        self._consumer = consumer
        self.handoff = handoff
        self.outcome: Future[Arrival] = Future()
        "set once: the arrival, or HandoffFailed. It cannot be cancelled: cancel the ticket"
        self.outcome.set_running_or_notify_cancel()
        self._lock = threading.Lock()
        self._waiting = 0
        self._early = False
        self._used: PdHandoffError | None = None
        "why there is nothing to take any more"

    def wait(self, timeout_s: float | None = None) -> Arrival:
        """The arrival, once every shard has landed and was checked.

        Raises:
            HandoffFailed: it ended without success.
            TimeoutError: not yet; the handoff goes on, wait again or cancel.
            LocalError: it was taken before: a reference can be used once.
        """
        with self._lock:
            self._waiting += 1
        self._consumer.want(self)
        try:
            self.outcome.result(timeout_s)
        except TimeoutError:
            pass  # what came at the last moment is taken all the same: it would be lost otherwise
        finally:
            with self._lock:
                self._waiting -= 1
        with self._lock:
            if not self.outcome.done():
                raise TimeoutError(f"handoff {self.handoff} has not arrived within {timeout_s} s")
            if self._used is not None:
                raise self._used
            arrival = self.outcome.result()
            reason = f"handoff {self.handoff} was taken before: a reference can be used once"
            self._used = LocalError(ErrorCode.DUPLICATE, reason)
        return arrival

    def convert_early(
        self,
        caches: Mapping[str, Placement],
        *,
        pages: Mapping[str, PageTable] | None = None,
        zero_until: int = 0,
        destination: int = 0,
        native: Native | None = None,
    ) -> None:
        """Convert rows into the decode engine's caches as they land, on the consumer's own thread. Returns at once.

        From now until `wait` has returned the arrival, or has raised anything but TimeoutError, the caches and pages
        are the library's. What is in them is no state of any request before the arrival's `convert_into` was called
        with the same arguments, which converts what is left; after HandoffFailed it never will be. Rows that a producer
        sends anew are converted anew, and a payload digest is taken of what the conversion has read.

        Args:
            caches: as for `Arrival.convert_into`, and so are the others.
            pages: see there.
            zero_until: see there.
            destination: see there.
            native: see there.

        Raises:
            LocalError: it was called before, the arrival was taken, or nothing that converts is installed.
        """
        engine = native or self._consumer.native
        with self._lock:
            if self._early or self._used is not None:
                raise LocalError(ErrorCode.MISUSE, "rows are converted early into one place, before they are taken")
            self._early = True
        self._consumer.convert_early(self, Target(caches, pages, zero_until, destination), engine)

    def cancel(self, reason: str = "cancelled by the decode side") -> None:
        """End it. Idempotent, never blocks; an arrival that nobody took is released."""
        self._consumer.cancel(self, reason)

    # ---- called by the consumer

    def give(self, claim: Callable[[], Arrival | None]) -> None:
        """It is ready: claim it, if somebody waits."""
        with self._lock:
            if self._waiting and not self.outcome.done():
                arrival = claim()
                if arrival is not None:
                    self.outcome.set_result(arrival)

    def take_back(self, reason: str) -> None:
        """It was cancelled: release an arrival that nobody took. One that was taken is its reader's."""
        with self._lock:
            if self._used is not None or not self.outcome.done() or self.outcome.exception() is not None:
                return
            self._used = HandoffFailed(ErrorCode.CANCELLED, reason)
        self.outcome.result().release()

    def fail(self, code: int, reason: str, shard: int | None = None) -> None:
        """It has ended."""
        with self._lock:
            if not self.outcome.done():
                self.outcome.set_exception(HandoffFailed(code, reason, shard=shard))
