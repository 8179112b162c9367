"""Handoffs that end badly: whoever cancels, fails or closes, and whenever, everything is free afterwards."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pdhandoff import (
    ErrorCode,
    HandoffFailed,
    HandoffId,
    Limits,
    LocalError,
    Outgoing,
    PageTable,
    Staging,
    Ticket,
    Unannounced,
)
from pdhandoff.engines.faults import Fault, Rule
from pdhandoff.errors import MoverError
from pdhandoff.protocol.consumer_table import ConsumerState
from pdhandoff.runtime.gathering import Gatherer
from pdhandoff.runtime.verify import shard_digest
from support.engines import DEADLINE_S, Pair, check_rows, kv_component, make_layout, push_all, until

HOLD = Rule(fault=Fault.HOLD)


def code_of(waits: Callable[[], object]) -> int:
    """How it failed."""
    with pytest.raises(HandoffFailed) as caught:
        waits()
    return caught.value.code


@pytest.mark.slow
@pytest.mark.parametrize("staging", Staging)
def test_a_byte_flipped_in_flight_is_refused_and_the_memory_is_good_again(staging: Staging) -> None:
    rules = [Rule(fault=Fault.FLIP, byte=777)]
    with Pair(rules=rules, producer={"digest": True, "staging": staging}) as pair:
        handoff = HandoffId.mint()
        ticket = pair.consumer.announce(handoff)
        outgoing = pair.send(handoff, pair.engine.request(1, 60))
        assert code_of(lambda: ticket.wait(DEADLINE_S)) == ErrorCode.DIGEST_MISMATCH
        assert code_of(lambda: outgoing.wait(DEADLINE_S)) == ErrorCode.DIGEST_MISMATCH
        assert pair.statistics().failed == {ErrorCode.DIGEST_MISMATCH: 1}
        pair.hand_off(2, 60)
        pair.check_clean()


def test_without_a_digest_a_flipped_byte_is_not_seen() -> None:
    """The guard of the test above: the fault does reach the memory."""
    with Pair(rules=[Rule(fault=Fault.FLIP, byte=777)]) as pair, pytest.raises(AssertionError, match="kv of 0x1"):
        pair.hand_off(1, 60)


@pytest.mark.parametrize("fault", [Fault.REFUSE, Fault.FAIL, Fault.DROP, Fault.PARTIAL])
@pytest.mark.parametrize("staging", [Staging.STAGED, Staging.DIRECT])
def test_a_failed_write_fails_its_handoff_on_both_sides(fault: Fault, staging: Staging) -> None:
    with Pair(rules=[Rule(fault=fault, call=1)], producer={"staging": staging}) as pair:
        handoff = HandoffId.mint()
        ticket = pair.consumer.announce(handoff)
        outgoing = pair.send(handoff, pair.engine.request(1, 60), chunk=20)
        assert code_of(lambda: ticket.wait(DEADLINE_S)) == ErrorCode.MOVER_FAILED
        assert code_of(lambda: outgoing.wait(DEADLINE_S)) == ErrorCode.MOVER_FAILED
        assert outgoing.source_free.wait(DEADLINE_S)
        pair.hand_off(2, 60)
        pair.check_clean()


def test_duplicated_and_delayed_writes_do_no_harm() -> None:
    rules = [Rule(fault=Fault.DUPLICATE, call=0), Rule(fault=Fault.DELAY, call=1, polls=5)]
    with Pair(rules=rules) as pair:
        pair.hand_off(1, 60, chunk=20)
        pair.check_clean()


def test_a_write_that_lands_late_after_its_error_touches_nobody_elses_memory() -> None:
    """The mover cannot say that it is quiet: the memory is fenced before anybody gets it again."""
    with Pair(rules=[Rule(fault=Fault.LATE)], arena_bytes=4096 * 8) as pair:
        handoff = HandoffId.mint()
        ticket = pair.consumer.announce(handoff)
        outgoing = pair.send(handoff, pair.engine.request(1, 100))
        assert code_of(lambda: ticket.wait(DEADLINE_S)) == ErrorCode.MOVER_FAILED
        assert not outgoing.source_free.is_set(), "rule 10: the mover may still read it"
        until(lambda: pair.statistics().book.free_bytes == pair.total_bytes, "fenced")
        assert pair.statistics().book.quarantines == 1
        second = HandoffId.mint()
        again = pair.consumer.announce(second)
        pair.send(second, pair.engine.request(2, 100))
        with again.wait(DEADLINE_S) as arrival:
            assert pair.fault.land_late() == 1
            check_rows(arrival, 2)


def test_a_held_write_keeps_its_memory_from_everybody_until_it_has_drained() -> None:
    limits = Limits(drain_s=3600.0)
    with Pair(rules=[HOLD], arena_bytes=4096 * 8, limits=limits) as pair:
        handoff, second = HandoffId.mint(), HandoffId.mint()
        ticket = pair.consumer.announce(handoff)
        outgoing = pair.send(handoff, pair.engine.request(1, 100))
        until(lambda: pair.fault.statistics().held == 1)
        ticket.cancel()
        assert code_of(lambda: ticket.wait(DEADLINE_S)) == ErrorCode.CANCELLED
        assert code_of(lambda: outgoing.wait(DEADLINE_S)) == ErrorCode.CANCELLED
        assert pair.statistics().book.ending_bytes > 0
        assert pair.producer._sender._ring.used > 0, "the mover still reads it"
        again = pair.consumer.announce(second)
        next_one = pair.send(second, pair.engine.request(2, 200), queue_s=DEADLINE_S)
        until(lambda: pair.producer._core.position(second) == 0, "it waits for the memory")
        assert not outgoing.source_free.is_set()
        pair.fault.release_hold()
        with again.wait(DEADLINE_S) as arrival:
            check_rows(arrival, 2)
        next_one.wait(DEADLINE_S)
        assert outgoing.source_free.wait(DEADLINE_S)
        pair.check_clean()


def test_a_cancelled_handoff_keeps_its_pages_as_long_as_a_write_reads_them() -> None:
    with Pair(rules=[HOLD], producer={"staging": Staging.DIRECT}) as pair:
        handoff = HandoffId.mint()
        pair.consumer.announce(handoff)
        outgoing = pair.offer(handoff, 20)
        chunk = outgoing.push(pair.engine.request(1, 20).tables, tokens=range(20))
        until(lambda: pair.fault.statistics().held == 1)
        outgoing.cancel()
        assert code_of(lambda: outgoing.wait(DEADLINE_S)) == ErrorCode.CANCELLED
        assert not chunk.source_free.is_set()
        pair.fault.release_hold()
        assert chunk.source_free.wait(DEADLINE_S)
        pair.check_clean()


def test_a_page_that_does_not_exist_is_refused_at_once() -> None:
    with Pair() as pair:
        outgoing = pair.offer(HandoffId.mint(), 40)
        tables = pair.engine.request(1, 40).tables
        for ids in ([9999, 1, 2], [1, 2, -1], [1, 128, 2]):
            with pytest.raises(LocalError, match=r"of kv names pages .* its cache has pages 0\.\.127") as caught:
                outgoing.push({**tables, "kv": PageTable(ids, 16)}, tokens=range(40))
            assert caught.value.code == ErrorCode.OUT_OF_RANGE
        outgoing.push({**tables, "kv": PageTable([9999, 1, 2, 9999], 16)}, tokens=range(16, 40))
        outgoing.cancel()
        pair.check_clean()


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [8, 6000])
@pytest.mark.parametrize(("what", "staging"), [("gather_parts", Staging.STAGED), ("digest", Staging.DIRECT)])
def test_a_job_on_bytes_that_fails_keeps_no_room_and_no_pages(
    monkeypatch: pytest.MonkeyPatch, what: str, staging: Staging, tokens: int
) -> None:
    def fail(*_: object) -> int:
        raise LocalError(ErrorCode.OUT_OF_RANGE, "the plan leaves its bounds")

    monkeypatch.setattr(f"pdhandoff.runtime.routes.Routes.{what}", fail)
    options = {"staging": staging, "digest": True, "staging_bytes": 4 << 20}
    with Pair(layout=make_layout(kv_component(page_tokens=256)), producer=options, arena_bytes=8 << 20) as pair:
        handoff = HandoffId.mint()
        ticket = pair.consumer.announce(handoff)
        outgoing = pair.offer(handoff, tokens)
        chunk = outgoing.push(range(24), tokens=range(tokens))
        assert code_of(lambda: outgoing.wait(DEADLINE_S)) == ErrorCode.OUT_OF_RANGE
        assert code_of(lambda: ticket.wait(DEADLINE_S)) == ErrorCode.OUT_OF_RANGE
        assert chunk.source_free.wait(DEADLINE_S)
        assert outgoing.source_free.wait(DEADLINE_S)
        pair.check_clean()


def test_a_write_that_cannot_be_planned_fails_its_handoff(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise LocalError(ErrorCode.OUT_OF_RANGE, "the plan leaves its bounds")

    monkeypatch.setattr("pdhandoff.runtime.routes.Routes.writes", fail)
    with Pair() as pair:
        handoff = HandoffId.mint()
        ticket = pair.consumer.announce(handoff)
        outgoing = pair.send(handoff, pair.engine.request(1, 20))
        with pytest.raises(HandoffFailed, match="leaves its bounds"):
            outgoing.wait(DEADLINE_S)
        with pytest.raises(HandoffFailed, match="leaves its bounds"):
            ticket.wait(DEADLINE_S)
        assert outgoing.source_free.wait(DEADLINE_S)
        pair.check_clean()


@pytest.mark.slow
def test_cancelled_while_the_worker_reads_its_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages are free only when the gather is over, whatever became of the handoff meanwhile."""
    begun, gate = threading.Event(), threading.Event()

    gather = Gatherer.gather

    def slow(*args: Any, **options: Any) -> None:
        begun.set()
        gate.wait(DEADLINE_S)
        gather(*args, **options)

    monkeypatch.setattr(Gatherer, "gather", slow)
    with Pair(layout=make_layout(kv_component(page_tokens=256)), staging_bytes=4 << 20, arena_bytes=8 << 20) as pair:
        handoff = HandoffId.mint()
        ticket = pair.consumer.announce(handoff)
        outgoing = pair.offer(handoff, 6000)
        chunk = outgoing.push(range(24), tokens=range(6000))
        assert begun.wait(DEADLINE_S)
        outgoing.cancel()
        assert code_of(lambda: ticket.wait(DEADLINE_S)) == ErrorCode.CANCELLED
        assert not chunk.source_free.is_set()
        assert not outgoing.source_free.is_set()
        gate.set()
        assert chunk.source_free.wait(DEADLINE_S)
        assert outgoing.source_free.wait(DEADLINE_S)
        pair.check_clean()


