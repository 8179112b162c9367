"""The line: bounded, visible, in order; handoffs land and are parked while another request decodes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.engines import DEADLINE_S, until
from support.node import Node, Sender

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with Node(tmp_path_factory.mktemp("node"), "--max-queue", "3", "--arena-bytes", "64K") as node:
        yield node


@pytest.fixture
def sender(node: Node) -> Iterator[Sender]:
    with Sender(node.control) as sender:
        yield sender
    node.order("go")
    node.idle()


def test_two_handoffs_land_while_one_decodes(node: Node, sender: Sender) -> None:
    node.order("hold", call="step")
    running = sender.send()
    answers = [node.later(running.body())]
    until(lambda: node.stages() == ["decoding"])
    parks = node.calls("park")
    later = [sender.offer(), sender.offer()]
    answers += [node.later(sent.body()) for sent in later]
    for sent in later:
        sender.finish(sent)
    for sent in later:  # T113: their producers are done with, and hold no pages
        sent.outgoing.wait(DEADLINE_S)
        assert sent.outgoing.source_free.wait(DEADLINE_S)
    until(lambda: sorted(node.stages()) == ["decoding", "landed", "parked"])
    assert node.calls("park") == parks + 1
    node.order("go")
    for sent, answer in zip([running, *later], answers, strict=True):
        assert answer.result(DEADLINE_S).json()["choices"][0]["token_ids"] == sent.tokens(8)


def test_requests_are_decoded_in_the_order_of_their_admission(node: Node, sender: Sender) -> None:
    node.order("hold", call="step")
    first = sender.send()
    answers = [node.later(first.body(request_id="0"))]
    until(lambda: node.stages() == ["decoding"])
    sent = [sender.landed() for _ in range(3)]
    for number, each in enumerate(sent, 1):
        answers.append(node.later(each.body(request_id=str(number))))
        until(lambda wanted=number: node.status()["queued"] == wanted)  # type: ignore[misc]
    until(lambda: "waiting" not in node.stages())
    status = node.status()
    assert status["running"]["request_id"] == "0"
    assert [each["request_id"] for each in status["queue"]] == ["1", "2", "3"]
    assert [each["position"] for each in status["queue"]] == [1, 2, 3]
    node.order("go")
    positions = [answer.result(DEADLINE_S).headers["x-pdhandoff-queue-position"] for answer in answers]
    assert positions == ["0", "1", "2", "3"]
    assert node.order("state")["begun"][-4:] == [each.first for each in (first, *sent)]


def test_who_is_ready_does_not_wait_for_who_is_not(node: Node, sender: Sender) -> None:
    slow, quick = sender.offer(), sender.landed()
    answer = node.later(slow.body())
    until(lambda: node.stages() == ["waiting"])
    assert node.generate(quick.body()).json()["choices"][0]["token_ids"] == quick.tokens(8)
    sender.finish(slow)
    assert answer.result(DEADLINE_S).json()["choices"][0]["token_ids"] == slow.tokens(8)


def test_T111_a_full_line_says_when_to_try_again(node: Node, sender: Sender) -> None:
    node.order("hold", call="step")
    sent = [sender.send() for _ in range(5)]
    answers = []
    for number, each in enumerate(sent[:4]):
        answers.append(node.later(each.body()))
        until(lambda wanted=number: len(node.stages()) > wanted and "decoding" in node.stages())  # type: ignore[misc]
    refused = node.generate(sent[4].body())
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) >= 1
    error = refused.json()["error"]
    assert (error["type"], error["pdhandoff"]) == ("TooManyRequestsError", {"code": "QUEUE_FULL", "retryable": True})
    assert "3 requests wait" in error["message"]
    node.order("go")
    for each, answer in zip(sent, answers, strict=False):
        assert answer.result(DEADLINE_S).json()["choices"][0]["token_ids"] == each.tokens(8)
    # a refusal for want of room has used nothing up
    assert node.generate(sent[4].body()).json()["choices"][0]["token_ids"] == sent[4].tokens(8)


def test_handoffs_for_which_there_is_no_landing_memory_wait_for_it(node: Node, sender: Sender) -> None:
    """64 KiB hold the rows of one such prompt; what does not fit lands when others are parked."""
    node.order("hold", call="step")
    sent = [sender.offer(250) for _ in range(4)]
    answers = []
    for each in sent:
        answers.append(node.later(each.body()))
        sender.finish(each)
        until(lambda: "decoding" in node.stages())
    until(lambda: node.status()["landing"]["queue"] > 0, "a handoff waits for landing memory")
    node.order("go")
    for each, answer in zip(sent, answers, strict=True):
        assert answer.result(DEADLINE_S).json()["choices"][0]["token_ids"] == each.tokens(8)


def test_a_prompt_that_never_fits_is_refused_at_once(node: Node, sender: Sender) -> None:
    sent = sender.send(500)
    response = node.generate(sent.body(2))
    assert response.status_code in {410, 413}  # whether its offer was there first
    code = response.json()["error"]["pdhandoff"]["code"]
    assert code in {"GONE", "TOO_LARGE"}
