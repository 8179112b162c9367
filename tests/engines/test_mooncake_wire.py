"""What a peer sends to a Mooncake mover: bounded, checked, never trusted. Needs no Mooncake."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdhandoff.engines.mooncake import wire
from pdhandoff.engines.mooncake.library import Protocol
from pdhandoff.errors import ErrorCode, MoverError

_DESCRIPTION = wire.Description(
    bytes(range(16)), Protocol.TCP, "127.0.0.1:15000", (wire.ExtentWire(4096, 8), wire.ExtentWire(0, 1))
)


def test_a_description_survives_the_wire() -> None:
    for description in (_DESCRIPTION, wire.Description(bytes(16), Protocol.RDMA)):
        assert wire.decode(wire.encode(description)) == description


@pytest.mark.parametrize(
    "change",
    [
        {"incarnation": b"short"},
        {"segment": ""},
        {"segment": "127.0.0.1"},
        {"segment": "127.0.0.1:0"},
        {"segment": "127.0.0.1:65536"},
        {"segment": "a b:1"},
        {"segment": "x" * 300 + ":1"},
        {"segment": "host:1\n"},
        {"extents": ()},
        {"extents": (wire.ExtentWire(-1, 1),)},
        {"extents": (wire.ExtentWire(1, 0),)},
        {"extents": (wire.ExtentWire(1 << 57, 1),)},
    ],
)
def test_a_description_with_a_wrong_field_is_refused(change: dict[str, Any]) -> None:
    encoded = msgspec.msgpack.encode(msgspec.structs.replace(_DESCRIPTION, **change))
    with pytest.raises(MoverError) as caught:
        wire.decode(encoded)
    assert caught.value.code is ErrorCode.MALFORMED


def test_a_description_beyond_the_limits_is_refused() -> None:
    many = msgspec.structs.replace(_DESCRIPTION, extents=(wire.ExtentWire(0, 1),) * 4097)
    for call in (lambda: wire.encode(many), lambda: wire.decode(msgspec.msgpack.encode(many))):
        with pytest.raises(MoverError) as caught:
            call()
        assert caught.value.code is ErrorCode.OVERSIZED
    with pytest.raises(MoverError) as caught:
        wire.decode(bytes((1 << 20) + 1))
    assert caught.value.code is ErrorCode.OVERSIZED


def _outcome(data: bytes) -> ErrorCode | int | None:
    """The code of the typed error; None for a description. Any other error ends the test."""
    try:
        wire.decode(data)
    except MoverError as error:
        return error.code
    return None


_WHOLE = wire.encode(_DESCRIPTION)
_ALLOWED = {None, ErrorCode.MALFORMED, ErrorCode.OVERSIZED}


@given(st.binary(max_size=200) | st.integers(0, len(_WHOLE)).map(lambda end: _WHOLE[:end]))
def test_any_bytes_are_a_description_or_a_typed_error(data: bytes) -> None:
    assert _outcome(data) in _ALLOWED


@given(st.integers(0, len(_WHOLE) - 1), st.integers(1, 255))
def test_one_wrong_byte_gives_a_description_or_a_typed_error(place: int, change: int) -> None:
    data = bytearray(_WHOLE)
    data[place] ^= change
    assert _outcome(bytes(data)) in _ALLOWED
