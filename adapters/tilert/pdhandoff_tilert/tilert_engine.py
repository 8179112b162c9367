"""TileRT behind the decode node's seam: `pdhandoff serve-decode --engine tilert`."""

from __future__ import annotations

from typing import Any, Final, final

import msgspec
import torch

from pdhandoff.errors import ErrorCode, LocalError
from pdhandoff.layouts.profiles import Profile
from pdhandoff.native import load
from pdhandoff.runtime.arrival import Arrival
from pdhandoff_tilert.caches import CacheShape, LiveCaches, describe, discover, shape_for_calls
from pdhandoff_tilert.decode_loop import DecodeLoop
from pdhandoff_tilert.engine import DecodeRequest, DecodeStep
from pdhandoff_tilert.generator import Calls, end_tokens, examine
from pdhandoff_tilert.inject import CacheInjector, CallInjector, Injector
from pdhandoff_tilert.parking import Facts, ParkedRows, Parking
from pdhandoff_tilert.published import build_generator, model_named
from pdhandoff_tilert.sampling import apply_sampling, refusal

__all__ = ["EngineOptions", "TilertEngine", "create"]

_DIRECT: Final = "direct"
_CALLS: Final = "calls"
_STEPS_LIMIT: Final = 1024
"steps that the engine's buffers hold (`ar_max_steps`, tilert/models/glm_5/modules/dsa.py)"


