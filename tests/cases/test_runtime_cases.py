"""Running engines that users of similar systems got hurt by, case by case."""

from __future__ import annotations

import gc
import random
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pdhandoff import (
    Consumer,
    ErrorCode,
    HandoffFailed,
    HandoffId,
    Limits,
    LocalError,
    Outgoing,
    Producer,
    Staging,
    Unannounced,
)
from pdhandoff.engines.faults import Fault, Faulty, Rule, random_script
from pdhandoff.engines.loopback import create
from pdhandoff.planner import Shard, shard_manifest
from pdhandoff.protocol.codec import encode_message
from pdhandoff.protocol.messages import Offer, Ping, Queued
from support.engines import (
    DEADLINE_S,
    FAST,
    LAYOUT,
    Pair,
    Prefill,
    Request,
    check_rows,
    counts,
    leaves_nothing,
    push_all,
    until,
)
from support.raw_peer import RawPeer, consumer_welcome, listening, producer_welcome

ROOT = Path(__file__).parents[2]


class Event:
    """A device's event that happens when the test says so."""

    def __init__(self) -> None:
        self.happened = False
        self.asked = 0

    def query(self) -> bool:
        self.asked += 1
        return self.happened


def granted(pair: Pair, handoff: HandoffId) -> bool:
    way = pair.producer._sender._ways.get(handoff)
    return way is not None and way.granted


def at(listener: socket.socket) -> str:
    return f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize("staging", [Staging.STAGED, Staging.DIRECT])
def test_T034_the_draft_layers_rows_are_read_after_the_draft_phase(staging: Staging) -> None:
    """A step runs the target's layers, then the draft's: rows count as there only after the second phase."""
    with Pair(producer={"staging": staging}) as pair:
        handoff = HandoffId.mint()
        ticket = pair.consumer.announce(handoff)
        request = pair.engine.request(0x34, 40, filled=False)
        outgoing = pair.offer(handoff, 40)
        for start in (0, 20):
            tokens = range(start, start + 20)
            pair.engine.fill(request, tokens, tag=0xBAD)  # the target's phase, and stale draft rows
            drafted = Event()
            outgoing.push(request.tables, tokens=tokens, after=drafted)
            until(lambda e=drafted: e.asked > 3)  # type: ignore[misc]
            pair.engine.fill(request, tokens)
            drafted.happened = True
        outgoing.commit()
        with ticket.wait(DEADLINE_S) as arrival:
            check_rows(arrival, 0x34)
        pair.check_clean()


@pytest.mark.parametrize("staging", [Staging.STAGED, Staging.DIRECT])
def test_T062_a_preempted_request_comes_back_on_entirely_new_pages(staging: Staging) -> None:
    with Pair(producer={"staging": staging}) as pair:
        handoff = HandoffId.mint()
        ticket = pair.consumer.announce(handoff)
        old = pair.engine.request(0x62, 60)
        outgoing = pair.offer(handoff, 60)
        first = outgoing.push(old.tables, tokens=range(32))
        until(lambda: first.over)
        outgoing.restart()
        pair.engine.free(old)
        new = pair.engine.request(0x63, 60, filled=False)
        for start in range(0, 60, 20):
            pair.engine.fill(new, range(start, start + 20))
            outgoing.push(new.tables, tokens=range(start, start + 20))
        outgoing.commit()
        with ticket.wait(DEADLINE_S) as arrival:
            assert check_rows(arrival, 0x63) == 60 * (3 * 2 * 2 + 3 * 2)
        pair.check_clean()


def test_T064_a_preempted_request_that_never_returns_is_forgotten_and_the_peer_is_told() -> None:
    with Pair() as pair:
        handoff = HandoffId.mint()
        ticket = pair.consumer.announce(handoff)
        request = pair.engine.request(0x64, 60)
        outgoing = pair.offer(handoff, 60)
        outgoing.push(request.tables, tokens=range(32))
        until(lambda: granted(pair, handoff))
        outgoing.restart()
        outgoing.cancel("aborted while it waited to be resumed")
        with pytest.raises(HandoffFailed, match="aborted while it waited") as caught:
            ticket.wait(DEADLINE_S)
        assert caught.value.code == ErrorCode.CANCELLED
        assert outgoing.source_free.wait(DEADLINE_S)
        pair.check_clean()


