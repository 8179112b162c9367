"""Requests of every kind against a real vLLM with the connector: in company, cut short, wrongly marked."""

from __future__ import annotations

import http.client
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest
import torch

from pdhandoff import HandoffFailed, HandoffId
from support.vllm_landing import Landed, Landing, vllm_layout
from support.vllm_server import VllmServer, completion
from support.vllm_servers import GQA, Running, Servers
from support.vllm_spy import spied_rows

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

USAGE = "vllm:kv_cache_usage_perc"
SETTLED_S = 20.0


@pytest.fixture
def running(servers: Servers) -> Running:
    return servers.get(GQA)


@pytest.fixture(scope="module")
def landing() -> Iterator[Landing]:
    with Landing(vllm_layout("gqa", dtype=torch.float32)) as landing:
        yield landing


def prompt(length: int, seed: int) -> list[int]:
    random = torch.Generator().manual_seed(1000 + seed)
    return torch.randint(0, 256, (length,), generator=random).tolist()


def settle(server: VllmServer) -> None:
    """Every block is free again, and the server well."""
    deadline, pause = time.monotonic() + SETTLED_S, threading.Event()
    while server.metrics()[USAGE] > 0:
        assert time.monotonic() < deadline, "blocks are still held"
        pause.wait(0.1)
    assert server.get("/health")[0] == http.client.OK


def same_rows(running: Running, ticket: Any, landed: Landed) -> bool:
    """The rows that landed are those that vLLM had in its pages at one time."""
    times = spied_rows(running.spy, str(ticket.handoff))
    return any(all(map(torch.equal, own, landed.rows)) for own in times)


def test_eight_at_once_of_which_half_are_unmarked(running: Running, landing: Landing) -> None:
    prompts = [prompt(60 + 50 * number, number) for number in range(8)]
    alone = [running.server.complete(tokens, max_tokens=12).tokens for tokens in prompts]
    tickets = [landing.expect() for _ in range(4)]

    def ask(number: int) -> Any:
        params = landing.mark(tickets[number // 2]) if number % 2 else None
        return running.server.complete(prompts[number], max_tokens=12, params=params)

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, range(8)))
    assert [answer.tokens for answer in answers] == alone
    assert [answer.params for answer in answers[::2]] == [None] * 4
    for number, ticket in enumerate(tickets):
        landed = landing.take(ticket)
        assert landed.first_token == alone[2 * number + 1][0]
        assert same_rows(running, ticket, landed)
    settle(running.server)


def test_a_prefix_that_vllm_had_in_its_cache_is_handed_off_too(running: Running, landing: Landing) -> None:
    first, hits = prompt(300, 50), running.server.metrics()["vllm:prefix_cache_hits_total"]
    running.server.complete(first, max_tokens=1)
    for tokens in (first, [*first[:260], *prompt(90, 51)]):
        ticket = landing.expect()
        running.server.complete(tokens, max_tokens=1, params=landing.mark(ticket))
        landed = landing.take(ticket)
        assert landed.prompt_tokens == len(tokens)
        assert same_rows(running, ticket, landed)
    assert running.server.metrics()["vllm:prefix_cache_hits_total"] >= hits + 2 * 256


def test_a_client_that_leaves_while_tokens_come_leaves_a_whole_handoff(running: Running, landing: Landing) -> None:
    ticket = landing.expect()
    body = completion(prompt(200, 60), max_tokens=700, params=landing.mark(ticket), stream=True, ignore_eos=True)
    with closing(running.server.ask("/v1/completions", body)) as link:
        link.getresponse().read(200)
        landed = landing.take(ticket)  # while vLLM goes on decoding
    assert same_rows(running, ticket, landed)
    settle(running.server)


def test_clients_that_leave_at_any_moment(running: Running, landing: Landing) -> None:
    ended = 0
    for number in range(12):
        ticket = landing.expect()
        body = completion(prompt(850, 70 + number), max_tokens=2, params=landing.mark(ticket))
        with closing(running.server.ask("/v1/completions", body)):
            for other in range(number):  # each takes a few steps of the engine
                running.server.complete(prompt(5, other), max_tokens=1)
        settle(running.server)
        ticket.cancel()  # it may be that the consumer never heard of it
        try:
            landed = landing.take(ticket)
        except HandoffFailed:
            ended += 1
        else:
            assert same_rows(running, ticket, landed)
    assert ended


def closed() -> str:
    with closing(socket.create_server(("127.0.0.1", 0))) as gone:
        return f"127.0.0.1:{gone.getsockname()[1]}"


