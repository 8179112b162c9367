"""The body of a request, in the words of vLLM's tokens-in, tokens-out endpoint.

Names follow vLLM 0.32, vllm/entrypoints/scale_out/token_in_token_out/protocol.py, `GenerateRequest`; fields that are
not listed here change nothing about decoding, and are ignored.
"""

from __future__ import annotations

import uuid
from typing import Annotated, Any, Final, final

import msgspec
from msgspec import Meta

from pdhandoff.ids import HandoffId
from pdhandoff_tilert.engine import DecodeRequest
from pdhandoff_tilert.node.refusals import Refusal, bad_request
from pdhandoff_tilert.node.sampling import read_sampling

__all__ = ["Wanted", "read_request"]

_Token = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
_Seconds = Annotated[float, Meta(gt=0)]
_MOST_ID: Final = 256
_MOST_REASON: Final = 512


@final
class _Mark(msgspec.Struct, frozen=True, kw_only=True):
    """`kv_transfer_params["pdhandoff"]`, as a router writes it or as the prefill side returned it."""

    handoff: str
    first_token: _Token | None = None
    prompt_tokens: int | None = None
    deadline_s: _Seconds | None = None
    wait_s: _Seconds | None = None
    status: str | None = None
    "as the prefill side returned it: sent or failed"
    reason: str | None = None


@final
class _Params(msgspec.Struct, frozen=True, kw_only=True):
    pdhandoff: _Mark | None = None


@final
class _StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


@final
class _Body(msgspec.Struct, frozen=True, kw_only=True):
    token_ids: Annotated[list[_Token], Meta(min_length=1)]
    sampling_params: dict[str, Any]
    request_id: str | None = None
    model: str | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    return_token_ids: bool | None = None
    output_mode: str = "tokens"
    priority: int = 0
    features: Any = None
    content_parts: Any = None
    ec_transfer_params: Any = None
    kv_transfer_params: _Params | None = None


@final
class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """A request that could be read and that this node could serve."""

    request_id: str
    handoff: HandoffId
    decode: DecodeRequest
    "its first token is 0 until the handoff has arrived"
    first_token: int | None
    "that the request says"
    deadline_s: float
    "from admission to the last token"
    wait_s: float | None
    "for the first offer of the handoff; None: as long as the node thinks fit"
    stream: bool
    usage_at_end: bool
    usage_always: bool
    return_prompt: bool


_DECODER = msgspec.json.Decoder(_Body)


def read_request(
    data: bytes, *, model: str, max_seq_len: int, deadline_s: float, header_id: str | None = None
) -> Wanted:
    """Read and check a body.

    Args:
        data: JSON.
        model: name that the request may use.
        max_seq_len: tokens of one request, prompt and output.
        deadline_s: the longest that a request may take; it may ask for less.
        header_id: request id that came as a header, and goes before that in the body.

    Raises:
        Refusal: naming the field that is wrong or not supported.
    """
    try:
        body = _DECODER.decode(data)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise bad_request("body", f"the body cannot be read: {error}"[:_MOST_REASON]) from error
    _refuse_unsupported(body)
    if body.model is not None and body.model != model:
        raise Refusal(
            404, f"the model {body.model[:128]!r} is not served here: ask for {model!r}", code="UNKNOWN_MODEL"
        )
    mark, handoff = _read_mark(body)
    options = body.stream_options or _StreamOptions()
    decode = _decode_request(body, max_seq_len)
    if mark.first_token is not None:
        decode = msgspec.structs.replace(decode, first_token=mark.first_token)
    return Wanted(
        request_id=_request_id(header_id or body.request_id or uuid.uuid4().hex),
        handoff=handoff,
        decode=decode,
        first_token=mark.first_token,
        deadline_s=deadline_s if mark.deadline_s is None else min(mark.deadline_s, deadline_s),
        wait_s=mark.wait_s,
        stream=bool(body.stream),
        usage_at_end=bool(options.include_usage),
        usage_always=bool(options.include_usage and options.continuous_usage_stats),
        return_prompt=bool(body.return_token_ids),
    )


def _request_id(text: str) -> str:
    if len(text) > _MOST_ID or not (text.isascii() and text.isprintable()):
        raise bad_request("request_id", f"request_id must have at most {_MOST_ID} printable ASCII characters")
    return text


def _refuse_unsupported(body: _Body) -> None:
    for name in ("features", "content_parts", "ec_transfer_params"):
        if getattr(body, name):
            raise bad_request(name, f"{name} is not supported by this decode node: it takes prompts of text tokens")
    if body.output_mode != "tokens":
        raise bad_request("output_mode", f"output_mode {body.output_mode[:64]!r}: this node has tokens only")
    if body.priority:
        raise bad_request("priority", "priority is not supported by this decode node: requests are decoded in order")


def _read_mark(body: _Body) -> tuple[_Mark, HandoffId]:
    where = "kv_transfer_params.pdhandoff"
    mark = body.kv_transfer_params.pdhandoff if body.kv_transfer_params else None
    if mark is None:
        raise bad_request(
            where,
            f'{where} is missing: this node decodes what was handed off to it; name that as {{"handoff": "<32 hex>"}}',
        )
    try:
        handoff = HandoffId.parse(mark.handoff)
    except ValueError as error:
        raise bad_request(f"{where}.handoff", f"{where}.handoff is no handoff id: {error}"[:_MOST_REASON]) from error
    if mark.status == "failed":
        reason = (mark.reason or "without a reason")[:_MOST_REASON]
        raise Refusal(502, f"the prefill side says that the handoff failed: {reason}", code="FAILED", retryable=True)
    if mark.prompt_tokens is not None and mark.prompt_tokens != len(body.token_ids):
        raise Refusal(
            409,
            f"token_ids has {len(body.token_ids)} tokens, {where}.prompt_tokens says {mark.prompt_tokens}: send the "
            "tokens that were prefilled",
            code="PROMPT_MISMATCH",
            param="token_ids",
        )
    return mark, handoff


def _decode_request(body: _Body, max_seq_len: int) -> DecodeRequest:
    sampling = read_sampling(body.sampling_params)
    room = max_seq_len - len(body.token_ids)
    if room < 1 or (sampling.max_tokens or 1) > room:
        raise bad_request(
            "token_ids" if room < 1 else "sampling_params.max_tokens",
            f"{len(body.token_ids)} prompt tokens and {sampling.max_tokens or 1} output tokens exceed the "
            f"{max_seq_len} that this node holds: shorten the prompt or lower max_tokens",
        )
    endless = sampling.ignore_eos and not sampling.stop_token_ids
    return DecodeRequest(
        prompt=tuple(body.token_ids),
        first_token=0,
        max_tokens=sampling.max_tokens or room,
        min_tokens=0 if endless or sampling.min_tokens <= 1 else sampling.min_tokens,
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=sampling.seed,
    )
