"""T060, T108: clients that leave, aborts and deadlines, at every stage; each leaves nothing behind."""

from __future__ import annotations

import random
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pdhandoff import HandoffFailed
from support.engines import DEADLINE_S, until
from support.node import Node, Sender, Sent

pytestmark = pytest.mark.slow

STAGES = ("waiting", "landed", "parked", "decoding")


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with Node(tmp_path_factory.mktemp("node")) as node:
        yield node


@pytest.fixture
def sender(node: Node) -> Iterator[Sender]:
    with Sender(node.control) as sender:
        yield sender
    node.order("go")
    node.idle()


class Scene:
    """A request that stays in one stage until the engine is let go. What is ahead of it, if anything, decodes."""

    def __init__(self, node: Node, sender: Sender, stage: str) -> None:
        node.order("hold", call="step")
        self.node = node
        self.drops = node.calls("drop")
        self.stage = stage
        ahead = {"waiting": 0, "landed": 2, "parked": 1, "decoding": 0}[stage]
        self.ahead = [(sent, node.later(sent.body())) for sent in (sender.send() for _ in range(ahead))]
        for number, (_, answer) in enumerate(self.ahead):
            until(lambda wanted=number: len(node.stages()) > wanted and "waiting" not in node.stages())  # type: ignore[misc]
            assert not answer.done()
        self.sent: Sent = sender.offer() if stage == "waiting" else sender.send()

    def reached(self) -> None:
        """Wait until it is where it should be."""
        rank = {"waiting": ["waiting"], "decoding": ["decoding"]}
        rank |= {"parked": ["parked", "decoding"], "landed": ["parked", "landed", "decoding"]}
        until(lambda: self.node.stages() == rank[self.stage], f"{self.stage}")

    def left(self) -> None:
        """Wait until it is out of the line, while what was ahead still decodes; then those end as they should."""
        until(lambda: len(self.node.stages()) == len(self.ahead) or self.stage == "decoding", "it left the line")
        assert self.node.calls("drop") == self.drops + (self.stage == "parked")
        self.node.order("go")
        for sent, answer in self.ahead:
            assert answer.result(DEADLINE_S).json()["choices"][0]["token_ids"] == sent.tokens(8)
        self.node.idle()

    def settled(self) -> None:
        """Its producer has learnt of an end: success where all rows had landed."""
        if self.stage == "waiting":
            with pytest.raises(HandoffFailed, match="CANCELLED"):
                self.sent.outgoing.wait(DEADLINE_S)
        else:
            self.sent.outgoing.wait(DEADLINE_S)
        assert self.sent.outgoing.source_free.wait(DEADLINE_S) or self.stage == "waiting"


def close(link: socket.socket) -> None:
    link.close()


def reset(link: socket.socket) -> None:
    """As a client that dies: no polite end."""
    link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
    link.close()


@pytest.mark.parametrize("leave", [close, reset])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_T108_a_client_that_leaves_frees_everything(
    node: Node, sender: Sender, stage: str, leave: Callable[[socket.socket], None], *, stream: bool
) -> None:
    scene = Scene(node, sender, stage)
    link = node.raw(scene.sent.body(200, stream=stream))
    scene.reached()
    leave(link)
    scene.left()
    scene.settled()
    assert node.status()["recent_failures"][0]["code"] == "DISCONNECTED"


@pytest.mark.parametrize("stage", STAGES)
def test_T060_an_abort_ends_a_request_as_vllm_ends_it(node: Node, sender: Sender, stage: str) -> None:
    scene = Scene(node, sender, stage)
    answer = node.later(scene.sent.body(200, request_id="to-abort"))
    scene.reached()
    said = node.client.post("/inference/v1/abort_requests", json={"request_ids": ["to-abort", "unknown"]})
    assert said.json() == {"aborted": 1}
    (choice,) = answer.result(DEADLINE_S).json()["choices"]
    assert choice["finish_reason"] == "abort"
    assert choice["token_ids"] == ([scene.sent.first] if stage == "decoding" else [])
    scene.left()
    scene.settled()


@pytest.mark.parametrize("stage", STAGES)
def test_a_deadline_ends_a_request_wherever_it_is(node: Node, sender: Sender, stage: str) -> None:
    scene = Scene(node, sender, stage)
    answer = node.later(scene.sent.body(200, mark={"deadline_s": 1.5}))
    scene.reached()
    response = answer.result(DEADLINE_S)
    if stage == "waiting" and response.status_code == 404:
        pass  # the clock of its announcement rang first
    else:
        assert response.status_code == 504
        assert f"while {stage}" in response.json()["error"]["message"]
    scene.left()


def test_a_deadline_in_the_middle_of_a_stream_is_an_error_event(node: Node, sender: Sender) -> None:
    node.order("hold", call="step")
    sent = sender.send()
    response = node.generate(sent.body(200, stream=True, mark={"deadline_s": 1.0}))
    assert response.status_code == 200
    first, error, done = [line for line in response.text.splitlines() if line]
    assert f'"token_ids":[{sent.first}]' in first
    assert '"type":"DeadlineExceededError"' in error
    assert "finish_reason" not in error
    assert done == "data: [DONE]"


def test_an_abort_names_requests(node: Node) -> None:
    def abort(body: object) -> int:
        return node.client.post("/inference/v1/abort_requests", json=body).status_code

    assert abort({"request_ids": "one"}) == 200
    assert abort({"request_ids": [1]}) == 400
    assert abort({}) == 400
    assert abort([]) == 400
    assert abort({"request_ids": ["x"] * 5000}) == 400


def held(node: Node) -> tuple[int, int]:
    """Threads and descriptors of the node's process."""
    process = Path("/proc") / str(node.process.pid)
    return len(list((process / "task").iterdir())), len(list((process / "fd").iterdir()))


def test_T079_clients_and_producers_that_come_and_go_as_they_like_leave_nothing(node: Node, sender: Sender) -> None:
    draw = random.Random(79)
    node.generate(sender.send().body())  # what the process keeps once it has served
    node.idle()
    before = held(node)
    for _ in range(25):
        stays, goes = sender.send(), sender.offer()
        link = node.raw(goes.body(50, stream=draw.random() < 0.5, request_id="goes"))
        answer = node.later(stays.body())
        end = draw.choice(["leave", "abort", "cancel", "leave late"])
        if draw.random() < 0.5:
            sender.finish(goes)
        if end == "cancel":
            goes.outgoing.cancel("as it likes")
        elif end == "abort":
            node.client.post("/inference/v1/abort_requests", json={"request_ids": ["goes"]})
        if end == "leave late":
            until(lambda: len(node.stages()) <= 1)
        link.close()
        assert answer.result(DEADLINE_S).json()["choices"][0]["token_ids"] == stays.tokens(8)
    node.idle()
    # threads that look things up for pages of the node stay: there may be some more of them
    until(lambda: all(now <= then + 6 for now, then in zip(held(node), before, strict=True)), f"{held(node)}, {before}")
