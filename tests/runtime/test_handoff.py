"""Handoffs that succeed: every way that rows may take, every row checked on the other side."""

from __future__ import annotations

import ctypes
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from pdhandoff import (
    Consumer,
    Expected,
    HandoffFailed,
    HandoffId,
    LocalError,
    PageTable,
    Placement,
    Staging,
    Unannounced,
    attach_int,
)
from pdhandoff.engines.faults import Fault, Rule
from pdhandoff.errors import ErrorCode
from pdhandoff.layouts import Layout
from pdhandoff.observe.trace import Recorder
from pdhandoff.protocol.attachments import read_int
from support.decode_side import check_converted, decode_caches, decode_pages
from support.engines import (
    DEADLINE_S,
    LAYOUT,
    Pair,
    check_rows,
    index_component,
    kv_component,
    make_layout,
    push_all,
    until,
)

WIDE = make_layout(
    *(kv_component(f"kv{number}", page_tokens=pages) for number, pages in enumerate((4, 16, 64))),
    index_component(page_tokens=64),
)


@pytest.mark.parametrize("staging", Staging)
@pytest.mark.parametrize(("tokens", "chunk"), [(1, 1), (16, 16), (17, 5), (100, 1 << 20), (100, 32)])
def test_rows_arrive(staging: Staging, tokens: int, chunk: int) -> None:
    with Pair(producer={"staging": staging}) as pair:
        pair.hand_off(0x1234, tokens, chunk=chunk)
        pair.check_clean()


@pytest.mark.parametrize("staging", Staging)
def test_several_components_with_pages_of_their_own(staging: Staging) -> None:
    with Pair(layout=WIDE, producer={"staging": staging}) as pair:
        for tag, tokens in enumerate((3, 64, 65, 150), 1):
            pair.hand_off(tag, tokens, chunk=40)
        pair.check_clean()


@pytest.mark.slow
@pytest.mark.parametrize("staging", Staging)
def test_with_a_payload_digest(staging: Staging) -> None:
    with Pair(producer={"staging": staging, "digest": True}) as pair:
        pair.hand_off(0x77, 70, chunk=33)
        pair.check_clean()


@pytest.mark.slow
@pytest.mark.parametrize("staging", Staging)
def test_large_chunks_take_the_worker(staging: Staging) -> None:
    """More than is done on the loop at once: gathers and digests go to another thread and come back."""
    options = {"staging": staging, "digest": True, "staging_bytes": 4 << 20}
    with Pair(layout=make_layout(kv_component(page_tokens=256)), producer=options, arena_bytes=8 << 20) as pair:
        pair.hand_off(5, 6000, chunk=5900)
        pair.check_clean()


def test_the_consumer_may_hold_a_prefix() -> None:
    with Pair() as pair:
        for start in (1, 15, 16, 40, 99):
            handoff = HandoffId.mint()
            ticket = pair.consumer.announce(handoff, start_token=start)
            request = pair.engine.request(start, 100)
            outgoing = pair.send(handoff, request, chunk=30)
            with ticket.wait(DEADLINE_S) as arrival:
                assert arrival.start_token == start
                assert check_rows(arrival, start) == (100 - start) * (3 * 2 * 2 + 3 * 2)
                assert arrival.nbytes == (100 - start) * (3 * 32 + 3 * 20)
            outgoing.wait(DEADLINE_S)
            pair.engine.free(request)
        pair.check_clean()


def test_a_full_hit_moves_nothing_and_still_arrives() -> None:
    with Pair() as pair:
        handoff = HandoffId.mint()
        ticket = pair.consumer.announce(handoff, start_token=50)
        outgoing = pair.offer(handoff, 50)
        outgoing.commit(first_token=9)
        with ticket.wait(DEADLINE_S) as arrival:
            assert arrival.value("first_token") == 9
            assert arrival.nbytes == 0
        outgoing.wait(DEADLINE_S)
        pair.check_clean()


