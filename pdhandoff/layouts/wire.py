"""Layouts as bytes: msgpack, bounded, strict. Nothing in a peer's descriptor is skipped or guessed."""

from __future__ import annotations

import re
from typing import Final

import msgspec

from pdhandoff.errors import ErrorCode, LayoutError, RemoteError
from pdhandoff.layouts.descriptor import Layout
from pdhandoff.limits import DEFAULT_LIMITS, Limits

__all__ = ["decode_layout", "encode_layout"]

_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(Layout)
_KIND: Final = re.compile(r"components\[[^\]]*\]\.kind$")


def encode_layout(layout: Layout, limits: Limits = DEFAULT_LIMITS) -> bytes:
    """A validated layout as msgpack: a map per struct, enumerations by their names.

    Raises:
        LayoutError: the layout is inconsistent, out of bounds, or longer than `limits.max_frame_bytes`.
    """
    data = _ENCODER.encode(layout.validate(limits))
    if len(data) > limits.max_frame_bytes:
        raise LayoutError(ErrorCode.OVERSIZED, _too_long(len(data), limits), field="layout")
    return data


def decode_layout(data: bytes, limits: Limits = DEFAULT_LIMITS) -> Layout:
    """The validated layout in a peer's bytes.

    Raises:
        RemoteError: more than `limits.max_frame_bytes` (OVERSIZED), or no msgpack at all (MALFORMED).
        LayoutError: a field that is missing, unknown, of a wrong type or inconsistent; `field` says which. A kind of
            state that is not known here is UNKNOWN_COMPONENT: it is refused, because a model that keeps such state
            would decode nonsense without it.
    """
    if len(data) > limits.max_frame_bytes:
        raise RemoteError(ErrorCode.OVERSIZED, _too_long(len(data), limits))
    try:
        layout = _DECODER.decode(data)
    except msgspec.ValidationError as error:
        raise _refusal(str(error), limits) from error
    except msgspec.DecodeError as error:
        raise RemoteError(ErrorCode.MALFORMED, f"the peer's layout is no msgpack ({error})") from error
    return layout.validate(limits)


def _too_long(length: int, limits: Limits) -> str:
    return f"the layout takes {length} bytes, and {limits.max_frame_bytes} are allowed (max_frame_bytes)"


def _refusal(text: str, limits: Limits) -> LayoutError:
    reason, marker, path = text.rpartition(" - at `$")
    field = path.rstrip("`").removeprefix(".") if marker and path != "`" else "layout"
    reason = (reason if marker else text)[: limits.max_string]
    if _KIND.search(field):
        sentence = f"{field}: {reason}; state of an unknown kind is never skipped, update the older side"
        return LayoutError(ErrorCode.UNKNOWN_COMPONENT, sentence, field=field)
    return LayoutError(ErrorCode.LAYOUT_MISMATCH, f"{field}: {reason}", field=field)