BAD_MARKS: dict[str, Callable[[str], object]] = {
    "a number": lambda _: 7,
    "a text": lambda address: address,
    "nothing": lambda _: {},
    "an address that is a number": lambda _: {"consumer": 5556},
    "no port": lambda _: {"consumer": "127.0.0.1"},
    "a port out of range": lambda _: {"consumer": "127.0.0.1:70000"},
    "a port that is no number": lambda _: {"consumer": "127.0.0.1:http"},
    "a host that no operator allowed": lambda _: {"consumer": "169.254.169.254:80"},
    "an unknown name": lambda _: {"consumer": "no-such-host.invalid:5556"},
    "a port where nobody listens": lambda _: {"consumer": closed()},
    "a handoff id that is a number": lambda address: {"consumer": address, "handoff": 12},
    "a short handoff id": lambda address: {"consumer": address, "handoff": "abc"},
    "an unknown key": lambda address: {"consumer": address, "handof": "x"},
    "a negative queue time": lambda address: {"consumer": address, "queue_s": -1},
    "a queue time that is a text": lambda address: {"consumer": address, "queue_s": "long"},
}


@pytest.mark.parametrize("kind", BAD_MARKS)
def test_a_bad_mark_fails_the_handoff_and_nothing_else(kind: str, running: Running, landing: Landing) -> None:
    tokens = prompt(150, 90)
    own = running.server.complete(tokens, max_tokens=3).tokens
    answer = running.server.complete(tokens, max_tokens=3, params={"pdhandoff": BAD_MARKS[kind](landing.address)})
    assert answer.tokens == own
    assert answer.params is not None
    assert answer.params["pdhandoff"]["status"] == "failed"
    assert answer.params["pdhandoff"]["reason"]
    settle(running.server)


OTHER_LAYOUTS = {
    "another element": vllm_layout("gqa", dtype=torch.bfloat16),
    "another model": vllm_layout("gqa", dtype=torch.float32, name="small"),
    "another revision": vllm_layout("gqa", dtype=torch.float32, revision="2"),
    "another depth": vllm_layout("gqa", dtype=torch.float32, spec_depth=1),
    "another number of layers": vllm_layout("gqa", dtype=torch.float32, layers=4),
}


@pytest.mark.parametrize("kind", OTHER_LAYOUTS)
def test_a_decode_node_with_another_layout_fails_the_handoff_and_nothing_else(kind: str, running: Running) -> None:
    tokens = prompt(900, 91)
    own = running.server.complete(tokens, max_tokens=3).tokens
    with Landing(OTHER_LAYOUTS[kind]) as other:
        ticket = other.expect()
        answer = running.server.complete(tokens, max_tokens=3, params=other.mark(ticket))
        ticket.cancel()
    assert answer.tokens == own
    assert answer.params is not None
    assert answer.params["pdhandoff"]["status"] == "failed"
    assert answer.params["pdhandoff"]["reason"]
    settle(running.server)


def test_a_handoff_id_that_is_in_use_is_refused(running: Running, landing: Landing) -> None:
    ticket, tokens = landing.expect(), prompt(500, 92)
    with ThreadPoolExecutor(2) as pool:
        asked = [
            pool.submit(running.server.complete, tokens, max_tokens=20, params=landing.mark(ticket)) for _ in range(2)
        ]
        answers = [each.result() for each in asked]
    assert answers[0].tokens == answers[1].tokens
    assert sorted(str((answer.params or {})["pdhandoff"]["status"]) for answer in answers) == ["failed", "sent"]
    assert same_rows(running, ticket, landing.take(ticket))
    settle(running.server)


def test_several_choices_fail_the_handoff_and_nothing_else(running: Running, landing: Landing) -> None:
    ticket = landing.expect()
    body = completion(prompt(80, 93), max_tokens=4, params=landing.mark(ticket), n=2)
    status, answer = running.server.post("/v1/completions", {**body, "temperature": 1.0})
    assert status == http.client.OK
    assert len(answer["choices"]) == 2
    assert answer["kv_transfer_params"]["pdhandoff"]["status"] == "failed"
    ticket.cancel()
    settle(running.server)


def test_a_request_without_a_handoff_id_gets_one(running: Running, landing: Landing) -> None:
    answer = running.server.complete(prompt(70, 94), max_tokens=1, params={"pdhandoff": {"consumer": landing.address}})
    assert answer.params is not None
    told = answer.params["pdhandoff"]
    assert told["status"] == "sent"
    landed = landing.take(landing.consumer.announce(HandoffId.parse(told["handoff"]), deadline_s=20))
    assert landed.first_token == answer.tokens[0]