def test_pages_larger_than_half_the_ring_are_refused_with_what_to_do() -> None:
    with Pair(staging_bytes=4096) as pair:
        handoff = HandoffId.mint()
        pair.consumer.announce(handoff)
        outgoing = pair.send(handoff, pair.engine.request(1, 100))
        with pytest.raises(HandoffFailed, match="push less at once, or stage more") as caught:
            outgoing.wait(DEADLINE_S)
        assert caught.value.code == ErrorCode.RING_FULL
        pair.check_clean()


def test_rows_pushed_twice_and_commits_with_holes_are_refused() -> None:
    with Pair() as pair:
        request = pair.engine.request(1, 60)
        for ranges, code in (
            ((range(30), range(20, 60)), ErrorCode.MISUSE),
            ((range(30), range(40, 60)), ErrorCode.INCOMPLETE),
            ((), ErrorCode.INCOMPLETE),
        ):
            handoff = HandoffId.mint()
            ticket = pair.consumer.announce(handoff)
            outgoing = pair.offer(handoff, 60)
            for tokens in ranges:
                outgoing.push(request.tables, tokens=tokens)
            outgoing.commit()
            assert code_of(lambda o=outgoing: o.wait(DEADLINE_S)) == code  # type: ignore[misc]
            assert code_of(lambda t=ticket: t.wait(DEADLINE_S)) == code  # type: ignore[misc]
        pair.check_clean()


