from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdhandoff.errors import ErrorCode, PlanError, RemoteError
from pdhandoff.ids import HandoffId, Incarnation
from pdhandoff.limits import DEFAULT_LIMITS
from pdhandoff.protocol.codec import FrameDecoder, UnknownMessage, decode_message, encode_message
from pdhandoff.protocol.link import Link, LinkClosed, LinkEvent, LinkOpened, LinkState, MessageReceived, Side
from pdhandoff.protocol.manifest import Entry, Manifest
from pdhandoff.protocol.messages import MAGIC, Grant, Hello, Message, Offer, Ping, Queued, Renew, Welcome
from support.strategies import MESSAGE_TYPES, any_message, of_type

pytestmark = pytest.mark.slow

NOW = 5.0


def frame(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + body


def hello(**more: Any) -> dict[str, Any]:
    return {"t": 1, "magic": MAGIC, "major": 1, "minor": 0, "incarnation": b"i" * 16, "nonce": b"n" * 16, **more}


def listener() -> Link:
    return Link(
        Side.LISTENER, now=0.0, incarnation=Incarnation(b"l" * 16), nonce=b"m" * 16, welcome=Welcome(mover="loopback")
    )


def opened() -> Link:
    link = listener()
    events = link.receive(frame(msgspec.msgpack.encode(hello())) + encode_message(Welcome(mover="loopback")), NOW)
    assert [type(event) for event in events] == [LinkOpened]
    return link


def feed(link: Link, pieces: Sequence[bytes]) -> list[LinkEvent]:
    return [event for piece in pieces if piece for event in link.receive(piece, NOW)]


def byte_by_byte(data: bytes) -> list[bytes]:
    return [data[at : at + 1] for at in range(len(data))]


@given(any_message())
def test_every_message_comes_back_as_it_went(message: Message) -> None:
    data = encode_message(message)
    decoder = FrameDecoder(1 << 20)
    decoder.feed(data)
    assert decoder.next() == message
    assert decoder.next() is None
    assert decoder.last_body == data[4:]


@given(st.binary(max_size=200))
def test_any_bytes_give_a_message_or_a_typed_error(body: bytes) -> None:
    try:
        message = decode_message(body)
    except RemoteError as error:
        assert error.code in {ErrorCode.MALFORMED, ErrorCode.VERSION}  # noqa: PT017 - either is right
    else:
        assert isinstance(message, (*MESSAGE_TYPES, UnknownMessage))


@given(st.lists(any_message(), max_size=4), st.binary(max_size=60), st.booleans())
@settings(deadline=None)
def test_an_open_link_sees_the_same_events_whole_and_byte_by_byte(
    messages: list[Message], garbage: bytes, hostile: bool
) -> None:
    data = b"".join(map(encode_message, messages)) + (garbage if hostile else b"")
    whole, parts = opened(), opened()
    assert feed(whole, [data]) == feed(parts, byte_by_byte(data))
    assert whole.state is parts.state
    assert whole.data_to_send() == parts.data_to_send()


@given(st.binary(max_size=300))
@settings(deadline=None)
def test_a_new_link_sees_the_same_events_whole_and_byte_by_byte(data: bytes) -> None:
    whole, parts = listener(), listener()
    events = feed(whole, [data])
    assert events == feed(parts, byte_by_byte(data))
    assert all(isinstance(event, LinkClosed) for event in events)


@given(any_message(), st.data())
def test_a_truncated_message_is_waited_for_or_refused(message: Message, data: st.DataObject) -> None:
    body = encode_message(message)[4:]
    cut = body[: data.draw(st.integers(0, len(body) - 1))]
    link = opened()
    assert link.receive(frame(body)[: len(cut) + 4], NOW) == []
    with pytest.raises(RemoteError):
        decode_message(cut)


@given(any_message(), st.data())
@settings(deadline=None)
def test_a_flipped_bit_never_raises_anything_else(message: Message, data: st.DataObject) -> None:
    body = bytearray(encode_message(message)[4:])
    body[data.draw(st.integers(0, len(body) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    link = opened()
    events = link.receive(frame(bytes(body)), NOW)
    assert all(isinstance(event, MessageReceived | LinkClosed) for event in events)


HOSTILE: dict[str, tuple[bytes, int]] = {
    "4 GiB": (b"\xff\xff\xff\xff", ErrorCode.OVERSIZED),
    "one byte too long": ((DEFAULT_LIMITS.max_frame_bytes + 1).to_bytes(4, "big"), ErrorCode.OVERSIZED),
    "empty": (frame(b""), ErrorCode.MALFORMED),
    "no map": (frame(b"\x01"), ErrorCode.MALFORMED),
    "JSON": (frame(b'{"t": 30, "number": 1}'), ErrorCode.MALFORMED),
    "pickle": (
        frame(b"\x80\x04\x95\x13\x00\x00\x00\x00\x00\x00\x00}\x94(\x8c\x01t\x94K\x1e\x8c\x06number\x94K\x01u."),
        ErrorCode.MALFORMED,
    ),
    "deep nesting": (frame(b"\x91" * 100_000), ErrorCode.MALFORMED),
    "deep nesting in a field": (frame(b"\x82\xa1t\x1e\xa6number" + b"\x91" * 100_000), ErrorCode.MALFORMED),
    "no tag": (frame(msgspec.msgpack.encode({"number": 1})), ErrorCode.MALFORMED),
    "tag is text": (frame(msgspec.msgpack.encode({"t": "30", "number": 1})), ErrorCode.MALFORMED),
    "negative": (frame(msgspec.msgpack.encode({"t": 30, "number": -1})), ErrorCode.MALFORMED),
    "text for a number": (frame(msgspec.msgpack.encode({"t": 30, "number": "0"})), ErrorCode.MALFORMED),
    "NaN for a number": (frame(msgspec.msgpack.encode({"t": 30, "number": float("nan")})), ErrorCode.MALFORMED),
    "a huge number": (frame(msgspec.msgpack.encode({"t": 30, "number": (1 << 64) - 1})), ErrorCode.MALFORMED),
    "a short id": (frame(msgspec.msgpack.encode({"t": 12, "handoff": b"x", "position": 0})), ErrorCode.MALFORMED),
    "invalid UTF-8": (frame(b"\x83\xa1t\x21\xa4code\x00\xa6reason\xa2\xc3\x28"), ErrorCode.MALFORMED),
    "generation 0": (
        frame(msgspec.msgpack.encode({"t": 15, "handoff": b"x" * 16, "generation": 0, "shard": 0})),
        ErrorCode.MALFORMED,
    ),
    "more after the end": (frame(encode_message(Ping(number=1))[4:] + b"\x00"), ErrorCode.MALFORMED),
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("cut", ["whole", "bytes"])
def test_hostile_bytes_end_their_link_with_a_typed_error(name: str, cut: str) -> None:
    data, code = HOSTILE[name]
    link = opened()
    link.data_to_send()
    good = encode_message(Queued(handoff=b"h" * 16, position=1))
    tail = good * 2
    pieces = [good + data + tail] if cut == "whole" else [good, *byte_by_byte(data[:2000]), data[2000:], tail]
    events = feed(link, pieces)
    assert [type(event) for event in events] == [MessageReceived, LinkClosed]
    closed = events[-1]
    assert isinstance(closed, LinkClosed)
    assert closed.code == code
    assert link.state is LinkState.CLOSED
    assert link.data_to_send()  # a BYE that says why
    assert feed(link, [good]) == []


def test_a_large_frame_is_refused_before_the_peer_has_proven_itself() -> None:
    link = listener()
    events = link.receive((DEFAULT_LIMITS.max_hello_bytes + 1).to_bytes(4, "big"), NOW)
    assert [type(event) for event in events] == [LinkClosed]


def test_an_unknown_type_is_counted_and_the_link_survives() -> None:
    link = opened()
    unknown = frame(msgspec.msgpack.encode({"t": 99, "anything": [1, {"deep": None}]}))
    events = link.receive(unknown + encode_message(Queued(handoff=b"h" * 16, position=0)), NOW)
    assert [type(event) for event in events] == [MessageReceived]
    assert link.statistics().unknown == 1


def test_an_unknown_type_during_the_handshake_ends_it() -> None:
    link = listener()
    events = link.receive(frame(msgspec.msgpack.encode({"t": 99})), NOW)
    assert isinstance(events[0], LinkClosed)
    assert events[0].code == ErrorCode.UNEXPECTED


def test_T084_unknown_fields_of_a_newer_minor_version_are_ignored() -> None:
    link = listener()
    body = msgspec.msgpack.encode(hello(minor=7, novelty={"a": [1]}))
    welcome = msgspec.msgpack.encode({"t": 3, "mover": "loopback", "novelty": 1})
    events = link.receive(frame(body) + frame(welcome), NOW)
    assert [type(event) for event in events] == [LinkOpened]
    renew = {"t": 15, "handoff": b"x" * 16, "generation": 1, "shard": 0, "novelty": b""}
    events = link.receive(frame(msgspec.msgpack.encode(renew)), NOW)
    assert events == [MessageReceived(message=Renew(handoff=b"x" * 16, generation=1, shard=0))]


@pytest.mark.parametrize("fields", [{}, {"incarnation": "no longer bytes"}, {"nonce": None}])
def test_T084_another_major_version_is_refused_naming_both(fields: dict[str, Any]) -> None:
    link = listener()
    events = link.receive(frame(msgspec.msgpack.encode(hello(major=2, minor=3, **fields))), NOW)
    assert len(events) == 1
    assert isinstance(events[0], LinkClosed)
    assert events[0].code == ErrorCode.VERSION
    assert "2.3" in events[0].reason
    assert "1.0" in events[0].reason


def test_a_malformed_hello_of_this_version_is_malformed() -> None:
    for body in (hello(nonce=None), hello(magic=b"other", major=2, nonce=None)):
        events = listener().receive(frame(msgspec.msgpack.encode(body)), NOW)
        assert isinstance(events[0], LinkClosed)
        assert events[0].code == ErrorCode.MALFORMED


def test_ids_are_encoded_as_the_bytes_that_they_are() -> None:
    handoff = HandoffId.mint()
    message = decode_message(encode_message(Queued(handoff=handoff, position=0))[4:])
    assert isinstance(message, Queued)
    assert message.handoff == handoff


def test_what_is_no_message_cannot_be_encoded() -> None:
    bad: Any = Queued(handoff=object(), position=0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="object is no part of any message"):
        encode_message(bad)


@given(of_type(Offer))
@settings(deadline=None)
def test_an_offer_of_any_numbers_is_validated_without_surprises(offer: Offer) -> None:
    with contextlib.suppress(PlanError):
        assert offer.manifest.validate() is offer.manifest


@given(of_type(Grant))
def test_messages_are_hashable_and_frozen(grant: Grant) -> None:
    assert hash(grant) == hash(decode_message(encode_message(grant)[4:]))
    with pytest.raises(AttributeError):
        grant.generation = 3  # type: ignore[misc]


def test_the_manifest_takes_no_unknown_fields() -> None:
    entry = Entry(component="k", layers=(0,), row_bytes=1, page_tokens=1, page_bytes=1)
    manifest = msgspec.to_builtins(Manifest(prompt_tokens=1, shard=0, shards=1, entries=(entry,)))
    offer = {"t": 10, "handoff": b"x" * 16, "manifest": {**manifest, "novelty": 1}}
    with pytest.raises(RemoteError, match="novelty"):
        decode_message(msgspec.msgpack.encode(offer))


def test_a_decoder_takes_nothing_after_an_error() -> None:
    decoder = FrameDecoder(10)
    decoder.feed(b"\xff\xff\xff\xff")
    with pytest.raises(RemoteError):
        decoder.next()
    decoder.feed(encode_message(Ping(number=1)))
    assert decoder.next() is None


def test_hello_is_what_a_dialler_says_first() -> None:
    link = Link(
        Side.DIALLER, now=0.0, incarnation=Incarnation(b"d" * 16), nonce=b"n" * 16, welcome=Welcome(mover="loopback")
    )
    decoder = FrameDecoder(4096)
    decoder.feed(link.data_to_send())
    assert isinstance(decoder.next(), Hello)
