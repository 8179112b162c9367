"""A listener under many connections: bounded, never busy for nothing, and open to those that mean it."""

from __future__ import annotations

import logging
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import msgspec
import pytest

from pdhandoff import ErrorCode, HandoffFailed, HandoffId, Limits, Shard, Unannounced
from pdhandoff.engines.loopback import create
from pdhandoff.planner import shard_manifest
from pdhandoff.protocol.codec import encode_message
from pdhandoff.protocol.link import LinkState
from pdhandoff.protocol.messages import AUTH_HMAC, PROTOCOL_MAJOR, Bye, Grant, Hello, Offer, Ping
from pdhandoff.runtime.complaints import Complaints
from pdhandoff.runtime.connections import Connections
from support.engines import DEADLINE_S, LAYOUT, Pair, until
from support.raw_peer import RawPeer, producer_welcome

FEW = Limits(max_handshakes=4, max_links=3, drain_s=0.2)
HELLO = Hello(magic=b"pdhandoff", major=PROTOCOL_MAJOR, minor=0, incarnation=bytes(16), nonce=bytes(16))
PROVABLE = msgspec.structs.replace(HELLO, authentication=AUTH_HMAC)


@pytest.fixture
def pair() -> Iterator[Pair]:
    with Pair(limits=FEW, consumer={"unannounced": Unannounced.ACCEPT}) as pair:
        yield pair


@pytest.fixture
def description() -> Iterator[bytes]:
    mover = create()
    yield mover.describe(())
    mover.close()


def connect(pair: Pair) -> socket.socket:
    address = pair.consumer.address
    sock = socket.create_connection((address.host, address.port), DEADLINE_S)
    sock.settimeout(DEADLINE_S)
    return sock


def connections(pair: Pair) -> Connections:
    return pair.consumer._connections


def test_a_flood_of_silent_connections_keeps_nobody_out(pair: Pair) -> None:
    """The oldest goes for each that comes, so that the flood costs a bounded number of descriptors."""
    with ExitStack() as stack:
        flood = [stack.enter_context(connect(pair)) for _ in range(40)]
        until(lambda: connections(pair)._next == 41)
        assert len(connections(pair)._all) == 4
        pair.hand_off(1, 20)
        heard = flood[0].recv(4096)
        assert b"more than 4 connections wait for their handshakes" in heard
        assert flood[0].recv(4096) == b""
        until(lambda: len(connections(pair)._handshakes) == 3)
    until(lambda: not connections(pair)._handshakes)
    pair.hand_off(2, 20)


def test_a_connection_that_has_proven_itself_makes_room_for_nobody(pair: Pair, description: bytes) -> None:
    with RawPeer.dial(pair.consumer.address, producer_welcome(description)) as peer, ExitStack() as stack:
        for _ in range(12):
            stack.enter_context(connect(pair))
        until(lambda: connections(pair)._next == 14)
        peer.send(Ping(number=1))
        peer.pump()
        assert peer.closed is None
        assert peer.link.state is LinkState.OPEN


def test_a_secret_has_to_be_shown_before_a_connection_counts_as_proven(description: bytes) -> None:
    with Pair(limits=FEW, consumer={"secret": b"s"}, producer={"secret": b"s"}) as pair, ExitStack() as stack:
        for _ in range(12):
            stack.enter_context(connect(pair)).sendall(encode_message(PROVABLE))
        until(lambda: connections(pair)._next == 13)
        assert len(connections(pair)._all) == 4
        pair.hand_off(1, 20)
    del description


def test_only_so_many_links_are_kept(pair: Pair, description: bytes) -> None:
    with ExitStack() as stack:
        for _ in range(3):
            peer = stack.enter_context(RawPeer.dial(pair.consumer.address, producer_welcome(description)))
            assert peer.closed is None
        with RawPeer.dial(pair.consumer.address, producer_welcome(description)) as extra:
            closed = extra.wait_closed()
        assert closed.code == ErrorCode.BUSY
        assert "no more than 3 links" in closed.reason
        assert len(connections(pair)._accepted) == 3
    until(lambda: not connections(pair)._accepted)
    pair.hand_off(1, 20)