@pytest.mark.parametrize("staging", Staging)
def test_T065_two_requests_of_one_step_for_two_decode_targets_get_their_own_bytes(staging: Staging) -> None:
    with Pair(producer={"staging": staging}, staging_bytes=1 << 15) as pair, Pair(counted=False) as other:
        ends = (pair, other)
        handoffs = [HandoffId.mint() for _ in ends]
        tickets = [end.consumer.announce(handoff) for end, handoff in zip(ends, handoffs, strict=True)]
        requests = [pair.engine.request(tag, 50) for tag in (0x65, 0x66)]
        outgoings = [
            pair.producer.offer(end.address, handoff, prompt_tokens=50)
            for end, handoff in zip(ends, handoffs, strict=True)
        ]
        for start in (0, 25):
            for outgoing, request in zip(outgoings, requests, strict=True):
                outgoing.push(request.tables, tokens=range(start, start + 25))
        for outgoing in outgoings:
            outgoing.commit()
        for ticket, request in zip(tickets, requests, strict=True):
            with ticket.wait(DEADLINE_S) as arrival:
                check_rows(arrival, request.tag)
        pair.check_clean()


def test_T067_an_idle_engines_pages_are_released_without_another_call() -> None:
    """Whether the consumer answers or not: nothing depends on the next step of the engine."""
    with Pair(rules=[Rule(fault=Fault.DELAY, polls=20)], producer={"staging": Staging.DIRECT}) as pair:
        handoff = HandoffId.mint()
        pair.consumer.announce(handoff)
        outgoing = pair.send(handoff, pair.engine.request(0x67, 60))
        assert outgoing.source_free.wait(DEADLINE_S)
    limits = Limits(assemble_s=0.05, unannounced_s=0.0)
    mover = create()
    with Pair(limits=limits, producer={"staging": Staging.DIRECT}) as pair, listening() as listener:
        outgoing = pair.producer.offer(at(listener), HandoffId.mint(), prompt_tokens=60)
        push_all(outgoing, pair.engine.request(0x67, 60), 20)
        outgoing.commit()
        with RawPeer.accept(listener, consumer_welcome(mover.describe(()))) as peer:
            peer.wait_for(Offer)
            assert outgoing.source_free.wait(DEADLINE_S)
            with pytest.raises(HandoffFailed, match="did not grant memory in time"):
                outgoing.wait(DEADLINE_S)
    mover.close()


