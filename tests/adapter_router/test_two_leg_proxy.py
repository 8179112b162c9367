"""Proxies that know nothing of handoffs work too: prefill with one token, pass what came back on to decode."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from pdhandoff import HandoffId
from support.node import Node, Sender
from support.router_fakes import Served, Stack

GENERATE = "/inference/v1/generate"


class Prefill(Served):
    """Hands off for real, and answers as a vLLM server with the connector does."""

    def __init__(self, sender: Sender) -> None:
        super().__init__(lambda: Starlette(routes=[Route(GENERATE, self._generate, methods=["POST"])]))
        self._sender = sender

    async def _generate(self, request: Request) -> Response:
        body = await request.json()
        assert body["sampling_params"]["max_tokens"] == 1
        mark = body["kv_transfer_params"]["pdhandoff"]
        handoff = HandoffId.parse(mark["handoff"]) if "handoff" in mark else HandoffId.mint()
        sent = await asyncio.to_thread(self._sender.send, len(body["token_ids"]), handoff=handoff)
        self.expected = sent.tokens(8)
        answer = {"handoff": str(handoff), "prompt_tokens": len(body["token_ids"]), "first_token": sent.first}
        params = {"pdhandoff": {**answer, "consumer": "ignored:1", "status": "sent", "reason": ""}}
        choice = {"index": 0, "token_ids": [sent.first], "finish_reason": "length"}
        return JSONResponse({"choices": [choice], "kv_transfer_params": params})


class TwoLegProxy(Served):
    """The usual one: two requests, the second with the parameters that the first brought."""

    def __init__(self, prefill: str, decode: str, mark: dict[str, Any]) -> None:
        super().__init__(lambda: Starlette(routes=[Route(GENERATE, self._generate, methods=["POST"])]))
        self._prefill, self._decode, self._mark = prefill, decode, mark

    async def _generate(self, request: Request) -> Response:
        body = await request.json()
        async with httpx.AsyncClient(timeout=30, trust_env=False) as client:
            sampling = {**body["sampling_params"], "max_tokens": 1}
            first = {**body, "stream": False, "sampling_params": sampling, "kv_transfer_params": self._mark}
            params = (await client.post(self._prefill + GENERATE, json=first)).json()["kv_transfer_params"]
            second = await client.post(self._decode + GENERATE, json={**body, "kv_transfer_params": params})
        return Response(second.content, second.status_code, media_type=second.headers["content-type"])


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with Node(tmp_path) as node:
        yield node


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.slow
def test_the_usual_two_leg_flow_reaches_a_real_decode_node(node: Node, *, named: bool) -> None:
    mark: dict[str, Any] = {"consumer": node.control, **({"handoff": str(HandoffId.mint())} if named else {})}
    with (
        Sender(node.control) as sender,
        Prefill(sender) as prefill,
        TwoLegProxy(prefill.url, node.ready["url"], {"pdhandoff": mark}) as proxy,
    ):
        body = {"token_ids": [77, *range(1001, 1040)], "sampling_params": {"temperature": 0, "max_tokens": 8}}
        answer = httpx.post(proxy.url + GENERATE, json=body, timeout=30, trust_env=False)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["token_ids"] == prefill.expected
        node.idle()


@pytest.mark.slow
def test_the_router_drives_a_real_decode_node(node: Node) -> None:
    with Sender(node.control) as sender, Stack(0, decode=[{"url": node.ready["url"]}]) as stack:

        def prefill(body: dict[str, Any]) -> Response:
            mark = body["kv_transfer_params"]["pdhandoff"]
            assert mark["consumer"] == node.control
            sent = sender.offer(len(body["token_ids"]), handoff=HandoffId.parse(mark["handoff"]))
            sender.finish(sent, first_token=sent.first, last_token=body["token_ids"][-1])
            stack.expected = sent.tokens(8)
            params = {"pdhandoff": {**mark, "status": "sent", "reason": "", "first_token": sent.first}}
            choice = {"index": 0, "token_ids": [sent.first], "finish_reason": "length"}
            return JSONResponse({"choices": [choice], "kv_transfer_params": params})

        stack.vllm.prefill = prefill
        for stream in (False, True):
            answer = stack.chat(max_tokens=8, stream=stream, messages=[{"role": "user", "content": "a" * 40}])
            assert answer.status_code == 200, answer.text
            derendered = stack.vllm.of("/v1/chat/completions/derender")
            chunks = [body["generate_chunk"] for body in derendered if body["stream"]]
            parts = chunks if stream else [derendered[-1]["generate_response"]]
            tokens = [token for part in parts for token in part["choices"][0]["token_ids"]]
            assert tokens == stack.expected
        stack.idle()
        node.idle()
