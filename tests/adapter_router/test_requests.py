from __future__ import annotations

import json
from typing import Any

import pytest
from starlette.responses import Response

from pdhandoff.ids import HandoffId
from support.router_fakes import FIRST, Stack, data_of

GENERATE = "/inference/v1/generate"


@pytest.mark.slow
def test_a_chat_request_is_rendered_prefilled_decoded_and_derendered() -> None:
    with Stack() as stack:
        answer = stack.chat()
        assert answer.status_code == 200, answer.text
        body = answer.json()
        assert body["choices"][0]["message"]["content"] == "abcd"
        assert answer.headers["x-pdhandoff-path"] == "handoff"
        assert answer.headers["x-pdhandoff-attempts"] == "1"
        prefill, decode = stack.vllm.of(GENERATE)[0], stack.nodes[0].asked[0]
        mark = prefill["kv_transfer_params"]["pdhandoff"]
        assert mark["consumer"] == "127.0.0.1:5556"
        assert mark["handoff"] == decode["kv_transfer_params"]["pdhandoff"]["handoff"]
        HandoffId.parse(mark["handoff"])
        assert decode["token_ids"] == list(b"abc")
        assert decode["sampling_params"]["max_tokens"] == 4
        stack.idle()


@pytest.mark.slow
def test_T106_usage_counts_the_prompt_once_and_the_first_token() -> None:
    with Stack() as stack:
        usage = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
        found = stack.chat().json()["usage"]
        assert {key: found[key] for key in usage} == usage
        events = data_of(stack.chat(stream=True, stream_options={"include_usage": True}).text)
        assert [event["usage"] for event in events if event["usage"]] == [usage]
        assert events[-1]["choices"] == []


@pytest.mark.slow
def test_a_stream_brings_every_token_once_in_order_and_ends_with_done() -> None:
    with Stack() as stack:
        answer = stack.chat(stream=True, max_tokens=20)
        assert answer.text.endswith("data: [DONE]\n\n")
        events = data_of(answer.text)
        text = "".join(event["choices"][0]["delta"]["content"] for event in events)
        assert text == "abcdefghijklmnopqrst"
        assert [event["choices"][0]["finish_reason"] for event in events][-1] == "length"
        sent = [
            token
            for body in stack.vllm.of("/v1/chat/completions/derender")
            for token in body["generate_chunk"]["choices"][0]["token_ids"]
        ]
        assert sent == list(range(FIRST, FIRST + 20))


@pytest.mark.parametrize(
    "asked", [{"max_tokens": 9}, {"max_completion_tokens": 9}, {"max_tokens": 5, "max_completion_tokens": 9}]
)
@pytest.mark.slow
def test_T101_the_prefill_leg_makes_one_token_whatever_the_budget_is_called(asked: dict[str, int]) -> None:
    with Stack() as stack:
        body: dict[str, Any] = {"max_tokens": None, **asked, "min_tokens": 3, "stop": []}
        assert stack.chat(**body).status_code == 200
        sampling = stack.vllm.of(GENERATE)[0]["sampling_params"]
        assert (sampling["max_tokens"], sampling["min_tokens"], sampling["n"], sampling["stop"]) == (1, 1, 1, [])
        assert "max_completion_tokens" not in sampling
        assert stack.vllm.of(GENERATE)[0]["stream"] is False
        assert stack.nodes[0].asked[0]["sampling_params"]["max_tokens"] == 9
        assert stack.nodes[0].asked[0]["sampling_params"]["min_tokens"] == 3


@pytest.mark.slow
def test_T101_without_a_budget_output_is_what_fits_into_a_node() -> None:
    with Stack() as stack:
        assert stack.chat(max_tokens=None).json()["usage"]["completion_tokens"] == 97
        assert stack.nodes[0].asked[0]["sampling_params"]["max_tokens"] == 97


@pytest.mark.slow
def test_T100_one_token_needs_no_transfer() -> None:
    with Stack() as stack:
        answer = stack.chat(max_tokens=1)
        assert answer.json()["choices"][0]["message"]["content"] == "a"
        assert answer.json()["usage"]["completion_tokens"] == 1
        assert answer.headers["x-pdhandoff-path"] == "prefill"
        assert stack.nodes[0].asked == []
        assert "kv_transfer_params" not in stack.vllm.of(GENERATE)[0]


@pytest.mark.parametrize(
    ("name", "value"), [("n", 3), ("best_of", 2), ("use_beam_search", True), ("prompt_logprobs", 1), ("echo", True)]
)
@pytest.mark.slow
def test_T103_T105_what_needs_one_engine_is_refused_by_name_before_anything_is_reserved(name: str, value: Any) -> None:
    with Stack() as stack:
        answer = stack.chat(**{name: value})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == name
        assert stack.vllm.of(GENERATE) == []
        assert stack.nodes[0].asked == []


@pytest.mark.slow
def test_T103_what_needs_one_engine_goes_to_the_native_pool_where_there_is_one() -> None:
    with Stack(native=True) as stack:
        answer = stack.chat(n=3)
        assert answer.json()["native"] is True
        assert answer.headers["x-pdhandoff-path"] == "native"


