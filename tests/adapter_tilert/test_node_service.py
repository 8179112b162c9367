"""The node without HTTP: what turns it unhealthy, and what a start that fails leaves behind."""

from __future__ import annotations

import json
import logging
import socket
import threading
from collections.abc import Iterator
from typing import final

import pytest

from pdhandoff import ErrorCode, HandoffId, LocalError
from pdhandoff_tilert.engine import DecodeRequest, DecodeStep
from pdhandoff_tilert.node.job import Ending, Event
from pdhandoff_tilert.node.landing import ends_at_once
from pdhandoff_tilert.node.refusals import Refusal, code_name, from_error
from pdhandoff_tilert.node.service import NodeSettings, Service
from pdhandoff_tilert.node.status import node_status
from support.engines import DEADLINE_S, leaves_nothing, until
from support.node import Sender, body_of
from support.node_engine import END, Engine

SETTINGS = NodeSettings(arena_bytes=1 << 20, max_queue=4)


@pytest.fixture
def service() -> Iterator[Service]:
    with leaves_nothing():
        service = Service(Engine, SETTINGS)
        yield service
        service.close()


def test_a_node_starts_healthy_and_serves(service: Service) -> None:
    assert service.problem() == ""
    with Sender(service.control) as sender:
        sent = sender.send()
        seen: list[Event] = []
        job = service.submit(service.read(json.dumps(sent.body(8)).encode(), None), seen.extend)
        until(lambda: job.over)
        tokens = [token for event in seen if not isinstance(event, Ending) for token in event.tokens]
        assert tokens == sent.tokens(8)
    status = node_status(service)
    assert (status.state, status.queued, status.running) == ("serving", 0, None)


@final
class Talkative(Engine):
    """Gives more tokens than it was asked for."""

    def step(self) -> DecodeStep:
        return DecodeStep(tokens=tuple(range(10, 40)), finish_reason="")


def test_nobody_gets_more_tokens_than_were_asked_for() -> None:
    service = Service(Talkative, SETTINGS)
    with Sender(service.control) as sender:
        seen: list[Event] = []
        job = service.submit(service.read(json.dumps(sender.send().body(8)).encode(), None), seen.extend)
        until(lambda: job.over)
    service.close()
    assert job.output_tokens == 8
    assert seen[-1] == Ending(finish_reason="length")


def test_a_consumer_that_broke_turns_the_node_unhealthy_and_fails_who_waits(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[Event] = []
    body = json.dumps(body_of(HandoffId.mint(), [1, 2])).encode()
    job = service.submit(service.read(body, None), seen.extend)

    def fault() -> None:
        raise RuntimeError("broken by the test")

    with caplog.at_level(logging.CRITICAL, "pdhandoff"):
        service.consumer._loop.post(fault)
        until(lambda: job.over)
    assert job.ending is not None
    assert job.ending.refusal is not None
    assert (job.ending.refusal.status, job.ending.refusal.code) == (500, "INTERNAL")
    assert "consumer does not answer" in service.problem()
    status = node_status(service)
    assert (status.state, status.landing) == ("unhealthy", None)
    assert b"pdhandoff_node_healthy 0.0" in service.metrics.text()


def test_an_engine_thread_that_ended_turns_the_node_unhealthy(service: Service) -> None:
    service._decoder.stop(DEADLINE_S)
    assert service.problem() == "the engine thread has ended"


def test_a_close_ends_who_waits_and_may_come_twice(service: Service) -> None:
    body = json.dumps(body_of(HandoffId.mint(), [1, 2])).encode()
    job = service.submit(service.read(body, None), lambda _: None)
    service.close()
    service.close()
    assert job.ending is not None
    assert job.ending.refusal is not None
    assert job.ending.refusal.status == 503
    with pytest.raises(Refusal):
        service.submit(service.read(json.dumps(body_of(HandoffId.mint(), [1])).encode(), None), lambda _: None)


def test_a_request_for_which_no_thread_can_be_started_is_refused(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    wanted = service.read(json.dumps(body_of(HandoffId.mint(), [1])).encode(), None)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(Refusal) as caught:
            service.submit(wanted, lambda _: None)
    assert (caught.value.status, caught.value.retryable) == (503, True)
    assert service.line.jobs() == []


def test_a_start_that_fails_leaves_nothing() -> None:
    def broken() -> Engine:
        raise LocalError(ErrorCode.CONFIG, "no weights")

    with leaves_nothing():
        with pytest.raises(LocalError, match="no weights"):
            Service(broken, SETTINGS)
        with socket.create_server(("127.0.0.1", 0)) as taken:
            listen = f"127.0.0.1:{taken.getsockname()[1]}"
            with pytest.raises(LocalError, match="cannot listen"):
                Service(Engine, NodeSettings(arena_bytes=1 << 20, listen=listen))


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (ErrorCode.EXPIRED, 404),
        (ErrorCode.NOT_ANNOUNCED, 404),
        (ErrorCode.DUPLICATE, 409),
        (ErrorCode.TOO_LARGE, 413),
        (ErrorCode.INTERNAL, 500),
        (ErrorCode.LINK_LOST, 502),
        (ErrorCode.DIGEST_MISMATCH, 502),
        (ErrorCode.LAYOUT_MISMATCH, 502),
        (ErrorCode.QUEUE_TIMEOUT, 503),
        (ErrorCode.BUSY, 503),
        (4711, 502),
    ],
)
def test_every_end_of_a_handoff_has_a_status(code: int, status: int) -> None:
    refusal = from_error(LocalError(code, "reason"))
    assert (refusal.status, refusal.reason, refusal.code) == (status, "reason", code_name(code))
    assert bool(refusal.headers) == (code in {ErrorCode.BUSY, ErrorCode.QUEUE_TIMEOUT})


@pytest.mark.parametrize(
    ("first", "stop", "ignore", "most", "least", "reason"),
    [
        (END, (), False, 9, 0, "stop"),
        (END, (), True, 9, 0, ""),
        (END, (END,), True, 9, 0, "stop"),
        (5, (5,), False, 9, 0, "stop"),
        (5, (5,), False, 9, 1, "stop"),
        (5, (5,), False, 9, 2, ""),
        (5, (), False, 1, 0, "length"),
        (5, (), False, 2, 0, ""),
    ],
)
def test_T098_T100_what_a_first_token_ends(
    *, first: int, stop: tuple[int, ...], ignore: bool, most: int, least: int, reason: str
) -> None:
    request = DecodeRequest(
        prompt=(1,),
        first_token=first,
        stop_token_ids=frozenset(stop),
        ignore_eos=ignore,
        max_tokens=most,
        min_tokens=least,
    )
    assert ends_at_once(request, frozenset({END})) == reason
