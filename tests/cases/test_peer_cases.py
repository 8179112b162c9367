"""Peers, handshake and transport: small inputs that hurt users of similar systems."""

from __future__ import annotations

import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pdhandoff import Consumer, ErrorCode, HandoffFailed, HandoffId, Layout, LayoutError, Producer, Unannounced
from pdhandoff.engines.base import Memory, Region
from pdhandoff.engines.faults import Fault, Faulty, Rule
from pdhandoff.engines.forwarding import Forwarding
from pdhandoff.engines.loopback import create
from pdhandoff.errors import MoverError
from pdhandoff.layouts import layout_digest
from pdhandoff.planner import Shard, shard_manifest
from pdhandoff.protocol.codec import FrameDecoder, encode_message
from pdhandoff.protocol.messages import (
    AUTH_HMAC,
    AUTH_NONE,
    MAGIC,
    PROTOCOL_MAJOR,
    Bye,
    Hello,
    Offer,
    Ping,
    Proof,
    Refuse,
    Welcome,
)
from support.certificates import Authority
from support.changes import CHANGES
from support.engines import DEADLINE_S, FAST, LAYOUT, Pair, Prefill, leaves_nothing, until
from support.raw_peer import RawPeer, consumer_welcome, listening, producer_welcome

ARENA = 1 << 16


@pytest.fixture
def description() -> Iterator[bytes]:
    """Of a mover that lives as long as the test."""
    mover = create()
    yield mover.describe(())
    mover.close()


@contextmanager
def consumer_of(layout: Layout, **options: Any) -> Iterator[Consumer]:
    mover = create()
    with Consumer(mover=mover, layout=layout, arena_bytes=ARENA, limits=FAST, **options) as consumer:
        yield consumer
    mover.close()


@contextmanager
def producer_of(layout: Layout) -> Iterator[Producer]:
    engine, mover = Prefill(layout, pages=2), create()
    with Producer(mover=mover, layout=layout, placements=engine.placements, staging_bytes=4096, limits=FAST) as made:
        yield made
    mover.close()


# ---- T085

INCONSISTENT = "Plane.quantisation left out"
"no layout at all: an endpoint does not even start with it"
CONSISTENT = [name for name in CHANGES if name != INCONSISTENT]
REFUSED = [name for name in CONSISTENT if CHANGES[name].refused is not None]


def names(reason: str, field: str) -> bool:
    """Whether a sentence names a field; of a component that is missing it names the list and the component."""
    return field in reason or (field.startswith("components.") and all(part in reason for part in field.split(".")))


@pytest.mark.parametrize("name", CONSISTENT)
def test_T085_each_field_that_cannot_be_bridged_is_refused_at_hello_by_name(name: str, description: bytes) -> None:
    """Every field of a layout, one at a time. Page sizes, strides and the like are bridged, and then nobody objects."""
    change = CHANGES[name]
    with consumer_of(change.after) as consumer:
        with RawPeer.dial(consumer.address, producer_welcome(description, layout=change.before)) as peer:
            if change.refused is None:
                peer.send(Ping(number=1))
                until(lambda: consumer._connections.open_links, "the link is open")
                assert consumer._loop.call(lambda: consumer._links)
                return
            closed = peer.wait_closed()
        assert closed.code == ErrorCode.LAYOUT_MISMATCH
        assert names(closed.reason, change.refused)


@pytest.mark.parametrize("name", REFUSED)
def test_T085_a_producer_refuses_the_same_fields(name: str, description: bytes) -> None:
    change = CHANGES[name]
    with producer_of(change.before) as producer, listening() as listener:
        where = f"127.0.0.1:{listener.getsockname()[1]}"
        outgoing = producer.offer(where, HandoffId.mint(), prompt_tokens=5)
        with RawPeer.accept(listener, consumer_welcome(description, layout=change.after)) as peer:
            assert peer.wait_closed().code == ErrorCode.LAYOUT_MISMATCH
        with pytest.raises(HandoffFailed, match=r"\w") as caught:
            outgoing.wait(DEADLINE_S)
    assert caught.value.code == ErrorCode.LAYOUT_MISMATCH
    assert change.refused is not None
    assert names(caught.value.reason, change.refused)
    assert not caught.value.retryable


def test_T085_a_layout_that_cannot_be_is_refused_at_start() -> None:
    with pytest.raises(LayoutError) as caught, consumer_of(CHANGES[INCONSISTENT].after):
        pass
    assert caught.value.field == CHANGES[INCONSISTENT].refused