def test_chunks_may_come_in_any_order_and_before_the_link_is_up() -> None:
    with Pair() as pair:
        handoff = HandoffId.mint()
        ticket = pair.consumer.announce(handoff)
        request = pair.engine.request(3, 90)
        outgoing = pair.offer(handoff, 90)
        chunks = [outgoing.push(request.tables, tokens=range(at, at + 30)) for at in (60, 0, 30)]
        outgoing.push(request.tables, tokens=range(40, 40))
        outgoing.commit()
        with ticket.wait(DEADLINE_S) as arrival:
            check_rows(arrival, 3)
            with pytest.raises(LocalError, match="no attachment 'first_token'"):
                arrival.value("first_token")
        assert all(chunk.source_free.wait(DEADLINE_S) for chunk in chunks)
        pair.check_clean()


@pytest.mark.slow
def test_hundreds_of_small_chunks_do_not_nest() -> None:
    with Pair(staging_bytes=1 << 20) as pair:
        pair.hand_off(0xABC, 300, chunk=1)
        pair.check_clean()


def test_staged_pages_are_free_before_the_consumer_has_any_room() -> None:
    """Rule: staged rows leave their pages at once; the pages may be overwritten and what arrives is what was pushed."""
    with Pair(consumer={"unannounced": Unannounced.WAIT}) as pair:
        handoff = HandoffId.mint()
        request = pair.engine.request(0x51, 60)
        outgoing = pair.offer(handoff, 60)
        chunk = outgoing.push(request.tables, tokens=range(60))
        assert chunk.source_free.wait(DEADLINE_S)
        pair.engine.fill(request, range(60), tag=0xDEAD)
        outgoing.commit()
        with pair.consumer.announce(handoff).wait(DEADLINE_S) as arrival:
            check_rows(arrival, 0x51)
        pair.check_clean()


def test_direct_pages_are_held_until_they_are_written() -> None:
    with Pair(rules=[Rule(fault=Fault.HOLD)], producer={"staging": Staging.DIRECT}) as pair:
        handoff = HandoffId.mint()
        ticket = pair.consumer.announce(handoff)
        request = pair.engine.request(0x52, 60)
        outgoing = pair.offer(handoff, 60)
        chunk = outgoing.push(request.tables, tokens=range(60))
        outgoing.commit()
        until(lambda: pair.fault.statistics().held == 1)
        assert not chunk.source_free.is_set()
        pair.fault.release_hold()
        assert chunk.source_free.wait(DEADLINE_S)
        with ticket.wait(DEADLINE_S) as arrival:
            check_rows(arrival, 0x52)
        pair.check_clean()


def test_a_ring_smaller_than_the_prompt() -> None:
    with Pair(staging_bytes=16384) as pair:
        pair.hand_off(0x61, 600, chunk=30)
        assert pair.producer._sender._ring.capacity < 600 * 156
        pair.check_clean()


@pytest.mark.parametrize("staging", [Staging.STAGED, Staging.AUTO])
def test_many_handoffs_share_a_small_ring(staging: Staging) -> None:
    with Pair(staging_bytes=16384, producer={"staging": staging}, arena_bytes=1 << 19) as pair:
        handoffs = [HandoffId.mint() for _ in range(8)]
        tickets = [pair.consumer.announce(handoff) for handoff in handoffs]
        requests = [pair.engine.request(number, 100) for number in range(8)]
        outgoings = [pair.offer(handoff, 100, queue_s=DEADLINE_S) for handoff in handoffs]
        for start in range(0, 100, 25):
            for outgoing, request in zip(outgoings, requests, strict=True):
                outgoing.push(request.tables, tokens=range(start, start + 25))
        for outgoing in outgoings:
            outgoing.commit()
        for number, ticket in enumerate(tickets):
            with ticket.wait(DEADLINE_S) as arrival:
                check_rows(arrival, number)
        pair.check_clean()


def test_an_auto_chunk_that_the_ring_cannot_hold_goes_directly() -> None:
    with Pair(staging_bytes=4096, producer={"staging": Staging.AUTO}) as pair:
        pair.hand_off(0x62, 200)
        assert pair.producer._sender._ring.used == 0
        pair.check_clean()


