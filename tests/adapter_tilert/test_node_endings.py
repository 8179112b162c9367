"""Engines that fail, drains, signals: what clients, the health page and the exit status say."""

from __future__ import annotations

import signal
from pathlib import Path

import httpx
import pytest

from pdhandoff import HandoffFailed
from support.engines import DEADLINE_S, until
from support.node import Node, Sender, events

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("call", ["inject", "begin", "step", "end", "park"])
def test_a_typed_failure_of_the_engine_fails_one_request(tmp_path: Path, call: str) -> None:
    with Node(tmp_path) as node, Sender(node.control) as sender:
        node.order("fail", call=call, kind="typed")
        failed, good = sender.send(), sender.send()
        response = node.generate(failed.body())
        if call != "end":  # the tokens were there before
            assert response.status_code == 500
            error = response.json()["error"]
            assert (error["type"], error["message"]) == ("InternalServerError", f"{call} failed as it was told to")
        assert node.generate(good.body()).json()["choices"][0]["token_ids"] == good.tokens(8)
        assert node.client.get("/health").status_code == 200
        node.idle()


def test_a_failure_in_the_middle_of_a_stream_is_an_error_event(tmp_path: Path) -> None:
    with Node(tmp_path) as node, Sender(node.control) as sender:
        node.order("hold", call="step")
        node.order("fail", call="step", kind="typed")
        sent = sender.send()
        with node.client.stream("POST", "/inference/v1/generate", json=sent.body(stream=True)) as response:
            stream = events(response)
            assert next(stream)["choices"][0]["token_ids"] == [sent.first]
            node.order("go")
            error, done = stream
        assert error["error"]["code"] == 500
        assert "choices" not in error
        assert done is None


def test_three_failures_in_a_row_mean_that_the_engine_is_broken(tmp_path: Path) -> None:
    with Node(tmp_path) as node, Sender(node.control) as sender:
        for _ in range(3):
            node.order("fail", call="step", kind="typed")
            assert node.generate(sender.send().body()).status_code == 500
        until(lambda: node.client.get("/health").status_code == 503)
        assert "3 requests in a row" in node.client.get("/health").json()["reason"]


def test_a_fault_of_the_engine_turns_the_node_unhealthy_and_answers_everybody(tmp_path: Path) -> None:
    with Node(tmp_path) as node, Sender(node.control) as sender:
        node.order("hold", call="step")
        node.order("fail", call="step", kind="fault")
        running, parked, landed, waiting = sender.send(), sender.send(), sender.send(), sender.offer()
        answers = []
        for number, each in enumerate((running, parked, landed, waiting), 1):
            answers.append(node.later(each.body()))
            until(lambda wanted=number: len(node.stages()) == wanted)  # type: ignore[misc]
            until(lambda: "decoding" in node.stages())
        node.order("go")
        responses = [answer.result(DEADLINE_S) for answer in answers]
        assert [response.status_code for response in responses] == [500, 503, 503, 503]
        assert "step broke" in responses[0].json()["error"]["message"]
        assert [response.json()["error"]["pdhandoff"]["retryable"] for response in responses] == [True] * 4
        health = node.client.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "unhealthy")
        assert "step broke as it was told to" in health.json()["reason"]
        assert node.generate(sender.send().body()).status_code == 503
        assert "pdhandoff_node_healthy 0.0" in node.client.get("/metrics").text
        assert node.status()["state"] == "unhealthy"
        until(lambda: not node.stages())


def test_an_engine_that_hangs_turns_the_node_unhealthy(tmp_path: Path) -> None:
    with Node(tmp_path, "--stall", "0.3") as node, Sender(node.control) as sender:
        node.order("hold", call="step")
        sent = sender.send()
        answer = node.later(sent.body())
        until(lambda: node.client.get("/health").status_code == 503)
        assert "in one call for" in node.client.get("/health").json()["reason"]
        node.order("go")
        assert answer.result(DEADLINE_S).json()["choices"][0]["token_ids"] == sent.tokens(8)
        assert node.client.get("/health").status_code == 200