@pytest.mark.parametrize(("shard", "shards"), [(2, 2), (5, 1), (0, 60000)])
def test_T085_a_shard_that_cannot_be_is_refused_at_hello(shard: int, shards: int, description: bytes) -> None:
    with consumer_of(LAYOUT) as consumer:
        welcome = producer_welcome(description, shard=shard, shards=shards)
        with RawPeer.dial(consumer.address, welcome) as peer:
            closed = peer.wait_closed()
    assert closed.code == ErrorCode.LAYOUT_MISMATCH
    assert closed.reason.startswith(f"shards: the peer is shard {shard} of {shards}")


def test_T085_another_shard_count_than_at_hello_is_refused_at_the_offer(description: bytes) -> None:
    manifest = shard_manifest(LAYOUT, Shard(0, 2), [LAYOUT], prompt_tokens=20, replicas=Shard(0, 2))
    with (
        consumer_of(LAYOUT, unannounced=Unannounced.ACCEPT) as consumer,
        RawPeer.dial(consumer.address, producer_welcome(description)) as peer,
    ):
        peer.send(Offer(handoff=HandoffId.mint(), manifest=manifest))
        refused = peer.wait_for(Refuse)
    assert refused.code == ErrorCode.MANIFEST_MISMATCH
    assert "shard 0 of 2, its producer is shard 0 of 1" in refused.reason


def test_T085_another_transport_is_refused_at_hello(description: bytes) -> None:
    with (
        consumer_of(LAYOUT) as consumer,
        RawPeer.dial(consumer.address, producer_welcome(description, mover="nixl")) as peer,
    ):
        closed = peer.wait_closed()
    assert closed.code == ErrorCode.MOVER_MISMATCH
    assert "'nixl'" in closed.reason
    assert "'loopback'" in closed.reason


def test_T085_settings_that_change_no_byte_are_not_refused() -> None:
    """Other names, another order of components, other sizes of arena and ring, another address, a wrapped mover."""
    other = msgspec.structs.replace(LAYOUT, name="by another name", components=LAYOUT.components[::-1])
    assert layout_digest(other) == layout_digest(LAYOUT)
    with Pair(
        layout=LAYOUT,
        shards=[other],
        arena_bytes=1 << 19,
        staging_bytes=1 << 17,
        consumer={"name": "somebody", "listen": "127.0.0.3:0"},
        producer={"name": "else"},
    ) as pair:
        pair.hand_off(1, 40)
        pair.check_clean()


# ---- T088

SECRET = b"a secret of the deployment"
TELLTALES = {"name": "telltale-name"}


def hello(authentication: str) -> bytes:
    return encode_message(
        Hello(
            magic=MAGIC,
            major=PROTOCOL_MAJOR,
            minor=0,
            incarnation=bytes(16),
            nonce=bytes(16),
            authentication=authentication,
        )
    )


UNPROVEN = {
    "nothing at all": b"",
    "a hello": hello(AUTH_HMAC),
    "a hello without authentication": hello(AUTH_NONE),
    "a wrong proof": hello(AUTH_HMAC) + encode_message(Proof(mac=bytes(32))),
    "a welcome in place of a proof": hello(AUTH_HMAC) + encode_message(Welcome(mover="loopback")),
    "an offer at once": encode_message(Ping(number=1)),
    "garbage": b"\0\0\0\4abcd",
    "http": b"GET /metrics HTTP/1.1\r\n\r\n",
}


def everything_said(consumer: Consumer, data: bytes) -> bytes:
    """All that a listener says to somebody who says this and then listens to the end."""
    heard = b""
    with socket.create_connection((consumer.address.host, consumer.address.port), DEADLINE_S) as sock:
        sock.settimeout(DEADLINE_S)
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        try:
            while piece := sock.recv(1 << 16):
                heard += piece
        except ConnectionError:
            pass
    until(lambda: not consumer._connections._all)
    return heard


def secrets_of(pair: Pair) -> list[bytes]:
    """What must not be heard: names, layouts, digests, the mover's description, addresses in any byte order."""
    memory = pair.consumer._region.memory
    numbers = (memory.address, memory.address + memory.length, memory.length)
    return [
        b"telltale",
        *(component.name.encode() for component in LAYOUT.components if len(component.name) > 4),  # not by chance
        b"test",
        layout_digest(LAYOUT),
        pair.landing_mover.describe(()),
        b"loopback",
        SECRET,
        *(struct.pack(order, number) for order in ("<Q", ">Q") for number in numbers),
        *(f"{number:x}".encode() for number in numbers),
        *(str(number).encode() for number in numbers),
    ]