def test_pushes_that_make_no_sense_raise_at_once() -> None:
    with Pair() as pair:
        request = pair.engine.request(1, 60)
        outgoing = pair.offer(HandoffId.mint(), 60)
        for tokens in (range(-1, 3), range(61), range(0, 10, 2), range(5, 4)):
            with pytest.raises(LocalError, match="outside the prompt"):
                outgoing.push(request.tables, tokens=tokens)
        with pytest.raises(LocalError, match="no block table for component index_key"):
            outgoing.push({"kv": request.tables["kv"]}, tokens=range(60))
        with pytest.raises(LocalError, match="ends at token 16"):
            outgoing.push({**request.tables, "kv": PageTable([1], 16)}, tokens=range(60))
        with pytest.raises(LocalError, match="pages of 16 tokens, its table 8"):
            outgoing.push(request.tables["index_key"], tokens=range(10))
        with pytest.raises(LocalError, match="no page for some of"):
            outgoing.push({**request.tables, "kv": PageTable([1, 0, 2, 3], 16, null=0)}, tokens=range(60))
        outgoing.cancel()
        pair.check_clean()


def test_an_id_that_is_under_way_is_refused_and_the_first_goes_on() -> None:
    with Pair() as pair:
        handoff = HandoffId.mint()
        ticket = pair.consumer.announce(handoff)
        request = pair.engine.request(1, 60)
        first = pair.offer(handoff, 60)
        second = pair.offer(handoff, 60)
        assert code_of(lambda: second.wait(DEADLINE_S)) == ErrorCode.DUPLICATE
        chunk = second.push(request.tables, tokens=range(60))
        second.commit()
        second.restart()
        second.cancel()
        assert chunk.source_free.wait(DEADLINE_S)
        push_all(first, request, 20)
        second.commit()
        second.cancel()
        first.commit()
        with ticket.wait(DEADLINE_S) as arrival:
            check_rows(arrival, 1)
        first.wait(DEADLINE_S)
        pair.check_clean()


