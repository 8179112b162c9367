"""A real `pdhandoff up` process, and clients of what it has started."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import anthropic
import httpx
import openai

from support.child import ROOT
from support.engines import until

__all__ = ["VLLM_INSTALLED", "Asked", "Up", "alive", "ask", "together"]

VLLM_INSTALLED: Final = ROOT / ".venv-vllm" / ".vllm"
"is there when the environment is whole"
READY_S: Final = 280.0
"bound on a start: about 30 s on a quiet machine"
END_S: Final = 60.0
ANSWER_S: Final = 60.0


def alive(pid: int) -> bool:
    """A process of this id runs."""
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split()[0]
    except (ProcessLookupError, FileNotFoundError):
        return False
    return state != "Z"


class Up:
    """Started with a ready file. Use as a context manager, which waits for it, and ends it.

    Args:
        folder: of its output, its logs and the ready file.
        command: what to run; `--ready-file PATH` is added.
    """

    def __init__(self, folder: Path, *command: str) -> None:
        self._ready_file, self._output = folder / "ready.json", folder / "up.log"
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, *command, "--ready-file", str(self._ready_file)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])},
                cwd=ROOT,
                start_new_session=True,
            )
        self.ready: dict[str, Any] = {}

    def __enter__(self) -> Self:
        try:
            self.wait_ready()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    @property
    def output(self) -> str:
        """What it has said so far."""
        return self._output.read_text(encoding="utf-8", errors="replace")

    def wait_ready(self) -> None:
        """Until the ready file is there. Fails with the output when it ends before."""
        until(
            lambda: self._ready_file.exists() or self.process.poll() is not None,
            "everything is up",
            timeout_s=READY_S,
        )
        assert self._ready_file.exists(), self.output
        self.ready = json.loads(self._ready_file.read_bytes())

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to it, and to nothing that it has started."""
        self.process.send_signal(number)

    def wait(self) -> int:
        """Until it ends; the exit status."""
        return self.process.wait(END_S)

    def wait_gone(self) -> None:
        """Until nothing that it has started runs any more."""
        pids = list(self.ready["processes"].values())
        until(lambda: not any(map(alive, pids)), f"the end of {pids}", timeout_s=END_S)

    def node(self) -> dict[str, Any]:
        """Status page of the first decode node."""
        answer = httpx.get(f"{self.ready['decode'][0]}/status", timeout=ANSWER_S, trust_env=False)
        status: dict[str, Any] = answer.raise_for_status().json()
        return status

    def idle(self) -> None:
        """Wait until the decode node holds nothing any more."""

        def free() -> bool:
            status = self.node()
            landing = status["landing"]
            return (
                status["running"] is None
                and not status["queue"]
                and not landing["states"]
                and landing["free_bytes"] == landing["total_bytes"]
            )

        until(free, "the decode node is idle")

    def generate(self, url: str, tokens: Sequence[int], max_tokens: int, params: object = None) -> dict[str, Any]:
        """Tokens in, tokens out, greedy."""
        body: dict[str, Any] = {
            "token_ids": list(tokens),
            "sampling_params": {"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True},
        }
        if params is not None:
            body["kv_transfer_params"] = params
        answer = httpx.post(f"{url}/inference/v1/generate", json=body, timeout=ANSWER_S, trust_env=False)
        assert answer.status_code == 200, answer.text
        decoded: dict[str, Any] = answer.json()
        return decoded

    def _close(self) -> None:
        """End it as a person does. Kills only after it had its time."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()  # its keeper ends the rest
            self.process.wait(END_S)
            raise


class Asked:
    """A text, why it ended, its tokens in and out, and the headers of the answer."""

    def __init__(self, text: str, finish: str | None, usage: tuple[int, int], headers: dict[str, str]) -> None:
        self.text, self.finish, self.usage, self.headers = text, finish, usage, headers

    def same(self, other: Asked) -> bool:
        """Equal for a client."""
        return (self.text, self.finish, self.usage) == (other.text, other.finish, other.usage)

    def __repr__(self) -> str:
        return f"Asked({self.text!r}, {self.finish}, {self.usage}, {self.headers})"


def ask(
    api: str, url: str, text: str, *, stream: bool = False, max_tokens: int = 24, headers: dict[str, str] | None = None
) -> Asked:
    """Ask a server by the client packages of its API, greedily.

    Args:
        api: `chat`, `completions`, `responses` or `messages`.
        url: of the server.
        text: the prompt, or the one message.
        stream: take the answer in pieces.
        max_tokens: of the answer.
        headers: more of them.
    """
    began = time.monotonic()
    asker = {"chat": _chat, "completions": _completions, "responses": _responses, "messages": _messages}[api]
    answer = asker(url, text, stream=stream, max_tokens=max_tokens, headers=headers or {})
    assert time.monotonic() - began < ANSWER_S
    return answer


def _openai(url: str, headers: dict[str, str]) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=ANSWER_S, default_headers=headers)


def _chat(url: str, text: str, *, stream: bool, max_tokens: int, headers: dict[str, str]) -> Asked:
    with _openai(url, headers) as client:
        create = client.chat.completions.with_raw_response.create
        common: dict[str, Any] = {
            "model": "tiny",
            "messages": [{"role": "user", "content": text}],
            "max_tokens": max_tokens,
            "temperature": 0,
        }
        if not stream:
            raw = create(**common)
            answer = raw.parse()
            choice, usage = answer.choices[0], answer.usage
            return Asked(
                choice.message.content or "",
                choice.finish_reason,
                (usage.prompt_tokens, usage.completion_tokens),
                dict(raw.headers),
            )
        raw = create(**common, stream=True, stream_options={"include_usage": True})
        pieces, finish, used = [], None, (0, 0)
        for chunk in raw.parse():
            for choice in chunk.choices:
                pieces.append(choice.delta.content or "")
                finish = choice.finish_reason or finish
            if chunk.usage is not None:
                used = (chunk.usage.prompt_tokens, chunk.usage.completion_tokens)
        return Asked("".join(pieces), finish, used, dict(raw.headers))


def _completions(url: str, text: str, *, stream: bool, max_tokens: int, headers: dict[str, str]) -> Asked:
    with _openai(url, headers) as client:
        create = client.completions.with_raw_response.create
        common: dict[str, Any] = {"model": "tiny", "prompt": text, "max_tokens": max_tokens, "temperature": 0}
        if not stream:
            raw = create(**common)
            answer = raw.parse()
            choice, usage = answer.choices[0], answer.usage
            return Asked(
                choice.text, choice.finish_reason, (usage.prompt_tokens, usage.completion_tokens), dict(raw.headers)
            )
        raw = create(**common, stream=True, stream_options={"include_usage": True})
        pieces, finish, used = [], None, (0, 0)
        for chunk in raw.parse():
            for choice in chunk.choices:
                pieces.append(choice.text)
                finish = choice.finish_reason or finish
            if chunk.usage is not None:
                used = (chunk.usage.prompt_tokens, chunk.usage.completion_tokens)
        return Asked("".join(pieces), finish, used, dict(raw.headers))


def _responses(url: str, text: str, *, stream: bool, max_tokens: int, headers: dict[str, str]) -> Asked:
    with _openai(url, headers) as client:
        create = client.responses.with_raw_response.create
        common: dict[str, Any] = {"model": "tiny", "input": text, "max_output_tokens": max_tokens, "temperature": 0}
        if not stream:
            raw = create(**common)
            return _of_response(raw.parse(), raw.parse().output_text, dict(raw.headers))
        raw = create(**common, stream=True)
        pieces, last = [], None
        for event in raw.parse():
            if event.type == "response.output_text.delta":
                pieces.append(event.delta)
            elif event.type in {"response.completed", "response.incomplete"}:
                last = event.response
        assert last is not None
        return _of_response(last, "".join(pieces), dict(raw.headers))


def _of_response(response: Any, text: str, headers: dict[str, str]) -> Asked:
    return Asked(text, response.status, (response.usage.input_tokens, response.usage.output_tokens), headers)


def _messages(url: str, text: str, *, stream: bool, max_tokens: int, headers: dict[str, str]) -> Asked:
    with anthropic.Anthropic(
        base_url=url, api_key="none", max_retries=0, timeout=ANSWER_S, default_headers=headers
    ) as client:
        common: dict[str, Any] = {
            "model": "tiny",
            "messages": [{"role": "user", "content": text}],
            "max_tokens": max_tokens,
            "extra_body": {"temperature": 0},
        }
        if not stream:
            raw = client.messages.with_raw_response.create(**common)
            answer, sent = raw.parse(), dict(raw.headers)
            return Asked(
                "".join(block.text for block in answer.content if block.type == "text"),
                answer.stop_reason,
                (answer.usage.input_tokens, answer.usage.output_tokens),
                sent,
            )
        with client.messages.stream(**common) as events:
            pieces = "".join(events.text_stream)
            answer, sent = events.get_final_message(), dict(events.response.headers)
        assert pieces == "".join(block.text for block in answer.content if block.type == "text")
        return Asked(pieces, answer.stop_reason, (answer.usage.input_tokens, answer.usage.output_tokens), sent)


def together(calls: Sequence[Any]) -> Iterator[Any]:
    """Results of calls that run at the same time, each on a thread of its own, in their order."""
    results: list[Any] = [None] * len(calls)
    start = threading.Barrier(len(calls), timeout=ANSWER_S)

    def call(number: int) -> None:
        start.wait()
        try:
            results[number] = calls[number]()
        except Exception as error:  # noqa: BLE001 - the caller's thread raises it
            results[number] = error

    threads = [threading.Thread(target=call, args=(number,), daemon=True) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * ANSWER_S)
    for result in results:
        if isinstance(result, Exception):
            raise result
        yield result
