"""A real vLLM server on CPU in processes of its own: started, asked over HTTP, ended by its id."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from support.child import ROOT

__all__ = ["Completion", "VllmServer", "completion", "free_port"]

READY_S: Final = 240.0
"bound on a start: about 20 s on a quiet machine"
ANSWER_S: Final = 120.0
END_S: Final = 30.0
LEAVE_S: Final = 15.0
"bound on the end of the engine's processes after the server's"
_POLL_S: Final = 0.2
_LOG_TAIL: Final = 6000


def free_port() -> int:
    """A port of the loopback interface that nobody uses now."""
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Completion:
    """What a client got."""

    def __init__(self, status: int, body: Mapping[str, Any]) -> None:
        self.status = status
        self.body = body

    @property
    def tokens(self) -> list[int]:
        """Generated tokens of the first choice."""
        return list(self.body["choices"][0]["token_ids"])

    @property
    def params(self) -> dict[str, Any] | None:
        """`kv_transfer_params` as they came back."""
        return self.body.get("kv_transfer_params")

    @property
    def logprobs(self) -> list[dict[int, float]]:
        """For each generated token, the likeliest tokens and their log probabilities."""
        return [
            {int(name.removeprefix("token_id:")): value for name, value in position.items()}
            for position in self.body["choices"][0]["logprobs"]["top_logprobs"]
        ]


class VllmServer:
    """`python -m vllm.entrypoints.openai.api_server` on 127.0.0.1. A context manager that waits until it is ready.

    Args:
        model: folder of a model.
        log: where its output goes.
        arguments: further arguments.
        environment: further variables.
        connector: `--kv-transfer-config`; None: none.
    """

    def __init__(
        self,
        model: Path,
        log: Path,
        *arguments: str,
        connector: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.port = free_port()
        self.log = log
        command = [
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(model), "--served-model-name", "tiny"),
            *("--host", "127.0.0.1", "--port", str(self.port)),
            *("--enforce-eager", "--max-model-len", "1024", "--max-num-seqs", "8", "--max-logprobs", "20"),
            *(() if "--num-gpu-blocks-override" in arguments else ("--num-gpu-blocks-override", "512")),
            *(() if connector is None else ("--kv-transfer-config", json.dumps(connector))),
            *arguments,
        ]
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**_environment(), **(environment or {})},
                cwd=log.parent,
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        try:
            self.wait_ready()
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    @property
    def output(self) -> str:
        """What it has written so far."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    @property
    def alive(self) -> bool:
        """It has not ended."""
        return self._process.poll() is None

    def wait_ready(self) -> None:
        """Wait until it answers. Raises RuntimeError with the end of its log when it ends, or does not come up."""
        deadline = time.monotonic() + READY_S
        pause = threading.Event()
        while time.monotonic() < deadline and self.alive:
            with suppress(OSError):
                if self.get("/health")[0] == http.client.OK:
                    return
            pause.wait(_POLL_S)
        state = "is not ready" if self.alive else f"has ended with {self._process.returncode}"
        raise RuntimeError(f"the vLLM server {state}:\n{self.output[-_LOG_TAIL:]}")

    def wait_ended(self, within_s: float = END_S) -> int:
        """Wait until it has ended by itself. Returns its exit status."""
        return self._process.wait(within_s)

    def signal(self, number: int) -> None:
        """Send a signal to the server's first process."""
        self._process.send_signal(number)

    def end(self) -> None:
        """End it and every process that it has started."""
        if self.alive:
            self._process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(END_S)
        if not self.wait_gone(LEAVE_S):  # its own session: whatever it left behind, and nothing else
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(END_S)

    def wait_gone(self, within_s: float) -> bool:
        """Wait until no process of its session is left. Returns whether that is so."""
        deadline, pause = time.monotonic() + within_s, threading.Event()
        while time.monotonic() < deadline:
            self._process.poll()
            try:
                os.killpg(self._process.pid, 0)
            except ProcessLookupError:
                return True
            pause.wait(_POLL_S)
        return False

    def get(self, path: str) -> tuple[int, str]:
        """Status and text of a page."""
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=ANSWER_S)) as link:
            link.request("GET", path)
            answer = link.getresponse()
            return answer.status, answer.read().decode()

    def metrics(self) -> dict[str, float]:
        """Sum over all labels of each sample of `/metrics`."""
        sums: dict[str, float] = {}
        for line in self.get("/metrics")[1].splitlines():
            if line and not line.startswith("#"):
                name, value = line.split("{")[0].split(" ")[0], float(line.rsplit(" ", 1)[1])
                sums[name] = sums.get(name, 0.0) + value
        return sums

    def post(self, path: str, body: Mapping[str, Any], *, timeout_s: float = ANSWER_S) -> tuple[int, dict[str, Any]]:
        """Status and JSON of an answer."""
        with closing(self.ask(path, body, timeout_s=timeout_s)) as link:
            answer = link.getresponse()
            decoded = json.loads(answer.read())
            assert isinstance(decoded, dict)
            return answer.status, decoded

    def ask(self, path: str, body: Mapping[str, Any], *, timeout_s: float = ANSWER_S) -> http.client.HTTPConnection:
        """Send a request and read nothing: the caller owns the link, and may close it at any moment."""
        link = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        try:
            link.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        except BaseException:
            link.close()
            raise
        return link

    def complete(
        self, prompt: Sequence[int], *, max_tokens: int, params: Mapping[str, Any] | None = None, **more: Any
    ) -> Completion:
        """Greedy completion of token ids. Fails when the status is none of success, unless `status` allows it."""
        body: dict[str, Any] = completion(prompt, max_tokens=max_tokens, params=params, **more)
        status, answer = self.post("/v1/completions", body)
        assert status == http.client.OK, (status, answer)
        return Completion(status, answer)


def completion(
    prompt: Sequence[int], *, max_tokens: int, params: Mapping[str, Any] | None = None, **more: Any
) -> dict[str, Any]:
    """The body of a greedy completion request that returns token ids."""
    body: dict[str, Any] = {
        "model": "tiny",
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "return_token_ids": True,
        **more,
    }
    if params is not None:
        body["kv_transfer_params"] = dict(params)
    return body


def _environment() -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT / "tests"),
        "OMP_NUM_THREADS": "1",
        # threads of several servers, bound to the same cores, would starve one another
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_CI_ENV": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
    }
