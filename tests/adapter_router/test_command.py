from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from pdhandoff.cli import main
from support.engines import until
from support.node import ENVIRONMENT
from support.router_fakes import FakeNode, FakeVllm, chat_body


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
@pytest.mark.slow
def test_the_router_serves_until_a_signal_ends_it(tmp_path: Path, number: signal.Signals, status: int) -> None:
    ready = tmp_path / "ready.json"
    with FakeVllm() as vllm, FakeNode() as node, (tmp_path / "log").open("wb") as log:
        vllm.marked = node.land
        command = [sys.executable, "-m", "pdhandoff", "router", "--port", "0", "--ready-file", str(ready)]
        process = subprocess.Popen(
            [*command, "--prefill", vllm.url, "--decode", node.url], stdout=log, stderr=log, env=ENVIRONMENT
        )
        try:
            until(lambda: ready.exists() or process.poll() is not None, "the router is ready", timeout_s=60)
            assert process.poll() is None, (tmp_path / "log").read_text()
            url = json.loads(ready.read_bytes())["url"]
            answer = httpx.post(f"{url}/v1/chat/completions", json=chat_body(), timeout=30, trust_env=False)
            assert answer.json()["choices"][0]["message"]["content"] == "abcd"
            process.send_signal(number)
            assert process.wait(20) == status
            assert not ready.exists()
        finally:
            process.kill()
            process.wait(20)


def test_a_router_without_servers_says_what_to_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["router", "--prefill", "http://127.0.0.1:1"]) == 1
    assert "name a prefill and a decode server, or a native one" in capsys.readouterr().err
    assert main(["router", "--config", "x.toml", "--prefill", "http://127.0.0.1:1"]) == 1
    assert "not both" in capsys.readouterr().err
