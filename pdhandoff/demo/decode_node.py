"""The demo's decode process: a TileRT-like engine, one request at a time, and a consumer beside it.

Run by `pdhandoff demo`; takes commands on standard input and says events on standard output. While one request decodes,
the rows of others land.
"""

from __future__ import annotations

import argparse
import json
import queue
import sys
import threading
import time
from pathlib import Path
from typing import Final

import msgspec
import torch

from pdhandoff.demo.faults import KillAt
from pdhandoff.demo.model import (
    DEFAULT_CONFIG,
    DecodeEngine,
    DecodeResult,
    DraftSeed,
    Network,
    decode,
    decode_layout,
    decode_locally,
    decode_placements,
    decode_warm_and_cold,
    fingerprint,
)
from pdhandoff.demo.wire import (
    Announce,
    ColdRun,
    Compare,
    Compared,
    Decoded,
    NodeReady,
    Request,
    Stop,
    Stopped,
    decode_command,
    encode,
)
from pdhandoff.engines.base import Mover
from pdhandoff.engines.registry import create
from pdhandoff.errors import HandoffFailed, PdHandoffError
from pdhandoff.ids import HandoffId
from pdhandoff.observe.steps import HANDOFF, Step
from pdhandoff.observe.trace import Recorder
from pdhandoff.protocol.attachments import Expected
from pdhandoff.runtime.arrival import Arrival, Ticket
from pdhandoff.runtime.consumer import Consumer

__all__ = ["DecodeNode", "main"]

_EXPECTED: Final = {
    "last_token": Expected(dtype="i64", required=True),
    "first_token": Expected(dtype="i64", required=True),
}
_QUIET_S: Final = 20.0
_ANNOUNCE_S: Final = 15.0