class Clock:
    """Time that passes when the test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_T071_a_transfer_deadline_does_not_measure_the_queue() -> None:
    """32 requests, room for 4, and a deadline that is far shorter than the whole queue takes."""
    clock = Clock()
    ages = 80_000.0
    limits = Limits(handoff_s=10.0, transfer_base_s=10.0, liveness_s=ages, heartbeat_s=ages, lease_s=ages)
    with Pair(limits=limits, arena_bytes=4 * 5 * 4096, consumer={"clock": clock}, producer={"clock": clock}) as pair:
        handoffs = [HandoffId.mint() for _ in range(32)]
        tickets = [pair.consumer.announce(handoff, deadline_s=ages) for handoff in handoffs]
        outgoings = [pair.offer(handoff, 100, queue_s=3600) for handoff in handoffs]
        until(lambda: pair.statistics().queue == 28)
        for start in range(0, 32, 4):
            until(lambda s=start: all(granted(pair, handoff) for handoff in handoffs[s : s + 4]))  # type: ignore[misc]
            clock.now += 6.0
            pair.consumer._loop.call(lambda: None)
            pair.producer._loop.call(lambda: None)
            for number in range(start, start + 4):
                request = pair.engine.request(number, 100)
                outgoings[number].push(request.tables, tokens=range(100))
                outgoings[number].commit()
                with tickets[number].wait(DEADLINE_S) as arrival:
                    check_rows(arrival, number)
                outgoings[number].wait(DEADLINE_S)
                pair.engine.free(request)
        assert pair.statistics().failed == {}
        assert clock.now - 1000 > 4 * limits.handoff_s
        pair.check_clean()


def test_T072_a_peer_that_goes_silent_while_a_request_is_queued_costs_the_liveness_window_only() -> None:
    limits = Limits(liveness_s=1.0, heartbeat_s=0.3)
    mover = create()
    with Pair(limits=limits) as pair, listening() as listener:
        handoff = HandoffId.mint()
        outgoing = pair.producer.offer(at(listener), handoff, prompt_tokens=60, queue_s=3600)
        with RawPeer.accept(listener, consumer_welcome(mover.describe(()))) as peer:
            peer.send(Queued(handoff=peer.wait_for(Offer).handoff, position=5, waiting=6))
            until(lambda: pair.producer._core.position(handoff) == 5)
            with pytest.raises(HandoffFailed) as caught:
                outgoing.wait(DEADLINE_S)
            assert caught.value.code == ErrorCode.LIVENESS
            assert caught.value.retryable
    mover.close()


@pytest.mark.parametrize("staging", Staging)
def test_T074_nothing_is_read_before_the_event_has_happened(staging: Staging) -> None:
    with Pair(producer={"staging": staging}) as pair:
        handoff = HandoffId.mint()
        ticket = pair.consumer.announce(handoff)
        request = pair.engine.request(0x74, 60, filled=False)
        outgoing = pair.offer(handoff, 60)
        event = Event()
        chunk = outgoing.push(request.tables, tokens=range(60), after=event)
        outgoing.commit()
        until(lambda: granted(pair, handoff) and event.asked > 10)
        assert pair.fault.statistics().submits == 0
        assert not chunk.source_free.is_set()
        assert pair.producer._sender._ring.used == 0
        pair.engine.fill(request, range(60))
        event.happened = True
        with ticket.wait(DEADLINE_S) as arrival:
            check_rows(arrival, 0x74)
        pair.check_clean()


def test_T075_one_late_push_covers_every_layer_and_none_at_all_is_refused() -> None:
    """An engine that replays a whole graph never calls back between layers."""
    with Pair() as pair:
        handoff, forgotten = HandoffId.mint(), HandoffId.mint()
        ticket, lost = pair.consumer.announce(handoff), pair.consumer.announce(forgotten)
        outgoing = pair.send(handoff, pair.engine.request(0x75, 60))
        with ticket.wait(DEADLINE_S) as arrival:
            seen = {(landed.entry.component, layer) for landed in arrival.rows() for layer in landed.entry.layers}
            assert seen == {(part.name, layer) for part in LAYOUT.components for layer in part.layers}
            check_rows(arrival, 0x75)
        outgoing.wait(DEADLINE_S)
        nothing = pair.offer(forgotten, 60)
        nothing.commit()
        with pytest.raises(HandoffFailed, match=r"kv, layer 0, tokens 0\.\.60 are missing") as caught:
            nothing.wait(DEADLINE_S)
        assert caught.value.code == ErrorCode.INCOMPLETE
        with pytest.raises(HandoffFailed):
            lost.wait(DEADLINE_S)
        pair.check_clean()


def test_T077_a_full_ring_with_two_handoffs_half_done_does_not_deadlock() -> None:
    """One of them waits in the consumer's queue for the memory of the other, which needs the ring to move on."""
    with Pair(staging_bytes=16384, arena_bytes=4096 * 6) as pair:
        handoffs = [HandoffId.mint() for _ in range(3)]
        tickets = [pair.consumer.announce(handoff) for handoff in handoffs]
        requests = [pair.engine.request(tag, 100) for tag in range(3)]
        outgoings = [pair.offer(handoff, 100, queue_s=DEADLINE_S) for handoff in handoffs]
        until(lambda: granted(pair, handoffs[0]) and pair.statistics().queue == 2)
        for outgoing, request in reversed(list(zip(outgoings, requests, strict=True))):
            for start in range(0, 100, 25):
                outgoing.push(request.tables, tokens=range(start, start + 25))
            outgoing.commit()
        for tag, (ticket, outgoing) in enumerate(zip(tickets, outgoings, strict=True)):
            with ticket.wait(DEADLINE_S) as arrival:
                check_rows(arrival, tag)
            outgoing.wait(DEADLINE_S)
        pair.check_clean()


