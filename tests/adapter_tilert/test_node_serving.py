"""A real node serves what a real producer hands off: tokens, streams, orders of events, mix-ups."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pdhandoff import HandoffId
from support.engines import DEADLINE_S, until
from support.node import Node, Sender, body_of, events
from support.node_engine import END, MAX_SEQ_LEN

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with Node(tmp_path_factory.mktemp("node"), "--announce", "1") as node:
        yield node


@pytest.fixture
def sender(node: Node) -> Iterator[Sender]:
    with Sender(node.control) as sender:
        yield sender
    node.idle()


def test_T106_a_whole_answer_has_the_right_tokens_and_counts_them_once(node: Node, sender: Sender) -> None:
    sent = sender.send()
    response = node.generate(sent.body(10, request_id="whole", return_token_ids=True))
    assert response.status_code == 200
    assert response.headers["x-request-id"] == "whole"
    answer = response.json()
    (choice,) = answer["choices"]
    assert choice["token_ids"] == sent.tokens(10)
    assert (choice["index"], choice["finish_reason"], choice["stop_reason"]) == (0, "length", None)
    assert answer["usage"] == {"prompt_tokens": 40, "completion_tokens": 10, "total_tokens": 50}
    assert (answer["prompt_token_ids"], answer["output_mode"], answer["request_id"]) == (sent.prompt, "tokens", "whole")
    speculation = answer["metrics"]["speculative_decoding"]
    assert (speculation["num_spec_steps"], speculation["num_draft_tokens"]) == (3, 6)
    sent.outgoing.wait(DEADLINE_S)


def test_a_stream_has_the_same_tokens_and_ends_with_usage(node: Node, sender: Sender) -> None:
    sent = sender.send()
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = sent.body(10, stream=True, stream_options=options, return_token_ids=True)
    with node.client.stream("POST", "/inference/v1/generate", json=body) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        *chunks, last, done = events(response)
    assert done is None
    assert last["choices"] == []
    assert last["usage"] == {"prompt_tokens": 40, "completion_tokens": 10, "total_tokens": 50}
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [token for choice in choices for token in choice["token_ids"]] == sent.tokens(10)
    assert [choice["finish_reason"] for choice in choices] == [*[None] * (len(choices) - 1), "length"]
    assert chunks[0]["prompt_token_ids"] == sent.prompt
    assert chunks[-1]["usage"]["completion_tokens"] == 10


def test_tokens_are_streamed_while_the_engine_decodes(node: Node, sender: Sender) -> None:
    node.order("hold", call="step")
    sent = sender.send()
    body = sent.body(10, stream=True)
    with node.client.stream("POST", "/inference/v1/generate", json=body) as response:
        chunks = events(response)
        assert next(chunks)["choices"][0]["token_ids"] == [sent.first]
        node.order("go")
        rest = [chunk["choices"][0]["token_ids"] for chunk in chunks if chunk is not None]
    assert [token for tokens in rest for token in tokens] == sent.tokens(10)[1:]


def test_the_request_may_come_before_its_handoff(node: Node, sender: Sender) -> None:
    handoff = HandoffId.mint()
    sent = sender.offer(handoff=handoff)
    answer = node.later(sent.body())
    until(lambda: node.stages() == ["waiting"])
    sender.finish(sent)
    assert answer.result(DEADLINE_S).json()["choices"][0]["token_ids"] == sent.tokens(8)


def test_the_handoff_may_be_complete_before_its_request(node: Node, sender: Sender) -> None:
    sent = sender.landed()
    assert node.generate(sent.body()).json()["choices"][0]["token_ids"] == sent.tokens(8)


def test_the_models_own_end_ends_it(node: Node, sender: Sender) -> None:
    sent = sender.send(starts_with=7)
    (choice,) = node.generate(sent.body(20)).json()["choices"]
    assert choice["token_ids"] == [*sent.tokens(6), END]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)
    sent = sender.send(starts_with=7)
    assert len(node.generate(sent.body(20, sampling={"ignore_eos": True})).json()["choices"][0]["token_ids"]) == 20


def test_a_stop_token_is_the_last_one_and_is_named(node: Node, sender: Sender) -> None:
    sent = sender.send()
    stop = sent.tokens(6)[5]
    (choice,) = node.generate(sent.body(20, sampling={"stop_token_ids": [stop, 4]})).json()["choices"]
    assert choice["token_ids"] == sent.tokens(6)
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("own", [False, True])
def test_T098_a_first_token_that_ends_it_needs_no_engine(
    node: Node, sender: Sender, *, own: bool, stream: bool
) -> None:
    before = node.calls("begin")
    sent = sender.offer()
    first = END if own else sent.first
    sender.finish(sent, first_token=first)
    body = sent.body(20, stream=stream, sampling={"stop_token_ids": [] if own else [first]})
    response = node.generate(body)
    answer = next(events(response)) if stream else response.json()
    (choice,) = answer["choices"]
    assert choice["token_ids"] == [first]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None if own else first)
    assert node.calls("begin") == before
    sent.outgoing.wait(DEADLINE_S)


def test_T100_one_token_is_the_first_one(node: Node, sender: Sender) -> None:
    before = node.calls("begin")
    sent = sender.send()
    (choice,) = node.generate(sent.body(1)).json()["choices"]
    assert (choice["token_ids"], choice["finish_reason"]) == ([sent.first], "length")
    assert node.calls("begin") == before


def test_T010_a_prompt_of_one_token(node: Node, sender: Sender) -> None:
    sent = sender.send(1)
    assert node.generate(sent.body()).json()["choices"][0]["token_ids"] == sent.tokens(8)


def test_T024_the_longest_prompt_gets_the_one_token_that_fits(node: Node, sender: Sender) -> None:
    sent = sender.send(MAX_SEQ_LEN - 1)
    body = sent.body()
    del body["sampling_params"]["max_tokens"]
    assert node.generate(body).json()["choices"][0]["token_ids"] == [sent.first]


def test_the_first_token_may_come_with_the_request(node: Node, sender: Sender) -> None:
    sent = sender.offer()
    sender.finish(sent, last_token=sent.prompt[-1])
    response = node.generate(sent.body(mark={"first_token": sent.first, "prompt_tokens": 40}))
    assert response.json()["choices"][0]["token_ids"] == sent.tokens(8)


@pytest.mark.parametrize(
    ("values", "mark", "code"),
    [
        ({"first_token": 9}, {"first_token": 8}, "FIRST_TOKEN_MISMATCH"),
        ({"last_token": 1039}, {}, "FIRST_TOKEN_MISSING"),
        ({"first_token": 9, "last_token": 3}, {}, "PROMPT_MISMATCH"),
    ],
)
def test_what_does_not_belong_together_is_not_decoded(
    node: Node, sender: Sender, values: dict[str, int], mark: dict[str, int], code: str
) -> None:
    before = node.calls("inject")
    sent = sender.offer()
    sender.finish(sent, **values)
    response = node.generate(sent.body(mark=mark))
    assert response.status_code == 409
    assert response.json()["error"]["pdhandoff"]["code"] == code
    assert node.calls("inject") == before


def test_a_prompt_of_another_length_is_not_decoded(node: Node, sender: Sender) -> None:
    sent = sender.send()
    response = node.generate(body_of(sent.handoff, sent.prompt[1:]))
    assert (response.status_code, response.json()["error"]["param"]) == (409, "token_ids")


def test_T057_a_handoff_is_used_once(node: Node, sender: Sender) -> None:
    sent = sender.send()
    assert node.generate(sent.body()).status_code == 200
    again = node.generate(sent.body())
    assert (again.status_code, again.json()["error"]["pdhandoff"]["code"]) == (409, "DUPLICATE")


def test_a_handoff_that_nobody_offers_is_not_found(node: Node) -> None:
    response = node.generate(body_of(HandoffId.mint(), [1, 2, 3]))
    assert (response.status_code, response.json()["error"]["pdhandoff"]["code"]) == (404, "EXPIRED")


def test_a_request_may_say_how_long_it_waits_for_its_producer(node: Node, sender: Sender) -> None:
    handoff = HandoffId.mint()
    assert node.generate(body_of(handoff, [1], mark={"wait_s": 0.05})).status_code == 404
    sent = sender.offer(handoff=HandoffId.mint())
    late = HandoffId.mint()
    answer = node.later(body_of(late, sent.prompt, mark={"wait_s": 20}))
    until(lambda: "waiting" in node.stages())
    # longer than this node waits by itself
    assert node.generate(body_of(HandoffId.mint(), [1])).status_code == 404
    assert not answer.done()
    again = sender.send(handoff=late)
    assert answer.result(DEADLINE_S).json()["choices"][0]["token_ids"] == again.tokens(8)
    sent.outgoing.cancel("not wanted")


def test_a_handoff_that_was_over_before_its_request_is_gone(node: Node, sender: Sender) -> None:
    sent = sender.offer()
    until(lambda: node.status()["landing"]["states"])
    sent.outgoing.cancel("the test does not want it")
    until(lambda: not node.status()["landing"]["states"])
    response = node.generate(sent.body())
    assert (response.status_code, response.json()["error"]["pdhandoff"]["code"]) == (410, "GONE")


@pytest.mark.parametrize("stream", [False, True])
def test_T109_a_prefill_that_fails_answers_the_request_at_once(node: Node, sender: Sender, *, stream: bool) -> None:
    sent = sender.offer()
    answer = node.later(sent.body(stream=stream))
    until(lambda: node.stages() == ["waiting"])
    sent.outgoing.cancel("out of pages")
    response = answer.result(DEADLINE_S)
    assert response.status_code == 502
    error = response.json()["error"]
    assert (error["type"], error["pdhandoff"]["code"]) == ("HandoffFailedError", "CANCELLED")
    assert "out of pages" in error["message"]
    newest = node.status()["recent_failures"][0]
    assert (newest["status"], newest["code"]) == (502, "CANCELLED")


def test_T109_a_producer_that_ends_in_the_middle_answers_the_request_at_once(node: Node) -> None:
    with Sender(node.control) as doomed:
        sent = doomed.offer()
        answer = node.later(sent.body())
        until(lambda: node.stages() == ["waiting"])
    response = answer.result(DEADLINE_S)
    assert response.status_code == 502
    node.idle()


def test_T096_requests_with_one_id_are_two_requests(node: Node, sender: Sender) -> None:
    node.order("hold", call="inject")
    first, second = sender.send(), sender.send()
    answers = [node.later(sent.body(request_id="same")) for sent in (first, second)]
    until(lambda: len(node.stages()) == 2)
    node.order("go")
    tokens = [answer.result(DEADLINE_S).json()["choices"][0]["token_ids"] for answer in answers]
    assert tokens == [first.tokens(8), second.tokens(8)]


def test_what_this_engine_cannot_is_refused_before_anything_is_announced(node: Node) -> None:
    response = node.generate(body_of(HandoffId.mint(), [1], sampling={"top_k": 5}))
    assert response.status_code == 400
    assert "top_k: this engine" in response.json()["error"]["message"]
    assert not node.status()["landing"]["states"]


def test_T089_a_host_in_a_request_is_not_contacted(node: Node, sender: Sender) -> None:
    sent = sender.send()
    response = node.generate(sent.body(mark={"consumer": "169.254.169.254:80"}))
    assert response.json()["choices"][0]["token_ids"] == sent.tokens(8)


def test_every_call_of_the_engine_but_parking_comes_from_one_thread(node: Node) -> None:
    assert node.order("state")["threads"] == ["pdhandoff-engine"]


def test_models_health_and_metrics_say_how_it_is(node: Node) -> None:
    (model,) = node.client.get("/v1/models").json()["data"]
    assert (model["id"], model["max_model_len"]) == ("node-test", MAX_SEQ_LEN)
    assert node.client.get("/health").json() == {"status": "ok"}
    text = node.client.get("/metrics").text
    for line in (
        "pdhandoff_node_healthy 1.0",
        'pdhandoff_node_requests_total{code="",outcome="length"}',
        'pdhandoff_node_requests_total{code="DUPLICATE",outcome="409"}',
        'pdhandoff_node_requests_present{stage="decoding"} 0.0',
        'pdhandoff_node_landing_bytes{use="quarantined"} 0.0',
        "pdhandoff_node_draft_tokens_accepted_total",
    ):
        assert line in text
    status = node.status()
    assert (status["state"], status["control"], status["layout"]) == ("serving", node.control, "test")
    assert status["layout_digest"] == node.ready["layout_digest"]
    assert len(status["incarnation"]) == 32


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/inference/v1/generate", 405), ("GET", "/x", 404)])
def test_what_is_not_there_is_a_typed_error_too(node: Node, method: str, path: str, status: int) -> None:
    response = node.client.request(method, path)
    assert (response.status_code, response.json()["error"]["code"]) == (status, status)
