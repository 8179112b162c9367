"""A real `pdhandoff serve-decode` process, a client of it, and a prefill side that hands off to it."""

from __future__ import annotations

import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

import httpx

from pdhandoff import HandoffId, Outgoing, Producer
from support.child import ROOT
from support.engines import DEADLINE_S, Prefill, Request, push_all, until
from support.node_engine import expected_tokens

__all__ = ["ENVIRONMENT", "Node", "Sender", "Sent", "body_of", "events", "node_arguments"]

_START_S: Final = 60.0
ENVIRONMENT: Final = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
    "OMP_NUM_THREADS": "1",
}
"of the node's process: it finds the engine of these tests"


def node_arguments(*more: str, engine: Sequence[str]) -> list[str]:
    """The command line of a node on any port."""
    return [
        *(sys.executable, "-m", "pdhandoff", "serve-decode", "--port", "0", "--listen", "127.0.0.1:0"),
        *("--arena-bytes", "1M", *engine, *more),
    ]


class Node:
    """A node's process. Use as a context manager, which ends it."""

    def __init__(self, folder: Path, *more: str, engine: Sequence[str] | None = None, ca: str | None = None) -> None:
        self._folder = folder
        self._control = folder / "orders"
        self._ready = folder / "ready.json"
        self._log = folder / "log"
        default = ("--engine", "support.node_engine:create", "--engine-arg", f"control={self._control}")
        arguments = node_arguments(
            "--ready-file", str(self._ready), *more, engine=default if engine is None else engine
        )
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                arguments,
                stdout=subprocess.PIPE,
                stderr=log,
                env=ENVIRONMENT,
                start_new_session=True,
            )
        self._threads: list[threading.Thread] = []
        try:
            until(
                lambda: self._ready.exists() or self.process.poll() is not None, "the node is ready", timeout_s=_START_S
            )
            assert self.process.poll() is None, self.log()
        except BaseException:
            self.kill()
            raise
        self.ready: dict[str, Any] = json.loads(self._ready.read_bytes())
        verify: ssl.SSLContext | bool = False
        if ca is not None:
            verify = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            verify.load_verify_locations(ca)
        self.client = httpx.Client(base_url=self.ready["url"], timeout=30.0, trust_env=False, verify=verify)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        self.client.close()
        for thread in self._threads:
            thread.join(DEADLINE_S)
        if kind is not None:
            print(self.log())

    @property
    def control(self) -> str:
        """Where producers connect."""
        control: str = self.ready["control"]
        return control

    def log(self) -> str:
        """What the process has said so far."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    def order(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Tell the engine something."""
        with socket.socket(socket.AF_UNIX) as link:
            link.settimeout(DEADLINE_S)
            link.connect(str(self._control))
            link.sendall(json.dumps({"do": do, **arguments}).encode() + b"\n")
            answer: dict[str, Any] = json.loads(link.makefile("rb").readline())
            return answer

    def calls(self, call: str) -> int:
        """How often the engine has entered a call."""
        log: list[str] = self.order("state")["log"]
        return log.count(call)

    def status(self) -> dict[str, Any]:
        """The status page."""
        status: dict[str, Any] = self.client.get("/status").raise_for_status().json()
        return status

    def stages(self) -> list[str]:
        """Stages of what is in the line; the one that decodes last."""
        status = self.status()
        return [each["stage"] for each in [*status["queue"], *filter(None, [status["running"]])]]

    def idle(self) -> None:
        """Wait until nothing is held by anybody."""

        def free() -> bool:
            status = self.status()
            landing = status["landing"]
            return (
                not status["queue"]
                and status["running"] is None
                and landing["free_bytes"] == landing["total_bytes"]
                and not landing["states"]
            )

        until(free, "nothing is held any more")

    def generate(self, body: Mapping[str, Any], **options: Any) -> httpx.Response:
        """Ask for tokens, and wait for the whole answer."""
        return self.client.post("/inference/v1/generate", json=body, **options)

    def later(self, body: Mapping[str, Any]) -> Future[httpx.Response]:
        """Ask for tokens on a thread and a connection of its own."""
        future: Future[httpx.Response] = Future()

        def ask() -> None:
            try:
                with httpx.Client(base_url=self.ready["url"], timeout=60.0, trust_env=False) as client:
                    future.set_result(client.post("/inference/v1/generate", json=body))
            except httpx.HTTPError as error:
                future.set_exception(error)

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        self._threads.append(thread)
        return future

    def raw(self, body: Mapping[str, Any]) -> socket.socket:
        """A connection over which a request has been sent, for clients that leave."""
        link = socket.create_connection((self.ready["host"], self.ready["port"]), DEADLINE_S)
        data = json.dumps(body).encode()
        link.sendall(
            b"POST /inference/v1/generate HTTP/1.1\r\nhost: node\r\ncontent-type: application/json\r\n"
            + f"content-length: {len(data)}\r\n\r\n".encode()
            + data
        )
        return link

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process."""
        self.process.send_signal(number)

    def wait(self) -> int:
        """Wait for its end; the exit status."""
        return self.process.wait(DEADLINE_S)

    def kill(self) -> None:
        """End it at once. Idempotent."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(DEADLINE_S)
        if self.process.stdout is not None:
            self.process.stdout.close()


