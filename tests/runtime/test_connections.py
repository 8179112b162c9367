"""Links between endpoints, and what a peer can do to one: garbage, silence, floods, lies, other layouts and movers."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from pdhandoff import Consumer, ErrorCode, HandoffFailed, HandoffId, Limits, LocalError, Producer, Unannounced, attach
from pdhandoff.engines.base import Extent, Memory
from pdhandoff.engines.faults import Fault, Faulty, Rule
from pdhandoff.engines.loopback import create
from pdhandoff.errors import MoverError
from pdhandoff.ids import Incarnation
from pdhandoff.planner import Shard, shard_manifest
from pdhandoff.protocol.codec import encode_message
from pdhandoff.protocol.manifest import Manifest
from pdhandoff.protocol.messages import (
    Cancel,
    Drained,
    Grant,
    GrantedRank,
    Hello,
    Offer,
    Ping,
    Pong,
    Queued,
    Refuse,
    Welcome,
)
from pdhandoff.runtime.address import Resolved
from pdhandoff.runtime.connections import Connections
from support.engines import (
    DEADLINE_S,
    FAST,
    LAYOUT,
    Pair,
    Prefill,
    check_rows,
    kv_component,
    leaves_nothing,
    make_layout,
    until,
)
from support.layouts import with_component, with_model
from support.raw_peer import RawPeer, consumer_welcome, listening, producer_welcome

NO_CHECK = {"unannounced": Unannounced.ACCEPT}


@pytest.fixture
def pair() -> Iterator[Pair]:
    with Pair(consumer=NO_CHECK) as pair:
        yield pair


@pytest.fixture
def description() -> Iterator[bytes]:
    """Of a mover that lives as long as the test."""
    mover = create()
    yield mover.describe(())
    mover.close()


def links(endpoint: Consumer | Producer) -> int:
    return len(endpoint._connections._all)


def manifest(pair: Pair, tokens: int = 20, **changes: Any) -> Manifest:
    """What the pair's own producer would offer."""
    request = pair.offer(HandoffId.mint(), tokens)
    until(lambda: request.manifest)
    request.cancel()
    assert request.manifest is not None
    return msgspec.structs.replace(request.manifest, **changes)


def send_for_ever(sock: socket.socket, data: bytes) -> None:
    while True:
        sock.sendall(data)


def open_for_ever(hogs: list[int]) -> None:
    while True:
        hogs.append(os.open(os.devnull, os.O_RDONLY))


def at(listener: socket.socket) -> str:
    """The address to offer to."""
    return f"127.0.0.1:{listener.getsockname()[1]}"


GARBAGE = {
    "three bytes": b"\0\0\1",
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "four gigabytes": struct.pack(">I", 0xFFFFFFFF),
    "a hello that is no map": struct.pack(">I", 3) + b"\x93\x01\x02",
    "nothing": struct.pack(">I", 0),
    "a message before the hello": encode_message(Ping(number=1)),
    "another magic": encode_message(Hello(magic=b"other", major=1, minor=0, incarnation=bytes(16), nonce=bytes(16))),
}


@pytest.mark.parametrize("data", GARBAGE.values(), ids=GARBAGE.keys())
def test_garbage_ends_its_own_link_and_nothing_else(pair: Pair, data: bytes) -> None:
    address = pair.consumer.address
    pair.hand_off(1, 20)
    before = links(pair.consumer)
    with socket.create_connection((address.host, address.port), DEADLINE_S) as sock:
        sock.sendall(data)
        if data == GARBAGE["three bytes"]:
            sock.shutdown(socket.SHUT_WR)
        sock.settimeout(DEADLINE_S)
        with contextlib.suppress(ConnectionError):
            while sock.recv(4096):
                pass
    until(lambda: links(pair.consumer) == before)
    pair.hand_off(2, 20)
    pair.check_clean()


def test_a_silent_peer_is_given_up_after_the_handshake_time() -> None:
    limits = Limits(handshake_s=0.05)
    with Pair(limits=limits) as pair:
        with socket.create_connection((pair.consumer.address.host, pair.consumer.address.port), DEADLINE_S) as sock:
            sock.settimeout(DEADLINE_S)
            while sock.recv(4096):
                pass
        until(lambda: links(pair.consumer) == 0)


