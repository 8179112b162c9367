"""What the two sides of the connector tell one another through vLLM, step by step.

vLLM serialises these with each step, so they are small: a step without handoffs sends `NOTHING`.
"""

from __future__ import annotations

from typing import Final, final

import msgspec

from pdhandoff_vllm.notes import Postbox

__all__ = ["NOTHING", "Begin", "Chunk", "Commit", "StepMeta", "WorkerReport"]


@final
class Begin(msgspec.Struct, frozen=True, kw_only=True):
    """A handoff whose first chunk is in this step."""

    request: str
    handoff: bytes
    consumer: tuple[str, int]
    "host and port"
    prompt_tokens: int
    queue_s: float
    traceparent: str = ""
    postbox: Postbox = Postbox()
    "where the worker sends bad news"


@final
class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """Rows that are there when this step has run."""

    request: str
    start: int
    stop: int
    "tokens of the prompt"
    blocks: tuple[tuple[int, ...], ...]
    "for each cache group, the blocks that hold the tokens: the first one holds token `start`"


@final
class Commit(msgspec.Struct, frozen=True, kw_only=True):
    """Every chunk has been sent, and the first token is known."""

    request: str
    last_token: int
    "of the prompt"
    first_token: int
    "that vLLM generated"


@final
class StepMeta(msgspec.Struct, frozen=True, kw_only=True):
    """From the scheduler's side to the workers' with one step. A worker takes the fields in this order."""

    restarts: tuple[str, ...] = ()
    "requests that were preempted: their rows are lost and come again"
    cancels: tuple[tuple[str, str], ...] = ()
    "requests whose handoff ends without success, and why"
    begins: tuple[Begin, ...] = ()
    commits: tuple[Commit, ...] = ()
    held: tuple[str, ...] = ()
    "requests that have finished, and whose blocks stay until the worker reports them"
    chunks: tuple[Chunk, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.restarts or self.cancels or self.begins or self.commits or self.held or self.chunks)


NOTHING: Final = StepMeta()
"a step without handoffs"


@final
class WorkerReport(msgspec.Struct, kw_only=True):
    """From a worker to the scheduler's side with the results of a step."""

    failed: dict[str, str] = {}
    "requests whose handoff has failed on this rank, and why"
    ended: dict[str, int] = {}
    "requests whose handoff is over, and on how many ranks"

    def aggregate(self, other: WorkerReport) -> WorkerReport:
        """Both together; the first failure of a request counts."""
        ended = dict(self.ended)
        for request, ranks in other.ended.items():
            ended[request] = ended.get(request, 0) + ranks
        return WorkerReport(failed={**other.failed, **self.failed}, ended=ended)
