"""The demo's parent: starts both nodes, plays the router, compares every token, and says how it went."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, TypeVar, final

import msgspec

from pdhandoff.demo.model.config import DEFAULT_CONFIG
from pdhandoff.demo.model.prompts import prompt_tokens
from pdhandoff.demo.nodes import Node, NodeDied
from pdhandoff.demo.wire import (
    Announce,
    ColdRun,
    Compare,
    Compared,
    Decoded,
    NodeReady,
    Prefill,
    Request,
    Sent,
    Stop,
    Stopped,
)
from pdhandoff.errors import ErrorCode, LocalError
from pdhandoff.ids import HandoffId
from pdhandoff.observe.trace import Recording, decode_recording

__all__ = ["DemoOptions", "DemoResult", "RequestResult", "judge", "run_demo"]

T = TypeVar("T", NodeReady, Sent, Decoded, Compared, Stopped)

_START_S: Final = 120.0
_STEP_S: Final = 120.0
_LEAST_ARENA: Final = 64 << 20
_PAGE_ROWS_BYTES: Final = 512 << 10
"more than the rows of one page take in all layers"


@final
class DemoOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What to run."""

    prompts: tuple[int, ...] = (300, 180, 421, 129)
    "tokens of each request's prompt"
    chunk: int = 128
    max_tokens: int = 32
    mover: str = "loopback"
    mover_options: Mapping[str, object] = {}
    "keyword arguments of the mover's factory, in both processes"
    listen: str = "127.0.0.1:0"
    corrupt: bool = False
    kill: str | None = None
    "producer or consumer"
    at: str | None = None
    "step at which it is killed"
    out: Path = Path("demo-out")