class World:
    """Two consumers and a producer that come and go, with a mover that fails by a seeded script."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.engine = Prefill(seed=seed)
        self.limits = Limits(drain_s=0.02, announce_s=0.5, assemble_s=5.0)
        self.movers = [create(), create()]
        self.consumers = [self._consume(number, "127.0.0.1:0") for number in range(2)]
        self.faults: Faulty
        self.producer: Producer
        self._produce()
        self.ends: dict[str, int] = {}
        self._open: list[tuple[Outgoing, Request]] = []

    def _consume(self, number: int, listen: str) -> Consumer:
        return Consumer(
            mover=self.movers[number],
            layout=LAYOUT,
            arena_bytes=4096 * 12,
            listen=listen,
            limits=self.limits,
            unannounced=Unannounced.WAIT,
        )

    def _produce(self) -> None:
        faults = [fault for fault in Fault if fault is not Fault.FLIP]
        script = random_script(self.random, submits=2000, rate=0.06, faults=faults)
        self.faults = Faulty(create(), script)
        self.producer = Producer(
            mover=self.faults,
            layout=LAYOUT,
            placements=self.engine.placements,
            memory=self.engine.memory,
            staging=self.random.choice(list(Staging)),
            staging_bytes=1 << 16,
            limits=self.limits,
        )

    def turn(self, tag: int) -> None:
        """One handoff, with what may befall it."""
        number = self.random.randrange(2)
        consumer = self.consumers[number]
        handoff = HandoffId.mint()
        ticket = consumer.announce(handoff, start_token=self.random.choice((0, 0, 3)))
        request = self.engine.request(tag, self.random.randint(3, 24))
        outgoing = self.producer.offer(
            consumer.address, handoff, prompt_tokens=request.tokens, queue_s=self.random.choice((0, DEADLINE_S))
        )
        whim = self.random.random()
        if whim < 0.05:
            outgoing.cancel()
        push_all(outgoing, request, self.random.randint(2, 24))
        if 0.05 < whim < 0.10:
            ticket.cancel()
        if 0.10 < whim < 0.12:
            outgoing.restart()
            push_all(outgoing, request, 24)
        outgoing.commit()
        if 0.12 < whim < 0.15:
            self._restart_producer()
        if 0.15 < whim < 0.17:
            self._restart_consumer(number)
        if whim > 0.95:
            self.faults.land_late()
        self._settle(ticket.wait, tag)
        self._open.append((outgoing, request))
        self._sweep(all_of_them=False)

    def _settle(self, wait: Callable[[float], Any], tag: int) -> None:
        """Wait for the end, and let go of what a rule holds back."""
        while True:
            try:
                with wait(0.02) as arrival:
                    if arrival.start_token < arrival.prompt_tokens:
                        check_rows(arrival, tag)
                end = "arrived"
            except TimeoutError:
                self.faults.release_hold()
                continue
            except HandoffFailed as error:
                end = ErrorCode(error.code).name
            self.ends[end] = self.ends.get(end, 0) + 1
            return

    def _sweep(self, *, all_of_them: bool) -> None:
        """Pages that nothing reads any more go to the next request."""
        self.faults.release_hold()
        for outgoing, request in list(self._open):
            if outgoing.source_free.is_set() or all_of_them:
                self.engine.free(request)
                self._open.remove((outgoing, request))

    def _restart_producer(self) -> None:
        self.producer.close(drain_s=0.05)
        self.faults.close()
        self._sweep(all_of_them=True)
        self._produce()

    def _restart_consumer(self, number: int) -> None:
        address = self.consumers[number].address
        self.consumers[number].close(drain_s=0.05)
        self.movers[number].close()
        self.movers[number] = create()
        self.consumers[number] = self._consume(number, str(address))

    def finish(self) -> None:
        """Everything must come free by itself; then everything is closed."""
        self.faults.release_hold()
        self.faults.land_late()
        for consumer in self.consumers:
            until(lambda c=consumer: self._free(c), "all landing memory is free")  # type: ignore[misc]
            assert not consumer._tickets
            assert not consumer._layouts_of
        self.producer.close(drain_s=0.2)
        for consumer in self.consumers:
            consumer.close()
        self.faults.close()
        for mover in self.movers:
            mover.close()
        assert self.faults._regions == []
        assert all(mover._regions == () for mover in self.movers)

    @staticmethod
    def _free(consumer: Consumer) -> bool:
        statistics = consumer.statistics()
        return not statistics.states and statistics.book.free_bytes == statistics.book.total_bytes


@pytest.mark.slow
def test_T079_a_thousand_handoffs_with_aborts_faults_and_restarts_leave_nothing() -> None:
    gc.collect()
    with leaves_nothing():
        world = World(seed=79)
        for turn in range(1000):
            world.turn(turn)
        world.finish()
        assert sum(world.ends.values()) == 1000
        assert world.ends["arrived"] > 600, world.ends
        assert world.ends["MOVER_FAILED"] > 20, world.ends
        assert world.ends["CANCELLED"] > 20, world.ends
        del world
        gc.collect()


def test_T080_a_restarted_peer_gets_a_new_handshake_and_its_old_memory_no_byte() -> None:
    with Pair() as pair:
        first_mover, second_mover = create(), create()
        first = Consumer(mover=first_mover, layout=LAYOUT, arena_bytes=1 << 16, limits=FAST)
        address = first.address
        old = first._region.memory
        handoff = HandoffId.mint()
        pair.producer.offer(address, handoff, prompt_tokens=60)
        first.announce(handoff)
        until(lambda: granted(pair, handoff))
        first.close(drain_s=DEADLINE_S)
        first_mover.close()
        spare = second_mover.allocate(1 << 16)
        second = Consumer(mover=second_mover, layout=LAYOUT, arena_bytes=1 << 16, listen=str(address), limits=FAST)
        assert second.address == address
        assert second._region.memory.address != old.address
        assert second.incarnation != first.incarnation
        ticket = second.announce(again := HandoffId.mint())
        until(lambda: not pair.producer._links)
        request = pair.engine.request(0x80, 60)
        outgoing = pair.producer.offer(address, again, prompt_tokens=60)
        push_all(outgoing, request, 20)
        outgoing.commit()
        with ticket.wait(DEADLINE_S) as arrival:
            check_rows(arrival, 0x80)
        assert bytes(old.owner) == bytes(old.length), "not a byte reached the old memory"
        second.close()
        second_mover.close()
        del spare


def test_T081_two_threads_that_offer_to_a_new_peer_make_one_handshake() -> None:
    with Pair() as pair:
        ready = threading.Barrier(8)
        outgoings: list[Outgoing] = []

        def offer() -> None:
            ready.wait(DEADLINE_S)
            outgoings.append(pair.offer(HandoffId.mint(), 5))

        threads = [threading.Thread(target=offer) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
        until(lambda: all(outgoing.offered for outgoing in outgoings))
        until(lambda: pair.consumer._links)
        assert len(pair.consumer._links) == 1
        assert pair.consumer._connections._next == 2, "no second connection was ever made"
        for outgoing in outgoings:
            outgoing.cancel()
        pair.check_clean()


def test_T082_a_peer_that_takes_long_over_its_handshake_delays_nobody_else() -> None:
    with Pair() as pair, listening() as slow:
        waiting = pair.producer.offer(at(slow), HandoffId.mint(), prompt_tokens=5)
        until(lambda: pair.producer._connections._all)
        pair.hand_off(0x82, 60)
        assert not waiting.settled.done()
        assert not waiting.offered
        waiting.cancel()
        with pytest.raises(HandoffFailed):
            waiting.wait(DEADLINE_S)


def frame(body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + body


def offer_with(**fields: object) -> bytes:
    """An OFFER with some fields replaced by what they must not be."""
    manifest = shard_manifest(LAYOUT, Shard(0, 1), [LAYOUT], prompt_tokens=20)
    body = msgspec.msgpack.decode(encode_message(Offer(handoff=bytes(HandoffId.mint()), manifest=manifest))[4:])
    for name, value in fields.items():
        (body["manifest"] if name in body["manifest"] else body)[name] = value
    return frame(msgspec.msgpack.encode(body))


BEFORE = {
    "three bytes": b"\0\1\2",
    "four gigabytes": b"\xff\xff\xff\xff",
    "sixteen megabytes and one": struct.pack(">I", (16 << 20) + 1) + bytes(100),
    "no message": frame(b"{not json"),
    "deep nesting": frame(b"\x91" * 4000),
    "pickle": frame(b"\x80\x04\x95\x1d\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94."),
    "a name of another protocol": b"GET / HTTP/1.1\r\n\r\n",
}
AFTER = {
    "sixteen megabytes and one": struct.pack(">I", (16 << 20) + 1),
    "deep nesting": frame(b"\x91" * 100_000),
    "a rank that is text": offer_with(shard="0"),
    "a count below zero": offer_with(queue_ms=-1),
    "a window that is no number": offer_with(queue_ms=float("nan")),
    "an id that is too short": offer_with(handoff=b"short"),
    "a manifest that is a list": offer_with(manifest=[1, 2]),
}


@pytest.fixture
def open_pair() -> Iterator[Pair]:
    with Pair(consumer={"unannounced": Unannounced.ACCEPT}) as pair:
        yield pair


@pytest.mark.parametrize("data", BEFORE.values(), ids=BEFORE.keys())
def test_T086_garbage_before_the_handshake_ends_that_link_only(open_pair: Pair, data: bytes) -> None:
    address = open_pair.consumer.address
    with socket.create_connection((address.host, address.port), DEADLINE_S) as sock:
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        sock.settimeout(DEADLINE_S)
        heard = b""
        try:
            while more := sock.recv(4096):
                heard += more
        except ConnectionError:
            pass
        assert b"kv" not in heard
    open_pair.hand_off(0x86, 20)
    open_pair.check_clean()


@pytest.mark.parametrize("data", AFTER.values(), ids=AFTER.keys())
def test_T086_garbage_after_the_handshake_ends_that_link_only(open_pair: Pair, data: bytes) -> None:
    mover = create()
    with RawPeer.dial(open_pair.consumer.address, producer_welcome(mover.describe(()))) as peer:
        peer.sock.sendall(data + encode_message(Ping(number=1)))
        closed = peer.wait_closed()
        assert closed.code in {ErrorCode.MALFORMED, ErrorCode.OVERSIZED, ErrorCode.LINK_LOST}
    until(lambda: not open_pair.consumer._links)
    open_pair.hand_off(0x86, 20)
    open_pair.check_clean()
    mover.close()


@pytest.mark.slow
def test_T092_a_port_that_is_taken_fails_at_start_and_is_named() -> None:
    with Pair() as pair:
        before = counts()
        with pytest.raises(LocalError, match=f"cannot listen on {pair.address}") as caught:
            Consumer(mover="loopback", layout=LAYOUT, arena_bytes=1 << 16, listen=pair.address)
        assert caught.value.code == ErrorCode.CONFIG
        assert counts() == before
        command = [sys.executable, str(ROOT / "examples" / "consumer.py"), pair.address]
        run = subprocess.run(
            command, capture_output=True, text=True, timeout=60, check=False, env={"PYTHONPATH": str(ROOT)}
        )
        assert run.returncode != 0
        assert pair.address in run.stderr