class Sent(NamedTuple):
    """A handoff that was offered, with its prompt and what should come of it."""

    handoff: HandoffId
    prompt: list[int]
    tag: int
    first: int
    request: Request
    outgoing: Outgoing

    def body(self, max_tokens: int = 8, **more: Any) -> dict[str, Any]:
        """A request for it."""
        return body_of(self.handoff, self.prompt, max_tokens, **more)

    def tokens(self, count: int) -> list[int]:
        """The right output."""
        return expected_tokens(self.tag, len(self.prompt), self.first, count)


def body_of(handoff: HandoffId, prompt: Sequence[int], max_tokens: int = 8, **more: Any) -> dict[str, Any]:
    """A request for a handoff."""
    sampling = {"temperature": 0.0, "max_tokens": max_tokens, **more.pop("sampling", {})}
    mark = {"handoff": str(handoff), **more.pop("mark", {})}
    return {
        "token_ids": list(prompt),
        "sampling_params": sampling,
        "kv_transfer_params": {"pdhandoff": mark},
        **more,
    }


class Sender:
    """A prefill side. Use as a context manager."""

    def __init__(self, control: str, *, mover: str = "loopback", **options: Any) -> None:
        self._stack = ExitStack()
        self._control = control
        self._engine = Prefill(pages=256)
        self.producer = self._stack.enter_context(
            Producer(
                mover=mover,
                layout=self._engine.layout,
                placements=self._engine.placements,
                memory=self._engine.memory,
                staging_bytes=1 << 18,
                **options,
            )
        )
        self._tag = 100

    def offer(
        self, tokens: int = 40, *, handoff: HandoffId | None = None, queue_s: float = 20.0, starts_with: int = 77
    ) -> Sent:
        """Offer a prompt; no row moves yet."""
        self._tag += 1
        handoff = handoff or HandoffId.mint()
        prompt = [starts_with, *(1000 + at for at in range(1, tokens))]
        request = self._engine.request(self._tag, tokens)
        outgoing = self.producer.offer(self._control, handoff, prompt_tokens=tokens, queue_s=queue_s)
        return Sent(handoff, prompt, self._tag, 5000 + self._tag, request, outgoing)

    def finish(self, sent: Sent, **values: int) -> None:
        """Push all rows of it and commit, with the first token unless `values` says what else."""
        push_all(sent.outgoing, sent.request, 16)
        values = values or {"first_token": sent.first, "last_token": sent.prompt[-1]}
        sent.outgoing.commit(first_token=values.get("first_token"), last_token=values.get("last_token"))

    def send(self, tokens: int = 40, **options: Any) -> Sent:
        """Offer, push and commit."""
        sent = self.offer(tokens, **options)
        self.finish(sent)
        return sent

    def landed(self, tokens: int = 40, **options: Any) -> Sent:
        """Send, and wait until it is complete and checked on the node."""
        sent = self.send(tokens, **options)
        sent.outgoing.wait(DEADLINE_S)
        return sent

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()


def events(response: httpx.Response) -> Iterator[Any]:
    """The events of a stream, decoded; `[DONE]` as None."""
    for line in response.iter_lines():
        if line.startswith("data: "):
            data = line.removeprefix("data: ")
            yield None if data == "[DONE]" else json.loads(data)
