"""The scheduler's side: which requests are handed off, which of their rows are there after a step, when they are over.

It runs in vLLM's engine core and sees requests and block tables, never memory. It says what it knows to the workers'
side with each step's metadata (`meta`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, Final, final

import msgspec

from pdhandoff.ids import HandoffId
from pdhandoff_vllm.blocks import BlockTables, table_slice
from pdhandoff_vllm.config import Config
from pdhandoff_vllm.hooks import LOG
from pdhandoff_vllm.mark import Claim, Refusal, answer, read_mark
from pdhandoff_vllm.meta import NOTHING, Begin, Chunk, Commit, StepMeta, WorkerReport
from pdhandoff_vllm.notes import Inbox, Postbox
from pdhandoff_vllm.objections import are_choices, objection

__all__ = ["Facts", "SchedulerSide"]

_REMEMBERED_IDS: Final = 4096
"handoff ids that were used: a second use is refused while it is among them"
_OUTCOME_S: Final = 5.0
"how long an engine without requests is kept awake for the outcomes of handoffs"
_ABORTED: Final = "FINISHED_ABORTED"


@final
class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What the scheduler's side knows of the engine."""

    group_tokens: tuple[int, ...]
    "tokens in a block, for each cache group"
    max_model_len: int
    draft_tokens: int = 0
    "that vLLM speculates per step"
    ranks: int = 1
    "workers that hand off"


class _Live:
    """A request that is handed off, from its arrival to its end."""

    __slots__ = ("begun", "claim", "committed", "ended", "failed", "prompt_tokens", "request", "sent")

    def __init__(self, request: Any, claim: Claim) -> None:
        self.request = request
        self.claim = claim
        self.prompt_tokens = int(request.num_prompt_tokens)
        self.sent = 0
        "tokens whose rows the workers have been told of"
        self.begun = False
        self.committed = False
        self.ended = 0
        "ranks on which the handoff is over"
        self.failed = ""

    @property
    def first_token(self) -> int | None:
        """The first token that vLLM generated, once there is one."""
        generated = self.request.output_token_ids
        return int(generated[0]) if len(generated) else None

    def answer(self) -> dict[str, Any]:
        """What the client gets back."""
        return answer(
            handoff=str(self.claim.handoff),
            consumer=str(self.claim.consumer),
            prompt_tokens=self.prompt_tokens,
            first_token=self.first_token,
            reason=self.failed,
        )


