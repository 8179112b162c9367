"""Small named values that travel with a handoff: last token, first token, drafts, hidden state, sampling, ..."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Final, final

import msgspec

from pdhandoff.errors import ErrorCode, RemoteError
from pdhandoff.limits import DEFAULT_LIMITS, Limits
from pdhandoff.protocol.messages import Attachment, AttachmentSpec

__all__ = ["DTYPES", "Expected", "attach", "attach_int", "check_attachments", "check_values", "read_int"]

DTYPES: Final[Mapping[str, int]] = {
    "bool": 1,
    "u8": 1,
    "i32": 4,
    "i64": 8,
    "f16": 2,
    "bf16": 2,
    "f32": 4,
    "f64": 8,
    "utf8": 1,
}
"name -> bytes of one element"


@final
class Expected(msgspec.Struct, frozen=True, kw_only=True):
    """What a consumer knows about an attachment name."""

    dtype: str
    shape: tuple[int | None, ...] = ()
    "None: any length along this axis"
    required: bool = False
    "the consumer cannot decode without it"


def attach(name: str, dtype: str, shape: Sequence[int], data: bytes, *, required: bool = False) -> Attachment:
    """An attachment from raw little-endian bytes. Raises ValueError when dtype, shape and length disagree."""
    spec = AttachmentSpec(name=name, dtype=dtype, shape=tuple(shape), required=required)
    if dtype not in DTYPES or _nbytes(spec) != len(data):
        raise ValueError(f"attachment {name}: {len(data)} bytes are not {dtype}{list(shape)}")
    return Attachment(spec=spec, data=data)


def attach_int(name: str, *values: int, required: bool = False) -> Attachment:
    """64-bit integers: a scalar for one value, otherwise shape [n]."""
    data = b"".join(value.to_bytes(8, "little", signed=True) for value in values)
    return attach(name, "i64", () if len(values) == 1 else (len(values),), data, required=required)


def read_int(attachment: Attachment) -> tuple[int, ...]:
    """The values that `attach_int` packed. Raises ValueError for another dtype."""
    if attachment.spec.dtype != "i64":
        raise ValueError(f"attachment {attachment.spec.name} is {attachment.spec.dtype}, not i64")
    data = attachment.data
    return tuple(int.from_bytes(data[at : at + 8], "little", signed=True) for at in range(0, len(data), 8))


def check_attachments(
    specs: Sequence[AttachmentSpec], expected: Mapping[str, Expected], limits: Limits = DEFAULT_LIMITS
) -> None:
    """Hold declared attachments against what this consumer knows. Unknown optional ones pass.

    Raises RemoteError for repeated names, unknown dtypes, absurd sizes, shapes that differ from what is expected,
    required names that are unknown, and expected required names that are absent.
    """
    names = [spec.name for spec in specs]
    if len(set(names)) != len(names):
        raise _bad(f"an attachment name is repeated: {sorted(names)}")
    if sum(_nbytes(spec) for spec in specs) > limits.max_attachment_bytes:
        raise _bad(f"attachments exceed {limits.max_attachment_bytes} bytes together")
    for spec in specs:
        _check_one(spec, expected.get(spec.name))
    for name, known in expected.items():
        if known.required and name not in names:
            raise _bad(f"attachment {name} is required by the consumer and was not offered")


def check_values(
    attachments: Sequence[Attachment], declared: Sequence[AttachmentSpec], required: Collection[str] = ()
) -> None:
    """Refuse, with RemoteError, values that were not declared so, in size too, and required ones that did not come."""
    have = {attachment.spec.name: attachment.spec for attachment in attachments}
    want = {spec.name: spec for spec in declared}
    if len(have) != len(attachments) or any(want.get(name) != spec for name, spec in have.items()):
        raise _bad(f"attachments {sorted(have)} came where {sorted(want)} were declared")
    missing = {spec.name for spec in declared if spec.name in required or spec.required} - set(have)
    if missing:
        raise _bad(f"attachments {sorted(missing)} were declared, are required, and did not come")
    for attachment in attachments:
        if _nbytes(attachment.spec) != len(attachment.data):
            raise _bad(
                f"attachment {attachment.spec.name} has {len(attachment.data)} bytes, not {_nbytes(attachment.spec)}"
            )


def _check_one(spec: AttachmentSpec, known: Expected | None) -> None:
    if spec.dtype not in DTYPES:
        raise _bad(f"attachment {spec.name} has the unknown dtype {spec.dtype!r}")
    if known is None:
        if spec.required:
            raise _bad(f"attachment {spec.name} is required by the producer and unknown to this consumer")
        return
    shape_fits = len(spec.shape) == len(known.shape) and all(
        want in (None, have) for have, want in zip(spec.shape, known.shape, strict=True)
    )
    if spec.dtype != known.dtype or not shape_fits:
        raise _bad(
            f"attachment {spec.name} is {spec.dtype}{list(spec.shape)}, "
            f"this consumer expects {known.dtype}{list(known.shape)}"
        )


def _nbytes(spec: AttachmentSpec) -> int:
    return DTYPES.get(spec.dtype, 1) * math.prod(spec.shape)


def _bad(reason: str) -> RemoteError:
    return RemoteError(ErrorCode.ATTACHMENT, reason)
