"""One client request, from its body to the last byte of its answer."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from typing import Any, Final, final

from pdhandoff_router.attempt import Attempt, Output, prefill_leg
from pdhandoff_router.client import Client, traceparent_of
from pdhandoff_router.config import OnFailure, Pool
from pdhandoff_router.formats import CHAT, COMPLETIONS, ChatFormat, Format, Usage
from pdhandoff_router.messages import MessagesFormat
from pdhandoff_router.native import answer_natively
from pdhandoff_router.refusals import Refusal
from pdhandoff_router.responses import ResponsesFormat
from pdhandoff_router.router import Router
from pdhandoff_router.texts import Texts, TextStream
from pdhandoff_router.wanted import Wanted, refuse_alone, strip_transfer, wanted_from

__all__ = ["PATHS", "Turn"]

MESSAGES: Final = "/v1/messages"
RESPONSES: Final = "/v1/responses"
PATHS: Final = (CHAT, COMPLETIONS, MESSAGES, RESPONSES)

_LOG: Final = logging.getLogger("pdhandoff.router")
_EVENTS: Final = "text/event-stream; charset=utf-8"
_MOST_ID: Final = 128


@final
class Turn:
    """Answers one request.

    Args:
        router: servers, nodes, configuration.
        path: one of PATHS.
        body: the client's, as it came.
        headers: the client's, with lower-case names.
        client: gets the answer.
    """

    def __init__(
        self, router: Router, path: str, body: dict[str, Any], headers: Mapping[str, str], client: Client
    ) -> None:
        self._router = router
        self._config = router.config
        self._path = path
        self._body = strip_transfer(body)
        self._given = headers
        self._headers = upstream_headers(headers)
        self._client = client
        self._format = _format_of(path, self._body)
        self._stream = self._body.get("stream") is True
        self._ran = "none"
        self._attempts = 0
        request_id = headers.get("x-request-id", "")
        sane = request_id.isascii() and request_id.isprintable() and len(request_id) <= _MOST_ID
        texts_headers = {**self._headers, **({"x-request-id": request_id} if request_id and sane else {})}
        self._texts_headers = texts_headers

    @property
    def ran(self) -> str:
        """The path that ran: handoff, prefill, native or none."""
        return self._ran

    async def run(self) -> None:
        """Answer, whatever happens. Cancelling this ends both legs."""
        outcome = "broken_off"
        try:
            await self._answer()
            outcome = "ok"
        except Refusal as refusal:
            outcome = refusal.code
            _LOG.info("%s %s: %d %s: %s", self._path, self._ran, refusal.status, refusal.code, refusal.reason)
            await self._refuse(refusal)
        finally:
            self._router.metrics.ended(self._ran, outcome)

    async def _refuse(self, refusal: Refusal) -> None:
        if not self._client.begun:
            await self._client.whole(refusal.status, self._format.refused(refusal), refusal.headers)
            return
        if self._stream:
            await self._client.write(self._format.failed(refusal))
            await self._client.finish()
            return
        raise OSError(refusal.reason)  # a whole answer that broke off: the connection breaks too, nothing is made up

    async def _answer(self) -> None:
        decided = self._decide(None)
        if decided is not None and decided[0] is Pool.NATIVE:
            await self._natively()
            return
        fallback = self._config.on_failure if decided is None else decided[1]
        try:
            refuse_alone(self._body)
            texts = self._texts()
            rendered = await texts.render(self._path, self._body)
            pool, fallback = self._decide(len(rendered["token_ids"])) or (Pool.HANDOFF, fallback)
            if pool is Pool.HANDOFF:
                await self._hand_off(texts, rendered, fallback)
                return
        except Refusal as refusal:
            failed = fallback is OnFailure.NATIVE and (refusal.status >= 500 or refusal.status == 429)
            if self._client.begun or not self._router.natives.members or not (refusal.unsupported or failed):
                raise
            _LOG.info("%s goes to the native pool: %s", self._path, refusal.reason)
        await self._natively()

    def _decide(self, prompt_tokens: int | None) -> tuple[Pool, OnFailure] | None:
        """Where the request goes; None: that depends on its length, which is not known."""
        config = self._config
        for rule in config.rule:
            if not rule.holds(self._body.get("model"), self._given, rule.least_prompt_tokens):
                continue
            if prompt_tokens is None and (rule.least_prompt_tokens or rule.most_prompt_tokens is not None):
                return None
            if prompt_tokens is None or rule.holds(self._body.get("model"), self._given, prompt_tokens):
                return rule.pool, rule.on_failure or config.on_failure
        return config.pool, config.on_failure

    async def _natively(self) -> None:
        self._ran = "native"
        self._client.headers = {"x-pdhandoff-path": "native"}
        config = self._config
        await answer_natively(
            self._client,
            self._router.transport,
            self._router.natives,
            path=self._path,
            body=self._body,
            headers=self._headers,
            prefill_s=config.prefill_s,
            within_s=config.native_s,
        )

    def _texts(self) -> Texts:
        with self._router.renders.lease() as server:
            return Texts(self._router.transport, server.url, headers=self._texts_headers, within_s=self._config.text_s)

    async def _hand_off(self, texts: Texts, rendered: dict[str, Any], fallback: OnFailure) -> None:
        self._ran = "handoff"
        pool, asked = self._router.pool, self._format.asked()
        wanted = wanted_from(rendered, asked=asked, room=pool.room())
        if wanted.max_tokens == 1:
            self._ran = "prefill"
            source = self._first_token_only(wanted)
        else:
            pool.refuse_long(len(wanted.tokens), wanted.max_tokens if isinstance(asked, int) else 1)
            source = self._handoffs(wanted, fallback)
        async with aclosing(source) as outputs:
            await (self._streamed if self._stream else self._whole)(texts, wanted, outputs)

    async def _first_token_only(self, wanted: Wanted) -> AsyncGenerator[Output, None]:
        """One token needs one leg and no transfer."""
        self._client.headers = {"x-pdhandoff-path": "prefill"}
        body = wanted.prefill_body(str(wanted.rendered.get("request_id", "")), None)
        config = self._config
        answer = await prefill_leg(self._router.transport, self._router.prefills, body, self._headers, config.prefill_s)
        choice = answer["choices"][0]
        logprobs = choice.get("logprobs")
        yield Output(
            tokens=choice["token_ids"],
            finish_reason=choice.get("finish_reason") or "length",
            stop_reason=choice.get("stop_reason"),
            logprobs=logprobs.get("content") if isinstance(logprobs, dict) else None,
        )

    async def _handoffs(self, wanted: Wanted, fallback: OnFailure) -> AsyncGenerator[Output, None]:
        """Output of the first handoff that gets to its first token. Every attempt has an id of its own."""
        router, config = self._router, self._config
        most = 1 if fallback is OnFailure.FAIL else config.attempts
        tried: frozenset[str] = frozenset()
        while True:
            self._attempts += 1
            asked_s = router.clock()
            async with router.pool.lease(
                _client_of(self._given),
                needs=len(wanted.tokens) + 1,
                avoid=tried,
                within_s=config.queue_s,
            ) as node:
                started_s = router.clock()
                router.metrics.waited(started_s - asked_s)
                self._client.headers = {
                    "x-pdhandoff-path": "handoff",
                    "x-pdhandoff-node": node.name,
                    "x-pdhandoff-attempts": str(self._attempts),
                }
                attempt = Attempt(
                    router.transport,
                    config,
                    router.prefills,
                    node,
                    wanted,
                    request_id=str(wanted.rendered.get("request_id", "")),
                    headers=self._headers,
                    decode_headers=router.decode_headers,
                )
                begun = False
                try:
                    async with attempt, aclosing(attempt.outputs()) as outputs:
                        async for output in outputs:
                            if not begun:
                                begun = True
                                router.metrics.first_token(router.clock() - started_s)
                            yield output
                except Refusal as refusal:
                    if attempt.decode_failed:
                        node.outcome(refusal)
                    if begun or not refusal.retryable or self._attempts >= most:
                        raise
                    tried |= {node.config.url}
                    router.metrics.retries.inc()
                    _LOG.info("handoff %s to %s: %s; trying anew", attempt.handoff, node.name, refusal.reason)
                else:
                    node.outcome(None)
                    return

    async def _streamed(self, texts: Texts, wanted: Wanted, outputs: AsyncIterator[Output]) -> None:
        stream = TextStream(texts, self._format.path, self._common(wanted))
        count = 0
        try:
            async for output in outputs:
                count += len(output.tokens)
                usage = Usage(prompt_tokens=len(wanted.tokens), completion_tokens=count)
                made = await stream.feed(_body_of(wanted, output, "chunk"))
                data = self._format.chunk(made, usage)
                if not self._client.begun:
                    await self._client.start(200, _EVENTS)
                await self._client.write(data)
            usage = Usage(prompt_tokens=len(wanted.tokens), completion_tokens=count)
            await self._client.write(self._format.end(usage))
            await self._client.finish()
        finally:
            self._router.metrics.tokens(len(wanted.tokens), count)

    async def _whole(self, texts: Texts, wanted: Wanted, outputs: AsyncIterator[Output]) -> None:
        tokens: list[int] = []
        logprobs: list[Any] = []
        last = Output(tokens=[])
        async for last in outputs:
            tokens += last.tokens
            logprobs += last.logprobs or []
        self._router.metrics.tokens(len(wanted.tokens), len(tokens))
        whole = Output(
            tokens=tokens,
            finish_reason=last.finish_reason,
            stop_reason=last.stop_reason,
            logprobs=logprobs or None,
        )
        body = {**self._common(wanted), "stream": False}
        generated = _body_of(wanted, whole, "response")
        if self._format.path == COMPLETIONS:
            listed = {key: [body.pop(key)] for key in ("prompt_tokens", "prompt_token_ids")}
            body |= {**listed, "generate_responses": [generated]}
        else:
            body["generate_response"] = generated
        made = await texts.derender(self._format.path, body)
        usage = Usage(prompt_tokens=len(wanted.tokens), completion_tokens=len(tokens))
        await self._client.whole(200, self._format.whole(made, usage))

    def _common(self, wanted: Wanted) -> dict[str, Any]:
        return {
            **self._format.context(),
            "model": self._body.get("model"),
            "prompt_tokens": len(wanted.tokens),
            "prompt_token_ids": wanted.tokens,
        }


def upstream_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """What of a client's headers goes to the servers: its key, in the form that vLLM reads, and its trace."""
    key = headers.get("authorization")
    if key is None and "x-api-key" in headers:
        key = f"Bearer {headers['x-api-key']}"
    found = {"traceparent": traceparent_of(headers)}
    if "tracestate" in headers and "traceparent" in headers:
        found["tracestate"] = headers["tracestate"]
    return found if key is None else {**found, "authorization": key}


def _client_of(headers: Mapping[str, str]) -> str:
    """Who takes turns with whom: an API key, and never the key itself."""
    key = headers.get("authorization") or headers.get("x-api-key") or ""
    return hashlib.sha256(key.encode("utf-8", "replace")).hexdigest()[:16]


def _format_of(path: str, body: Mapping[str, Any]) -> Format:
    if path == MESSAGES:
        return MessagesFormat(body)
    if path == RESPONSES:
        return ResponsesFormat(body)
    return ChatFormat(path, body)


def _body_of(wanted: Wanted, output: Output, form: str) -> dict[str, Any]:
    """Tokens as vLLM's derender endpoints take them."""
    choice = {
        "index": 0,
        "token_ids": output.tokens,
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
        "logprobs": None if output.logprobs is None else {"content": output.logprobs},
    }
    head = {"request_id": wanted.rendered.get("request_id"), "output_mode": "tokens"}
    return {**head, "choices": [choice], **({"usage": None} if form == "chunk" else {})}