@final
class SchedulerSide:
    """See the module's text. All methods are called by the engine core's one thread.

    Args:
        config: the operator's.
        facts: of the engine.
        clock: monotonic seconds.
    """

    def __init__(self, config: Config, facts: Facts, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._facts = facts
        self._clock = clock
        self._destinations = config.destinations()
        self._live: dict[str, _Live] = {}
        self._refused: dict[str, tuple[Refusal, int]] = {}
        self._used: dict[HandoffId, None] = {}
        self._tables = BlockTables()
        self._inbox = Inbox()
        self._cancels: dict[str, str] = {}
        self._commits: dict[str, Commit] = {}
        self._held: dict[str, None] = {}
        self._ending: dict[str, tuple[int, float]] = {}
        "requests that have finished: ranks whose outcome is not known, and until when it is waited for"

    # ---- hooks, in the order of a request's life

    def on_new_request(self, request: Any) -> None:
        """A request arrives: is it marked?"""
        params = request.kv_transfer_params
        if not params:
            return
        found = read_mark(params, self._config, self._destinations)
        if found is None:
            return
        if isinstance(found, Claim):
            reason = self._objection(request, found)
            if not reason:
                self._claim(request, found)
                return
            found = Refusal(reason=reason, handoff=str(found.handoff), consumer=str(found.consumer))
        LOG.warning("request %s is not handed off: %s", request.request_id, found.reason)
        self._refused[request.request_id] = (found, int(request.num_prompt_tokens))

    def build_meta(self, scheduled: Any) -> StepMeta:
        """What the workers need to know of a step. `scheduled`: vLLM's SchedulerOutput."""
        if not (self._live or self._held or self._cancels or self._commits):
            return NOTHING
        restarts = [request for request in scheduled.preempted_req_ids or () if self._restart(request)]
        begins: list[Begin] = []
        chunks: list[Chunk] = []
        if self._live:
            self._look_for_first_tokens()  # before this step's chunks: the worker commits first, and pushes later
            steps = list(self._steps(scheduled))
            self._tables.update(scheduled, self._live)
            for request, computed in steps:
                live = self._live[request]
                if computed < live.sent and self._restart(request):  # rows are computed anew, for whatever reason
                    restarts.append(request)
                chunk = self._chunk(request, live, computed, scheduled)
                if chunk is None:
                    continue
                if not live.begun:
                    begins.append(_begin(request, live, self._inbox.postbox))
                    live.begun = True
                live.sent = chunk.stop
                chunks.append(chunk)
        meta = StepMeta(
            restarts=tuple(restarts),
            cancels=tuple(self._cancels.items()),
            begins=tuple(begins),
            commits=tuple(self._commits.values()),
            held=tuple(self._held),
            chunks=tuple(chunks),
        )
        self._cancels.clear()
        self._commits.clear()
        self._held.clear()
        return meta or NOTHING

    def request_finished(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        """A request has ended, in whatever way.

        Returns:
            Whether its blocks stay until a worker reports the request, and what the client gets back.
        """
        name = request.request_id
        if name not in self._live:
            return False, self._refusal(name)
        for note in self._inbox.read():
            self._note_failure(note.request, note.reason)
        live = self._live.pop(name)
        self._tables.forget(name)
        first = live.first_token
        if not live.begun:
            live.failed = live.failed or "it ended before its prefill began"
            return False, live.answer()
        if not live.committed and not live.failed:
            if request.status.name == _ABORTED or first is None or live.sent < live.prompt_tokens:
                live.failed = "the request ended before its prompt had been computed"
            else:
                self._commit(live, first)
        if live.failed:
            self._cancels[name] = live.failed
        self._held[name] = None
        if live.ended < self._facts.ranks:
            self._ending[name] = (self._facts.ranks - live.ended, self._clock() + _OUTCOME_S)
        return True, live.answer()

    def update_output(self, report: object) -> None:
        """What the workers report with a step's results."""
        if not isinstance(report, WorkerReport):
            return
        for request, reason in report.failed.items():
            self._note_failure(request, reason)
        for request, ranks in report.ended.items():
            live = self._live.get(request)
            if live is not None:
                live.ended += ranks
            waited = self._ending.pop(request, None)
            if waited is not None and waited[0] > ranks:
                self._ending[request] = (waited[0] - ranks, waited[1])

    def has_pending_work(self) -> bool:
        """Whether the engine must make steps although it has no requests: outcomes are on their way to the metrics."""
        if not self._ending:
            return False
        now = self._clock()
        for request in [request for request, (_, until) in self._ending.items() if now > until]:
            del self._ending[request]
        return bool(self._ending)

    def close(self) -> None:
        """The engine ends."""
        self._inbox.close()

    def fault(self, hook: str, error: Exception) -> None:
        """A hook has raised: no handoff of which a chunk may be missing can succeed."""
        reason = f"fault in the connector's {hook}: {type(error).__name__}: {error}"
        self._cancels.update(dict.fromkeys(self._commits, reason))
        for request, live in self._live.items():
            if request in self._commits or not live.committed:
                live.failed = live.failed or reason
                if live.begun:
                    self._cancels[request] = live.failed
        self._commits.clear()

    # ---- inside

    def _objection(self, request: Any, claim: Claim) -> str:
        """Why a marked request cannot be handed off; empty: it can."""
        if request.request_id in self._live:
            return "a request with this id is being handed off already"
        if claim.handoff in self._used:
            return self._used_before(request.request_id, claim)
        return objection(
            request,
            longest=self._config.tilert_max_seq_len,
            draft_tokens=self._facts.draft_tokens,
            max_model_len=self._facts.max_model_len,
        )

    def _used_before(self, name: str, claim: Claim) -> str:
        """Another request has the same handoff: a retry, or another choice of one request. Then none is handed off."""
        for other, live in self._live.items():
            if live.claim.handoff == claim.handoff and are_choices(other, name):
                live.failed = "several choices share one mark: ask for one choice (n=1)"
                if live.begun:
                    self._cancels[other] = live.failed
                return live.failed
        return f"handoff {claim.handoff} was used before: mint a new id for every attempt"

    def _claim(self, request: Any, claim: Claim) -> None:
        self._live[request.request_id] = _Live(request, claim)
        self._used[claim.handoff] = None
        if len(self._used) > _REMEMBERED_IDS:
            del self._used[next(iter(self._used))]

    def _refusal(self, name: str) -> dict[str, Any] | None:
        found = self._refused.pop(name, None)
        if found is None:
            return None
        refusal, prompt_tokens = found
        return answer(
            handoff=refusal.handoff,
            consumer=refusal.consumer,
            prompt_tokens=prompt_tokens,
            first_token=None,
            reason=refusal.reason,
        )

    def _note_failure(self, request: str, reason: str) -> None:
        live = self._live.get(request)
        if live is not None:
            live.failed = live.failed or reason

    def _restart(self, request: str) -> bool:
        """A request was preempted. Whether the workers have rows of it that are lost now."""
        live = self._live.get(request)
        if live is None:
            return False
        self._tables.forget(request)
        self._commits.pop(request, None)
        lost = live.begun
        live.sent, live.committed = 0, False
        return lost

    def _steps(self, scheduled: Any) -> Iterator[tuple[str, int]]:
        """(request, tokens computed before this step) of every live request that this step computes."""
        for new in scheduled.scheduled_new_reqs:
            if new.req_id in self._live:
                yield new.req_id, int(new.num_computed_tokens)
        cached = scheduled.scheduled_cached_reqs
        for index, request in enumerate(cached.req_ids):
            if request in self._live:
                yield request, int(cached.num_computed_tokens[index])

    def _chunk(self, request: str, live: _Live, computed: int, scheduled: Any) -> Chunk | None:
        """The rows of the prompt that are new with this step; look-ahead and draft slots are none."""
        stop = min(computed + scheduled.num_scheduled_tokens.get(request, 0), live.prompt_tokens)
        if live.failed or stop <= live.sent:
            return None
        table = self._tables.of(request, scheduled)
        blocks = tuple(
            table_slice(ids, range(live.sent, stop), tokens)
            for ids, tokens in zip(table, self._facts.group_tokens, strict=True)
        )
        return Chunk(request=request, start=live.sent, stop=stop, blocks=blocks)

    def _look_for_first_tokens(self) -> None:
        """Commit what is complete: a request that goes on decoding here does not keep the decode side waiting."""
        for live in self._live.values():
            if live.sent == live.prompt_tokens and not live.committed and not live.failed:
                first = live.first_token
                if first is not None:
                    self._commit(live, first)

    def _commit(self, live: _Live, first_token: int) -> None:
        name = live.request.request_id
        live.committed = True
        self._commits[name] = Commit(
            request=name, last_token=int(live.request.prompt_token_ids[-1]), first_token=first_token
        )


def _begin(request: str, live: _Live, postbox: Postbox) -> Begin:
    claim = live.claim
    return Begin(
        request=request,
        handoff=bytes(claim.handoff),
        consumer=(claim.consumer.host, claim.consumer.port),
        prompt_tokens=live.prompt_tokens,
        queue_s=claim.queue_s,
        traceparent=claim.traceparent,
        postbox=postbox,
    )
