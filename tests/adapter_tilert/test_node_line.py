"""The line by itself: who holds a request, however close two events are."""

from __future__ import annotations

import threading
import time

import pytest

from pdhandoff import HandoffId
from pdhandoff_tilert.engine import DecodeRequest
from pdhandoff_tilert.node.job import Ending, Event, Job, Stage, Tokens
from pdhandoff_tilert.node.line import Line
from pdhandoff_tilert.node.refusals import Refusal
from pdhandoff_tilert.node.schema import Wanted
from support.engines import DEADLINE_S, until


def wanted(handoff: HandoffId | None = None) -> Wanted:
    return Wanted(
        request_id="r",
        handoff=handoff or HandoffId.mint(),
        decode=DecodeRequest(prompt=(1,), first_token=0, max_tokens=2),
        first_token=None,
        deadline_s=10.0,
        wait_s=None,
        stream=False,
        usage_at_end=False,
        usage_always=False,
        return_prompt=False,
    )


def make_line(*, most: int = 4, parking: int = 1) -> Line:
    return Line(most=most, parking=parking, clock=time.monotonic)


def admit(line: Line) -> tuple[Job, list[Event]]:
    seen: list[Event] = []
    return line.admit(wanted(), seen.extend), seen


def test_a_job_ends_once_and_says_nothing_afterwards() -> None:
    line = make_line()
    job, seen = admit(line)
    job.emit(Tokens(tokens=(5,)))
    assert line.end(job, Ending(finish_reason="stop"), Tokens(tokens=(7, 2)))
    assert not line.end(job, Ending(finish_reason="length"))
    job.emit(Tokens(tokens=(6,)))
    assert seen == [Tokens(tokens=(5,)), Tokens(tokens=(7, 2)), Ending(finish_reason="stop")]
    assert job.output_tokens == 3


def test_what_is_parked_belongs_to_one_thread_however_soon_it_is_done() -> None:
    """The engine may be through with a request before the thread that parked it has looked."""
    line = make_line()
    for _ in range(50):
        job, _ = admit(line)
        assert line.landed(job, DEADLINE_S)
        taken: list[bool] = []
        parker = threading.Thread(target=lambda job=job, taken=taken: taken.append(line.parked(job, None, DEADLINE_S)))
        parker.start()
        found = line.take(DEADLINE_S)
        assert found is not None
        assert found[0] is job
        line.place_free()
        line.end(job, Ending(finish_reason="stop"))
        line.leave(job)
        parker.join(DEADLINE_S)
        assert taken == [True]


def test_what_ended_while_it_was_parked_goes_back_to_who_parked_it() -> None:
    line = make_line()
    job, _ = admit(line)
    assert line.landed(job, DEADLINE_S)
    line.end(job, Ending(finish_reason="abort"))
    assert not line.parked(job, "rows", DEADLINE_S)
    assert line.take(0.0) is None


def test_places_go_to_those_who_landed_in_order_of_admission() -> None:
    line = make_line()
    (first, _), (second, _), (third, _) = admit(line), admit(line), admit(line)
    assert line.landed(second, DEADLINE_S)  # alone so far
    order: list[int] = []

    def come(job: Job) -> None:
        if line.landed(job, DEADLINE_S):
            order.append(job.number)
            line.place_free()

    threads = [threading.Thread(target=come, args=(job,)) for job in (third, first)]
    for thread in threads:
        thread.start()
    until(lambda: {first.stage, third.stage} == {Stage.LANDED})
    line.place_free()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert order == [first.number, third.number]


def test_waits_are_bounded() -> None:
    line = make_line()
    (first, _), (second, _) = admit(line), admit(line)
    assert line.landed(first, 0.0)
    assert not line.landed(second, 0.0)
    assert not line.parked(first, "rows", 0.0)
    assert line.take(0.0) is None
    assert not line.empty(0.0)


def test_a_full_line_a_used_handoff_and_a_closed_line_are_refused() -> None:
    line = make_line(most=1)
    job, _ = admit(line)
    with pytest.raises(Refusal) as full:
        admit(line)
    assert full.value.status == 429
    line.leave(job)
    with pytest.raises(Refusal) as used:
        line.admit(wanted(job.wanted.handoff), lambda _: None)
    assert used.value.status == 409
    line.refuse_all(Refusal(503, "first", code="X"))
    line.refuse_all(Refusal(503, "second", code="Y"))
    with pytest.raises(Refusal, match="first"):
        admit(line)
