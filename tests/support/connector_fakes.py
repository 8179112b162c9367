"""Stand-ins for what vLLM and the library give the two sides of the connector: vLLM itself is not needed."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

from pdhandoff.errors import PdHandoffError
from pdhandoff.ids import HandoffId
from pdhandoff_vllm.config import Config, read_config

__all__ = [
    "FakeChunk",
    "FakeClock",
    "FakeOutgoing",
    "FakeProducer",
    "block_state",
    "config_of",
    "finish",
    "mark_of",
    "request_of",
    "step_of",
]


class FakeClock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def config_of(**keys: Any) -> Config:
    """A configuration that allows the loopback interface."""
    return read_config({"allow": ["127.0.0.1"], **keys})


def mark_of(handoff: HandoffId | None = None, **keys: Any) -> dict[str, Any]:
    """`kv_transfer_params` of a request that is to be handed off."""
    named = {} if handoff is None else {"handoff": str(handoff)}
    return {"pdhandoff": {"consumer": "127.0.0.1:5556", **named, **keys}}


def request_of(name: str, tokens: int, params: dict[str, Any] | None = None, **more: Any) -> SimpleNamespace:
    """vLLM's Request. It has generated nothing yet."""
    request = SimpleNamespace(
        request_id=name,
        kv_transfer_params=params,
        num_prompt_tokens=tokens,
        prompt_token_ids=[7 * at % 250 for at in range(tokens)],
        output_token_ids=[],
        status=SimpleNamespace(name="RUNNING"),
        prompt_embeds=None,
        pooling_params=None,
        mm_features=[],
        lora_request=None,
    )
    request.__dict__.update(more)
    return request


def finish(request: SimpleNamespace, *tokens: int, status: str = "FINISHED_LENGTH_CAPPED") -> SimpleNamespace:
    """It has generated these tokens and is over."""
    request.output_token_ids.extend(tokens)
    request.status = SimpleNamespace(name=status)
    return request


def block_state(tables: Mapping[str, Sequence[Sequence[int]]]) -> SimpleNamespace:
    """`kv_connector_block_state` of vLLM 0.32 and newer."""
    return SimpleNamespace(get_block_ids=tables.get)


def step_of(
    *,
    new: Sequence[tuple[str, int, Sequence[Sequence[int]]]] = (),
    cached: Sequence[tuple[str, int, Sequence[Sequence[int]] | None]] = (),
    tokens: Mapping[str, int] | None = None,
    preempted: set[str] | None = None,
    resumed: Sequence[str] = (),
    tables: Mapping[str, Sequence[Sequence[int]]] | None = None,
) -> SimpleNamespace:
    """vLLM's SchedulerOutput: (request, computed before, blocks) of new requests, and of those that go on."""
    output = SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, num_computed_tokens=computed, block_ids=blocks)
            for name, computed, blocks in new
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[name for name, _, _ in cached],
            num_computed_tokens=[computed for _, computed, _ in cached],
            new_block_ids=[blocks for _, _, blocks in cached],
            resumed_req_ids=set(resumed),
        ),
        num_scheduled_tokens=dict(tokens or {}),
        preempted_req_ids=preempted,
    )
    if tables is not None:
        output.kv_connector_block_state = block_state(tables)
    return output


class FakeChunk:
    """A chunk that the test lets go of."""

    def __init__(self, tables: Any, tokens: range, after: Any = None, stream: int = 0) -> None:
        self.tables = tables
        self.tokens = tokens
        self.after = after
        self.stream = stream
        self.source_free = threading.Event()


class FakeOutgoing:
    """Records what it is told."""

    def __init__(self, handoff: HandoffId) -> None:
        self.handoff = handoff
        self.settled: Future[None] = Future()
        self.chunks: list[FakeChunk] = []
        self.commits: list[tuple[int, int]] = []
        self.restarts = 0
        self.cancels: list[str] = []
        self.refuses: PdHandoffError | None = None
        "what the next push raises"

    def push(self, tables: Any, *, tokens: range, after: Any = None) -> FakeChunk:
        if self.refuses is not None:
            raise self.refuses
        self.chunks.append(FakeChunk(tables, tokens, after))
        return self.chunks[-1]

    def stage(self, tables: Any, *, tokens: range, stream: int = 0, after: Any = None) -> FakeChunk:
        self.chunks.append(FakeChunk(tables, tokens, after, stream))
        return self.chunks[-1]

    def commit(self, *, last_token: int, first_token: int) -> None:
        self.commits.append((last_token, first_token))

    def restart(self) -> None:
        self.restarts += 1

    def cancel(self, reason: str) -> None:
        self.cancels.append(reason)

    def free(self) -> None:
        """Nobody reads any page any more."""
        for chunk in self.chunks:
            chunk.source_free.set()


class FakeProducer:
    """Takes every offer, unless it is told not to."""

    def __init__(self) -> None:
        self.offers: dict[HandoffId, FakeOutgoing] = {}
        self.arguments: dict[HandoffId, dict[str, Any]] = {}
        self.refuses: PdHandoffError | None = None
        self.closed = False

    def offer(self, consumer: Any, handoff: HandoffId, **arguments: Any) -> FakeOutgoing:
        if self.refuses is not None:
            raise self.refuses
        self.arguments[handoff] = {"consumer": consumer, **arguments}
        self.offers[handoff] = FakeOutgoing(handoff)
        return self.offers[handoff]

    def close(self, drain_s: float) -> None:
        self.closed = drain_s > 0