PHASES = ("queued", "granted", "writing", "landed", "ready")


def reach(pair: Pair, phase: str) -> tuple[Outgoing, Ticket]:
    """A handoff in some phase of its life, held there."""
    handoff = HandoffId.mint()
    ticket = pair.consumer.announce(handoff)
    if phase == "queued":
        hog = HandoffId.mint()
        pair.consumer.announce(hog)
        pair.offer(hog, 100)
        until(lambda: pair.consumer._core.state(hog) is ConsumerState.LANDING)
    outgoing = pair.offer(handoff, 100, queue_s=DEADLINE_S)
    request = pair.engine.request(1, 100)
    if phase == "queued":
        until(lambda: pair.producer._core.position(handoff) is not None)
    else:
        until(lambda: pair.consumer._core.state(handoff) is ConsumerState.LANDING)
    if phase in {"writing", "landed", "ready"}:
        chunks = push_all(outgoing, request, 50 if phase == "landed" else 100)
    if phase == "landed":
        until(lambda: all(chunk.over for chunk in chunks))
    if phase == "writing":
        until(lambda: pair.fault.statistics().held == 1)
    if phase == "ready":
        outgoing.commit()
        outgoing.wait(DEADLINE_S)
    return outgoing, ticket


@pytest.fixture(params=PHASES)
def reached(request: pytest.FixtureRequest) -> Iterator[tuple[Pair, Outgoing, Ticket, str]]:
    phase: str = request.param
    rules = [HOLD] if phase == "writing" else []
    with Pair(rules=rules, arena_bytes=4096 * 6) as pair:
        yield (pair, *reach(pair, phase), phase)


def test_the_producer_cancels(reached: tuple[Pair, Outgoing, Ticket, str]) -> None:
    pair, outgoing, ticket, phase = reached
    outgoing.cancel("gone")
    outgoing.cancel()
    if phase == "ready":
        ticket.wait(DEADLINE_S).release()
    else:
        assert code_of(lambda: outgoing.wait(DEADLINE_S)) == ErrorCode.CANCELLED
        assert code_of(lambda: ticket.wait(DEADLINE_S)) == ErrorCode.CANCELLED
    pair.fault.release_hold()
    assert outgoing.source_free.wait(DEADLINE_S)
    end_all(pair)