def test_one_page_table_and_plain_ids_where_all_components_share_a_page_size() -> None:
    layout = make_layout(kv_component(page_tokens=8), index_component(page_tokens=8))
    with Pair(layout=layout) as pair:
        for tag, plain in ((1, True), (2, False)):
            handoff = HandoffId.mint()
            ticket = pair.consumer.announce(handoff)
            ids = list(range(5 * tag, 5 * tag + 5))
            table = PageTable(ids, 8)
            pair.engine.fill(pair.engine.request(tag, 1)._replace(tables={"kv": table, "index_key": table}), range(40))
            outgoing = pair.offer(handoff, 40)
            outgoing.push(ids if plain else table, tokens=range(40))
            ids[:] = [0] * 5  # the engine goes on using its list
            outgoing.commit()
            with ticket.wait(DEADLINE_S) as arrival:
                check_rows(arrival, tag)
        pair.check_clean()


def shards_by_heads() -> tuple[Layout, list[Layout]]:
    whole = make_layout(kv_component(heads=range(4), of=4))
    return whole, [make_layout(kv_component(heads=range(at, at + 2), of=4)) for at in (0, 2)]


def shards_by_layers() -> tuple[Layout, list[Layout]]:
    whole = make_layout(kv_component(), index_component())
    first = make_layout(kv_component(layers=(0,)), index_component(layers=(0, 1)))
    second = make_layout(kv_component(layers=(1, 2)), index_component(layers=(2,)))
    return whole, [first, second]


@pytest.mark.slow
@pytest.mark.parametrize("split", [shards_by_heads, shards_by_layers])
@pytest.mark.parametrize("staging", [Staging.STAGED, Staging.DIRECT])
def test_two_producers_bring_a_part_each(split: Any, staging: Staging) -> None:
    whole, parts = split()
    with Pair(layout=whole, shards=parts, producer={"staging": staging}) as pair:
        handoff = HandoffId.mint()
        ticket = pair.consumer.announce(handoff)
        requests = [engine.request(0x99, 70) for engine in pair.engines]
        outgoings = [pair.send(handoff, request, chunk=40, rank=rank) for rank, request in enumerate(requests)]
        caches, buffers = decode_caches(whole, 80)
        with ticket.wait(DEADLINE_S) as arrival:
            rows = check_rows(arrival, 0x99)
            assert rows == sum(
                70 * len(component.layers) * component.heads * len(component.planes) for component in whole.components
            )
            arrival.convert_into(caches, pages=decode_pages(whole))
        for outgoing in outgoings:
            outgoing.wait(DEADLINE_S)
        check_converted(whole, caches, 0x99, 70)
        del buffers
        pair.check_clean()


@pytest.mark.slow
def test_conversion_into_the_engines_pages_zeroes_the_tail_and_nothing_else() -> None:
    with Pair() as pair:
        caches, buffers = decode_caches(LAYOUT, 80)
        handoff = HandoffId.mint()
        ticket = pair.consumer.announce(handoff)
        pair.send(handoff, pair.engine.request(4, 37))
        with ticket.wait(DEADLINE_S) as arrival:
            with pytest.raises(LocalError, match="component index_key has landed and no cache"):
                arrival.convert_into({"kv": caches["kv"]}, pages=decode_pages(LAYOUT))
            with pytest.raises(LocalError, match="no pages, were given"):
                arrival.convert_into(caches, pages={})
            arrival.convert_into(caches, pages=decode_pages(LAYOUT))
        check_converted(LAYOUT, caches, 4, 37)
        last = caches["kv"].bases[""][0] + 4 * LAYOUT.component("kv").planes[0].page_stride
        assert ctypes.string_at(last, 8) == b"\xee" * 8
        del buffers
        pair.check_clean()


@pytest.mark.slow
def test_what_was_released_cannot_be_converted() -> None:
    with Pair() as pair:
        handoff = HandoffId.mint()
        ticket = pair.consumer.announce(handoff)
        pair.send(handoff, pair.engine.request(4, 37))
        with pytest.raises(ZeroDivisionError), ticket.wait(DEADLINE_S) as arrival:
            raise ZeroDivisionError
        with pytest.raises(LocalError, match="released"):
            arrival.convert_into({})
        arrival.release()
        pair.check_clean()


def test_release_while_converting_is_noticed() -> None:
    with Pair() as pair:
        handoff = HandoffId.mint()
        ticket = pair.consumer.announce(handoff)
        pair.send(handoff, pair.engine.request(4, 37))
        arrival = ticket.wait(DEADLINE_S)

        class Native:
            name = "careless"

            def convert(self, *_: object, **__: object) -> None:
                arrival.release()

        with pytest.raises(LocalError, match="released"):
            arrival.convert_into(
                {"kv": Placement(0, {}), "index_key": Placement(0, {})},
                native=Native(),  # type: ignore[arg-type]
            )
        pair.check_clean()


