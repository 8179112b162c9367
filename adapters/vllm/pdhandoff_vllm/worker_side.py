"""The workers' side: pushes the rows of each step, and says when a request's blocks may go.

It runs on the thread of vLLM's forward pass, so nothing here waits for a network, a lock that somebody holds for long,
or the device: the library's own threads do.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol, final

from pdhandoff.engines.base import Mover
from pdhandoff.errors import ErrorCode, HandoffFailed, PdHandoffError
from pdhandoff.ids import HandoffId
from pdhandoff.layouts import Layout
from pdhandoff.layouts.catalogue import expand_blocks
from pdhandoff.planner import PageTable
from pdhandoff.runtime.address import Address
from pdhandoff_vllm.caches import Caches, piece_tokens
from pdhandoff_vllm.config import Config
from pdhandoff_vllm.hooks import LOG
from pdhandoff_vllm.meta import Begin, Chunk, StepMeta, WorkerReport
from pdhandoff_vllm.notes import Outbox
from pdhandoff_vllm.sending import Outcome, Sending
from pdhandoff_vllm.tally import Tally

if TYPE_CHECKING:
    from pdhandoff.runtime import chunks
    from pdhandoff.runtime.outgoing import Outgoing
    from pdhandoff.runtime.producer import Producer
    from pdhandoff.runtime.tables import BlockTable

__all__ = ["Device", "WorkerSide"]

_DRAIN_S: Final = 10.0
"after a handoff that kept its blocks for too long was ended: how long its writes may go on before the blocks go anyway"
_GRACE_S: Final = 1.0
"blocks that are kept for a shorter time than this are no burden"
_CLOSE_S: Final = 5.0
_NULL_BLOCK: Final = 0
"vLLM's block that is never real"


class Device(Protocol):
    """Where the caches are."""

    def stream(self) -> int:
        """Handle of the stream that the forward pass runs on; 0 in CPU memory."""

    def event(self) -> Any:
        """An event after everything that was launched on that stream so far; None in CPU memory."""


@final
class WorkerSide:
    """See the module's text.

    Args:
        config: the operator's.
        caches: this worker's.
        producer: that sends them. It is closed by `shutdown`.
        mover: closed after it; None: the producer's own.
        device: None: the caches are in CPU memory.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        config: Config,
        caches: Caches,
        producer: Producer,
        *,
        mover: Mover | None = None,
        device: Device | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._caches = caches
        self._producer = producer
        self._mover = mover
        self._device = device
        self._clock = clock
        self._row_bytes = sum(len(each.layers) * each.row_bytes for each in caches.layout.components)
        self._piece_tokens = piece_tokens(config, caches)
        self._hold_bytes = config.hold_bytes or max(1, caches.nbytes // 2)
        self._sendings: dict[str, Sending] = {}
        "requests whose handoff this worker knows of, until their blocks have been given back"
        self._held: dict[str, Sending] = {}
        "those whose blocks vLLM has left to us, oldest first"
        self._outcomes: deque[Outcome] = deque()
        "appended to by the library's thread"
        self._outbox = Outbox()
        self._tally = Tally()
        self._failed: dict[str, str] = {}
        self._ended: dict[str, int] = {}

    @property
    def layout(self) -> Layout:
        """What this worker hands off."""
        return self._caches.layout

    # ---- hooks, in the order of a step

    def handle_preemptions(self, meta: StepMeta) -> None:
        """Before anything is overwritten: rows of preempted requests are lost."""
        for request in meta.restarts:
            sending = self._sendings.get(request)
            if sending is not None:
                sending.restart()

    def bind(self, meta: StepMeta) -> None:
        """Before the forward pass: offers go out while it computes."""
        begins = [(begin, self._known(begin)) for begin in meta.begins]  # first: a fault below must find them
        for request, reason in meta.cancels:
            self._give_up(request, HandoffFailed(ErrorCode.CANCELLED, reason))
        for begin, known in begins:
            self._offer(begin, known)
        for commit in meta.commits:
            sending = self._sendings.get(commit.request)
            if sending is not None:
                sending.commit(commit.last_token, commit.first_token)
        for request in meta.held:
            self._hold(request)

    def wait_for_save(self, meta: StepMeta) -> None:
        """After the forward pass, and the draft pass: the rows of this step are there, or will be in stream order."""
        if not meta.chunks:
            return
        event = None if self._device is None else self._device.event()
        for chunk in meta.chunks:
            sending = self._sendings.get(chunk.request)
            if sending is not None and not sending.over:
                self._push(sending, chunk, event)

    def finished(self, requests: set[str]) -> set[str] | None:
        """Requests whose blocks may go. `requests`: those that vLLM says are over."""
        if not self._sendings:
            return None
        for request in requests:
            sending = self._sendings.get(request)
            if sending is not None:
                sending.finished = True
        if not self._held:
            return None
        self._bound_held()
        free = {request for request, sending in self._held.items() if sending.finished and self._may_go(sending)}
        for request in free:
            del self._held[request]
            del self._sendings[request]
        return free or None

    def tally(self) -> Tally | None:
        """What has ended since it was asked last, for the metrics."""
        self._collect()
        if self._tally.empty:
            return None
        tally, self._tally = self._tally, Tally()
        return tally

    def report(self) -> WorkerReport | None:
        """What the scheduler's side should know."""
        self._collect()
        if not (self._failed or self._ended):
            return None
        report = WorkerReport(failed=self._failed, ended=self._ended)
        self._failed, self._ended = {}, {}
        return report

    def shutdown(self) -> None:
        """End what is under way and give everything back, within seconds."""
        self._producer.close(_CLOSE_S)
        self._outbox.close()
        if self._mover is not None:
            self._mover.close()

    def fault(self, hook: str, error: Exception, meta: StepMeta) -> None:
        """A hook has raised: end every handoff, and go on giving blocks back.

        What the step's metadata said of requests may not have been taken in: handoffs that begin fail too, and blocks
        that were left to us are.
        """
        for begin in meta.begins:
            if begin.request not in self._sendings:
                self._known(begin)
        for request in meta.held:
            if request not in self._held:
                self._hold(request)
        failure = HandoffFailed(ErrorCode.INTERNAL, f"fault in the connector's {hook}: {type(error).__name__}: {error}")
        for sending in list(self._sendings.values()):
            if not sending.over and not sending.sealed:
                sending.fail(failure)

    # ---- inside

    def _known(self, begin: Begin) -> Sending:
        self._outbox.open(begin.postbox)
        sending = self._sendings[begin.request] = Sending(
            request=begin.request,
            handoff=HandoffId(begin.handoff),
            consumer=str(Address(*begin.consumer)),
            prompt_tokens=begin.prompt_tokens,
            now=self._clock,
            ended=self._note_end,
            postbox=begin.postbox,
        )
        return sending

    def _offer(self, begin: Begin, sending: Sending) -> None:
        try:
            outgoing = self._producer.offer(
                Address(*begin.consumer),
                sending.handoff,
                prompt_tokens=begin.prompt_tokens,
                queue_s=begin.queue_s,
                traceparent=begin.traceparent,
            )
        except PdHandoffError as error:
            sending.fail(error)
            return
        sending.start(outgoing)

    def _push(self, sending: Sending, chunk: Chunk, event: Any) -> None:
        """Hand over a chunk in pieces that the ring takes."""
        tables = self._tables(chunk)
        device = self._device
        for start in range(chunk.start, chunk.stop, self._piece_tokens):
            tokens = range(start, min(start + self._piece_tokens, chunk.stop))
            if device is None:
                sending.push(partial(_push, tables, tokens))
            else:
                sending.push(partial(_stage, tables, tokens, device.stream(), event))
        sending.nbytes += (chunk.stop - chunk.start) * self._row_bytes
        sending.block_bytes += sum(
            len(blocks) * nbytes for blocks, nbytes in zip(chunk.blocks, self._caches.block_bytes, strict=False)
        )

    def _tables(self, chunk: Chunk) -> Mapping[str, PageTable]:
        """One table of kernel pages per component."""
        tables: dict[str, PageTable] = {}
        for component in self._caches.layout.components:
            group, factor = self._caches.groups[component.name]
            block_tokens = component.page_tokens * factor
            pages = expand_blocks(
                chunk.blocks[group], block_tokens=block_tokens, page_tokens=component.page_tokens, null=_NULL_BLOCK
            )
            first = chunk.start // block_tokens * block_tokens
            tables[component.name] = PageTable(pages, component.page_tokens, first, null=_NULL_BLOCK)
        return tables

    def _give_up(self, request: str, error: PdHandoffError) -> None:
        sending = self._sendings.get(request)
        if sending is not None and not sending.over and not sending.sealed:
            sending.fail(error)

    def _hold(self, request: str) -> None:
        """The blocks of a request are left to us."""
        sending = self._sendings.get(request)
        if sending is None:  # its beginning was lost to a fault: nobody reads its blocks, and it has to be reported
            sending = self._sendings[request] = Sending(
                request=request,
                handoff=HandoffId.mint(),
                consumer="",
                prompt_tokens=0,
                now=self._clock,
                ended=self._note_end,
            )
        sending.released_at = self._clock()
        self._held[request] = sending

    def _may_go(self, sending: Sending) -> bool:
        if sending.quiet:
            return True
        now, released = self._clock(), sending.released_at
        if sending.expired_at is None:
            if released is not None and now >= released + self._config.hold_s:
                self._expire(sending, f"it kept its blocks for more than hold_s, {self._config.hold_s:g} s")
            return sending.quiet
        if now < sending.expired_at + _DRAIN_S:
            return False
        LOG.warning(
            "blocks of request %s go back while a write that cannot be stopped may read them: its handoff has ended, "
            "and nobody will read what it writes",
            sending.request,
        )
        self._tally.stuck += 1
        return True

    def _expire(self, sending: Sending, reason: str) -> None:
        sending.expired_at = self._clock()
        self._tally.expired += 1
        if not sending.over:
            sending.fail(HandoffFailed(ErrorCode.LEASE_EXPIRED, f"{reason}: start fewer handoffs at once"))

    def _bound_held(self) -> None:
        """Blocks that finished requests keep are blocks that others lack: the oldest go first."""
        total, now = 0, self._clock()
        for sending in reversed(self._held.values()):
            released = sending.released_at
            if sending.quiet or released is None or now < released + _GRACE_S:
                continue
            total += sending.block_bytes
            if total > self._hold_bytes and sending.expired_at is None:
                self._expire(sending, f"finished requests kept more than hold_bytes, {self._hold_bytes}, together")

    def _note_end(self, sending: Sending, outcome: Outcome) -> None:
        """A handoff has its outcome. Called from any thread."""
        self._outcomes.append(outcome)
        if outcome.code:
            self._outbox.send(sending.postbox, outcome.request, outcome.reason)
        after = (
            ""
            if outcome.committed_s is None
            else f", {1e3 * (outcome.settled_s - outcome.committed_s):.1f} after commit"
        )
        LOG.log(
            logging.WARNING if outcome.code else logging.INFO,
            "handoff %s of request %s to %s: %s; %d tokens, %.1f MiB, %.1f ms from the offer%s",
            sending.handoff,
            sending.request,
            sending.consumer,
            "ready" if outcome.code == 0 else f"failed: {outcome.reason}",
            outcome.tokens,
            outcome.nbytes / (1 << 20),
            1e3 * outcome.settled_s,
            after,
        )

    def _collect(self) -> None:
        while self._outcomes:
            outcome = self._outcomes.popleft()
            self._tally.add(outcome)
            self._ended[outcome.request] = 1
            if outcome.code:
                self._failed[outcome.request] = outcome.reason


def _push(tables: BlockTable, tokens: range, outgoing: Outgoing) -> chunks.Chunk:
    return outgoing.push(tables, tokens=tokens)


def _stage(tables: BlockTable, tokens: range, stream: int, event: Any, outgoing: Outgoing) -> chunks.Chunk:
    return outgoing.stage(tables, tokens=tokens, stream=stream, after=event)
