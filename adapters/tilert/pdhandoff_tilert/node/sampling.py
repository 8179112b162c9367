"""Sampling parameters of a request: what is honoured, what changes nothing, and what is refused by name.

The names and defaults are those of vLLM 0.32, vllm/sampling_params.py, `SamplingParams`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, final

import msgspec
from msgspec import Meta

from pdhandoff_tilert.node.refusals import bad_request

__all__ = ["Sampling", "read_sampling"]

_MOST_TOKEN: Final = (1 << 31) - 1
_MOST_STOP_TOKENS: Final = 1024
_MOST_SEED: Final = 1 << 62

_NO_MATTER: Final = frozenset({
    "detokenize",
    "flat_logprobs",
    "include_stop_str_in_output",
    "output_kind",
    "output_text_buffer_length",
    "skip_clone",
    "skip_reading_prefix_cache",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "stream_interval",
})  # fmt: skip
"these decide on text, or on caches of the prefill side, and not on tokens"

_NEUTRAL: Final[Mapping[str, object]] = {
    "n": 1,
    "best_of": 1,
    "repetition_penalty": 1,
    "watermarking": True,
}
"name -> the value, beside null, false, 0 and empty ones, that asks for nothing"

_COUNTS: Final = frozenset({"logprobs", "prompt_logprobs"})
_PATH: Final = re.compile(r"`\$\.(\w+)")
"where msgspec found a wrong value"

_Token = Annotated[int, Meta(ge=0, le=_MOST_TOKEN)]


@final
class _Given(msgspec.Struct, frozen=True, kw_only=True):
    """What is honoured, as it comes. None: as if it were not there."""

    temperature: Annotated[float, Meta(ge=0, le=1000)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=_MOST_TOKEN)] | None = None
    seed: Annotated[int, Meta(gt=-_MOST_SEED, lt=_MOST_SEED)] | None = None
    stop_token_ids: Annotated[list[_Token], Meta(max_length=_MOST_STOP_TOKENS)] | None = None
    ignore_eos: bool | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None


_HONOURED: Final = frozenset(_Given.__struct_fields__)


@final
class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """What this node honours."""

    temperature: float
    top_p: float
    top_k: int
    "0: all"
    seed: int | None
    stop_token_ids: frozenset[int]
    ignore_eos: bool
    max_tokens: int | None
    "None: as many as fit"
    min_tokens: int


def read_sampling(params: Mapping[str, Any]) -> Sampling:
    """Read `sampling_params`. What is absent has vLLM's default, but `max_tokens`, which then is all that fit.

    Raises:
        Refusal: 400, for a wrong value, and for a parameter that no decode node honours, by name.
    """
    for name, value in params.items():
        if name not in _HONOURED and name not in _NO_MATTER:
            _refuse_unless_neutral(name, value)
    try:
        given = msgspec.convert({name: params[name] for name in _HONOURED if name in params}, _Given)
    except msgspec.ValidationError as error:
        found = _PATH.search(str(error))
        where = f"sampling_params.{found[1]}" if found else "sampling_params"
        raise bad_request(where, f"{where} cannot be used: {error}") from error
    if given.min_tokens is not None and given.max_tokens is not None and given.min_tokens > given.max_tokens:
        raise bad_request(
            "sampling_params.min_tokens", f"min_tokens {given.min_tokens} exceeds max_tokens {given.max_tokens}"
        )
    return Sampling(
        temperature=1.0 if given.temperature is None else given.temperature,
        top_p=1.0 if given.top_p is None else given.top_p,
        top_k=max(0, given.top_k or 0),
        seed=given.seed,
        stop_token_ids=frozenset(given.stop_token_ids or ()),
        ignore_eos=bool(given.ignore_eos),
        max_tokens=given.max_tokens,
        min_tokens=given.min_tokens or 0,
    )


def _refuse_unless_neutral(name: str, value: object) -> None:
    # 0 log probabilities still are those of the sampled tokens
    neutral = value is None if name in _COUNTS else not value or value == _NEUTRAL.get(name)
    if not neutral:
        raise bad_request(
            f"sampling_params.{name}"[:128],
            f"sampling_params.{name[:64]} is not supported by this decode node: leave it out, or send the request to "
            "an engine that prefills and decodes by itself",
        )