@pytest.mark.slow
def test_T096_T097_every_attempt_has_ids_of_its_own_whatever_the_client_calls_it() -> None:
    with Stack() as stack:
        for name in ("job-1", "job-2", "job-2", "deadbeef-0123456789abcdef"):
            answer = stack.client.post(
                "/v1/chat/completions",
                json={"model": "m", "messages": [{"role": "user", "content": "abc"}], "max_tokens": 4},
                headers={"x-request-id": name},
            )
            assert answer.status_code == 200
        ids = [body["request_id"] for body in stack.nodes[0].asked]
        handoffs = [body["kv_transfer_params"]["pdhandoff"]["handoff"] for body in stack.nodes[0].asked]
        assert len(set(ids)) == len(set(handoffs)) == 4
        assert all("x-request-id" not in headers for path, _, headers in stack.vllm.asked if path == GENERATE)


@pytest.mark.slow
def test_completions_take_the_same_way() -> None:
    with Stack() as stack:
        body = {"model": "m", "prompt": "abc", "max_tokens": 3}
        assert stack.client.post("/v1/completions", json=body).json()["choices"][0]["text"] == "abc"
        events = data_of(stack.client.post("/v1/completions", json={**body, "stream": True}).text)
        assert "".join(event["choices"][0]["text"] for event in events) == "abc"


@pytest.mark.slow
def test_messages_have_anthropics_shape_whole_and_streamed() -> None:
    with Stack() as stack:
        body = {"model": "m", "messages": [{"role": "user", "content": "abc"}], "max_tokens": 4}
        whole = stack.client.post("/v1/messages", json=body, headers={"x-api-key": "K"}).json()
        assert whole["content"] == [{"type": "text", "text": "abcd"}]
        assert whole["stop_reason"] == "max_tokens"
        assert whole["usage"] == {"input_tokens": 3, "output_tokens": 4}
        assert {headers.get("authorization") for _, _, headers in stack.vllm.asked} >= {"Bearer K"}
        events = data_of(stack.client.post("/v1/messages", json={**body, "stream": True}).text)
        kinds = [event["type"] for event in events]
        assert kinds[:2] == ["message_start", "content_block_start"]
        assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
        assert "".join(e["delta"]["text"] for e in events if e["type"] == "content_block_delta") == "abcd"
        assert events[-2]["usage"]["output_tokens"] == 4


@pytest.mark.slow
def test_responses_have_their_shape_whole_and_streamed() -> None:
    with Stack() as stack:
        body = {"model": "m", "input": "abc", "max_output_tokens": 4}
        whole = stack.client.post("/v1/responses", json=body).json()
        assert whole["status"] == "incomplete"
        assert whole["output"][0]["content"][0]["text"] == "abcd"
        assert whole["usage"]["total_tokens"] == 7
        events = data_of(stack.client.post("/v1/responses", json={**body, "stream": True}).text)
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert events[0]["type"] == "response.created"
        assert events[-1]["type"] == "response.completed"
        assert events[-1]["response"]["status"] == "incomplete"
        assert "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta") == "abcd"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.slow
def test_T098_a_first_token_that_ends_the_answer_ends_it(*, stream: bool) -> None:
    with Stack() as stack:

        def ends_at_once(_body: dict[str, Any]) -> Response:
            choice = {"index": 0, "token_ids": [FIRST], "finish_reason": "stop", "stop_reason": FIRST}
            return Response(
                f"data: {json.dumps({'choices': [choice]})}\n\ndata: [DONE]\n\n", media_type="text/event-stream"
            )

        stack.nodes[0].answer = ends_at_once
        answer = stack.chat(stream=stream)
        body = data_of(answer.text)[-1] if stream else answer.json()
        assert body["choices"][0]["finish_reason"] == "stop"
        sent = stack.vllm.of("/v1/chat/completions/derender")[-1]
        generated = sent["generate_chunk"] if stream else sent["generate_response"]
        assert generated["choices"][0] | {"logprobs": None} == {
            "index": 0,
            "token_ids": [FIRST],
            "finish_reason": "stop",
            "stop_reason": FIRST,
            "logprobs": None,
        }
        stack.idle()


@pytest.mark.slow
def test_T104_log_probabilities_have_one_entry_for_each_token_the_first_one_included() -> None:
    with Stack() as stack:
        entries = [{"token_id": FIRST + at, "logprob": -1.0 - at, "top_logprobs": []} for at in range(3)]

        def with_logprobs(_body: dict[str, Any]) -> Response:
            events = [
                {"token_ids": [FIRST + at], "logprobs": {"content": [entries[at]]}, "finish_reason": reason}
                for at, reason in enumerate((None, None, "length"))
            ]
            lines = [f"data: {json.dumps({'choices': [{'index': 0, **each}]})}\n\n" for each in events]
            return Response("".join(lines) + "data: [DONE]\n\n", media_type="text/event-stream")

        stack.nodes[0].answer = with_logprobs
        choice = stack.chat(logprobs=True, max_tokens=3).json()["choices"][0]
        assert choice["logprobs"]["content"] == entries


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.slow
def test_T101_a_budget_that_vllm_leaves_out_because_it_is_the_default_holds(path: str) -> None:
    with Stack() as stack:
        said = {"max_tokens": 16} if "chat" in path else {}
        body = {"model": "m", "prompt": "abc", "messages": [{"role": "user", "content": "abc"}], **said}
        assert stack.client.post(path, json=body).json()["usage"]["completion_tokens"] == 16
        assert stack.nodes[0].asked[0]["sampling_params"]["max_tokens"] == 16
