"""A producer or a consumer in a process of its own, told what to do by lines of JSON, to be killed at any moment."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

from pdhandoff import Consumer, HandoffId, Layout, Outgoing, Producer, Ticket, Unannounced
from pdhandoff.demo.faults import KillAt
from pdhandoff.engines.base import Extent, Mover, Peer, Transfer, Writes
from pdhandoff.engines.faults import Fault, Faulty, Rule
from pdhandoff.engines.forwarding import Forwarding
from pdhandoff.observe.trace import Recorder
from support.child import ChildProcess, obey
from support.engines import DEADLINE_S, FAST, LAYOUT, WIDE, Prefill, check_rows, push_all
from support.transfer_engines import MOVERS

__all__ = ["EngineChild"]


class EngineChild(ChildProcess):
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
        super().__init__("support.engine_child", role, listen, mover, kill_at or "", "wide" if wide else "")
        self.address: str = self.hello["address"]

    def has_killed_itself(self) -> bool:
        """Wait for its end at the step that it was started with."""
        return self.wait() == -signal.SIGKILL


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
    obey(worker, {"address": worker.address})


if __name__ == "__main__":
    main()
