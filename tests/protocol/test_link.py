from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pdhandoff.errors import ErrorCode, LocalError
from pdhandoff.ids import Incarnation
from pdhandoff.limits import DEFAULT_LIMITS, Limits
from pdhandoff.protocol.codec import FrameDecoder, encode_message
from pdhandoff.protocol.link import (
    MIN_HEARTBEAT_S,
    Link,
    LinkClosed,
    LinkEvent,
    LinkOpened,
    LinkState,
    MessageReceived,
    Side,
)
from pdhandoff.protocol.messages import Bye, Grant, GrantedRank, Hello, Message, Ping, Pong, Proof, Queued, Welcome

QUEUED = Queued(handoff=b"h" * 16, position=0)


def make(side: Side, *, secret: bytes | None = None, nonce: bytes = b"n" * 16, **welcome: Any) -> Link:
    life = Incarnation(side.value.encode().ljust(16, b"_"))
    hello = Welcome(mover="loopback", **welcome)
    return Link(side, now=0.0, incarnation=life, nonce=nonce, welcome=hello, secret=secret, digest=b"layout")


def exchange(near: Link, far: Link, now: float = 0.0) -> list[tuple[Link, LinkEvent]]:
    events: list[tuple[Link, LinkEvent]] = []
    while near.has_data or far.has_data:
        for source, target in ((near, far), (far, near)):
            if source.has_data:
                events += [(target, event) for event in target.receive(source.data_to_send(), now)]
    return events


def pair(**more: Any) -> tuple[Link, Link]:
    near, far = make(Side.DIALLER, **more), make(Side.LISTENER, **more)
    exchange(near, far)
    assert (near.state, far.state) == (LinkState.OPEN, LinkState.OPEN)
    return near, far


def messages(data: bytes) -> list[object]:
    decoder = FrameDecoder(1 << 22)
    decoder.feed(data)
    found: list[object] = []
    while (message := decoder.next()) is not None:
        found.append(message)
    return found


@pytest.mark.parametrize("secret", [None, b"s3cret"])
def test_both_ends_learn_who_the_other_is(secret: bytes | None) -> None:
    near, far = make(Side.DIALLER, secret=secret), make(Side.LISTENER, secret=secret, name="decode")
    events = exchange(near, far)
    assert [type(event) for _, event in events] == [LinkOpened, LinkOpened]
    seen = {link.side: event for link, event in events}
    at_near = seen[Side.DIALLER]
    assert isinstance(at_near, LinkOpened)
    assert at_near.incarnation == b"listener".ljust(16, b"_")
    assert at_near.welcome.name == "decode"
    assert at_near.digest == (b"layout" if secret is None else b""), "an unproven peer learns nothing of the model"


@pytest.mark.parametrize(("ours", "theirs"), [(b"a", b"b"), (None, b"b"), (b"a", None)])
def test_secrets_that_differ_end_the_link(ours: bytes | None, theirs: bytes | None) -> None:
    near, far = make(Side.DIALLER, secret=ours), make(Side.LISTENER, secret=theirs)
    events = exchange(near, far)
    assert {event.code for _, event in events if isinstance(event, LinkClosed)} == {ErrorCode.AUTHENTICATION}
    assert not any(isinstance(event, LinkOpened) for _, event in events)


def test_a_listener_discloses_nothing_but_its_hello_before_a_proof() -> None:
    far = make(Side.LISTENER, secret=b"s", description=b"memory")
    far.receive(make(Side.DIALLER, secret=b"s").data_to_send(), 0.0)
    assert [type(message) for message in messages(far.data_to_send())] == [Hello]


def test_a_dialler_tells_its_welcome_only_after_the_listener_has_proven_itself() -> None:
    near = make(Side.DIALLER, secret=b"s", description=b"memory")
    near.data_to_send()
    near.receive(_hello_of(make(Side.LISTENER, secret=b"s")), 0.0)
    assert [type(message) for message in messages(near.data_to_send())] == [Proof]
    events = near.receive(encode_message(Proof(mac=b"x" * 32)), 0.0)
    assert isinstance(events[0], LinkClosed)


def _hello_of(far: Link) -> bytes:
    return far._hello


def test_a_reflected_proof_is_no_proof() -> None:
    near = make(Side.DIALLER, secret=b"s")
    hello = near.data_to_send()
    near.receive(hello, 0.0)
    events = near.receive(near.data_to_send(), 0.0)
    assert isinstance(events[0], LinkClosed)
    assert events[0].code == ErrorCode.AUTHENTICATION


def test_a_proof_does_not_fit_another_nonce() -> None:
    near, far = make(Side.DIALLER, secret=b"s"), make(Side.LISTENER, secret=b"s")
    hello = near.data_to_send()
    far.receive(hello, 0.0)
    near.receive(far.data_to_send(), 0.0)
    proof = near.data_to_send()
    other = make(Side.LISTENER, secret=b"s", nonce=b"o" * 16)
    other.receive(hello, 0.0)
    events = other.receive(proof, 0.0)
    assert isinstance(events[0], LinkClosed)


@pytest.mark.parametrize("message", [Welcome(mover="m"), Proof(mac=b"x" * 32), Ping(number=1), QUEUED])
def test_a_message_out_of_turn_ends_the_handshake(message: Message) -> None:
    events = make(Side.LISTENER).receive(encode_message(message), 0.0)
    assert isinstance(events[0], LinkClosed)
    assert events[0].code == ErrorCode.UNEXPECTED
    assert "HELLO was due" in events[0].reason


