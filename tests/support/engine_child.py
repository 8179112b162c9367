"""A producer or a consumer in a process of its own, told what to do by lines of JSON, to be killed at any moment."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pdhandoff import Consumer, HandoffId, Layout, Outgoing, PdHandoffError, Producer, Ticket, Unannounced
from pdhandoff.demo.faults import KillAt
from pdhandoff.engines.base import Extent, Mover, Peer, Transfer, Writes
from pdhandoff.engines.faults import Fault, Faulty, Rule
from pdhandoff.engines.forwarding import Forwarding
from pdhandoff.observe.trace import Recorder
from support.engines import DEADLINE_S, FAST, LAYOUT, WIDE, Prefill, check_rows, push_all
from support.transfer_engines import MOVERS

__all__ = ["EngineChild"]

ROOT = Path(__file__).parents[2]


class EngineChild:
    """Runs `main` below in a process of its own."""

    def __init__(
        self,
        role: str,
        listen: str = "127.0.0.1:0",
        *,
        mover: str = "loopback",
        kill_at: str | None = None,
        wide: bool = False,
    ) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "support.engine_child", role, listen, mover, kill_at or "", "wide" if wide else ""],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])},
        )
        self.address: str = self.answer()["address"]

    def answer(self) -> dict[str, Any]:
        """What it says next."""
        stream = self._process.stdout
        assert stream is not None
        answer = json.loads(stream.readline())
        assert isinstance(answer, dict)
        return answer

    def tell(self, do: str, **arguments: object) -> None:
        """Send a command whose answer is read later, or never."""
        stream = self._process.stdin
        assert stream is not None
        stream.write(json.dumps({"do": do, **arguments}) + "\n")
        stream.flush()

    def ask(self, do: str, **arguments: object) -> dict[str, Any]:
        """Send a command and read its answer."""
        self.tell(do, **arguments)
        return self.answer()

    def has_killed_itself(self) -> bool:
        """Wait for its end at the step that it was started with."""
        return self._process.wait(DEADLINE_S) == -signal.SIGKILL

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
                with suppress(BrokenPipeError):  # a command that it did not live to read
                    stream.close()


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class _Killing(Forwarding):
    """A mover that kills its process at a step that no observer is told of."""

    def __init__(self, mover: Mover, step: str | None) -> None:
        super().__init__(mover)
        self._step = step

    def submit(self, peer: Peer, writes: Writes) -> Transfer:
        """At `submitted`, bytes are under way."""
        transfer = self._mover.submit(peer, writes)
        if self._step == "submitted":
            _die()
        return transfer

    def describe(self, extents: Sequence[Extent]) -> bytes:
        """At `granting`, memory is set aside and the producer has not heard of it."""
        description = self._mover.describe(extents)
        if extents and self._step == "granting":
            _die()
        return description


class _Producing:
    def __init__(self, mover: str, kill_at: str | None, layout: Layout) -> None:
        rules = [Rule(fault=Fault.HOLD, call=0)] if kill_at is None and layout is LAYOUT else []
        self.mover = Faulty(_Killing(MOVERS[mover](), kill_at), rules)
        self.engine = Prefill(layout)
        self.producer = Producer(
            mover=self.mover,
            layout=layout,
            placements=self.engine.placements,
            limits=FAST,
            staging_bytes=1 << 18 if layout is LAYOUT else 1 << 27,
            recorder=KillAt(Recorder("producer"), kill_at),
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

    def finish(self, handoffs: list[str], tags: list[int], chunk: int) -> dict[str, object]:
        """Push and commit several handoffs, in turns."""
        for handoff, tag in zip(handoffs, tags, strict=True):
            self.push(handoff, tag, chunk)
        for handoff in handoffs:
            self.commit(handoff)
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
    def __init__(self, listen: str, mover: str, kill_at: str | None) -> None:
        self.kill_at = kill_at
        self.consumer = Consumer(
            mover=_Killing(MOVERS[mover](), kill_at),
            layout=LAYOUT,
            arena_bytes=4096 * 6,
            limits=FAST,
            listen=listen,
            unannounced=Unannounced.ACCEPT,
            recorder=KillAt(Recorder("consumer"), kill_at),
        )
        self.tickets: dict[str, Ticket] = {}
        self.address = str(self.consumer.address)

    def announce(self, handoff: str) -> dict[str, object]:
        self.tickets[handoff] = self.consumer.announce(HandoffId.parse(handoff))
        return {}

    def take(self, handoff: str, tag: int) -> dict[str, object]:
        with self.tickets[handoff].wait(DEADLINE_S) as arrival:
            if self.kill_at == "reading":
                _die()
            return {"rows": check_rows(arrival, tag)}


def main() -> None:
    """Obey until standard input ends."""
    role, listen, mover, step, wide = sys.argv[1:]
    kill_at = step or None
    worker: _Producing | _Consuming
    if role == "producer":
        worker = _Producing(mover, kill_at, WIDE if wide else LAYOUT)
    else:
        worker = _Consuming(listen, mover, kill_at)
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
