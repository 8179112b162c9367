"""Few blocks, a full consumer, and a server that ends while it sends."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from pdhandoff import HandoffFailed, HandoffId
from support.vllm_landing import Landing, vllm_layout
from support.vllm_models import cached_model
from support.vllm_server import Completion, VllmServer
from support.vllm_servers import Servers, Setting, connector_of
from support.vllm_spy import spied_rows

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

FEW = Setting(
    "few",
    "gqa",
    (
        *("--dtype", "bfloat16", "--num-gpu-blocks-override", "18", "--no-scheduler-reserve-full-isl"),
        *("--shutdown-timeout", "20"),
    ),
    connector_of(mover="loopback", staging="auto"),
)
"it ends in good order, while by default vLLM kills its workers"
PUBLISHED = Setting(
    "published",
    "gqa",
    ("--dtype", "bfloat16"),
    {
        "kv_connector": "TileRTConnector",
        "kv_connector_module_path": "pdhandoff_vllm.connector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {
            "tilert_host": "127.0.0.1",
            "tilert_ctrl_port": 5556,
            "tilert_transport": "loopback",
            "allow": ["127.0.0.1"],
            "model": "tiny",
        },
    },
)
"the keys that operators of the published integration have in their configurations"


@pytest.fixture
def landing() -> Iterator[Landing]:
    with Landing(vllm_layout("gqa")) as landing:
        yield landing


def prompt(length: int, seed: int) -> list[int]:
    random = torch.Generator().manual_seed(2000 + seed)
    return torch.randint(0, 256, (length,), generator=random).tolist()


def test_preempted_requests_are_handed_off(servers: Servers, landing: Landing) -> None:
    running = servers.get(FEW)
    tickets = [landing.expect() for _ in range(8)]

    def ask(number: int) -> Completion:
        mark = landing.mark(tickets[number])
        return running.server.complete(prompt(501, number), max_tokens=60, ignore_eos=True, params=mark)

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, range(8)))
    for answer, ticket in zip(answers, tickets, strict=True):
        landed = landing.take(ticket)
        assert landed.first_token == answer.tokens[0]
        assert len(answer.tokens) == 60
        times = spied_rows(running.spy, str(ticket.handoff))
        assert any(all(map(torch.equal, own, landed.rows)) for own in times)
    metrics = running.server.metrics()
    assert metrics["vllm:num_preemptions_total"] > 0
    assert metrics["vllm:kv_cache_usage_perc"] == 0


def test_the_marks_of_the_published_integration_work(servers: Servers, landing: Landing) -> None:
    server = servers.get(PUBLISHED).server
    host, port = landing.address.rsplit(":", 1)
    tokens = prompt(200, 95)
    answer = server.complete(tokens, max_tokens=1, params={"tilert_host": host, "tilert_ctrl_port": int(port)})
    assert answer.params is not None
    told = answer.params["pdhandoff"]
    landed = landing.take(landing.consumer.announce(HandoffId.parse(told["handoff"]), deadline_s=20))
    assert (landed.prompt_tokens, landed.last_token, [landed.first_token]) == (200, tokens[-1], answer.tokens)


@pytest.mark.parametrize("setting", [PUBLISHED, FEW], ids=["killed", "in good order"])
def test_a_server_that_ends_while_it_sends(setting: Setting, servers: Servers) -> None:
    layout = vllm_layout("gqa")
    # memory for one handoff: the others wait in the consumer's queue, with their rows in the server's ring
    with Landing(layout, arena_bytes=4 * 3 * layout.components[0].planes[0].page_stride) as landing:
        server = servers.get(setting).server
        tickets = [landing.expect() for _ in range(4)]
        for number, ticket in enumerate(tickets):
            answer = server.complete(prompt(400, number), max_tokens=1, params=landing.mark(ticket))
            assert answer.params is not None
            assert answer.params["pdhandoff"]["status"] == "sent"
        server.signal(signal.SIGTERM)
        server.wait_ended()
        assert server.wait_gone(30), "processes are left"
        landing.take(tickets[0])  # it had landed before
        for ticket in tickets[1:]:
            with pytest.raises(HandoffFailed):
                landing.take(ticket)
        landing.check_empty(30)
    assert "encountered a fatal error" not in server.output


def test_a_wrong_key_stops_the_server_with_its_name(tmp_path: Path) -> None:
    wrong = connector_of("PDHandoffConnector", "pdhandoff_vllm", mover="loopback", stagging="direct")
    server = VllmServer(cached_model("gqa"), tmp_path / "server.log", connector=wrong)
    try:
        with pytest.raises(RuntimeError, match="has ended"):
            server.wait_ready()
        assert "unknown field `stagging`" in server.output
    finally:
        server.end()
