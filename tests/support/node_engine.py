"""A decode engine for tests of the node, in the node's process: its tokens say whose rows landed.

Run as `--engine support.node_engine:create --engine-arg control=PATH`; it takes orders, one line of JSON each, over the
Unix socket PATH: hold and go, fail, state.
"""

from __future__ import annotations

import ctypes
import json
import socketserver
import threading
from typing import Any, Final

from pdhandoff.errors import ErrorCode, LocalError
from pdhandoff.runtime.arrival import Arrival
from pdhandoff_tilert.engine import DecodeRequest, DecodeStep
from support.engines import LAYOUT, check_rows

__all__ = ["END", "MAX_SEQ_LEN", "MODEL", "create", "expected_tokens"]

END: Final = 2
MODEL: Final = "node-test"
MAX_SEQ_LEN: Final = 512
_HELD_S: Final = 60.0


def expected_tokens(tag: int, prompt_tokens: int, first: int, count: int) -> list[int]:
    """The output for rows that were marked with `tag`; the first token, then what this engine decodes."""
    return [first, *(100 + (31 * tag + 7 * prompt_tokens + at) % 9000 for at in range(1, count))]


class _Parked:
    """A tag that was read from the landed rows."""

    def __init__(self, tag: int, prompt_tokens: int) -> None:
        self.tag = tag
        self.prompt_tokens = prompt_tokens
        self.dropped = False


class Engine:
    """One request at a time; three tokens a step. A prompt that begins with token n < 50 ends at output token n."""

    layout = LAYOUT
    model = MODEL
    max_seq_len = MAX_SEQ_LEN
    end_token_ids = frozenset({END})

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._held: set[str] = set()
        self._fail: tuple[str, str] | None = None
        self._log: list[str] = []
        self._threads: set[str] = set()
        self._begun: list[int] = []
        self._live: _Parked | None = None
        self._request: DecodeRequest | None = None
        self._done = 0

    # ---- the seam

    def unsupported(self, request: DecodeRequest) -> str:
        return "top_k: this engine knows all or one" if request.top_k > 1 else ""

    def park(self, arrival: Arrival) -> object:
        self._enter("park")
        with arrival:
            first = next(iter(arrival.rows()))
            bases = first.placement.bases[""]
            row = ctypes.string_at(bases[0] + first.component.planes[0].offset, 8)
            tag = row[0] | row[5] << 8
            check_rows(arrival, tag)
            return _Parked(tag, arrival.prompt_tokens)

    def inject(self, parked: object) -> None:
        self._enter("inject")
        assert isinstance(parked, _Parked)
        assert not parked.dropped
        self._live = parked

    def drop(self, parked: object) -> None:
        self._enter("drop")
        assert isinstance(parked, _Parked)
        parked.dropped = True

    def begin(self, request: DecodeRequest) -> None:
        self._enter("begin")
        assert self._live is not None
        assert self._live.prompt_tokens == len(request.prompt)
        self._request = request
        self._begun.append(request.first_token)
        self._done = 1

    def step(self) -> DecodeStep:
        self._enter("step")
        request, live = self._request, self._live
        assert request is not None
        assert live is not None
        ends_at = request.prompt[0] if request.prompt[0] < 50 and not request.ignore_eos else 0
        last = min(request.max_tokens, self._done + 3)
        tokens = expected_tokens(live.tag, live.prompt_tokens, request.first_token, last)[self._done :]
        if ends_at and ends_at <= last:
            tokens = [*tokens[: ends_at - self._done - 1], END]
        stop = next((at for at, token in enumerate(tokens) if token in request.stop_token_ids), None)
        if stop is not None:
            tokens = tokens[: stop + 1]
        self._done += len(tokens)
        ended = tokens[-1] == END or stop is not None
        reason = "stop" if ended else "length" if self._done >= request.max_tokens else ""
        return DecodeStep(
            tokens=tuple(tokens), finish_reason=reason, drafted=2, accepted=max(0, min(2, len(tokens) - 1))
        )

    def end(self) -> None:
        self._enter("end")
        self._live = self._request = None

    def close(self) -> None:
        self._enter("close")

    # ---- orders

    def order(self, do: str, **arguments: Any) -> dict[str, Any]:
        """What a test asks for."""
        with self._changed:
            if do == "hold":
                self._held.add(arguments["call"])
            elif do == "go":
                self._held.clear()
                self._changed.notify_all()
            elif do == "fail":
                self._fail = arguments["call"], arguments["kind"]
            return {"log": self._log, "threads": sorted(self._threads), "begun": self._begun}

    def _enter(self, call: str) -> None:
        with self._changed:
            self._log.append(call)
            if call not in {"park", "drop"}:
                self._threads.add(threading.current_thread().name)
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: call not in self._held, _HELD_S):
                raise AssertionError(f"{call} was held and never let go")
            if self._fail is None or self._fail[0] != call:
                return
            kind = self._fail[1]
            self._fail = None
        if kind == "typed":
            raise LocalError(ErrorCode.INTERNAL, f"{call} failed as it was told to")
        raise RuntimeError(f"{call} broke as it was told to")


def create(*, control: str = "") -> Engine:
    """Make it, and take orders where a path is given."""
    engine = Engine()

    class Orders(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            for line in self.rfile:
                self.wfile.write(json.dumps(engine.order(**json.loads(line))).encode() + b"\n")
                self.wfile.flush()

    if control:
        server = socketserver.ThreadingUnixStreamServer(control, Orders)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, name="orders", daemon=True).start()
    return engine
