"""A producer or a consumer in a process of its own, told what to do by lines of JSON, to be killed at any moment."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pdhandoff import Consumer, HandoffId, Outgoing, PdHandoffError, Producer, Ticket, Unannounced
from pdhandoff.engines.faults import Fault, Faulty, Rule
from pdhandoff.engines.loopback import create
from support.engines import DEADLINE_S, FAST, LAYOUT, Prefill, check_rows, push_all

__all__ = ["EngineChild"]

ROOT = Path(__file__).parents[2]


class EngineChild:
    """Runs `main` below in a process of its own."""

    def __init__(self, role: str, listen: str = "127.0.0.1:0") -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "support.engine_child", role, listen],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])},
        )
        self.address: str = self._answer()["address"]

    def _answer(self) -> dict[str, Any]:
        stream = self._process.stdout
        assert stream is not None
        answer = json.loads(stream.readline())
        assert isinstance(answer, dict)
        return answer

    def ask(self, do: str, **arguments: object) -> dict[str, Any]:
        """Send a command and read its answer."""
        stream = self._process.stdin
        assert stream is not None
        stream.write(json.dumps({"do": do, **arguments}) + "\n")
        stream.flush()
        return self._answer()

    def signal(self, number: int) -> None:
        """Stop it, or let it go on."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """As `kill -9`, and wait until the process is gone."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(30)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()


class _Producing:
    def __init__(self) -> None:
        self.mover = Faulty(create(), [Rule(fault=Fault.HOLD, call=0)])
        self.engine = Prefill()
        self.producer = Producer(
            mover=self.mover, layout=LAYOUT, placements=self.engine.placements, limits=FAST, staging_bytes=1 << 18
        )
        self.outgoing: dict[str, Outgoing] = {}
        self.address = ""

    def offer(self, consumer: str, handoff: str, tokens: int) -> dict[str, object]:
        self.outgoing[handoff] = self.producer.offer(
            consumer, HandoffId.parse(handoff), prompt_tokens=tokens, queue_s=DEADLINE_S
        )
        return {}

    def push(self, handoff: str, tag: int, chunk: int) -> dict[str, object]:
        outgoing = self.outgoing[handoff]
        push_all(outgoing, self.engine.request(tag, outgoing.prompt_tokens), chunk)
        return {}

    def commit(self, handoff: str) -> dict[str, object]:
        self.outgoing[handoff].commit()
        return {}

    def wait(self, handoff: str) -> dict[str, object]:
        self.outgoing[handoff].wait(DEADLINE_S)
        return {}

    def release(self) -> dict[str, object]:
        return {"released": self.mover.release_hold()}


class _Consuming:
    def __init__(self, listen: str) -> None:
        self.consumer = Consumer(
            mover="loopback",
            layout=LAYOUT,
            arena_bytes=4096 * 6,
            limits=FAST,
            listen=listen,
            unannounced=Unannounced.ACCEPT,
        )
        self.tickets: dict[str, Ticket] = {}
        self.address = str(self.consumer.address)

    def announce(self, handoff: str) -> dict[str, object]:
        self.tickets[handoff] = self.consumer.announce(HandoffId.parse(handoff))
        return {}

    def take(self, handoff: str, tag: int) -> dict[str, object]:
        with self.tickets[handoff].wait(DEADLINE_S) as arrival:
            return {"rows": check_rows(arrival, tag)}


def main() -> None:
    """Obey until standard input ends."""
    worker = _Producing() if sys.argv[1] == "producer" else _Consuming(sys.argv[2])
    sys.stdout.write(json.dumps({"address": worker.address}) + "\n")
    sys.stdout.flush()
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = getattr(worker, command.pop("do"))(**command)
        except PdHandoffError as error:
            answer = {"error": int(error.code), "reason": error.reason}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