def test_the_consumer_cancels(reached: tuple[Pair, Outgoing, Ticket, str]) -> None:
    pair, outgoing, ticket, phase = reached
    ticket.cancel("client left")
    ticket.cancel()
    assert code_of(lambda: ticket.wait(DEADLINE_S)) == ErrorCode.CANCELLED
    if phase != "ready":
        with pytest.raises(HandoffFailed, match="client left"):
            outgoing.wait(DEADLINE_S)
    pair.fault.release_hold()
    assert outgoing.source_free.wait(DEADLINE_S)
    end_all(pair)


def test_the_producer_closes(reached: tuple[Pair, Outgoing, Ticket, str]) -> None:
    pair, outgoing, ticket, phase = reached
    pair.producer.close(drain_s=0.1)
    if phase == "ready":
        ticket.wait(DEADLINE_S).release()
    else:
        assert code_of(lambda: ticket.wait(DEADLINE_S)) in {ErrorCode.CANCELLED, ErrorCode.LINK_LOST}
        assert code_of(lambda: outgoing.wait(DEADLINE_S)) == ErrorCode.CANCELLED
    with pytest.raises(LocalError, match="closed"):
        pair.offer(HandoffId.mint(), 5)
    chunk = outgoing.push(pair.engine.request(1, 100).tables, tokens=range(5))
    assert chunk.source_free.is_set()
    until(lambda: pair.statistics().book.free_bytes == pair.total_bytes)


def test_the_consumer_closes(reached: tuple[Pair, Outgoing, Ticket, str]) -> None:
    pair, outgoing, ticket, phase = reached
    pair.consumer.close(drain_s=0.1)
    with pytest.raises(HandoffFailed):
        ticket.wait(DEADLINE_S)
    if phase != "ready":
        assert code_of(lambda: outgoing.wait(DEADLINE_S)) in {ErrorCode.CANCELLED, ErrorCode.LINK_LOST}
    with pytest.raises(HandoffFailed, match="closed"):
        pair.consumer.announce(HandoffId.mint()).wait(DEADLINE_S)
    with pytest.raises(LocalError, match="closed"):
        pair.consumer.statistics()
    pair.fault.release_hold()
    assert outgoing.source_free.wait(DEADLINE_S)


def end_all(pair: Pair) -> None:
    """Cancel what a phase was reached by, and look for leftovers."""
    for other in list(pair.producer._outgoing.values()):
        other.cancel()
    pair.check_clean()


def test_an_arrival_that_nobody_took_is_given_back_by_cancel_and_one_in_use_is_not() -> None:
    with Pair() as pair:
        handoff = HandoffId.mint()
        ticket = pair.consumer.announce(handoff)
        pair.send(handoff, pair.engine.request(1, 20))
        with ticket.wait(DEADLINE_S) as arrival:
            ticket.cancel()
            pair.statistics()
            check_rows(arrival, 1)
            assert pair.statistics().book.granted_bytes > 0, "its reader still reads"
        pair.check_clean()


def test_a_wait_that_times_out_can_be_repeated_and_leaves_no_claim() -> None:
    limits = Limits(ready_s=0.05)
    with Pair(limits=limits) as pair:
        handoff = HandoffId.mint()
        ticket = pair.consumer.announce(handoff)
        with pytest.raises(TimeoutError, match="has not arrived"):
            ticket.wait(0.001)
        outgoing = pair.offer(handoff, 20)
        with pytest.raises(TimeoutError):
            outgoing.wait(0.001)
        outgoing.push(pair.engine.request(1, 20).tables, tokens=range(20))
        outgoing.commit()
        outgoing.wait(DEADLINE_S)
        until(ticket.outcome.done)
        assert code_of(lambda: ticket.wait(DEADLINE_S)) == ErrorCode.EXPIRED
        pair.check_clean()