@pytest.mark.parametrize("data", UNPROVEN.values(), ids=UNPROVEN)
def test_T088_a_peer_without_the_secret_gets_a_challenge_and_nothing_else(data: bytes) -> None:
    with Pair(consumer={"secret": SECRET, **TELLTALES}) as pair:
        heard = everything_said(pair.consumer, data)
        for secret in secrets_of(pair):
            assert secret not in heard
    frames = FrameDecoder(4096)
    frames.feed(heard)
    said: list[Any] = []
    while (message := frames.next()) is not None:
        said.append(message)
    assert [type(each) for each in said] in ([], [Hello], [Bye], [Hello, Bye])
    for each in said:
        if isinstance(each, Hello):
            assert each.digest == b""
            assert each.authentication == AUTH_HMAC


@pytest.mark.parametrize("data", UNPROVEN.values(), ids=UNPROVEN)
def test_T088_a_peer_without_a_certificate_gets_less(data: bytes, tmp_path: Path) -> None:
    with Pair(consumer={"tls": Authority(tmp_path).issue("decode"), **TELLTALES}) as pair:
        heard = everything_said(pair.consumer, data)
        for secret in secrets_of(pair):
            assert secret not in heard
    assert len(heard) < 200
    alert = len(heard) == 7 and heard[0] == 0x15
    assert heard == b"" or alert or b"one side of the link speaks TLS, the other does not" in heard


def test_T088_a_dialler_discloses_nothing_to_a_listener_without_the_secret(description: bytes) -> None:
    with Pair(producer={"secret": SECRET, **TELLTALES}) as pair, listening() as listener:
        where = f"127.0.0.1:{listener.getsockname()[1]}"
        outgoing = pair.producer.offer(where, HandoffId.mint(), prompt_tokens=5)
        with RawPeer.accept(listener, consumer_welcome(description), secret=b"another") as peer:
            peer.flush()
            assert peer.closed is not None
            heard = peer.heard
        with pytest.raises(HandoffFailed) as caught:
            outgoing.wait(DEADLINE_S)
        assert caught.value.code == ErrorCode.AUTHENTICATION
        for secret in secrets_of(pair):
            assert secret not in heard


# ---- T089, T091: who is contacted at all

_CONTACTS: list[tuple[str, Any]] = []
_WATCHED = {"socket.connect", "socket.sendto", "socket.sendmsg", "socket.getaddrinfo", "socket.gethostbyname"}
_watching: list[bool] = []


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if _watching and event in _WATCHED:
        _CONTACTS.append((event, arguments[1] if event in {"socket.connect", "socket.sendto"} else arguments[0]))


@pytest.fixture
def contacts() -> Iterator[list[tuple[str, Any]]]:
    """Every connection, datagram and name look-up of this process. An audit hook cannot be removed, only idle."""
    if not hasattr(sys, "_pdhandoff_contacts"):
        sys.addaudithook(_hook)
        sys._pdhandoff_contacts = True  # type: ignore[attr-defined]
    _CONTACTS.clear()
    _watching.append(True)
    yield _CONTACTS
    _watching.clear()


@pytest.mark.parametrize(
    "host",
    [
        "169.254.169.254:80",
        "[::ffff:169.254.169.254]:80",
        "[::ffff:a9fe:a9fe]:80",
        "2852039166:80",
        "metadata.google.internal:80",
        "unknown-host:5556",
        "decode-7.attacker.example:5556",
        "127.0.0.1:22",
    ],
)
def test_T089_a_host_that_is_not_on_the_list_is_never_contacted(host: str, contacts: list[tuple[str, Any]]) -> None:
    with Pair(producer={"allow": ["decode-7", "127.0.0.1:5556", "10.0.0.0/8"]}) as pair:
        contacts.clear()
        outgoing = pair.producer.offer(host, HandoffId.mint(), prompt_tokens=5)
        with pytest.raises(HandoffFailed) as caught:
            outgoing.wait(DEADLINE_S)
        pair.producer.statistics()  # the loop has done all that it was asked to
        assert contacts == []
        assert not pair.producer._dialler._ways
    assert caught.value.code == ErrorCode.NOT_ALLOWED
    assert host in caught.value.reason
    assert not caught.value.retryable
    assert outgoing.source_free.is_set()