@final
class EngineOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an operator chooses about the engine: `--engine-arg NAME=VALUE`."""

    model: str = "glm5"
    "glm5, dsv32, or an alias of the published package"
    weights: str = ""
    "folder of the converted weights"
    mtp: bool = True
    "decode with drafts"
    fp8: bool = False
    "keep latents in fp8"
    max_seq_len: int = 0
    "tokens of one request, prompt and output; 0: all that the caches hold"
    steps_per_call: int = 8
    "steps that one call may run, where the engine can; the next token, a cancel and a stop token wait for the call"
    park_bytes: int = 4 << 30
    "memory for requests that have landed and wait for their turn; 0: they wait as they landed"
    inject: str = _DIRECT
    "direct: into the live tensors; calls: through the engine's inject_cache"
    convert_on: str = "cpu"
    "where conversions run and rows are parked: cpu, or cuda:0 where the landing memory is that GPU's"
    revision: str = ""
    "of the weights, as the prefill side names it"
    weight_epoch: int = 0
    "of the weights, as the prefill side counts it"
    spec_depth: int = 1
    "num_speculative_tokens of the prefill side"
    served_model: str = ""
    "name that requests may use; empty: the model's"


def create(**options: Any) -> TilertEngine:
    """Load the published package's engine; all arguments are fields of `EngineOptions`.

    Raises:
        LocalError: an option is wrong, or the package, one of its calls or its caches are not as this adapter needs.
    """
    try:
        chosen = msgspec.convert(options, EngineOptions)
    except msgspec.ValidationError as error:
        known = ", ".join(EngineOptions.__struct_fields__)
        raise LocalError(ErrorCode.CONFIG, f"engine arguments: {error} (there are {known})") from error
    if not chosen.weights:
        raise LocalError(ErrorCode.CONFIG, "weights: give the folder of the converted weights")
    entry = model_named(chosen.model)
    generator = build_generator(
        entry, weights=chosen.weights, mtp=chosen.mtp, fp8=chosen.fp8, max_seq_len=chosen.max_seq_len
    )
    return TilertEngine(generator, entry.profile, chosen)


@final
class TilertEngine:
    """A loaded generator as a `DecodeEngine`. Every call comes from one thread, except `park` and `drop`.

    Args:
        generator: loaded; this engine cleans it up.
        profile: its model.
        options: `model`, `weights`, `mtp` and `fp8` are the generator's already and not read here.

    Raises:
        LocalError: a call is missing or a cache is not as this adapter needs; the sentence names it.
    """

    def __init__(self, generator: Any, profile: Profile, options: EngineOptions | None = None) -> None:
        options = options or EngineOptions()
        if not 1 <= options.steps_per_call <= _STEPS_LIMIT:
            raise LocalError(
                ErrorCode.CONFIG, f"steps_per_call {options.steps_per_call}: the engine runs 1 to {_STEPS_LIMIT}"
            )
        self._calls = examine(generator)
        self._steps_per_call = options.steps_per_call
        shape, self._injector = _injector(self._calls, profile, options)
        self.layout = describe(
            shape,
            profile,
            revision=options.revision,
            weight_epoch=options.weight_epoch,
            spec_depth=options.spec_depth,
        )
        self.model = options.served_model or profile.name
        self.max_seq_len = _longest(self._calls, shape, options.max_seq_len)
        self.end_token_ids = end_tokens(generator)
        self._facts: Facts | None = None
        "of what the caches hold; None: no request's state"
        self._loop: DecodeLoop | None = None
        self._used = False
        self._closed = False

    def unsupported(self, request: DecodeRequest) -> str:
        """See `DecodeEngine.unsupported`."""
        return refusal(request, can_seed=self._calls.can_seed)

    def park(self, arrival: Arrival) -> object:
        """See `DecodeEngine.park`. Raises LocalError, and releases the arrival, when it does not fit."""
        return self._injector.park(arrival)

    def inject(self, parked: object) -> None:
        """See `DecodeEngine.inject`.

        Raises:
            LocalError: a request is still running, or the rows do not fit.
        """
        if self._loop is not None:
            self.drop(parked)
            raise LocalError(ErrorCode.MISUSE, "a request is running: end it before the next one is injected")
        self._used, self._facts = True, None
        self._facts = self._injector.inject(parked)

    def drop(self, parked: object) -> None:
        """See `DecodeEngine.drop`."""
        if isinstance(parked, ParkedRows):
            parked.give_back()
        elif isinstance(parked, Arrival):
            parked.release()

    def begin(self, request: DecodeRequest) -> None:
        """See `DecodeEngine.begin`.

        Raises:
            LocalError: nothing was injected, what was is another prompt's, or the engine cannot honour the request.
        """
        facts, self._facts = self._facts, None
        if facts is None or self._loop is not None:
            raise LocalError(ErrorCode.MISUSE, "no rows were injected for this request: inject, then begin")
        last = request.prompt[-1] if request.prompt else None
        if len(request.prompt) != facts.prompt_tokens or facts.last_token not in {None, last}:
            raise LocalError(
                ErrorCode.MISUSE,
                f"the request's prompt has {len(request.prompt)} tokens and ends with {last}, and the rows that were "
                f"injected are of {facts.prompt_tokens} tokens that end with {facts.last_token}",
            )
        limit = min(request.max_tokens, self.max_seq_len - facts.prompt_tokens)
        if limit < 1:
            raise LocalError(
                ErrorCode.TOO_LARGE,
                f"no token fits after a prompt of {facts.prompt_tokens} in {self.max_seq_len}, or none was asked for",
            )
        reason = self.unsupported(request)
        if reason:
            raise LocalError(ErrorCode.CONFIG, reason)
        self._used = True
        apply_sampling(self._calls, request)
        own = frozenset[int]() if request.ignore_eos else self.end_token_ids
        self._loop = DecodeLoop(
            self._calls,
            request,
            facts,
            limit=limit,
            end_tokens=own | request.stop_token_ids,
            steps_per_call=self._steps_per_call,
            keep_draft_row=self._injector.keep_draft_row,
        )

    def step(self) -> DecodeStep:
        """See `DecodeEngine.step`. Raises LocalError when no request is running, or the engine answers nonsense."""
        if self._loop is None:
            raise LocalError(ErrorCode.MISUSE, "no request is running: begin one")
        return self._loop.step()

    def end(self) -> None:
        """See `DecodeEngine.end`."""
        self._facts, self._loop = None, None
        if self._used:
            self._used = False
            self._calls.layer.reset_sequence()

    def close(self) -> None:
        """See `DecodeEngine.close`."""
        if not self._closed:
            self._closed = True
            self.end()
            cleanup = getattr(self._calls.generator, "cleanup", None)
            if cleanup is not None:
                cleanup()


def _injector(calls: Calls, profile: Profile, options: EngineOptions) -> tuple[CacheShape, Injector]:
    if options.inject == _CALLS:
        if not hasattr(calls.generator, "inject_cache"):
            raise LocalError(ErrorCode.CONFIG, "inject=calls: this generator has no inject_cache; use inject=direct")
        length = options.max_seq_len or _declared_length(calls)
        if length is None:
            raise LocalError(ErrorCode.CONFIG, "inject=calls: the generator does not say its length; give max_seq_len")
        shape = shape_for_calls(profile, length=length + _beyond(calls), draft_layer=calls.with_mtp)
        return shape, CallInjector(calls.generator.inject_cache, _parking(shape, options, pinned=False))
    if options.inject != _DIRECT:
        raise LocalError(ErrorCode.CONFIG, f"inject={options.inject}: use {_DIRECT} or {_CALLS}")
    live = discover(calls.layer, profile)
    device = _device(options.convert_on)
    direct = all(each.type == device.type for each in live.devices)
    if direct and device.type == "cuda":
        _open_peers(device, live)
    pinned = device.type == "cpu" and any(each.type == "cuda" for each in live.devices)
    parking = _parking(live.shape, options, pinned=pinned)
    return live.shape, CacheInjector(live, parking, layers=profile.layers, direct=direct)


def _parking(shape: CacheShape, options: EngineOptions, *, pinned: bool) -> Parking:
    device = _device(options.convert_on)
    native = load("cuda") if device.type == "cuda" else None
    return Parking(shape, options.park_bytes, device, pinned=pinned, native=native)


def _device(convert_on: str) -> torch.device:
    try:
        device = torch.device(convert_on)
    except RuntimeError as error:
        raise LocalError(ErrorCode.CONFIG, f"convert_on={convert_on}: torch knows no such device") from error
    if device.type not in {"cpu", "cuda"}:
        raise LocalError(ErrorCode.CONFIG, f"convert_on={convert_on}: conversions run on cpu or cuda:0")
    return device


def _open_peers(device: torch.device, live: LiveCaches) -> None:
    """Let kernels on `device` write the others' memory: torch opens peer access at the first copy between two."""
    one = torch.zeros(1, device=device)
    for other in live.devices:
        if other != device:
            one.to(other)


def _beyond(calls: Calls) -> int:
    """Rows that the last steps of a request write past its last token: drafts of tokens, and drafts of drafts."""
    width = calls.stepper.width
    return 2 * width if width > 1 else 0


def _declared_length(calls: Calls) -> int | None:
    """`max_seq_len` of the model's arguments, which leaves the caches' padding out."""
    length = getattr(getattr(calls.generator, "config", None), "max_seq_len", None)
    return length if isinstance(length, int) else None


def _longest(calls: Calls, shape: CacheShape, chosen: int) -> int:
    """Tokens of one request."""
    beyond = _beyond(calls)
    held = min(shape.index_length, shape.rows_length)
    declared = _declared_length(calls)
    longest = held - beyond if declared is None else min(declared, held - beyond)
    if chosen < 0 or chosen > longest or longest < 2:
        raise LocalError(
            ErrorCode.CONFIG,
            f"max_seq_len {chosen}: this engine's caches hold {held} tokens, {beyond} of which its drafts need; it "
            f"takes requests of 2 to {longest}",
        )
    return chosen or longest