@final
class RequestResult(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one request."""

    number: int
    handoff: str
    prompt_tokens: int
    chunks: int
    nbytes: int
    code: int
    "0: decoded; otherwise why it was refused"
    reason: str
    identical: bool | None
    "None: refused, so there is nothing to compare"
    tokens: list[int]
    drafts_accepted_first_step: int
    steps: int
    cold_start: bool
    cold: ColdRun | None = None
    "a second run of the same prompt without the draft layer's rows, where the demo is not about failures"


@final
class DemoResult(msgspec.Struct, frozen=True, kw_only=True):
    """What became of all."""

    requests: tuple[RequestResult, ...]
    killed: str | None
    "the node that was killed, if one was"
    interrupted: int
    "handoffs that the kill ended, each with a reason, none with a token"
    held_after: dict[str, int]
    "what the nodes still held at the end: everything should be 0"
    recordings: tuple[Recording, ...]
    native: str
    "what converted the rows: cuda, cpu or reference"
    ok: bool
    why: str
    "one sentence"


def run_demo(options: DemoOptions, progress: Callable[[str], None]) -> DemoResult:
    """Run it. `progress` is told what goes on."""
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LocalError(
            ErrorCode.CONFIG, f"cannot write to {options.out}: {error.strerror}; choose another folder with --out"
        ) from error
    with _Stage(options, progress) as stage:
        return stage.play()


@final
class _Stage:
    """Both nodes and what they said."""

    def __init__(self, options: DemoOptions, progress: Callable[[str], None]) -> None:
        self._options = options
        self._progress = progress
        self._nodes: list[Node] = []
        self._generation = 0
        self._native = ""

    def __enter__(self) -> _Stage:
        return self

    def __exit__(self, *_: object) -> None:
        for node in self._nodes:
            node.end()

    def play(self) -> DemoResult:
        options = self._options
        self._progress("starting a decode and a prefill process")
        decode, address = self._start_decode(options.at if options.kill == "consumer" else None)
        prefill = self._start_prefill(options.at if options.kill == "producer" else None, corrupt=options.corrupt)
        interrupted = 0
        if options.kill is not None:
            self._progress(f"killing the {options.kill} at step {options.at!r}, without any clean-up")
            interrupted = self._killed_round(prefill, decode, address)
            self._progress("starting it anew; the same prompts again, under new handoff ids")
            if options.kill == "consumer":
                decode, address = self._start_decode(None)
            else:
                prefill = self._start_prefill(None, corrupt=False)
        requests = self._requests()
        sent, decoded = self._round(prefill, decode, address, requests)
        self._progress("comparing with the same engine after a prefill in its own process")
        results = tuple(
            self._compare(decode, request, sent[request.number], decoded[request.number]) for request in requests
        )
        return self._result(results, interrupted, *self._stop(prefill, decode))

    # ---- rounds

    def _requests(self) -> list[Request]:
        return [
            Request(number=number, handoff=str(HandoffId.mint()), prompt=prompt_tokens(number, tokens))
            for number, tokens in enumerate(self._options.prompts)
        ]

    def _round(
        self, prefill: Node, decode: Node, address: str, requests: list[Request]
    ) -> tuple[dict[int, Sent], dict[int, Decoded]]:
        """Announce, prefill, and collect every outcome. Raises NodeDied."""
        options = self._options
        decode.tell(Announce(requests=requests, max_tokens=options.max_tokens))
        _expect(decode, NodeReady)
        self._progress(
            f"prefilling {len(requests)} prompts in chunks of {options.chunk}; rows move while prefill is running"
        )
        prefill.tell(Prefill(requests=requests, consumer=address, chunk=options.chunk))
        decoded: dict[int, Decoded] = {}
        for _ in requests:
            event = _expect(decode, Decoded)
            decoded[event.number] = event
            said = "decoded" if event.code == 0 else f"refused ({_name(event.code)})"
            self._progress(f"request {event.number}: {said}")
        sent = {event.number: event for event in (_expect(prefill, Sent) for _ in requests)}
        return sent, decoded

    def _killed_round(self, prefill: Node, decode: Node, address: str) -> int:
        """A round in which one side dies. Returns how many handoffs the survivor ended with a reason.

        Raises LocalError when nobody died, or the survivor did not end each of its handoffs.
        """
        options, requests = self._options, self._requests()
        dying, survivor = (prefill, decode) if options.kill == "producer" else (decode, prefill)
        decode.tell(Announce(requests=requests, max_tokens=options.max_tokens))
        prefill_command = Prefill(requests=requests, consumer=address, chunk=options.chunk)
        prefill.tell(prefill_command)
        ended = 0
        wanted = len(requests)
        while wanted:
            event = survivor.next(_STEP_S)
            if isinstance(event, Decoded | Sent):
                wanted -= 1
                ended += event.code != 0
        try:
            while True:
                dying.next(_STEP_S)
        except NodeDied:
            self._progress(f"the survivor ended {ended} of {len(requests)} handoffs with a reason and no token")
            return ended

    def _compare(self, decode: Node, request: Request, sent: Sent, decoded: Decoded) -> RequestResult:
        identical, cold = None, None
        if decoded.code == 0:
            plain = self._options.kill is None and not self._options.corrupt
            decode.tell(Compare(request=request, max_tokens=self._options.max_tokens, cold=plain))
            local = _expect(decode, Compared)
            cold = local.cold
            identical = local.tokens == decoded.tokens and (cold is None or cold.tokens == decoded.tokens)
        return RequestResult(
            number=request.number,
            handoff=request.handoff,
            prompt_tokens=len(request.prompt),
            chunks=sent.chunks,
            nbytes=sent.nbytes,
            code=decoded.code,
            reason=decoded.reason,
            identical=identical,
            tokens=decoded.tokens,
            drafts_accepted_first_step=decoded.drafts_accepted_first_step,
            steps=decoded.steps,
            cold_start=decoded.cold_start,
            cold=cold,
        )

    # ---- nodes

    def _start_decode(self, kill_at: str | None) -> tuple[Node, str]:
        arena = max(_LEAST_ARENA, sum(self._pages()) * _PAGE_ROWS_BYTES)
        arguments = [*self._mover(), "--listen", self._options.listen, "--arena", str(arena)]
        node = self._start("decode", [*arguments, *_kill(kill_at)])
        ready = _expect(node, NodeReady, _START_S)
        self._native = ready.native
        return node, ready.address

    def _start_prefill(self, kill_at: str | None, *, corrupt: bool) -> Node:
        arguments = [*self._mover(), "--pages", str(sum(self._pages()) + 1), *(["--corrupt"] if corrupt else [])]
        node = self._start("prefill", [*arguments, *_kill(kill_at)])
        _expect(node, NodeReady, _START_S)
        return node

    def _pages(self) -> list[int]:
        """Pages of each request; a prompt that is refused needs none."""
        page = DEFAULT_CONFIG.page_tokens
        return [-(-tokens // page) for tokens in self._options.prompts if tokens < DEFAULT_CONFIG.max_seq_len] or [1]

    def _mover(self) -> list[str]:
        options = msgspec.json.encode(self._options.mover_options).decode()
        return ["--mover", self._options.mover, "--mover-options", options]

    def _start(self, name: str, arguments: list[str]) -> Node:
        self._generation += 1
        log = self._options.out / f"{name}-{self._generation}.log"
        node = Node(name, f"pdhandoff.demo.{name}_node", arguments, log)
        self._nodes.append(node)
        return node

    def _stop(self, prefill: Node, decode: Node) -> tuple[dict[str, int], tuple[Recording, ...]]:
        """End both; what they still hold, and their recordings."""
        held: dict[str, int] = {}
        recordings: list[Recording] = []
        for node in (decode, prefill):
            path = self._options.out / f"{node.name}.recording.json"
            node.tell(Stop(recording=str(path)))
            stopped = _expect(node, Stopped)
            for field, value in msgspec.structs.asdict(stopped).items():
                held[f"{node.name}.{field}"] = value
            recordings.append(decode_recording(path.read_bytes()))
            path.unlink()
        return held, tuple(recordings)

    def _result(
        self,
        results: tuple[RequestResult, ...],
        interrupted: int,
        held: dict[str, int],
        recordings: tuple[Recording, ...],
    ) -> DemoResult:
        ok, why = judge(results, held, corrupt=self._options.corrupt)
        return DemoResult(
            requests=results,
            killed=self._options.kill,
            interrupted=interrupted,
            held_after=held,
            recordings=recordings,
            native=self._native,
            ok=ok,
            why=why,
        )


def judge(results: Sequence[RequestResult], held: dict[str, int], *, corrupt: bool) -> tuple[bool, str]:
    """Whether everything went as promised, and a sentence about it."""
    refused = [result for result in results if result.code]
    if any(result.identical is False for result in results):
        return False, "a request was decoded to other tokens than after a local prefill"
    if any(held.values()):
        return False, f"something was still held at the end: {held}"
    if not corrupt:
        if refused:
            return False, f"request {refused[0].number} failed: {refused[0].reason}"
        return True, "every token is identical to the same engine's after a local prefill, and nothing is held any more"
    if [result.code for result in refused] != [ErrorCode.DIGEST_MISMATCH]:
        return False, "the flipped byte was not refused as it must be"
    return True, "the corrupted handoff was refused before its first token; every other token is identical"


def _expect(node: Node, kind: type[T], timeout_s: float = _STEP_S) -> T:
    """The next event, which must be of this kind."""
    event = node.next(timeout_s)
    if not isinstance(event, kind):
        raise LocalError(
            ErrorCode.INTERNAL, f"the {node.name} process said {type(event).__name__}, not {kind.__name__}"
        )
    return event


def _kill(step: str | None) -> list[str]:
    return [] if step is None else ["--kill-at", step]


def _name(code: int) -> str:
    return ErrorCode(code).name if code in set(ErrorCode) else str(code)
