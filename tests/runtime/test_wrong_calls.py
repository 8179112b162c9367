"""A wrong call costs the caller an error and nobody else anything; what ends must say so about its pages."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from pdhandoff import Attachment, AttachmentSpec, ErrorCode, HandoffFailed, HandoffId, LocalError, Staging
from pdhandoff.engines.faults import Fault, Rule
from pdhandoff.runtime.outgoing import Outgoing
from support.engines import DEADLINE_S, Pair, push_all, until

WRONG: list[Callable[[Pair, Outgoing], object]] = [
    lambda pair, _: pair.offer(HandoffId.mint(), 4.0),  # type: ignore[arg-type]
    lambda pair, _: pair.offer(HandoffId.mint(), "4"),  # type: ignore[arg-type]
    lambda pair, _: pair.consumer.announce(HandoffId.mint(), start_token=1.5),  # type: ignore[arg-type]
    lambda _, outgoing: outgoing.push([1], tokens=range(4), after=threading.Event()),  # type: ignore[arg-type]
    lambda _, outgoing: outgoing.commit(first_token=1.5),  # type: ignore[arg-type]
]


class Number:
    """As NumPy's integers: a number by `__index__` only."""

    def __index__(self) -> int:
        return 60


@pytest.mark.parametrize("wrong", WRONG, ids=["length", "text", "start", "event", "token"])
def test_a_wrong_argument_is_refused_where_it_is_given_and_harms_no_other_handoff(
    wrong: Callable[[Pair, Outgoing], object],
) -> None:
    with Pair() as pair:
        innocent = HandoffId.mint()
        ticket = pair.consumer.announce(innocent)
        request = pair.engine.request(1, 60)
        outgoing = pair.producer.offer(str(pair.consumer.address), innocent, prompt_tokens=60)
        with pytest.raises(LocalError) as caught:
            wrong(pair, outgoing)
        assert caught.value.code == ErrorCode.MISUSE
        push_all(outgoing, request, 60)
        outgoing.commit()
        with ticket.wait(DEADLINE_S):
            pass
        outgoing.wait(DEADLINE_S)
        pair.engine.free(request)
        pair.check_clean()


def test_whole_numbers_of_any_library_are_taken() -> None:
    number: Any = Number()
    with Pair() as pair:
        handoff = HandoffId.mint()
        ticket = pair.consumer.announce(handoff)
        request = pair.engine.request(1, 60)
        outgoing = pair.producer.offer(str(pair.consumer.address), handoff, prompt_tokens=number)
        push_all(outgoing, request, 60)
        outgoing.commit(first_token=number)
        with ticket.wait(DEADLINE_S) as arrival:
            assert arrival.value("first_token") == 60
        outgoing.wait(DEADLINE_S)
        pair.engine.free(request)
        pair.check_clean()


def test_an_event_that_raises_ends_its_own_handoff_only() -> None:
    class Broken:
        def query(self) -> bool:
            raise KeyError("no such stream")

    with Pair() as pair:
        request = pair.engine.request(1, 60)
        handoff = HandoffId.mint()
        pair.consumer.announce(handoff)
        outgoing = pair.producer.offer(str(pair.consumer.address), handoff, prompt_tokens=60)
        outgoing.push(request.tables, tokens=range(60), after=Broken())
        with pytest.raises(HandoffFailed) as caught:
            outgoing.wait(DEADLINE_S)
        assert caught.value.code == ErrorCode.SOURCE_LOST
        pair.engine.free(request)
        pair.hand_off(2, 60)
        pair.check_clean()


def test_values_of_another_shape_and_rows_after_release_are_refused() -> None:
    empty = AttachmentSpec(name="first_token", dtype="i64", shape=(0,))
    with Pair() as pair:
        handoff = HandoffId.mint()
        ticket = pair.consumer.announce(handoff)
        request = pair.engine.request(1, 60)
        outgoing = pair.producer.offer(
            str(pair.consumer.address),
            handoff,
            prompt_tokens=60,
            attachments=[Attachment(spec=empty, data=b"")],
            declares=(),
        )
        push_all(outgoing, request, 60)
        outgoing.commit()
        with ticket.wait(DEADLINE_S) as arrival:
            with pytest.raises(LocalError, match="no single i64"):
                arrival.value("first_token")
            assert arrival.rows()
        with pytest.raises(LocalError, match="released"):
            arrival.rows()
        outgoing.wait(DEADLINE_S)
        pair.engine.free(request)
        pair.check_clean()


@pytest.mark.slow
def test_a_closed_producer_frees_what_nobody_reads_and_says_what_its_mover_still_does(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with Pair(rules=[Rule(fault=Fault.HOLD)], producer={"staging": Staging.DIRECT}) as pair:
        held, idle = HandoffId.mint(), HandoffId.mint()
        for handoff in (held, idle):
            pair.consumer.announce(handoff)
        reading = pair.send(held, pair.engine.request(1, 60))
        waiting = pair.offer(idle, 60)
        until(lambda: pair.fault.statistics().held == 1)
        pair.producer.close(drain_s=0.2)
        with pytest.raises(HandoffFailed):
            waiting.wait(DEADLINE_S)
        assert waiting.source_free.is_set()
        assert not reading.source_free.is_set(), "the mover, which is the caller's, may still read these pages"
        assert "still reads the pages of 1 handoffs" in caplog.text


def test_a_fault_in_the_loop_frees_what_nobody_reads() -> None:
    with Pair() as pair:
        outgoing = pair.offer(HandoffId.mint(), 60)

        def fault() -> None:
            raise ZeroDivisionError

        pair.producer._loop.post(fault)
        with pytest.raises(HandoffFailed, match="fault"):
            outgoing.wait(DEADLINE_S)
        assert outgoing.source_free.wait(DEADLINE_S)