class DecodeNode:
    """Waits for handoffs on a thread each, decodes them one after another on the caller's thread."""

    def __init__(self, *, mover: Mover, listen: str, recorder: Recorder, kill_at: str | None, arena_bytes: int) -> None:
        self._recorder = KillAt(recorder, kill_at)
        self._network = Network(DEFAULT_CONFIG)
        self._engine = DecodeEngine(self._network)
        self._caches = decode_placements(self._engine)
        self.consumer = Consumer(
            mover=mover,
            layout=decode_layout(DEFAULT_CONFIG, revision=fingerprint(self._network.weights)),
            arena_bytes=arena_bytes,
            max_seq_len=DEFAULT_CONFIG.max_seq_len,
            listen=listen,
            expected=_EXPECTED,
            name="decode",
            recorder=self._recorder,
        )
        self._arrivals: queue.SimpleQueue[tuple[Request, Arrival | HandoffFailed, int]] = queue.SimpleQueue()

    def run(self, command: Announce) -> None:
        """Announce the requests, then decode each when it has arrived."""
        for request in command.requests:
            ticket = self.consumer.announce(HandoffId.parse(request.handoff), deadline_s=_ANNOUNCE_S)
            threading.Thread(target=self._wait, args=(request, ticket), daemon=True).start()
        _say(NodeReady(address=str(self.consumer.address)))
        for _ in command.requests:
            request, arrival, arrived_ns = self._arrivals.get()
            if isinstance(arrival, HandoffFailed):
                _say(
                    Decoded(
                        number=request.number, handoff=request.handoff, code=int(arrival.code), reason=arrival.reason
                    )
                )
            else:
                _say(self._decode(request, arrival, arrived_ns, command.max_tokens))

    def compare(self, command: Compare) -> Compared:
        """The same engine after a prefill in this process, with rows converted by hand."""
        request, cold = command.request, None
        if command.cold:
            result, without = decode_warm_and_cold(self._network, request.prompt, max_tokens=command.max_tokens)
            cold = ColdRun(
                tokens=list(without.tokens),
                drafts_accepted_first_step=without.drafts_accepted_first_step,
                steps=without.steps,
            )
        else:
            result = decode_locally(self._network, request.prompt, max_tokens=command.max_tokens)
        return Compared(number=request.number, tokens=list(result.tokens), cold=cold)

    def stopped(self) -> Stopped:
        """What is still held, once writers had time to drain."""
        deadline = time.monotonic() + _QUIET_S
        pause = threading.Event()
        statistics = self.consumer.statistics()
        while statistics.book.free_bytes < statistics.book.total_bytes and time.monotonic() < deadline:
            pause.wait(0.05)
            statistics = self.consumer.statistics()
        self.consumer.close()
        return Stopped(
            landing_bytes_held=statistics.book.total_bytes - statistics.book.free_bytes,
            handoffs=sum(statistics.states.values()),
        )

    def _wait(self, request: Request, ticket: Ticket) -> None:
        try:
            arrival: Arrival | HandoffFailed = ticket.wait()
        except HandoffFailed as failure:
            arrival = failure
        self._arrivals.put((request, arrival, time.monotonic_ns()))

    def _decode(self, request: Request, arrival: Arrival, arrived_ns: int, max_tokens: int) -> Decoded:
        """Convert the landed rows straight into the engine's caches, then decode."""
        label, track = request.handoff[:8], f"decode {request.number}"
        with arrival:
            started = time.monotonic_ns()
            self._recorder.add(Step.WAIT, track, arrived_ns, started, **{HANDOFF: label})
            arrival.convert_into(self._caches)
            converted = time.monotonic_ns()
            self._recorder.add(Step.CONVERT, track, started, converted, **{HANDOFF: label})
            last, first = arrival.value("last_token"), arrival.value("first_token")
            tokens, nbytes, cold = arrival.prompt_tokens, arrival.nbytes, arrival.mtp_cold
        at = converted

        def on_tokens(_: object) -> None:
            nonlocal at
            now = time.monotonic_ns()
            self._recorder.add(Step.DECODE, track, at, now, **{HANDOFF: label})
            at = now

        result: DecodeResult = decode(
            self._engine,
            prompt_last_token=last,
            first_token=first,
            prompt_tokens=tokens,
            max_tokens=max_tokens,
            seed=DraftSeed.MISSING if cold else DraftSeed.REPLAY,
            on_tokens=on_tokens,
        )
        return Decoded(
            number=request.number,
            handoff=request.handoff,
            code=0,
            reason="",
            tokens=list(result.tokens),
            drafts_accepted_first_step=result.drafts_accepted_first_step,
            steps=result.steps,
            cold_start=result.cold_start,
            nbytes=nbytes,
        )


def main(argv: list[str] | None = None) -> int:
    """Take commands until Stop."""
    parser = argparse.ArgumentParser(prog="pdhandoff.demo.decode_node")
    parser.add_argument("--mover", default="loopback")
    parser.add_argument("--mover-options", type=json.loads, default={})
    parser.add_argument("--listen", default="127.0.0.1:0")
    parser.add_argument("--arena", type=int, default=64 << 20)
    parser.add_argument("--kill-at")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    recorder = Recorder("decode")
    mover = create(options.mover, **options.mover_options)
    node = DecodeNode(
        mover=mover,
        listen=options.listen,
        recorder=recorder,
        kill_at=options.kill_at,
        arena_bytes=options.arena,
    )
    _say(NodeReady(address=str(node.consumer.address), native=node.consumer.native.name))
    for line in sys.stdin.buffer:
        command = decode_command(line)
        if isinstance(command, Announce):
            node.run(command)
        elif isinstance(command, Compare):
            _say(node.compare(command))
        elif isinstance(command, Stop):
            stopped = node.stopped()
            Path(command.recording).write_bytes(recorder.recording().encode())
            _say(stopped)
            mover.close()
            return 0
    return 0


def _say(event: NodeReady | Decoded | Compared | Stopped) -> None:
    sys.stdout.buffer.write(encode(event))
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (msgspec.MsgspecError, PdHandoffError) as error:
        sys.exit(f"decode node: {error}")