def test_a_drain_refuses_what_is_new_and_finishes_what_is_under_way(tmp_path: Path) -> None:
    with Node(tmp_path) as node, Sender(node.control) as sender:
        node.order("hold", call="step")
        running, waiting, late = sender.send(), sender.offer(), sender.send()
        answers = [node.later(running.body()), node.later(waiting.body())]
        until(lambda: sorted(node.stages()) == ["decoding", "waiting"])
        said = node.client.post("/drain")
        assert (said.status_code, said.json()) == (202, {"state": "draining", "requests": 2})
        assert node.client.post("/drain").status_code == 202
        refused = node.generate(late.body())
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert refused.json()["error"]["pdhandoff"] == {"code": "DRAINING", "retryable": True}
        with pytest.raises(HandoffFailed, match="DRAINING"):
            sender.send().outgoing.wait(DEADLINE_S)
        health = node.client.get("/health")
        assert (health.status_code, health.json()) == (503, {"status": "draining", "reason": "draining"})
        assert node.status()["state"] == "draining"
        sender.finish(waiting)
        node.order("go")
        for sent, answer in zip((running, waiting), answers, strict=True):
            assert answer.result(DEADLINE_S).json()["choices"][0]["token_ids"] == sent.tokens(8)


def test_sigterm_drains_and_the_process_ends_well(tmp_path: Path) -> None:
    with Node(tmp_path) as node, Sender(node.control) as sender:
        node.order("hold", call="step")
        sent = sender.send()
        answer = node.later(sent.body())
        until(lambda: node.stages() == ["decoding"])
        node.signal(signal.SIGTERM)
        until(lambda: node.client.get("/health").status_code == 503)
        assert not answer.done()
        node.order("go")
        assert answer.result(DEADLINE_S).json()["choices"][0]["token_ids"] == sent.tokens(8)
        assert node.wait() == 0
        assert not (tmp_path / "ready.json").exists()
        assert "Traceback" not in node.log()


@pytest.mark.parametrize("how", ["time", "signal"])
def test_a_drain_does_not_wait_for_ever(tmp_path: Path, how: str) -> None:
    with Node(tmp_path, "--drain", "0.3" if how == "time" else "60") as node, Sender(node.control) as sender:
        sent = sender.offer()
        answer = node.later(sent.body())
        until(lambda: node.stages() == ["waiting"])
        node.signal(signal.SIGTERM)
        if how == "signal":
            until(lambda: node.client.get("/health").status_code == 503)
            node.signal(signal.SIGTERM)
        response = answer.result(DEADLINE_S)
        assert response.status_code == 503
        assert response.json()["error"]["pdhandoff"]["retryable"] is True
        assert node.wait() == 1


def test_ctrl_c_ends_everything_at_once(tmp_path: Path) -> None:
    with Node(tmp_path) as node, Sender(node.control) as sender:
        sent = sender.offer()
        answer = node.later(sent.body())
        until(lambda: node.stages() == ["waiting"])
        node.signal(signal.SIGINT)
        assert answer.result(DEADLINE_S).status_code == 503
        assert node.wait() == 130
        assert "Traceback" not in node.log()
        assert "interrupted" in node.log()
        assert not (tmp_path / "ready.json").exists()


def test_an_engine_that_never_comes_back_does_not_keep_the_process(tmp_path: Path) -> None:
    with Node(tmp_path) as node, Sender(node.control) as sender:
        node.order("hold", call="step")
        answer = node.later(sender.send().body())
        until(lambda: node.stages() == ["decoding"])
        node.signal(signal.SIGTERM)
        until(lambda: node.client.get("/health").status_code == 503)
        node.signal(signal.SIGTERM)
        assert answer.result(DEADLINE_S).status_code == 503
        assert node.wait() == 1
        assert "did not return from a call" in node.log()


def test_a_node_that_is_killed_fails_its_producer(tmp_path: Path) -> None:
    with Node(tmp_path) as node, Sender(node.control) as sender:
        sent = sender.offer()
        answer = node.later(sent.body())
        until(lambda: node.stages() == ["waiting"])
        node.kill()
        with pytest.raises(httpx.TransportError):
            answer.result(DEADLINE_S)
        until(sent.outgoing.settled.done)
        assert sent.outgoing.settled.exception() is not None