def test_a_reference_can_be_used_once() -> None:
    with Pair() as pair:
        handoff = HandoffId.mint()
        ticket = pair.consumer.announce(handoff)
        pair.send(handoff, pair.engine.request(4, 10))
        with ticket.wait(DEADLINE_S):
            with pytest.raises(LocalError, match="used once") as caught:
                ticket.wait(DEADLINE_S)
            assert caught.value.code == ErrorCode.DUPLICATE
            with pytest.raises(HandoffFailed, match="announced before"):
                pair.consumer.announce(handoff).wait(DEADLINE_S)
        pair.check_clean()
        with pytest.raises(HandoffFailed) as after:
            pair.consumer.announce(handoff).wait(DEADLINE_S)
        assert after.value.code == ErrorCode.DUPLICATE


def test_many_threads_wait_like_an_http_front_end() -> None:
    with Pair() as pair, ThreadPoolExecutor(8) as pool:
        handoffs = [HandoffId.mint() for _ in range(40)]

        def serve(number: int) -> int:
            with pair.consumer.announce(handoffs[number]).wait(DEADLINE_S) as arrival:
                return check_rows(arrival, number)

        served = [pool.submit(serve, number) for number in range(40)]
        requests = [pair.engine.request(number, 12) for number in range(20)]
        for number in range(20):
            pair.send(handoffs[number], requests[number], queue_s=DEADLINE_S)
        for number in range(20):
            assert served[number].result(DEADLINE_S) > 0
            pair.engine.free(requests[number])
        for number in range(20, 40):
            pair.send(handoffs[number], pair.engine.request(number, 12), queue_s=DEADLINE_S)
        assert all(each.result(DEADLINE_S) for each in served)
        pair.check_clean()


def test_attachments_travel_and_late_ones_too() -> None:
    with Pair(consumer={"expected": {"sampling": Expected(dtype="i64", shape=(2,), required=True)}}) as pair:
        handoff = HandoffId.mint()
        ticket = pair.consumer.announce(handoff)
        request = pair.engine.request(4, 10)
        outgoing = pair.offer(
            handoff, 10, attachments=[attach_int("sampling", 3, 4)], traceparent="00-" + "a" * 32 + "-" + "b" * 16
        )
        outgoing.push(request.tables, tokens=range(10))
        outgoing.commit(last_token=7, first_token=8)
        with ticket.wait(DEADLINE_S) as arrival:
            assert read_int(arrival.attachments["sampling"]) == (3, 4)
            assert arrival.value("last_token") == 7
            assert arrival.value("first_token") == 8
            assert arrival.traceparent.startswith("00-aaaa")
            assert not arrival.mtp_cold
        bare = HandoffId.mint()
        pair.consumer.announce(bare)
        with pytest.raises(HandoffFailed, match="sampling is required") as caught:
            pair.offer(bare, 10).wait(DEADLINE_S)
        assert caught.value.code == ErrorCode.ATTACHMENT
        pair.check_clean()


def test_a_preempted_request_starts_over_under_the_same_grant() -> None:
    with Pair(rules=[Rule(fault=Fault.HOLD, call=0)]) as pair:
        handoff = HandoffId.mint()
        ticket = pair.consumer.announce(handoff)
        old = pair.engine.request(0x11, 64)
        outgoing = pair.offer(handoff, 64)
        outgoing.push(old.tables, tokens=range(32))
        until(lambda: pair.fault.statistics().held == 1)
        outgoing.restart()
        pair.engine.free(old)
        new = pair.engine.request(0x22, 64)
        push_all(outgoing, new, 20)
        outgoing.commit()
        pair.fault.release_hold()
        with ticket.wait(DEADLINE_S) as arrival:
            check_rows(arrival, 0x22)
        assert pair.statistics().book.grants == 1
        pair.check_clean()


