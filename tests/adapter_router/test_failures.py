from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from starlette.responses import JSONResponse, Response

from support.engines import until
from support.router_fakes import Stack, chat_body, data_of

GENERATE = "/inference/v1/generate"


def leave_after(stack: Stack, body: dict[str, Any]) -> socket.socket:
    """Ask, and keep the connection: closing it is leaving."""
    parts = urlsplit(stack.served.url)
    assert parts.hostname is not None
    link = socket.create_connection((parts.hostname, parts.port or 0), timeout=10)
    data = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n"
    link.sendall(head.encode() + data)
    return link


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.slow
def test_T108_a_client_that_leaves_before_prefill_ends_leaves_nothing_behind(*, stream: bool) -> None:
    with Stack() as stack:
        stack.vllm.hold.clear()
        link = leave_after(stack, chat_body(stream=stream))
        until(lambda: stack.vllm.of(GENERATE) != [] and stack.nodes[0].present == 1, "both legs run")
        link.close()
        until(lambda: stack.vllm.gone == 1 and stack.nodes[0].ended != [], "both legs have been ended")
        stack.idle()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.slow
def test_T108_a_client_that_leaves_between_or_in_the_legs_leaves_nothing_behind(*, stream: bool) -> None:
    with Stack() as stack:
        stack.nodes[0].most = 2
        link = leave_after(stack, chat_body(stream=stream))
        until(lambda: len(stack.nodes[0].landed) == 1 and stack.nodes[0].present == 1, "it decodes")
        link.close()
        until(lambda: stack.nodes[0].ended != [], "the decode leg has been ended")
        stack.idle()


@pytest.mark.slow
def test_T108_a_client_that_leaves_the_queue_leaves_nothing_behind() -> None:
    with Stack(decode_credits=1) as stack:
        stack.nodes[0].most = 1
        first = leave_after(stack, chat_body(stream=True))
        until(lambda: len(stack.nodes[0].asked) == 1, "the first decodes")
        second = leave_after(stack, chat_body())
        until(lambda: stack.router.pool.queued == 1, "the second waits")
        assert len(stack.vllm.of(GENERATE)) == 1  # T113: it holds no prefill pages
        second.close()
        until(lambda: stack.router.pool.queued == 0, "the second has gone")
        first.close()
        stack.idle()


@pytest.mark.parametrize("status", [400, 500])
@pytest.mark.slow
def test_T109_a_prefill_error_reaches_the_client_at_once_and_ends_the_decode_leg(status: int) -> None:
    with Stack(on_failure="fail") as stack:
        stack.vllm.prefill = lambda _body: JSONResponse({"error": {"message": "prefill says no"}}, status)
        answer = stack.chat()
        assert answer.status_code == status
        assert "prefill says no" in answer.json()["error"]["message"]
        until(lambda: len(stack.nodes[0].ended) == 1, "the decode leg has been ended")
        stack.idle()


@pytest.mark.slow
def test_T109_a_prefill_that_hangs_is_given_up() -> None:
    with Stack(on_failure="fail", prefill_s=0.2) as stack:
        stack.vllm.hold.clear()
        answer = stack.chat()
        assert answer.status_code == 504
        assert "prefill server" in answer.json()["error"]["message"]
        until(lambda: stack.vllm.gone == 1 and len(stack.nodes[0].ended) == 1, "both legs have been ended")
        stack.idle()