def test_a_second_welcome_ends_the_link() -> None:
    near, far = pair()
    events = near.receive(encode_message(Welcome(mover="m")), 0.0)
    assert isinstance(events[0], LinkClosed)
    assert "after the handshake" in events[0].reason
    assert far.state is LinkState.OPEN


def test_another_protocol_is_refused() -> None:
    far = make(Side.LISTENER)
    hello = Hello(magic=b"http", major=1, minor=0, incarnation=b"i" * 16, nonce=b"n" * 16)
    events = far.receive(encode_message(hello), 0.0)
    assert isinstance(events[0], LinkClosed)
    assert events[0].code == ErrorCode.MALFORMED


def test_messages_before_a_bye_are_still_delivered() -> None:
    near, far = pair()
    near.send(QUEUED, 0.0)
    assert [type(event) for event in near.close(7, "done")] == [LinkClosed]
    events = far.receive(near.data_to_send(), 0.0)
    assert events == [MessageReceived(message=QUEUED), LinkClosed(code=7, reason="done")]
    assert near.close() == []
    assert far.lost("later") == []
    assert near.next_deadline() is None


def test_a_bye_without_words_is_a_lost_link() -> None:
    near, far = pair()
    near.close()
    assert far.receive(near.data_to_send(), 0.0) == [
        LinkClosed(code=ErrorCode.LINK_LOST, reason="the peer said goodbye")
    ]


def test_a_bye_may_come_during_the_handshake() -> None:
    far = make(Side.LISTENER)
    events = far.receive(encode_message(Bye(code=9, reason="not you")), 0.0)
    assert events == [LinkClosed(code=9, reason="not you")]


def test_the_end_of_the_connection_ends_the_link() -> None:
    near, _ = pair()
    assert near.receive(b"", 0.0) == [LinkClosed(code=ErrorCode.LINK_LOST, reason="the peer closed the connection")]
    near.send(QUEUED, 0.0)
    assert near.data_to_send() == b""


def test_silence_is_met_by_a_ping_and_then_by_the_end() -> None:
    near, far = pair()
    assert near.next_deadline() == DEFAULT_LIMITS.heartbeat_s
    assert near.tick(0.5) == []
    assert not near.has_data
    near.tick(1.0)
    far.receive(near.data_to_send(), 1.0)
    assert messages(far.data_to_send()) == [Pong(number=1)]
    far.tick(2.0)
    near.receive(far.data_to_send(), 2.0)
    near.receive(encode_message(Pong(number=1)), 2.0)
    events = near.tick(2.0 + DEFAULT_LIMITS.liveness_s)
    assert len(events) == 1
    assert isinstance(events[0], LinkClosed)
    assert events[0].code == ErrorCode.LIVENESS
    assert near.tick(100.0) == []


def test_a_handshake_that_takes_too_long_ends() -> None:
    far = make(Side.LISTENER)
    assert far.next_deadline() == DEFAULT_LIMITS.handshake_s
    assert far.tick(DEFAULT_LIMITS.handshake_s - 0.1) == []
    events = far.tick(DEFAULT_LIMITS.handshake_s)
    assert isinstance(events[0], LinkClosed)
    assert "handshake" in events[0].reason


@pytest.mark.parametrize(("liveness_ms", "beat_s"), [(1500, 0.5), (0, MIN_HEARTBEAT_S), (60_000, 1.0)])
def test_heartbeats_suit_the_peers_patience(liveness_ms: int, beat_s: float) -> None:
    near, _ = pair(liveness_ms=liveness_ms)
    assert near.next_deadline() == beat_s


def test_a_message_that_the_peer_would_not_take_is_refused_here() -> None:
    near, _ = pair(max_frame_bytes=4096)
    rank = GrantedRank(0, (), bytes(4096))
    with pytest.raises(LocalError, match=r"Grant of .* bytes exceeds") as raised:
        near.send(Grant(handoff=b"h" * 16, generation=1, shard=0, lease_ms=1, ranks=(rank,)), 0.0)
    assert raised.value.code == ErrorCode.OVERSIZED
    assert near.state is LinkState.OPEN


def test_a_peer_that_takes_no_messages_is_refused_before_a_ping_fails() -> None:
    near, far = make(Side.DIALLER, max_frame_bytes=10), make(Side.LISTENER)
    events = exchange(near, far)
    assert {event.code for link, event in events if isinstance(event, LinkClosed) and link is far} == {
        ErrorCode.UNEXPECTED
    }


def test_a_long_reason_is_cut() -> None:
    limits: Limits = msgspec.structs.replace(DEFAULT_LIMITS, max_string=10)
    near = Link(
        Side.DIALLER,
        now=0.0,
        incarnation=Incarnation(b"i" * 16),
        nonce=b"n" * 16,
        welcome=Welcome(mover="m"),
        limits=limits,
    )
    near.data_to_send()
    near.close(1, "x" * 100)
    assert messages(near.data_to_send()) == [Bye(code=1, reason="x" * 10)]


def test_a_welcome_without_a_hello_is_a_fault_of_this_side() -> None:
    near, far = make(Side.DIALLER), make(Side.LISTENER)
    far.receive(near.data_to_send(), 0.0)
    near.receive(far._hello, 0.0)
    near._peer = None
    with pytest.raises(LocalError):
        near.receive(encode_message(Welcome(mover="m")), 0.0)


def test_statistics_count_messages() -> None:
    near, far = pair()
    near.send(QUEUED, 0.0)
    far.receive(near.data_to_send(), 0.0)
    assert (near.statistics().sent, far.statistics().received, far.statistics().unknown) == (3, 3, 0)