def test_two_waiters_get_one_arrival() -> None:
    with Pair() as pair:
        handoff = HandoffId.mint()
        ticket = pair.consumer.announce(handoff)
        taken: list[int] = []

        def take() -> None:
            try:
                with ticket.wait(DEADLINE_S) as arrival:
                    taken.append(check_rows(arrival, 1))
            except LocalError as error:
                taken.append(error.code)

        threads = [threading.Thread(target=take) for _ in range(4)]
        for thread in threads:
            thread.start()
        pair.send(handoff, pair.engine.request(1, 20))
        for thread in threads:
            thread.join(DEADLINE_S)
        assert sorted(taken)[:3] == [ErrorCode.DUPLICATE] * 3
        assert len(taken) == 4
        pair.check_clean()


def test_a_future_of_ours_cannot_be_cancelled_by_its_holder() -> None:
    with Pair() as pair:
        handoff = HandoffId.mint()
        ticket = pair.consumer.announce(handoff)
        outgoing = pair.offer(handoff, 5)
        assert not ticket.outcome.cancel()
        assert not outgoing.settled.cancel()
        outgoing.cancel()
        assert code_of(lambda: outgoing.wait(DEADLINE_S)) == ErrorCode.CANCELLED


@pytest.mark.parametrize("policy", Unannounced)
def test_offers_that_nobody_announced(policy: Unannounced) -> None:
    with Pair(consumer={"unannounced": policy}, limits=Limits(unannounced_s=0.05)) as pair:
        handoff = HandoffId.mint()
        outgoing = pair.send(handoff, pair.engine.request(1, 20))
        if policy is Unannounced.ACCEPT:
            outgoing.wait(DEADLINE_S)
            with pair.consumer.announce(handoff).wait(DEADLINE_S) as arrival:
                check_rows(arrival, 1)
        else:
            assert code_of(lambda: outgoing.wait(DEADLINE_S)) == ErrorCode.NOT_ANNOUNCED
            assert not pair.consumer._layouts_of
        pair.check_clean()


def test_what_was_accepted_unannounced_ends_with_the_consumer() -> None:
    with Pair(consumer={"unannounced": Unannounced.ACCEPT}) as pair:
        outgoing = pair.offer(HandoffId.mint(), 20)
        until(lambda: pair.statistics().states == {"landing": 1})
        pair.consumer.close(drain_s=DEADLINE_S)
        assert code_of(lambda: outgoing.wait(DEADLINE_S)) == ErrorCode.CANCELLED


def test_an_announced_handoff_that_never_comes_says_so() -> None:
    with Pair() as pair:
        ticket = pair.consumer.announce(HandoffId.mint(), deadline_s=0.01)
        with pytest.raises(HandoffFailed, match="no producer ever offered it") as caught:
            ticket.wait(DEADLINE_S)
        assert caught.value.code == ErrorCode.EXPIRED
        pair.check_clean()


def test_a_draining_consumer_finishes_what_it_has_and_takes_no_more() -> None:
    with Pair() as pair:
        handoff = HandoffId.mint()
        ticket = pair.consumer.announce(handoff)
        outgoing = pair.offer(handoff, 20)
        until(lambda: pair.statistics().states == {"landing": 1})
        pair.consumer.drain()
        assert code_of(lambda: pair.consumer.announce(HandoffId.mint()).wait(DEADLINE_S)) == ErrorCode.DRAINING
        assert code_of(lambda: pair.offer(HandoffId.mint(), 20).wait(DEADLINE_S)) == ErrorCode.DRAINING
        outgoing.push(pair.engine.request(1, 20).tables, tokens=range(20))
        outgoing.commit()
        with ticket.wait(DEADLINE_S) as arrival:
            check_rows(arrival, 1)
        pair.check_clean()


def test_no_room_and_no_patience_is_busy_and_can_be_retried() -> None:
    with Pair(arena_bytes=4096 * 5) as pair:
        hog, late = HandoffId.mint(), HandoffId.mint()
        pair.consumer.announce(hog)
        first = pair.offer(hog, 100)
        until(lambda: pair.statistics().states == {"landing": 1})
        pair.consumer.announce(late)
        with pytest.raises(HandoffFailed) as caught:
            pair.offer(late, 100).wait(DEADLINE_S)
        assert caught.value.code == ErrorCode.BUSY
        assert caught.value.retryable
        first.cancel()
        pair.hand_off(3, 100)
        pair.check_clean()


