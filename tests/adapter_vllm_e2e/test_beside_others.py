"""The connector beside vLLM's own, under MultiConnector: marked and unmarked requests in one batch, all answered right.

Two servers: one that prefills for three pools at once (pdhandoff, vLLM's NIXL, files), and one that decodes what came
over NIXL.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from support.vllm_landing import Landing, vllm_layout
from support.vllm_models import cached_model
from support.vllm_server import Completion, VllmServer, free_port
from support.vllm_servers import PLAIN

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

OURS = {
    "kv_connector": "PDHandoffConnector",
    "kv_connector_module_path": "pdhandoff_vllm.connector",
    "kv_role": "kv_producer",
    "kv_connector_extra_config": {"mover": "loopback", "model": "tiny", "allow": ["127.0.0.1"]},
}
NIXL = {
    "kv_connector": "NixlConnector",
    "kv_role": "kv_both",
    "kv_buffer_device": "cpu",
    "kv_connector_extra_config": {"kv_lease_duration": 200},
}
REMOTE_DECODE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def prompt(length: int, seed: int) -> list[int]:
    random = torch.Generator().manual_seed(3000 + seed)
    return torch.randint(0, 256, (length,), generator=random).tolist()


def side_channel() -> dict[str, str]:
    return {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
        "UCX_TLS": "tcp,self,sm",
    }


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[VllmServer, VllmServer]]:
    folder: Path = tmp_path_factory.mktemp("pair")
    store = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
    store |= {"kv_connector_extra_config": {"shared_storage_path": str(folder / "store")}}  # type: ignore[dict-item]
    several: dict[str, Any] = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [OURS, NIXL, store]},
    }
    model = cached_model("gqa")
    # ExampleConnector cannot save a prompt in several steps
    whole = (*PLAIN, "--max-num-batched-tokens", "2048", "--shutdown-timeout", "20")
    prefill = VllmServer(model, folder / "prefill.log", *whole, connector=several, environment=side_channel())
    # ExampleConnector switches this manager off, and both ends of NIXL must agree
    alike = (*PLAIN, "--disable-hybrid-kv-cache-manager", "--shutdown-timeout", "20")
    decode = VllmServer(model, folder / "decode.log", *alike, connector=NIXL, environment=side_channel())
    with prefill, decode:  # they come up at the same time
        yield prefill, decode


def test_marked_and_unmarked_requests_in_one_batch(pair: tuple[VllmServer, VllmServer]) -> None:
    prefill, decode = pair
    prompts = [prompt(150 + 70 * number, number) for number in range(6)]
    with Landing(vllm_layout("gqa", dtype=torch.float32)) as landing:
        tickets = {0: landing.expect(), 3: landing.expect()}
        ways: list[dict[str, Any] | None] = [None] * 6
        ways[0], ways[3] = (landing.mark(ticket) for ticket in tickets.values())
        ways[1], ways[4] = REMOTE_DECODE, REMOTE_DECODE

        def ask(number: int) -> Completion:
            tokens = 20 if ways[number] is None else 1
            return prefill.complete(prompts[number], max_tokens=tokens, params=ways[number])

        with ThreadPoolExecutor(6) as pool:
            answers = list(pool.map(ask, range(6)))
        landed = {number: landing.take(ticket) for number, ticket in tickets.items()}
    over_nixl = {
        number: decode.complete(prompts[number], max_tokens=20, params=params_of(answers[number])) for number in (1, 4)
    }
    alone = [prefill.complete(tokens, max_tokens=20).tokens for tokens in prompts]
    for number, came in landed.items():
        assert params_of(answers[number])["pdhandoff"]["status"] == "sent"
        assert (came.prompt_tokens, came.first_token) == (len(prompts[number]), alone[number][0])
    for number, answer in over_nixl.items():
        assert "pdhandoff" not in params_of(answers[number])
        assert answer.tokens == alone[number]
    for number in (2, 5):
        assert answers[number].params is None
        assert answers[number].tokens == alone[number]


def params_of(answer: Completion) -> dict[str, Any]:
    assert answer.params is not None
    return answer.params


def test_metrics_of_every_connector_are_there(pair: tuple[VllmServer, VllmServer]) -> None:
    counted = {name for name, value in pair[0].metrics().items() if value > 0}
    assert any(name.startswith("vllm:pdhandoff_") for name in counted), counted


def test_servers_with_several_connectors_end_when_they_are_told_to(pair: tuple[VllmServer, VllmServer]) -> None:
    for server in pair:
        server.signal(signal.SIGTERM)
        server.wait_ended()
        assert server.wait_gone(30), "processes are left"
        assert "encountered a fatal error" not in server.output
