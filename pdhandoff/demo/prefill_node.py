"""The demo's prefill process: a vLLM-like engine with paged fp8 caches, and a producer beside it.

Run by `pdhandoff demo`; takes commands on standard input and says events on standard output.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec
import torch

from pdhandoff.demo.faults import KillAt
from pdhandoff.demo.model import (
    DEFAULT_CONFIG,
    Network,
    PrefillEngine,
    fingerprint,
    prefill_layout,
    prefill_placements,
)
from pdhandoff.demo.wire import NodeReady, Prefill, Request, Sent, Stop, Stopped, decode_command, encode
from pdhandoff.engines.base import Mover
from pdhandoff.engines.faults import Fault, Faulty, Rule
from pdhandoff.engines.registry import create
from pdhandoff.errors import ErrorCode, HandoffFailed, LocalError, PdHandoffError
from pdhandoff.ids import HandoffId
from pdhandoff.observe.steps import HANDOFF, Step
from pdhandoff.observe.trace import Recorder
from pdhandoff.runtime.outgoing import Outgoing
from pdhandoff.runtime.producer import Producer

__all__ = ["PrefillNode", "main", "make_mover"]

_SETTLE_S: Final = 60.0


class _Running:
    """One request under way."""

    def __init__(self, request: Request, number: int | None, outgoing: Outgoing) -> None:
        self.request = request
        self.engine_request = number
        self.outgoing = outgoing
        self.chunks = 0
        self.done = 0
        self.prefill_end_ns = 0


class PrefillNode:
    """Prefills the requests of one command together and hands each off while it runs."""

    def __init__(self, *, mover: Mover, recorder: Recorder, kill_at: str | None, pages: int) -> None:
        self._recorder = KillAt(recorder, kill_at)
        network = Network(DEFAULT_CONFIG)
        self._engine = PrefillEngine(network, pages=pages)
        self._producer = Producer(
            mover=mover,
            layout=prefill_layout(DEFAULT_CONFIG, revision=fingerprint(network.weights)),
            placements=prefill_placements(self._engine),
            staging_bytes=16 << 20,
            digest=True,
            name="prefill",
            recorder=self._recorder,
        )

    def run(self, command: Prefill) -> None:
        """Prefill in turns, one chunk of each request after another, then report every outcome."""
        running = [self._start(request, command.consumer) for request in command.requests]
        waiting = [item for item in running if item.engine_request is not None]
        while waiting:
            for item in list(waiting):
                if self._step(item, command.chunk):
                    waiting.remove(item)
        for item in running:
            _say(self._finish(item))

    def stopped(self) -> Stopped:
        """What is still held."""
        statistics = self._producer.statistics()
        self._producer.close()
        return Stopped(
            handoffs=statistics.active,
            writes_in_flight=statistics.writes_in_flight,
            pages_held=self._engine.tensors.pages - 1 - self._engine.free_pages,
        )

    def _start(self, request: Request, consumer: str) -> _Running:
        outgoing = self._producer.offer(
            consumer, HandoffId.parse(request.handoff), prompt_tokens=len(request.prompt), queue_s=30.0
        )
        try:
            number = self._engine.add(request.prompt)
        except LocalError:
            number = None  # longer than the decode engine can take, too: it refuses the offer and says why
        return _Running(request, number, outgoing)

    def _step(self, item: _Running, chunk: int) -> bool:
        """Run one chunk and push its rows, after its draft phase. True: there is no further chunk."""
        if item.engine_request is None:
            return True
        started = time.monotonic_ns()
        try:
            progress = self._engine.step(item.engine_request, chunk)
        except LocalError as error:
            item.outgoing.cancel(error.reason)
            return True
        label = item.request.handoff[:8]
        track = f"prefill {item.request.number}"
        self._recorder.add(Step.PREFILL, track, started, time.monotonic_ns(), **{HANDOFF: label})
        item.outgoing.push(
            self._engine.block_table(item.engine_request), tokens=range(item.done, progress.draft_tokens)
        )
        item.chunks += 1
        item.done = progress.draft_tokens
        if progress.finished and progress.first_token is not None:
            item.prefill_end_ns = time.monotonic_ns()
            item.outgoing.commit(last_token=item.request.prompt[-1], first_token=progress.first_token)
        return progress.finished

    def _finish(self, item: _Running) -> Sent:
        code, reason = 0, ""
        try:
            item.outgoing.wait(_SETTLE_S)
        except HandoffFailed as failure:
            code, reason = int(failure.code), failure.reason
        except TimeoutError:
            code, reason = int(ErrorCode.INTERNAL), "no outcome"
            item.outgoing.cancel("the demo gave up")
        if item.outgoing.source_free.wait(_SETTLE_S) and item.engine_request is not None:
            self._engine.free(item.engine_request)
        manifest = item.outgoing.manifest
        return Sent(
            number=item.request.number,
            handoff=item.request.handoff,
            chunks=item.chunks,
            nbytes=0 if manifest is None else manifest.nbytes,
            code=code,
            reason=reason,
            prefill_end_ns=item.prefill_end_ns,
        )


def make_mover(name: str, options: Mapping[str, object], *, corrupt: bool) -> Mover:
    """The mover, with one byte of its first write flipped on the way where that is wanted."""
    mover = create(name, **options)
    return Faulty(mover, [Rule(fault=Fault.FLIP, call=0, byte=1000)]) if corrupt else mover


def main(argv: list[str] | None = None) -> int:
    """Take commands until Stop."""
    parser = argparse.ArgumentParser(prog="pdhandoff.demo.prefill_node")
    parser.add_argument("--mover", default="loopback")
    parser.add_argument("--mover-options", type=json.loads, default={})
    parser.add_argument("--corrupt", action="store_true")
    parser.add_argument("--kill-at")
    parser.add_argument("--pages", type=int, default=256)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    recorder = Recorder("prefill")
    mover = make_mover(options.mover, options.mover_options, corrupt=options.corrupt)
    node = PrefillNode(mover=mover, recorder=recorder, kill_at=options.kill_at, pages=options.pages)
    _say(NodeReady())
    for line in sys.stdin.buffer:
        command = decode_command(line)
        if isinstance(command, Prefill):
            node.run(command)
        elif isinstance(command, Stop):
            Path(command.recording).write_bytes(recorder.recording().encode())
            _say(node.stopped())
            mover.close()
            return 0
    return 0


def _say(event: NodeReady | Sent | Stopped) -> None:
    sys.stdout.buffer.write(encode(event))
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (msgspec.MsgspecError, PdHandoffError) as error:
        sys.exit(f"prefill node: {error}")