def test_a_peer_that_goes_silent_later_is_given_up_too(description: bytes) -> None:
    limits = Limits(liveness_s=1.0, heartbeat_s=0.3, drain_s=0.1)
    with Pair(limits=limits, consumer=NO_CHECK) as pair:
        with RawPeer.dial(pair.consumer.address, producer_welcome(description)) as peer:
            handoff = HandoffId.mint()
            peer.send(Offer(handoff=handoff, manifest=raw_manifest()))
            peer.wait_for(Grant)
            until(lambda: links(pair.consumer) == 0)
        assert pair.statistics().failed == {ErrorCode.LIVENESS: 1}
        until(lambda: pair.statistics().book.free_bytes == pair.total_bytes)


def raw_manifest(tokens: int = 20, **changes: Any) -> Manifest:
    """What a producer with the usual layout offers."""
    made = shard_manifest(LAYOUT, Shard(0, 1), [LAYOUT], prompt_tokens=tokens)
    return msgspec.structs.replace(made, **changes)


def test_a_peer_that_never_reads_is_cut_off(pair: Pair, description: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdhandoff.runtime.connections._MAX_UNSENT", 1 << 16)
    with RawPeer.dial(pair.consumer.address, producer_welcome(description)) as peer:
        flood = encode_message(Ping(number=1)) * 4096
        peer.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)
        with pytest.raises(ConnectionError):
            send_for_ever(peer.sock, flood)
    until(lambda: links(pair.consumer) == 0)
    pair.hand_off(2, 20)


@pytest.mark.parametrize("most", [0, 1])
def test_a_peer_that_takes_no_frame_at_all_loses_its_link(pair: Pair, description: bytes, most: int) -> None:
    """Even the answer to a PING would be too large for it. That must not hurt anybody else."""
    welcome = producer_welcome(description, max_frame_bytes=most)
    with RawPeer.dial(pair.consumer.address, welcome) as peer:
        peer.send(Ping(number=1 << 40), Offer(handoff=HandoffId.mint(), manifest=raw_manifest()))
        assert peer.wait_closed().code in {ErrorCode.OVERSIZED, ErrorCode.UNEXPECTED}
    pair.hand_off(2, 20)
    until(lambda: pair.statistics().book.free_bytes == pair.total_bytes)