def test_what_can_never_fit_is_refused_before_anything_moves() -> None:
    with Pair(arena_bytes=4096) as pair:
        handoff = HandoffId.mint()
        ticket = pair.consumer.announce(handoff)
        outgoing = pair.send(handoff, pair.engine.request(1, 100), queue_s=60)
        assert code_of(lambda: outgoing.wait(DEADLINE_S)) == ErrorCode.TOO_LARGE
        assert code_of(lambda: ticket.wait(DEADLINE_S)) == ErrorCode.TOO_LARGE
        assert pair.fault.statistics().submits == 0
        pair.check_clean()


def test_a_prompt_that_leaves_the_decode_engine_no_room_for_a_token_is_refused_before_anything_moves() -> None:
    with Pair(consumer={"max_seq_len": 100}) as pair:
        handoff = HandoffId.mint()
        ticket = pair.consumer.announce(handoff)
        outgoing = pair.send(handoff, pair.engine.request(1, 100))
        assert code_of(lambda: outgoing.wait(DEADLINE_S)) == ErrorCode.TOO_LARGE
        assert code_of(lambda: ticket.wait(DEADLINE_S)) == ErrorCode.TOO_LARGE
        assert pair.fault.statistics().submits == 0
        pair.hand_off(2, 99)
        pair.check_clean()


def test_a_prompt_over_the_limit_is_refused_by_the_producer_itself() -> None:
    with Pair(limits=Limits(max_prompt_tokens=50)) as pair:
        assert code_of(lambda: pair.offer(HandoffId.mint(), 51).wait(DEADLINE_S)) == ErrorCode.MANIFEST_MISMATCH
        pair.check_clean()


def test_the_queue_moves_on_and_tells_positions() -> None:
    with Pair(arena_bytes=4096 * 5) as pair:
        handoffs = [HandoffId.mint() for _ in range(4)]
        tickets = [pair.consumer.announce(handoff) for handoff in handoffs]
        outgoings = [pair.offer(handoff, 100, queue_s=DEADLINE_S) for handoff in handoffs]
        core = pair.producer._core
        until(lambda: [core.position(handoff) for handoff in handoffs] == [None, 0, 1, 2])
        for number, (ticket, outgoing) in enumerate(zip(tickets, outgoings, strict=True)):
            request = pair.engine.request(number, 100)
            outgoing.push(request.tables, tokens=range(100))
            outgoing.commit()
            with ticket.wait(DEADLINE_S) as arrival:
                check_rows(arrival, number)
        pair.check_clean()


def test_waiting_longer_than_the_caller_allows_fails_and_leaves_the_queue() -> None:
    with Pair(arena_bytes=4096 * 5) as pair:
        hog, late = HandoffId.mint(), HandoffId.mint()
        pair.consumer.announce(hog)
        first = pair.offer(hog, 100)
        until(lambda: pair.statistics().states == {"landing": 1})
        pair.consumer.announce(late)
        assert code_of(lambda: pair.offer(late, 100, queue_s=0.02).wait(DEADLINE_S)) == ErrorCode.QUEUE_TIMEOUT
        assert pair.statistics().queue == 0
        first.cancel()
        pair.check_clean()


class Broken:
    """An event of a device that has failed."""

    def query(self) -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_an_event_of_a_broken_device_fails_its_handoff_and_nothing_else() -> None:
    with Pair() as pair:
        handoff = HandoffId.mint()
        ticket = pair.consumer.announce(handoff)
        outgoing = pair.offer(handoff, 20)
        outgoing.push(pair.engine.request(1, 20).tables, tokens=range(20), after=Broken())
        assert code_of(lambda: ticket.wait(DEADLINE_S)) == ErrorCode.SOURCE_LOST
        pair.hand_off(2, 20)
        pair.check_clean()


