from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from pdhandoff.errors import LocalError
from pdhandoff_router.config import read_config
from support.engines import until
from support.router_fakes import Stack, chat_body

GENERATE = "/inference/v1/generate"
ELSEWHERE: dict[str, Any] = {"pdhandoff": {"consumer": "192.0.2.1:1", "handoff": "0" * 32}, "tilert_host": "192.0.2.1"}


@pytest.mark.slow
def test_what_a_client_says_about_transfers_reaches_no_server() -> None:
    with Stack(native=True) as stack:
        body = {
            "kv_transfer_params": ELSEWHERE,
            "ec_transfer_params": ELSEWHERE,
            "vllm_xargs": {"kv_transfer_params": ELSEWHERE, "mine": 1},
        }
        assert stack.chat(**body).status_code == 200
        assert stack.chat(**body, n=2).json()["native"] is True
        everything = repr(stack.vllm.asked) + repr(stack.natives.asked) + repr(stack.nodes[0].asked)
        assert "192.0.2.1" not in everything
        assert "'mine': 1" in everything


@pytest.mark.slow
def test_headers_of_a_client_name_no_host_and_keys_are_passed_on() -> None:
    with Stack() as stack:
        headers = {
            "host": "192.0.2.1",
            "x-forwarded-host": "192.0.2.1",
            "authorization": "Bearer K",
            "x-prefill-url": "http://192.0.2.1",
            "traceparent": "00-" + "a" * 32 + "-" + "b" * 16 + "-01",
        }
        answer = stack.client.post("/v1/chat/completions", json=chat_body(), headers=headers)
        assert answer.status_code == 200
        assert "192.0.2.1" not in repr(stack.vllm.asked)
        generate = next((body, head) for path, body, head in stack.vllm.asked if path == GENERATE)
        assert generate[1]["authorization"] == "Bearer K"
        trace = generate[0]["kv_transfer_params"]["pdhandoff"]["traceparent"]
        assert re.fullmatch("00-" + "a" * 32 + "-[0-9a-f]{16}-01", trace)
        assert generate[1]["traceparent"] == trace


@pytest.mark.slow
def test_rules_send_requests_by_header_model_and_length() -> None:
    rules = [
        {"pool": "native", "header": "x-tier", "value": "slow"},
        {"pool": "native", "model": "other"},
        {"pool": "native", "least_prompt_tokens": 4},
    ]
    with Stack(native=True, rule=rules) as stack:
        assert stack.chat().headers["x-pdhandoff-path"] == "handoff"
        assert stack.chat(model="other").headers["x-pdhandoff-path"] == "native"
        assert stack.chat(messages=[{"role": "user", "content": "abcd"}]).headers["x-pdhandoff-path"] == "native"
        slow = stack.client.post("/v1/chat/completions", json=chat_body(), headers={"x-tier": "slow"})
        assert slow.headers["x-pdhandoff-path"] == "native"
        fast = stack.client.post("/v1/chat/completions", json=chat_body(), headers={"x-tier": "fast"})
        assert fast.headers["x-pdhandoff-path"] == "handoff"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
@pytest.mark.slow
def test_T101_a_native_server_with_a_prefill_server_gets_vllms_two_legs(path: str) -> None:
    with Stack(native=True, pool="native") as stack:
        native = stack.router.natives.members[0]
        native.prefill = stack.vllm.url
        body = chat_body(
            input="abc", max_completion_tokens=9, max_output_tokens=9, min_tokens=3, stream=True, stop=["x"]
        )
        assert stack.client.post(path, json=body).status_code == 200
        first, second = stack.vllm.of(path)[0], stack.natives.of(path)[0]
        budgets = {"max_tokens", "max_completion_tokens"} if "chat" in path else {"max_output_tokens"}
        assert {first[name] for name in budgets} == {1}
        assert not {"min_tokens", "stop", "stream"} & set(first)
        assert first["kv_transfer_params"]["do_remote_decode"] is True
        assert second["kv_transfer_params"] == {"do_remote_prefill": True, "remote_port": 7}
        assert second["stop"] == ["x"]


@pytest.mark.slow
def test_pages_tell_the_truth_about_servers_that_come_and_go() -> None:
    with Stack() as stack:
        assert stack.client.get("/health").status_code == 200
        assert stack.client.get("/v1/models").json()["data"][0]["id"] == "m"
        stack.chat()
        text = stack.client.get("/metrics").text
        assert 'pdhandoff_router_requests_total{outcome="ok",path="handoff"} 1.0' in text
        assert "pdhandoff_router_output_tokens_total 4.0" in text
        stack.nodes[0].status = {**stack.nodes[0].status, "state": "draining", "reason": "asked to"}
        until(lambda: stack.client.get("/health").status_code == 503, "the drained node is not used")
        answer = stack.chat()
        assert answer.status_code == 503
        assert "retry-after" in answer.headers
        assert "draining" in answer.json()["error"]["message"]
        stack.nodes[0].status = {**stack.nodes[0].status, "state": "serving"}
        until(lambda: stack.client.get("/health").status_code == 200, "the node is used again")
        assert stack.client.get("/status").json()["decode"][0]["layout_digest"] == "d"
        assert stack.client.post("/drain").status_code == 202
        assert stack.chat().status_code == 503


def test_a_configuration_says_what_is_wrong_with_it(tmp_path: Path) -> None:
    file = tmp_path / "router.toml"
    for text, word in (
        ("prefill = 3", "prefill"),
        ("prefil = []", "prefil"),
        ('prefill = ["127.0.0.1:8000"]\n[[decode]]\nurl = "http://a"', "127.0.0.1:8000"),
        ('prefill = ["http://a"]', "no server to go to"),
        ('pool = "native"\nprefill = ["http://a"]\n[[decode]]\nurl = "http://b"', "native pool"),
        ('prefill = ["http://a"]\n[[decode]]\nurl = "http://b"\n[[decode]]\nurl = "http://b/"', "twice"),
        ("[", "router.toml"),
    ):
        file.write_text(text)
        with pytest.raises(LocalError, match=re.escape(word)):
            read_config(file)
    with pytest.raises(LocalError, match=r"missing\.toml"):
        read_config(tmp_path / "missing.toml")


@pytest.mark.slow
def test_a_changed_file_changes_the_nodes_and_a_broken_one_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "router.toml"

    def write(*urls: str, more: str = "") -> None:
        nodes = "".join(f'[[decode]]\nurl = "{url}"\n' for url in urls)
        fresh = tmp_path / "fresh"
        fresh.write_text(f'prefill = ["{stack.vllm.url}"]\nprobe_s = 0.05\n{more}{nodes}')
        os.replace(fresh, file)  # noqa: PTH105 - as an operator's tools do it

    with Stack(2) as stack:
        write(stack.nodes[0].url)
        stack.router._file = file
        stack.served.call(stack.router.reload)
        until(lambda: set(stack.router.pool.nodes) == {stack.nodes[0].url}, "the list has been read")
        write(stack.nodes[0].url, stack.nodes[1].url)
        until(lambda: len(stack.router.pool.nodes) == 2, "it has been read again without a signal")
        write(more="nonsense = 1\n")
        stack.served.call(stack.router.reload)
        assert stack.chat().status_code == 200
        assert len(stack.router.pool.nodes) == 2