def test_a_handshake_that_trickles_in_ends_on_time() -> None:
    """Byte by byte: each is a sign of life, and none moves the deadline."""
    with Pair(limits=Limits(handshake_s=0.2)) as pair, connect(pair) as sock:
        sock.settimeout(0.01)
        heard = b""
        for byte in encode_message(HELLO)[:-1]:
            try:
                sock.sendall(bytes([byte]))
                heard += sock.recv(4096)
            except TimeoutError:
                continue
            except ConnectionError:
                break
        assert b"the handshake took more than 0.2 s" in heard
        until(lambda: not connections(pair)._all)


def test_a_peer_that_never_reads_costs_a_bounded_amount_before_it_has_proven_itself(pair: Pair) -> None:
    with connect(pair) as sock:
        sock.sendall(encode_message(HELLO))
        until(lambda: any(c.link.state is LinkState.WELCOME for c in connections(pair)._all.values()))
        (connection,) = connections(pair)._all.values()
        assert len(connection.unsent) < 1 << 16
        with pytest.raises(ConnectionError):  # noqa: PT012 - until it is cut off
            while True:
                sock.sendall(encode_message(Ping(number=1)) * 100)
    until(lambda: not connections(pair)._all)
    pair.hand_off(1, 20)


def test_last_words_are_heard_though_writing_has_failed(pair: Pair, description: bytes) -> None:
    """The peer says why and resets the connection. This end finds out by writing, and still reads what was said."""
    begun, said = threading.Event(), threading.Event()
    with RawPeer.dial(pair.consumer.address, producer_welcome(description)) as peer:
        handoff = HandoffId.mint()
        ticket = pair.consumer.announce(handoff)
        peer.send(Offer(handoff=handoff, manifest=shard_manifest(LAYOUT, Shard(0, 1), [LAYOUT], prompt_tokens=20)))
        peer.wait_for(Grant)
        (number,) = connections(pair)._all

        def write_too_late() -> None:
            begun.set()
            said.wait(DEADLINE_S)
            connections(pair).send(number, Ping(number=1), 0.0)
            connections(pair).flush()

        pair.consumer._loop.post(write_too_late)
        assert begun.wait(DEADLINE_S)
        peer.sock.sendall(encode_message(Bye(code=ErrorCode.SOURCE_LOST, reason="closing time")))
        peer.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        peer.close()
        said.set()
        with pytest.raises(HandoffFailed, match="closing time"):
            ticket.wait(DEADLINE_S)


def test_health_checks_are_not_worth_a_line(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        connect(pair).close()
    until(lambda: connections(pair)._next == 4 and not connections(pair)._all)
    assert caplog.records == []


def test_complaints_are_few_whatever_comes(caplog: pytest.LogCaptureFixture) -> None:
    complaints = Complaints()
    for number in range(1000):
        complaints.about("10.0.0.1", ErrorCode.MALFORMED, "no message\nat all", number / 1000)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "no message\\nat all" in caplog.text, "a peer writes no lines of its own into the log"
    complaints.about("10.0.0.1", ErrorCode.MALFORMED, "no message", 11.0)
    assert "999 more like it" in caplog.text
    for code in range(1000, 2000):
        complaints.about("10.0.0.1", code, "made up", 12.0)
    assert len(caplog.records) == 65


def test_listening_to_everybody_without_a_secret_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with Pair(consumer={"listen": "0.0.0.0:0", "secret": b"s"}, producer={"secret": b"s"}):
        assert "neither a secret nor TLS" not in caplog.text
    with Pair(consumer={"listen": "0.0.0.0:0"}):
        assert "listening on 0.0.0.0 with neither a secret nor TLS" in caplog.text