def test_a_request_may_be_preempted_before_its_link_is_up_and_before_its_grant() -> None:
    with Pair() as pair:
        for announce_first in (True, False):
            handoff = HandoffId.mint()
            ticket = pair.consumer.announce(handoff) if announce_first else None
            outgoing = pair.offer(handoff, 64)
            if not announce_first:
                until(lambda o=outgoing: o.offered)  # type: ignore[misc]
            old = pair.engine.request(0x11, 64)
            chunk = outgoing.push(old.tables, tokens=range(32))
            outgoing.restart()
            assert chunk.source_free.wait(DEADLINE_S)
            pair.engine.free(old)
            new = pair.engine.request(0x22, 64)
            push_all(outgoing, new, 20)
            outgoing.commit()
            ticket = ticket or pair.consumer.announce(handoff)
            with ticket.wait(DEADLINE_S) as arrival:
                check_rows(arrival, 0x22)
            pair.engine.free(new)
        pair.check_clean()


def test_a_recorder_sees_every_step() -> None:
    recorder = Recorder("test")
    with Pair(producer={"recorder": recorder}, consumer={"recorder": recorder}) as pair:
        pair.hand_off(5, 40, chunk=20)
    names = {event.name for event in recorder.recording().events}
    assert {"offer", "grant", "gather", "write", "commit", "landed", "ready"} <= names


def test_two_links_of_one_consumer_carry_handoffs_of_two_producers() -> None:
    with Pair() as pair, Pair(counted=False) as other:
        handoffs = [HandoffId.mint() for _ in range(2)]
        tickets = [pair.consumer.announce(handoff) for handoff in handoffs]
        pair.send(handoffs[0], pair.engine.request(1, 30))
        request = other.engine.request(2, 30)
        outgoing = other.producer.offer(pair.address, handoffs[1], prompt_tokens=30)
        outgoing.push(request.tables, tokens=range(30))
        outgoing.commit()
        for tag, ticket in enumerate(tickets, 1):
            with ticket.wait(DEADLINE_S) as arrival:
                check_rows(arrival, tag)
        pair.check_clean()


@pytest.mark.parametrize("listen", ["[::1]:0", "[::]:0", "localhost:0", ":0"])
def test_a_consumer_listens_where_it_is_told(listen: str) -> None:
    with Pair(consumer={"listen": listen}) as pair:
        port = pair.consumer.address.port
        host = "localhost" if listen == "localhost:0" else "[::1]"
        handoff = HandoffId.mint()
        ticket = pair.consumer.announce(handoff)
        request = pair.engine.request(5, 20)
        outgoing = pair.producer.offer(f"{host}:{port}", handoff, prompt_tokens=20)
        outgoing.push(request.tables, tokens=range(20))
        outgoing.commit()
        with ticket.wait(DEADLINE_S) as arrival:
            check_rows(arrival, 5)


def test_a_shared_secret() -> None:
    with Pair(consumer={"secret": b"s3cret"}, producer={"secret": b"s3cret"}) as pair:
        pair.hand_off(5, 20)


def test_statistics_count() -> None:
    with Pair() as pair:
        pair.hand_off(5, 20)
        statistics = pair.statistics()
        assert statistics.ready == 1
        assert statistics.book.free_bytes == statistics.book.total_bytes
        until(lambda: pair.producer.statistics().ready == 1)


def test_movers_by_name_are_made_and_closed_by_their_endpoint() -> None:
    with Pair() as pair, Consumer(mover="loopback", layout=LAYOUT, arena_bytes=1 << 16) as consumer:
        handoff = HandoffId.mint()
        ticket = consumer.announce(handoff)
        request = pair.engine.request(5, 20)
        outgoing = pair.producer.offer(consumer.address, handoff, prompt_tokens=20)
        outgoing.push(request.tables, tokens=range(20))
        outgoing.commit()
        with ticket.wait(DEADLINE_S) as arrival:
            check_rows(arrival, 5)
        threads = {thread.name for thread in threading.enumerate()}
        assert {"pdhandoff-consumer", "pdhandoff-consumer-bytes", "pdhandoff-consumer-proofs"} <= threads


def test_a_chunk_larger_than_the_ring_passes_through_it_in_parts() -> None:
    with Pair(staging_bytes=8192, producer={"digest": True}) as pair:
        pair.hand_off(0x63, 300)
        assert pair.producer._sender._ring.capacity < 300 * 156
        pair.check_clean()