def test_a_grant_that_the_peer_does_not_take_fails_its_handoff_and_not_the_link(
    pair: Pair, description: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RawPeer.dial(pair.consumer.address, producer_welcome(description, max_frame_bytes=4096)) as peer:
        handoff = HandoffId.mint()
        ticket = pair.consumer.announce(handoff)
        with monkeypatch.context() as patch:
            patch.setattr(pair.landing_mover, "describe", lambda _: bytes(5000))
            peer.send(Offer(handoff=handoff, manifest=raw_manifest()))
            with pytest.raises(HandoffFailed, match="exceeds what the peer takes"):
                ticket.wait(DEADLINE_S)
        peer.send(Drained(handoff=handoff, generation=1, shard=0))
        until(lambda: pair.statistics().book.free_bytes == pair.total_bytes)
        peer.send(Offer(handoff=HandoffId.mint(), manifest=raw_manifest()))
        peer.wait_for(Grant)


def test_a_short_word_that_is_too_large_ends_the_link(
    pair: Pair, description: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise LocalError(ErrorCode.OVERSIZED, "too large")

    with RawPeer.dial(pair.consumer.address, producer_welcome(description)) as peer:
        for connection in pair.consumer._connections._all.values():
            monkeypatch.setattr(connection.link, "send", refuse)
        peer.send(*(Offer(handoff=HandoffId.mint(), manifest=raw_manifest(start_token=1)) for _ in range(3)))
        assert peer.wait_closed().reason == "too large"
    assert "offer over a closed link" not in pair.statistics().ignored, "what came with it is not handed on"
    pair.hand_off(2, 20)


def test_several_messages_after_one_that_ends_the_link(pair: Pair, description: bytes) -> None:
    """All in one read: what follows the end is not handed on."""
    with RawPeer.dial(pair.consumer.address, producer_welcome(description)) as peer:
        offers = [Offer(handoff=HandoffId.mint(), manifest=raw_manifest()) for _ in range(3)]
        hello = Hello(magic=b"pdhandoff", major=1, minor=0, incarnation=bytes(16), nonce=bytes(16))
        peer.sock.sendall(b"".join(encode_message(message) for message in (offers[0], hello, offers[1], offers[2])))
        assert peer.wait_closed().code == ErrorCode.UNEXPECTED
    pair.hand_off(2, 20)
    until(lambda: pair.statistics().book.free_bytes == pair.total_bytes)


def test_a_producer_whose_mover_has_gone_is_refused(pair: Pair) -> None:
    mover = create()
    dead = mover.describe(())
    mover.close()
    with RawPeer.dial(pair.consumer.address, producer_welcome(dead)) as peer:
        assert peer.wait_closed().code == ErrorCode.STALE_INCARNATION
    with RawPeer.dial(pair.consumer.address, producer_welcome(b"garbage")) as peer:
        assert peer.wait_closed().code == ErrorCode.MALFORMED
    pair.hand_off(2, 20)


@pytest.mark.parametrize("field", ["produces", "consumes"])
def test_a_layout_that_cannot_be_read_ends_the_link(pair: Pair, description: bytes, field: str) -> None:
    if field == "produces":
        welcome = producer_welcome(description, produces=b"\xc1 no layout")
        with RawPeer.dial(pair.consumer.address, welcome) as peer:
            assert peer.wait_closed().code in {ErrorCode.MALFORMED, ErrorCode.LAYOUT_MISMATCH}
        pair.hand_off(2, 20)
        return
    with listening() as listener:
        outgoing = pair.producer.offer(at(listener), HandoffId.mint(), prompt_tokens=5)
        with RawPeer.accept(listener, consumer_welcome(description, consumes=b"\xc1")) as peer:
            assert peer.wait_closed().code == ErrorCode.MALFORMED
        with pytest.raises(HandoffFailed, match="no list"):
            outgoing.wait(DEADLINE_S)


def test_a_consumer_with_too_many_ranks_is_refused(pair: Pair, description: bytes) -> None:
    many = msgspec.msgpack.encode([b""] * 1000)
    with listening() as listener:
        outgoing = pair.producer.offer(at(listener), HandoffId.mint(), prompt_tokens=5)
        with RawPeer.accept(listener, consumer_welcome(description, consumes=many)) as peer:
            peer.wait_closed()
        with pytest.raises(HandoffFailed, match="1000 ranks") as caught:
            outgoing.wait(DEADLINE_S)
    assert caught.value.code == ErrorCode.OVERSIZED


OTHERS: dict[str, Any] = {
    "model.name": with_model(LAYOUT, name="other"),
    "model.revision": with_model(LAYOUT, revision="2"),
    "model.weight_epoch": with_model(LAYOUT, weight_epoch=5),
    "components": make_layout(kv_component()),
    "index_key.layers": with_component(LAYOUT, "index_key", layers=(0, 1)),
}


@pytest.mark.parametrize("field", OTHERS)
def test_another_layout_is_refused_with_the_fields_name_on_both_sides(field: str, description: bytes) -> None:
    with Pair() as pair:
        with RawPeer.dial(pair.consumer.address, producer_welcome(description, layout=OTHERS[field])) as peer:
            closed = peer.wait_closed()
            assert closed.code == ErrorCode.LAYOUT_MISMATCH
            assert field in closed.reason
        engine = Prefill(OTHERS[field])
        with Producer(mover=create(), layout=OTHERS[field], placements=engine.placements, limits=FAST) as producer:
            outgoing = producer.offer(pair.address, HandoffId.mint(), prompt_tokens=5)
            with pytest.raises(HandoffFailed) as caught:
                outgoing.wait(DEADLINE_S)
            assert caught.value.code == ErrorCode.LAYOUT_MISMATCH
            assert field in caught.value.reason
            assert outgoing.source_free.is_set()
            producer._mover.close()


def test_another_mover_is_refused_on_both_sides(pair: Pair, description: bytes) -> None:
    with RawPeer.dial(pair.consumer.address, producer_welcome(description, mover="carrier pigeon")) as peer:
        closed = peer.wait_closed()
        assert closed.code == ErrorCode.MOVER_MISMATCH
        assert "'carrier pigeon'" in closed.reason
    with listening() as listener:
        outgoing = pair.producer.offer(at(listener), HandoffId.mint(), prompt_tokens=5)
        with RawPeer.accept(listener, consumer_welcome(description, mover="carrier pigeon")) as peer:
            assert peer.wait_closed().code == ErrorCode.MOVER_MISMATCH
        with pytest.raises(HandoffFailed, match="same mover"):
            outgoing.wait(DEADLINE_S)


def test_two_producers_or_two_consumers_have_nothing_to_say_to_each_other(pair: Pair, description: bytes) -> None:
    with RawPeer.dial(pair.consumer.address, consumer_welcome(description)) as peer:
        assert "no producer" in peer.wait_closed().reason
    with listening() as listener:
        outgoing = pair.producer.offer(at(listener), HandoffId.mint(), prompt_tokens=5)
        with RawPeer.accept(listener, producer_welcome(description)) as peer:
            assert "takes no handoffs" in peer.wait_closed().reason
        with pytest.raises(HandoffFailed, match="connect to a consumer"):
            outgoing.wait(DEADLINE_S)


@pytest.mark.parametrize("secret", [None, b"wrong"])
def test_nothing_is_disclosed_before_the_right_proof(description: bytes, secret: bytes | None) -> None:
    with Pair(consumer={"secret": b"right"}, producer={"secret": secret}) as pair:
        with RawPeer.dial(pair.consumer.address, producer_welcome(description), secret=secret) as peer:
            assert peer.wait_closed().code == ErrorCode.AUTHENTICATION
            assert b"loopback" not in peer.heard
            assert b"page_tokens" not in peer.heard
        outgoing = pair.offer(HandoffId.mint(), 5)
        with pytest.raises(HandoffFailed, match="same secret") as caught:
            outgoing.wait(DEADLINE_S)
        assert caught.value.code == ErrorCode.AUTHENTICATION


def test_a_repeated_hostile_offer_leaves_nothing_behind(pair: Pair, description: bytes) -> None:
    with RawPeer.dial(pair.consumer.address, producer_welcome(description)) as peer:
        handoff = HandoffId.mint()
        peer.send(Offer(handoff=handoff, manifest=raw_manifest()))
        peer.wait_for(Grant)
        for shard in range(1, 50):
            peer.send(Offer(handoff=handoff, manifest=raw_manifest(shard=shard, shards=60)))
            peer.wait_for(Refuse)
        assert len(pair.consumer._layouts_of[handoff]) == 1
        for _ in range(20):
            peer.send(Offer(handoff=HandoffId.mint(), manifest=raw_manifest(start_token=3)))
            peer.wait_for(Refuse)
        assert len(pair.consumer._layouts_of) == 1
        peer.send(Cancel(handoff=handoff, generation=1, shard=0, reason="", drained=True))
        until(lambda: pair.statistics().book.free_bytes == pair.total_bytes)
    pair.check_clean()


def test_an_offer_for_a_rank_that_is_not_there_is_refused(pair: Pair, description: bytes) -> None:
    good = raw_manifest()
    entries = tuple(msgspec.structs.replace(entry, destination=3) for entry in good.entries)
    with RawPeer.dial(pair.consumer.address, producer_welcome(description)) as peer:
        peer.send(Offer(handoff=HandoffId.mint(), manifest=msgspec.structs.replace(good, entries=entries)))
        refused = peer.wait_for(Refuse)
        assert refused.code == ErrorCode.MANIFEST_MISMATCH
        assert "rank 3" in refused.reason


def test_a_grant_of_memory_that_was_never_described_moves_nothing(pair: Pair) -> None:
    """A hostile consumer names addresses; the mover writes only where its description allows."""
    mover = create()
    memory = mover.allocate(1 << 16)
    mover.register(memory)
    request = pair.engine.request(1, 20)
    with listening() as listener:
        welcome = consumer_welcome(mover.describe(()))
        where = at(listener)
        outgoing = pair.producer.offer(where, HandoffId.mint(), prompt_tokens=20)
        outgoing.push(request.tables, tokens=range(20))
        outgoing.commit()
        grants: list[Callable[[Offer], Grant]] = [
            lambda offer: grant(offer, ((memory.address, 1 << 16),), mover.describe(())),
            lambda offer: grant(offer, ((memory.address, 64),), mover.describe(())),
            lambda offer: grant(offer, ((memory.address, 1 << 16),), b"garbage"),
            lambda offer: msgspec.structs.replace(grant(offer, (), b""), ranks=()),
        ]
        with RawPeer.accept(listener, welcome) as peer:
            for make in grants:
                peer.send(make(peer.wait_for(Offer)))
                with pytest.raises(HandoffFailed):
                    outgoing.wait(DEADLINE_S)
                assert outgoing.source_free.wait(DEADLINE_S)
                outgoing = pair.producer.offer(where, HandoffId.mint(), prompt_tokens=20)
                outgoing.push(request.tables, tokens=range(20))
                outgoing.commit()
    until(lambda: pair.producer._sender._ring.used == 0)
    mover.close()


def grant(offer: Offer, extents: tuple[tuple[int, int], ...], description: bytes) -> Grant:
    rank = GrantedRank(0, extents, description)
    return Grant(handoff=offer.handoff, generation=1, shard=0, lease_ms=5000, ranks=(rank,))


def test_an_offer_too_large_for_the_consumer_fails_alone(pair: Pair, description: bytes) -> None:
    with listening() as listener:
        where = at(listener)
        big = attach("hidden", "u8", (5000,), bytes(5000))
        large = pair.producer.offer(where, HandoffId.mint(), prompt_tokens=5, attachments=[big])
        small = pair.producer.offer(where, HandoffId.mint(), prompt_tokens=5)
        with RawPeer.accept(listener, consumer_welcome(description, max_frame_bytes=4096)) as peer:
            with pytest.raises(HandoffFailed, match="exceeds what the peer takes"):
                large.wait(DEADLINE_S)
            offer = peer.wait_for(Offer)
            assert offer.handoff == small.handoff
            peer.send(Refuse(handoff=offer.handoff, code=ErrorCode.BUSY, reason="full"))
            with pytest.raises(HandoffFailed, match="full"):
                small.wait(DEADLINE_S)


def test_an_unknown_address_and_a_closed_port_fail_the_handoff(pair: Pair) -> None:
    with listening() as listener:
        port = listener.getsockname()[1]
    for where in (f"127.0.0.1:{port}", f"localhost:{port}", "no-such-host.invalid:1"):
        outgoing = pair.producer.offer(where, HandoffId.mint(), prompt_tokens=5)
        with pytest.raises(HandoffFailed) as caught:
            outgoing.wait(DEADLINE_S)
        assert caught.value.code == ErrorCode.LINK_LOST
        assert caught.value.retryable
        assert outgoing.source_free.is_set()
    until(lambda: not pair.producer._dialler._ways)


def test_every_address_of_a_name_is_tried(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    with listening() as closed:
        dead = closed.getsockname()[:2]
    address = pair.consumer.address
    found: list[Resolved] = [
        (socket.AF_INET, dead),
        (99, ("no such family", 1)),
        (socket.AF_INET, (address.host, address.port)),
    ]
    monkeypatch.setattr("pdhandoff.runtime.dialler.resolve", lambda _: found)
    handoff = HandoffId.mint()
    ticket = pair.consumer.announce(handoff)
    outgoing = pair.producer.offer("decode:5556", handoff, prompt_tokens=20)
    request = pair.engine.request(3, 20)
    outgoing.push(request.tables, tokens=range(20))
    outgoing.commit()
    with ticket.wait(DEADLINE_S) as arrival:
        check_rows(arrival, 3)


def test_offers_to_one_address_share_one_link(pair: Pair) -> None:
    outgoings = [pair.offer(HandoffId.mint(), 5) for _ in range(10)]
    until(lambda: all(outgoing.offered for outgoing in outgoings))
    assert links(pair.producer) == 1
    for outgoing in outgoings:
        outgoing.cancel()


def test_a_redialled_link_says_what_the_last_one_could_not(description: bytes) -> None:
    """The link is cut while rows are written: DRAINED is owed, and comes over the next link by itself."""
    with Pair(rules=[Rule(fault=Fault.HOLD)]) as pair, listening() as listener:
        mover = create()
        memory = mover.allocate(1 << 16)
        region = mover.register(memory)
        welcome = consumer_welcome(mover.describe(()))
        incarnation = Incarnation.mint()
        request = pair.engine.request(3, 20)
        handoff = HandoffId.mint()
        outgoing = pair.producer.offer(at(listener), handoff, prompt_tokens=20)
        outgoing.push(request.tables, tokens=range(20))
        with RawPeer.accept(listener, welcome, incarnation=incarnation) as peer:
            extent = Extent(memory.address, 1 << 16)
            peer.send(grant(peer.wait_for(Offer), ((extent.address, extent.length),), mover.describe([extent])))
            until(lambda: pair.fault.statistics().held == 1)
        with pytest.raises(HandoffFailed) as caught:
            outgoing.wait(DEADLINE_S)
        assert caught.value.code == ErrorCode.LINK_LOST
        assert not outgoing.source_free.is_set(), "a lost link ends no write"
        pair.fault.release_hold()
        assert outgoing.source_free.wait(DEADLINE_S)
        pair.producer.offer(at(listener), HandoffId.mint(), prompt_tokens=20)
        with RawPeer.accept(listener, welcome, incarnation=incarnation) as peer:
            drained = peer.wait_for(Drained)
            assert drained.handoff == handoff
            assert drained.generation == 1
        mover.deregister(region)
        mover.close()
        del description


def test_a_link_that_is_lost_with_words_owed_is_dialled_again_by_itself(description: bytes) -> None:
    with Pair() as pair, listening() as listener:
        mover = create()
        memory = mover.allocate(1 << 16)
        mover.register(memory)
        incarnation = Incarnation.mint()
        welcome = consumer_welcome(mover.describe(()))
        handoff = HandoffId.mint()
        outgoing = pair.producer.offer(at(listener), handoff, prompt_tokens=20)
        with RawPeer.accept(listener, welcome, incarnation=incarnation) as peer:
            extent = Extent(memory.address, 1 << 16)
            peer.send(grant(peer.wait_for(Offer), ((extent.address, extent.length),), mover.describe([extent])))
            until(lambda: pair.producer._sender._ways and next(iter(pair.producer._sender._ways.values())).granted)
            outgoing.cancel()
            assert peer.wait_for(Cancel).drained
        with RawPeer.accept(listener, welcome, incarnation=incarnation) as peer:
            assert peer.wait_for(Drained).handoff == handoff
        assert outgoing.settled.exception(DEADLINE_S) is not None
        mover.close()
        del description


def test_a_listener_survives_a_process_without_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdhandoff.runtime.connections._ACCEPT_AGAIN_S", 0.01)
    with Pair(consumer=NO_CHECK) as pair:
        pair.hand_off(1, 10)
        gc.collect()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        client = socket.socket()
        client.settimeout(DEADLINE_S)
        hogs = [os.open(os.devnull, os.O_RDONLY)]
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(hogs[0] + 20, 64), hard))
            with pytest.raises(OSError, match="files"):
                open_for_ever(hogs)
            client.connect((pair.consumer.address.host, pair.consumer.address.port))
            until(lambda: pair.consumer._connections._accept_at is not None)
        finally:
            for hog in hogs:
                os.close(hog)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        until(lambda: links(pair.consumer) == 2, "it is accepted after all")
        client.close()


def test_offers_are_checked_before_they_can_hurt_the_link(pair: Pair) -> None:
    for options in ({"queue_s": -1.0}, {"queue_s": 1e9}, {"traceparent": "x" * 65}):
        with pytest.raises(LocalError) as caught:
            pair.offer(HandoffId.mint(), 5, **options)
        assert caught.value.code == ErrorCode.MISUSE
    for name, count in (("x" * 65, 1), ("x", 70)):
        values = [attach(f"{name}{number}"[:65], "u8", (1,), b"1") for number in range(count)]
        with pytest.raises(LocalError) as caught:
            pair.offer(HandoffId.mint(), 5, attachments=values)
        assert caught.value.code == ErrorCode.ATTACHMENT
    with pytest.raises(HandoffFailed, match="prompt_tokens"):
        pair.offer(HandoffId.mint(), 0).wait(DEADLINE_S)
    pair.hand_off(1, 10)


def fault() -> None:
    raise KeyError("a fault")


def test_a_fault_in_a_consumer_ends_it_and_close_still_gives_everything_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with Pair(consumer=NO_CHECK) as pair:
        pair.hand_off(1, 10)
        ticket = pair.consumer.announce(HandoffId.mint())
        pair.consumer._loop.post(fault)
        with pytest.raises(HandoffFailed, match="fault in the consumer"):
            ticket.wait(DEADLINE_S)
        with pytest.raises(HandoffFailed):
            pair.consumer.announce(HandoffId.mint()).wait(DEADLINE_S)
        until(lambda: pair.consumer._loop.ended)
        with pytest.raises(LocalError, match="closed"):
            pair.consumer.statistics()
        with pytest.raises(HandoffFailed) as caught:
            pair.offer(HandoffId.mint(), 10).wait(DEADLINE_S)
        assert caught.value.code == ErrorCode.LINK_LOST
    assert "fault in the loop" in caplog.text


def test_a_fault_in_a_producer_ends_it_and_close_still_gives_everything_back(caplog: pytest.LogCaptureFixture) -> None:
    with Pair(consumer=NO_CHECK) as pair:
        pair.hand_off(1, 10)
        outgoing = pair.offer(HandoffId.mint(), 10)
        pair.producer._loop.post(fault)
        with pytest.raises(HandoffFailed, match="fault in the producer"):
            outgoing.wait(DEADLINE_S)
        until(lambda: pair.producer._loop.ended)
        after = pair.offer(HandoffId.mint(), 10)
        chunk = after.push(pair.engine.request(2, 10).tables, tokens=range(10))
        with pytest.raises(HandoffFailed):
            after.wait(DEADLINE_S)
        assert after.source_free.is_set()
        assert chunk.source_free.is_set()
        until(lambda: pair.statistics().book.free_bytes == pair.total_bytes)
    assert "fault in the loop" in caplog.text


def test_a_constructor_that_fails_leaves_nothing(pair: Pair) -> None:
    engine = Prefill(LAYOUT)
    with leaves_nothing():
        with pytest.raises(LocalError, match="cannot listen"):
            Consumer(mover="loopback", layout=LAYOUT, arena_bytes=1 << 16, listen=pair.address)
        with pytest.raises(LocalError, match="no mover"):
            Consumer(mover="teleport", layout=LAYOUT, arena_bytes=1 << 16)
        with pytest.raises(Exception, match="0 bytes"):
            Consumer(mover="loopback", layout=LAYOUT, arena_bytes=0)
        with pytest.raises(Exception, match="0 bytes"):
            Producer(mover="loopback", layout=LAYOUT, placements=engine.placements, staging_bytes=0)
        with pytest.raises(LocalError, match="is no address"):
            Consumer(mover="loopback", layout=LAYOUT, arena_bytes=1 << 16, listen="5556")


def test_registration_that_fails_is_undone() -> None:
    from pdhandoff.engines.faults import Fault, Rule

    engine = Prefill(LAYOUT)
    with leaves_nothing():
        inner = create()
        mover = Faulty(inner, [Rule(fault=Fault.REGISTER, call=2)])
        memory: list[Memory] = engine.memory
        with pytest.raises(MoverError, match="registration 2 fails"):
            Producer(mover=mover, layout=LAYOUT, placements=engine.placements, memory=memory, staging_bytes=4096)
        assert inner._regions == ()
        assert mover._regions == []
        mover.close()
        mover = Faulty(create(), [Rule(fault=Fault.REGISTER, call=0)])
        with pytest.raises(MoverError, match="registration 0 fails"):
            Consumer(mover=mover, layout=LAYOUT, arena_bytes=1 << 16)
        mover.close()
        gc.collect()


def test_words_for_a_producer_that_make_no_sense_are_counted(pair: Pair, description: bytes) -> None:
    with listening() as listener:
        outgoing = pair.producer.offer(at(listener), HandoffId.mint(), prompt_tokens=5)
        with RawPeer.accept(listener, consumer_welcome(description)) as peer:
            offer = peer.wait_for(Offer)
            peer.send(
                Queued(handoff=offer.handoff, position=3, waiting=4), Queued(handoff=bytes(16), position=1, waiting=1)
            )
            peer.send(Offer(handoff=HandoffId.mint(), manifest=raw_manifest()), Pong(number=3), Welcome(mover="late"))
            assert peer.wait_closed().code == ErrorCode.UNEXPECTED
        with pytest.raises(HandoffFailed):
            outgoing.wait(DEADLINE_S)
    assert pair.producer.statistics().ignored > 0
    assert isinstance(pair.producer._connections, Connections)
    assert pair.producer._connections.open_links == []


def test_closing_twice_and_at_once_is_closing_once() -> None:
    with Pair() as pair:
        threads = [threading.Thread(target=end.close) for end in (pair.consumer, pair.producer) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
            assert not thread.is_alive()
