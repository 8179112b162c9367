"""The mark on a request that is to be handed off, and what the client gets back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, final

import msgspec
from msgspec import Meta

from pdhandoff.errors import LocalError
from pdhandoff.ids import HandoffId
from pdhandoff.runtime.address import Address, parse_address
from pdhandoff.runtime.allow import Destinations
from pdhandoff_vllm.config import Config

__all__ = ["KEY", "Claim", "Refusal", "answer", "read_mark"]

KEY: Final = "pdhandoff"
"the private key in `kv_transfer_params`, on the way in and on the way out"

_HOST_KEY: Final = "tilert_host"
_PORT_KEY: Final = "tilert_ctrl_port"
_SHOWN: Final = 256
"characters of a client's own text that are given back"


@final
class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """A request that is to be handed off."""

    handoff: HandoffId
    consumer: Address
    queue_s: float
    "how long it may wait for landing memory"
    traceparent: str = ""


@final
class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """A mark that cannot be honoured: the request runs in vLLM as any other, and its answer says why."""

    reason: str
    handoff: str = ""
    consumer: str = ""


class _Mark(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    consumer: Annotated[str, Meta(max_length=_SHOWN)] | None = None
    handoff: Annotated[str, Meta(pattern="^[0-9a-fA-F]{32}$")] | None = None
    queue_s: Annotated[float, Meta(ge=0, le=86_400)] | None = None
    traceparent: Annotated[str, Meta(max_length=64)] = ""


class _Published(msgspec.Struct, frozen=True, kw_only=True):
    """The published mark. Other keys beside it belong to other connectors."""

    tilert_host: Annotated[str, Meta(min_length=1, max_length=_SHOWN)] | None = None
    tilert_ctrl_port: Annotated[int, Meta(ge=1, le=65_535)] | None = None


def read_mark(params: object, config: Config, destinations: Destinations) -> Claim | Refusal | None:
    """What `kv_transfer_params` of a request asks for.

    Args:
        params: as the client, or its router, sent them.
        config: the operator's.
        destinations: the allow-list.

    Returns:
        None: nothing of ours.
    """
    if not isinstance(params, Mapping):
        return None
    try:
        if KEY in params:
            return _claim(msgspec.convert(params[KEY], _Mark), config, destinations)
        if _HOST_KEY in params or _PORT_KEY in params:
            found = {key: params[key] for key in (_HOST_KEY, _PORT_KEY) if key in params}
            published = msgspec.convert(found, _Published, strict=False)
            host = published.tilert_host or config.tilert_host or ""
            port = published.tilert_ctrl_port or config.tilert_ctrl_port
            return _claim(_Mark(consumer=str(Address(host, port))), config, destinations)
    except msgspec.ValidationError as error:
        return Refusal(reason=f"kv_transfer_params: {str(error)[:_SHOWN]}")
    return None


def _claim(mark: _Mark, config: Config, destinations: Destinations) -> Claim | Refusal:
    shown = mark.consumer or ("" if config.consumer is None else str(config.consumer))
    handoff = (mark.handoff or "").lower()
    queue_s = config.queue_s if mark.queue_s is None else mark.queue_s
    try:
        consumer = config.consumer if mark.consumer is None else parse_address(mark.consumer)
        if consumer is None:
            return Refusal(reason="the mark names no consumer, and tilert_host is not set: name one", handoff=handoff)
        destinations.check(consumer)
    except LocalError as error:
        return Refusal(reason=error.reason, handoff=handoff, consumer=shown)
    return Claim(
        handoff=HandoffId.parse(handoff) if handoff else HandoffId.mint(),
        consumer=consumer,
        queue_s=queue_s,
        traceparent=mark.traceparent,
    )


def answer(
    *, handoff: str, consumer: str, prompt_tokens: int, first_token: int | None, reason: str = ""
) -> dict[str, Any]:
    """`kv_transfer_params` of the response. A reason means that the handoff has failed."""
    return {
        KEY: {
            "handoff": handoff,
            "consumer": consumer,
            "prompt_tokens": prompt_tokens,
            "first_token": first_token,
            "status": "failed" if reason else "sent",
            "reason": reason,
        }
    }