def test_a_payload_that_cannot_be_checked_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_installed(*_: object) -> None:
        raise LocalError(ErrorCode.CONFIG, "nothing that converts is installed")

    with Pair(producer={"digest": True}) as pair:
        monkeypatch.setattr("pdhandoff.runtime.natives.load", none_installed)
        handoff = HandoffId.mint()
        ticket = pair.consumer.announce(handoff)
        pair.send(handoff, pair.engine.request(1, 20))
        with pytest.raises(HandoffFailed, match="could not be checked: nothing that converts") as caught:
            ticket.wait(DEADLINE_S)
        assert caught.value.code == ErrorCode.DIGEST_MISMATCH
        pair.check_clean()


@pytest.mark.slow
def test_cancelled_while_it_is_verified_the_memory_is_held_until_the_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, gate = threading.Event(), threading.Event()

    def slow(*arguments: Any, **options: Any) -> bytes:
        begun.set()
        gate.wait(DEADLINE_S)
        return shard_digest(*arguments, **options)

    monkeypatch.setattr("pdhandoff.runtime.verify.shard_digest", slow)
    with Pair(producer={"digest": True}) as pair:
        handoff = HandoffId.mint()
        ticket = pair.consumer.announce(handoff)
        outgoing = pair.send(handoff, pair.engine.request(1, 20))
        assert begun.wait(DEADLINE_S)
        ticket.cancel()
        assert code_of(lambda: outgoing.wait(DEADLINE_S)) == ErrorCode.CANCELLED
        assert pair.statistics().book.ending_bytes > 0
        gate.set()
        pair.check_clean()


def test_a_fence_that_fails_leaves_the_memory_in_quarantine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fences: list[int] = []

    def fail(*_: object) -> None:
        fences.append(1)
        if len(fences) < 3:
            raise MoverError(ErrorCode.MOVER_FAILED, "no descriptors are left")

    with Pair(rules=[HOLD], limits=Limits(drain_s=0.02)) as pair:
        monkeypatch.setattr(pair.landing_mover, "fence", fail)
        handoff = HandoffId.mint()
        ticket = pair.consumer.announce(handoff)
        outgoing = pair.send(handoff, pair.engine.request(1, 20))
        until(lambda: pair.fault.statistics().held == 1)
        ticket.cancel()
        until(lambda: len(fences) == 3, "it is tried again")
        until(lambda: pair.statistics().book.free_bytes == pair.total_bytes)
        assert "no descriptors are left" in caplog.text
        pair.fault.release_hold()
        assert outgoing.source_free.wait(DEADLINE_S)


def test_a_reader_that_outlives_its_consumer_is_told() -> None:
    with Pair() as pair:
        handoff = HandoffId.mint()
        ticket = pair.consumer.announce(handoff)
        pair.send(handoff, pair.engine.request(1, 20))
        arrival = ticket.wait(DEADLINE_S)
        pair.consumer.close(drain_s=0.01)
        with pytest.raises(LocalError, match="the consumer was closed"):
            arrival.convert_into({})
        arrival.release()
        arrival.release()


def test_many_cancels_race_with_everything() -> None:
    """Both sides cancel at moments of their own choosing, from threads of their own."""
    with Pair(arena_bytes=4096 * 12, staging_bytes=1 << 15) as pair:
        codes: set[int] = set()
        for turn in range(60):
            handoff = HandoffId.mint()
            ticket = pair.consumer.announce(handoff, deadline_s=0.2)
            request = pair.engine.request(turn, 40)
            outgoing = pair.offer(handoff, 40, queue_s=DEADLINE_S)
            rival = threading.Thread(target=ticket.cancel if turn % 2 else outgoing.cancel)
            if turn % 3 == 0:
                rival.start()
            push_all(outgoing, request, 10)
            if turn % 3 == 1:
                rival.start()
            outgoing.commit()
            if turn % 3 == 2:
                rival.start()
            try:
                with ticket.wait(DEADLINE_S) as arrival:
                    check_rows(arrival, turn)
            except HandoffFailed as error:
                codes.add(error.code)
            rival.join(DEADLINE_S)
            assert outgoing.source_free.wait(DEADLINE_S)
            pair.engine.free(request)
        assert codes <= {ErrorCode.CANCELLED, ErrorCode.EXPIRED}
        pair.check_clean()