@pytest.mark.slow
def test_T109_a_prefill_whose_link_drops_is_a_bad_gateway() -> None:
    class Broken(Response):
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            del receive
            head = [(b"content-length", b"100"), (b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": 200, "headers": head})
            await send({"type": "http.response.body", "body": b'{"cho', "more_body": True})
            scope["state"] = None
            raise OSError("the link drops")

    with Stack(on_failure="fail") as stack:
        stack.vllm.prefill = lambda _body: Broken()
        assert stack.chat().status_code == 502
        stack.idle()


@pytest.mark.slow
def test_a_failed_handoff_is_tried_anew_on_another_node_with_another_id() -> None:
    with Stack(2) as stack:
        answers: Iterator[Response | None] = iter([
            JSONResponse(
                {"error": {"message": "lost", "code": 502, "pdhandoff": {"code": "LINK_LOST", "retryable": True}}}, 502
            )
        ])  # fmt: skip
        for node in stack.nodes:
            node.answer = lambda _body: next(answers, None)
        answer = stack.chat()
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-pdhandoff-attempts"] == "2"
        asked = [body for node in stack.nodes for body in node.asked]
        assert len({body["kv_transfer_params"]["pdhandoff"]["handoff"] for body in asked}) == 2
        assert [len(node.asked) for node in stack.nodes] == [1, 1]
        stack.idle()


@pytest.mark.slow
def test_T111_a_node_that_stays_busy_is_asked_twice_and_then_the_client_is_told_when_to_come_back() -> None:
    with Stack() as stack:
        busy = {"error": {"message": "the line is full", "code": 429, "pdhandoff": {"code": "QUEUE_FULL"}}}
        stack.nodes[0].answer = lambda _body: JSONResponse(busy, 429, {"retry-after": "3"})
        answer = stack.chat()
        assert answer.status_code == 429
        assert answer.headers["retry-after"] == "3"
        assert len(stack.nodes[0].asked) == 2
        stack.idle()


@pytest.mark.slow
def test_a_handoff_that_fails_falls_back_to_the_native_pool_where_told_so() -> None:
    with Stack(native=True, on_failure="native", attempts=1) as stack:
        stack.nodes[0].answer = lambda _body: JSONResponse({"error": {"message": "broken", "code": 503}}, 503)
        answer = stack.chat()
        assert answer.json()["native"] is True
        assert answer.headers["x-pdhandoff-path"] == "native"
        stack.idle()


@pytest.mark.slow
def test_what_a_node_does_not_honour_goes_to_the_native_pool_or_is_refused_by_name() -> None:
    error = {"error": {"message": "no", "param": "sampling_params.logprobs", "code": 400}}
    with Stack(native=True) as stack:
        stack.nodes[0].answer = lambda _body: JSONResponse(error, 400)
        assert stack.chat(logprobs=True).json()["native"] is True
    with Stack() as stack:
        stack.nodes[0].answer = lambda _body: JSONResponse(error, 400)
        answer = stack.chat(logprobs=True)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "logprobs")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
@pytest.mark.slow
def test_a_failure_in_mid_stream_is_an_error_event_and_no_made_up_stop(path: str) -> None:
    with Stack() as stack:
        stack.nodes[0].most, stack.nodes[0].breaks = 2, True
        answer = stack.client.post(path, json=chat_body(stream=True, input="abc"))
        events = data_of(answer.text)
        assert "the engine broke" in json.dumps(events[-1])
        assert "length" not in answer.text
        assert 'stop_reason":"' not in answer.text.replace(" ", "")
        assert stack.chat(max_tokens=2).status_code == 200  # nothing is left of it
        stack.idle()


@pytest.mark.slow
def test_a_prefill_side_that_could_not_hand_off_says_why() -> None:
    with Stack(on_failure="fail") as stack:
        params = {"pdhandoff": {"handoff": "", "status": "failed", "reason": "10.0.0.1 is not allowed"}}
        choice = {"index": 0, "token_ids": [1000], "finish_reason": "length"}
        stack.vllm.prefill = lambda _body: JSONResponse({"choices": [choice], "kv_transfer_params": params})
        answer = stack.chat()
        assert answer.status_code == 502
        assert "10.0.0.1 is not allowed" in answer.json()["error"]["message"]
        stack.vllm.prefill = lambda _body: JSONResponse({"choices": [choice]})
        assert "--kv-transfer-config" in stack.chat().json()["error"]["message"]
        stack.idle()


@pytest.mark.slow
def test_a_decode_node_that_begins_with_another_token_is_not_believed() -> None:
    with Stack(on_failure="fail") as stack:
        choice = {"index": 0, "token_ids": [7], "finish_reason": "length"}

        def prefill(body: dict[str, Any]) -> Response:
            params = body["kv_transfer_params"]
            stack.vllm.marked(params["pdhandoff"]["handoff"])
            return JSONResponse({"choices": [choice], "kv_transfer_params": params})

        stack.vllm.prefill = prefill
        stack.nodes[0].most = 2
        assert stack.chat().status_code == 502


@pytest.mark.slow
def test_vllm_without_scale_out_is_told_what_to_start() -> None:
    with Stack() as stack:
        stack.vllm.scale_out = False
        answer = stack.chat()
        assert answer.status_code == 503
        assert "--enable-scale-out" in answer.json()["error"]["message"]
        assert "launch render" in answer.json()["error"]["message"]


@pytest.mark.slow
def test_bad_requests_get_openais_errors() -> None:
    with Stack() as stack:
        wrong = stack.client.post("/v1/chat/completions", content=b"{")
        assert (wrong.status_code, wrong.json()["error"]["type"]) == (400, "BadRequestError")
        assert stack.client.post("/v1/chat/completions", json=[1]).status_code == 400
        assert stack.chat(stream="yes").json()["error"]["param"] == "stream"
        assert stack.chat(model="other").status_code == 404
        long = stack.chat(max_tokens=98)
        assert long.status_code == 400
        assert "the 100 that a decode node holds" in long.json()["error"]["message"]
        assert stack.vllm.of(GENERATE) == []
        assert stack.client.get("/nowhere").status_code == 404
        messages = stack.client.post("/v1/messages", content=b"{").json()
        assert messages["error"]["type"] == "invalid_request_error"