def test_T091_the_configured_address_is_advertised_and_nobody_else_is_contacted(
    contacts: list[tuple[str, Any]],
) -> None:
    """No default route is needed: the address that was configured is used as it is, and no route is asked for."""
    with Pair(consumer={"listen": "127.0.0.9:0"}) as pair:
        assert pair.consumer.address.host == "127.0.0.9"
        pair.hand_off(1, 40)
        asked = {name for event, name in contacts if "get" in event}
        reached = {tuple(where[:2]) for event, where in contacts if "get" not in event and isinstance(where, tuple)}
        assert asked == {"127.0.0.9"}, "a numeric address is read, not looked up"
        assert reached == {("127.0.0.9", pair.consumer.address.port)}


def test_T091_all_addresses_of_a_machine_serve_without_choosing_one(contacts: list[tuple[str, Any]]) -> None:
    with Pair(consumer={"listen": "0.0.0.0:0"}) as pair:
        port = pair.consumer.address.port
        for host in ("127.0.0.1", "127.0.0.5"):
            outgoing = pair.producer.offer(f"{host}:{port}", HandoffId.mint(), prompt_tokens=5)
            until(lambda sent=outgoing: sent.offered)  # type: ignore[misc]
            outgoing.cancel()
        reached = {where[0] for event, where in contacts if "get" not in event and isinstance(where, tuple)}
        assert reached == {"127.0.0.1", "127.0.0.5"}


# ---- T093


class _Part:
    """A region that is smaller than what was asked for."""

    def __init__(self, region: Region) -> None:
        self.region = region

    @property
    def memory(self) -> Memory:
        return self.region.memory._replace(length=self.region.memory.length // 2)


class _PartOnly(Forwarding):
    """Registers half of the memory, from some call on, and says so."""

    def __init__(self, inner: Any, whole: int) -> None:
        super().__init__(inner)
        self.whole = whole
        self.held: list[object] = []

    def register(self, memory: Memory) -> Region:
        region = super().register(memory)
        self.held.append(region)
        if len(self.held) <= self.whole:
            return region
        self.held[-1] = part = _Part(region)
        return part

    def deregister(self, region: Region) -> None:
        self.held.remove(region)
        super().deregister(region.region if isinstance(region, _Part) else region)


def test_T093_a_consumer_whose_memory_is_registered_in_part_is_not_ready() -> None:
    with leaves_nothing():
        mover = _PartOnly(create(), 0)
        with pytest.raises(MoverError, match=rf"registered {ARENA // 2} bytes .* of {ARENA} .* raise the limit"):
            Consumer(mover=mover, layout=LAYOUT, arena_bytes=ARENA)
        assert mover.held == []
        mover.close()


def test_T093_a_producer_whose_memory_is_registered_in_part_is_not_ready() -> None:
    engine = Prefill(LAYOUT)
    with leaves_nothing():
        mover = _PartOnly(create(), 2)
        with pytest.raises(MoverError, match="raise the limit"):
            Producer(mover=mover, layout=LAYOUT, placements=engine.placements, memory=engine.memory)
        assert mover.held == []
        mover.close()


def test_T093_registration_that_fails_leaves_nothing_that_listens() -> None:
    with leaves_nothing():
        mover = Faulty(create(), [Rule(fault=Fault.REGISTER)])
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
        with pytest.raises(MoverError, match="registration 0 fails"):
            Consumer(mover=mover, layout=LAYOUT, arena_bytes=ARENA, listen=f"127.0.0.1:{port}")
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), DEADLINE_S)
        mover.close()


def test_T093_memory_that_only_seems_registered_is_never_served() -> None:
    """The mover says that all is well and no byte lands: the handoff fails, and no row is decoded."""
    with Pair(rules=[Rule(fault=Fault.DROP, times=None)]) as pair:
        handoff = HandoffId.mint()
        ticket = pair.consumer.announce(handoff)
        outgoing = pair.send(handoff, pair.engine.request(1, 40))
        with pytest.raises(HandoffFailed) as caught:
            ticket.wait(DEADLINE_S)
        assert caught.value.code == ErrorCode.MOVER_FAILED
        with pytest.raises(HandoffFailed):
            outgoing.wait(DEADLINE_S)
        pair.check_clean()
