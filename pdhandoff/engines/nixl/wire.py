"""What a NIXL mover writes into a grant, and reads from one: plain integers and NIXL's own metadata, bounded."""

from __future__ import annotations

import hashlib
from typing import Annotated, Final, final

import msgspec

from pdhandoff.errors import ErrorCode, MoverError
from pdhandoff.ids import ID_BYTES
from pdhandoff.limits import DEFAULT_LIMITS, Limits

__all__ = ["Description", "PartWire", "decode", "encode"]

_MAX: Final = 1 << 47
"addresses and sizes stay below this many bytes"

Cookie = Annotated[bytes, msgspec.Meta(min_length=ID_BYTES, max_length=ID_BYTES)]
Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
Size = Annotated[int, msgspec.Meta(ge=0, lt=_MAX)]


@final
class PartWire(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A run of granted memory that lies in one registration of the granting agent."""

    address: Size
    length: Size
    cuda: bool
    device: Annotated[int, msgspec.Meta(ge=0, lt=1024)]


@final
class Description(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="nixl1"):
    """Who grants, and what."""

    incarnation: Cookie
    "of the mover"
    machine: Cookie
    "same for processes of one machine: only those may write into one another's memory directly"
    host: Cookie
    "same for processes that can watch one another, see `host`"
    pid: Number
    control_fd: Number
    "descriptor that is locked as long as the mover lives"
    life: Number = 0
    "counts the receiving agents of this mover; 0: nothing is granted"
    metadata: tuple[bytes, ...] = ()
    "NIXL's: how to connect, and one for each kind of memory"
    parts: tuple[PartWire, ...] = ()
    "what is granted: sorted, disjoint"

    @property
    def agent(self) -> str:
        """Name of the receiving agent."""
        return f"r{self.life}.{self.incarnation.hex()}"


_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(Description)
_MAX_METADATA: Final = 3
_CHECKSUM_BYTES: Final = 16


def encode(description: Description, limits: Limits = DEFAULT_LIMITS) -> bytes:
    """Bytes for a grant. Raises MoverError (OVERSIZED) when they would not fit into one."""
    body = _encoder.encode(description)
    encoded = body + _checksum(body)
    _check_size(len(encoded), len(description.parts), limits)
    return encoded


def decode(encoded: bytes, limits: Limits = DEFAULT_LIMITS) -> Description:
    """The description that a peer sent.

    Raises:
        MoverError: OVERSIZED above the limits, MALFORMED for anything that `encode` does not write.
    """
    _check_size(len(encoded), 0, limits)
    body, checksum = encoded[:-_CHECKSUM_BYTES], encoded[-_CHECKSUM_BYTES:]
    if checksum != _checksum(body):
        raise MoverError(ErrorCode.MALFORMED, "a description of NIXL memory was altered on its way, or is none")
    try:
        description = _decoder.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise MoverError(ErrorCode.MALFORMED, f"no description of NIXL memory: {error}") from error
    _check_size(len(encoded), len(description.parts), limits)
    if bool(description.life) != bool(description.parts) or bool(description.life) != bool(description.metadata):
        raise MoverError(ErrorCode.MALFORMED, "a grant names an agent, its metadata and its memory, or none of them")
    if len(description.metadata) > _MAX_METADATA:
        raise MoverError(ErrorCode.MALFORMED, f"a grant carries {len(description.metadata)} pieces of metadata")
    end = 0
    for index, part in enumerate(description.parts):
        if part.address < end or not part.length:
            raise MoverError(ErrorCode.MALFORMED, f"part {index} is empty, overlaps the one before it, or precedes it")
        end = part.address + part.length
    return description


def _checksum(body: bytes) -> bytes:
    """NIXL's own parser crashes on metadata with changed bytes, so chance must not get them there. Malice still can."""
    return hashlib.blake2b(body, digest_size=_CHECKSUM_BYTES).digest()


def _check_size(nbytes: int, parts: int, limits: Limits) -> None:
    # An extent may be spread over several registrations, so there may be more parts than extents.
    if nbytes > limits.max_descriptor_bytes or parts > 4 * limits.max_extents:
        raise MoverError(
            ErrorCode.OVERSIZED,
            f"a description of {parts} parts in {nbytes} bytes exceeds {4 * limits.max_extents} parts or "
            f"{limits.max_descriptor_bytes} bytes: grant fewer or larger extents",
        )
