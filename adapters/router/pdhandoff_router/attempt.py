"""One handoff: a prefill leg and a decode leg that run at the same time and end together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, Final, Self, final

import msgspec

from pdhandoff.ids import HandoffId
from pdhandoff_router.config import Config
from pdhandoff_router.decode_pool import Node
from pdhandoff_router.refusals import Refusal, from_answer
from pdhandoff_router.servers import Servers
from pdhandoff_router.transport import Events, Transport, read_json
from pdhandoff_router.wanted import Wanted

__all__ = ["GENERATE", "Attempt", "Output", "prefill_leg"]

GENERATE: Final = "/inference/v1/generate"
_ASK_S: Final = 5.0
"how long the decode node may take to read a request, before prefill begins all the same"
_BLAME_S: Final = 1.0
"how long a failed decode leg waits for prefill to say that it was the cause"
_OK: Final = 200


@final
class Output(msgspec.Struct, frozen=True, kw_only=True):
    """What came since the last one."""

    tokens: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[Any] | None = None
    "an entry for each token"


@final
class Attempt:
    """Runs both legs. An asynchronous context manager: leaving it ends them, and waits until they have ended.

    Args:
        transport: the way to the servers.
        config: time-outs.
        prefills: where to prefill.
        node: where to decode.
        wanted: the request.
        request_id: goes to both legs, with the handoff's id behind it.
        headers: the client's, that both legs get.
        decode_headers: what the decode leg gets in place of some of them.

    Attributes:
        handoff: its id.
        decode_failed: the decode leg was the first to fail.
    """

    def __init__(
        self,
        transport: Transport,
        config: Config,
        prefills: Servers,
        node: Node,
        wanted: Wanted,
        *,
        request_id: str,
        headers: Mapping[str, str],
        decode_headers: Mapping[str, str],
    ) -> None:
        self.handoff = str(HandoffId.mint())
        self._transport = transport
        self._config = config
        self._prefills = prefills
        self._node = node
        self._wanted = wanted
        self._request_id = f"{request_id}-{self.handoff}"
        self._headers = headers
        self._decode_headers = {**headers, **decode_headers}
        self._announced = asyncio.Event()
        self._news = asyncio.Event()
        self._outputs: list[Output] = []
        self._first_token: int | None = None
        self._decoded_first: int | None = None
        self.decode_failed = False
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        # the decode node hears of the handoff first, so that it grants landing memory while prefill computes
        self._tasks = [asyncio.create_task(self._decode()), asyncio.create_task(self._prefill())]
        for task in self._tasks:
            task.add_done_callback(self._wake)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def outputs(self) -> AsyncGenerator[Output, None]:
        """Output as it comes, what has gathered in one piece. Raises Refusal: a leg failed, or took too long."""
        decode, prefill = self._tasks
        left = self._config.first_token_s
        while True:
            self._news.clear()
            if self._outputs:
                gathered, self._outputs = self._outputs, []
                merged = _merge(gathered)
                yield merged
                if merged.finish_reason is not None:
                    return
                left = self._config.stall_s
                continue
            for task in (prefill, decode):
                if task.done():
                    await self._raise_of(task)
            try:
                async with asyncio.timeout(left):
                    await self._news.wait()
            except TimeoutError:
                reason = f"the decode node {self._node.name} gave nothing for {left:.3g} s"
                raise Refusal(504, reason, code="STALLED", retryable=True) from None

    async def _raise_of(self, task: asyncio.Task[None]) -> None:
        decode, prefill = self._tasks
        problem = task.exception()
        if task is decode and problem is not None and not prefill.done():
            with suppress(TimeoutError):
                async with asyncio.timeout(_BLAME_S):
                    await asyncio.wait([prefill])
            if prefill.done() and prefill.exception() is not None:
                task, problem = prefill, prefill.exception()
        if problem is not None:
            self.decode_failed = task is decode
            raise problem

    def _wake(self, _task: asyncio.Task[None]) -> None:
        self._announced.set()
        self._news.set()

    async def _prefill(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(_ASK_S):
                await self._announced.wait()
        mark = {
            "consumer": self._node.control,
            "handoff": self.handoff,
            "queue_s": self._config.prefill_s,
            "traceparent": self._headers.get("traceparent", ""),
        }
        body = self._wanted.prefill_body(self._request_id, {"pdhandoff": mark})
        answer = await prefill_leg(self._transport, self._prefills, body, self._headers, self._config.prefill_s)
        params = answer.get("kv_transfer_params")
        said = params.get("pdhandoff") if isinstance(params, dict) else None
        if not isinstance(said, dict):
            reason = "the prefill server does not know handoffs: start it with --kv-transfer-config and our connector"
            raise Refusal(502, reason, code="NO_CONNECTOR")
        if said.get("status") == "failed":
            reason = f"the prefill side could not hand off: {said.get('reason') or 'without a reason'}"
            raise Refusal(502, reason, code="HANDOFF_FAILED", retryable=True)
        self._first_token = answer["choices"][0]["token_ids"][0]
        self._compare()

    def _compare(self) -> None:
        """Both legs must tell of the same first token."""
        if None not in (self._first_token, self._decoded_first) and self._first_token != self._decoded_first:
            reason = f"the decode node {self._node.name} begins with another token than prefill sampled"
            raise Refusal(502, reason, code="TOKEN_MISMATCH", retryable=True)

    async def _decode(self) -> None:
        mark = {
            "handoff": self.handoff,
            "prompt_tokens": len(self._wanted.tokens),
            "wait_s": self._config.prefill_s,
        }
        who = f"the decode node {self._node.name}"
        async with self._transport.open(
            self._node.config.url + GENERATE,
            who=who,
            body=self._wanted.decode_body(self._request_id, mark),
            headers=self._decode_headers,
            on_sent=self._announced.set,
        ) as answer:
            if answer.status != _OK:
                raise _of_node(answer.status, await answer.body(), answer.headers, who)
            await self._read(answer, who)

    async def _read(self, answer: Events, who: str) -> None:
        finished = False
        async for data in answer.events():
            event = read_json(data, who)
            if isinstance(event, dict) and "error" in event:
                raise from_answer(_status_of(event), data, who=who)
            output = _output_of(event)
            if output is None:
                continue
            if self._decoded_first is None and output.tokens:
                self._decoded_first = output.tokens[0]
                self._compare()
            self._outputs.append(output)
            self._news.set()
            finished = finished or output.finish_reason is not None
        if not finished:
            raise Refusal(502, f"{who} ended its stream without a finish reason", code="BAD_UPSTREAM", retryable=True)


async def prefill_leg(
    transport: Transport, prefills: Servers, body: Mapping[str, Any], headers: Mapping[str, str], within_s: float
) -> dict[str, Any]:
    """Prefill, and one token.

    Returns:
        The answer of a generate request that has that token.

    Raises:
        Refusal: as the server refuses it, or when none answers.
    """
    with prefills.lease() as server:
        who = f"the prefill server {server.name}"
        try:
            answer = await transport.ask(server.url + GENERATE, who=who, within_s=within_s, body=body, headers=headers)
        except Refusal as refusal:
            if refusal.code == "UNREACHABLE":
                server.problem = refusal.reason
            raise
    if answer.status == 403:
        reason = f"{who} does not serve {GENERATE}: start it with --enable-scale-out"
        raise Refusal(503, reason, code="NO_SCALE_OUT")
    if answer.status != _OK:
        refused = from_answer(answer.status, answer.body, who=who, retry_after=answer.headers.get("retry-after"))
        refused.retryable = refused.retryable or refused.status >= 500
        raise refused
    found = read_json(answer.body, who)
    output = _output_of(found)
    if output is None or len(output.tokens) != 1:
        raise Refusal(502, f"{who} gave no single token", code="BAD_UPSTREAM", retryable=True)
    whole: dict[str, Any] = found
    return whole


def _of_node(status: int, body: bytes, headers: Mapping[str, str], who: str) -> Refusal:
    """What a decode node refused. A parameter that it does not honour is one for a native engine."""
    refusal = from_answer(status, body, who=who, retry_after=headers.get("retry-after"))
    if status == 400 and refusal.param is not None:
        refusal.unsupported = True
        refusal.param = refusal.param.removeprefix("sampling_params.")
    return refusal


def _status_of(event: Mapping[str, Any]) -> int:
    error = event["error"]
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, int) else 502


def _output_of(event: object) -> Output | None:
    """The one choice of a chunk, or of a whole answer; None: it has none."""
    choices = event.get("choices") if isinstance(event, dict) else None
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        return None
    choice = choices[0]
    tokens, logprobs = choice.get("token_ids") or [], choice.get("logprobs")
    if not isinstance(tokens, list) or not all(type(each) is int for each in tokens):
        raise Refusal(502, "a server sent tokens that are none", code="BAD_UPSTREAM")
    return Output(
        tokens=tokens,
        finish_reason=choice.get("finish_reason"),
        stop_reason=choice.get("stop_reason"),
        logprobs=logprobs.get("content") if isinstance(logprobs, dict) else None,
    )


def _merge(outputs: list[Output]) -> Output:
    """Several in one."""
    logprobs = [entry for each in outputs for entry in each.logprobs or ()]
    return Output(
        tokens=[token for each in outputs for token in each.tokens],
        finish_reason=outputs[-1].finish_reason,
        stop_reason=outputs[-1].stop_reason,
        logprobs=logprobs or None,
    )
