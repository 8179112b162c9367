"""The loop's thread and the workers': calls from many threads, wake-ups, ends, faults."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from pdhandoff.errors import ErrorCode, LocalError, PdHandoffError
from pdhandoff.runtime.loop import Loop
from pdhandoff.runtime.worker import Worker
from support.engines import DEADLINE_S, counts, leaves_nothing, until


class Owner:
    """Something with one deadline at most."""

    def __init__(self) -> None:
        self.deadline: float | None = None
        self.ticks = 0
        self.polls = 0
        self.turns = 0
        self.polling = False
        self.hasty = True
        self.error: BaseException | None = None
        self.ticked = threading.Event()

    def next_deadline(self) -> float | None:
        return self.deadline

    def tick(self, now: float) -> None:
        assert self.deadline is not None
        assert now >= self.deadline
        self.deadline = None
        self.ticks += 1
        self.ticked.set()

    def turned(self) -> None:
        self.turns += 1

    def poll(self) -> bool:
        self.polls += 1
        self.polling = self.polls < 5
        return self.polls % 2 == 0

    def failed(self, error: BaseException) -> None:
        self.error = error


@pytest.fixture
def owner() -> Owner:
    return Owner()


@pytest.fixture
def loop(owner: Owner) -> Iterator[Loop]:
    with leaves_nothing():
        loop = Loop("pdhandoff-test", owner)
        loop.start()
        yield loop
        loop.stop()


def test_calls_from_many_threads_all_happen_in_order_of_each_thread(loop: Loop) -> None:
    done: list[tuple[int, int]] = []

    def caller(number: int) -> None:
        for turn in range(200):
            loop.post(lambda turn=turn: done.append((number, turn)))  # type: ignore[misc]

    threads = [threading.Thread(target=caller, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    loop.call(lambda: None)
    assert len(done) == 1600
    for number in range(8):
        assert [turn for who, turn in done if who == number] == list(range(200))


def test_no_wake_up_is_lost(loop: Loop) -> None:
    """Each call finds the loop asleep, or on its way there. A lost wake-up would hang: nothing else wakes it."""
    for _ in range(2000):
        assert loop.call(lambda: 5, timeout_s=DEADLINE_S) == 5


def test_a_call_raises_what_the_function_raised(loop: Loop) -> None:
    with pytest.raises(ZeroDivisionError):
        loop.call(lambda: 1 // 0)
    assert loop.call(lambda: 1) == 1


def test_a_call_from_the_loop_itself_does_not_wait_for_itself(loop: Loop) -> None:
    assert loop.call(lambda: loop.call(lambda: 7)) == 7


def test_deadlines_and_polling(loop: Loop, owner: Owner) -> None:
    def begin() -> None:
        owner.deadline = time.monotonic() + 0.001
        owner.polling = True

    loop.post(begin)
    assert owner.ticked.wait(DEADLINE_S)
    until(lambda: owner.polls == 5)
    assert owner.ticks == 1


def test_after_the_end_nobody_waits(loop: Loop) -> None:
    loop.stop()
    loop.stop()
    assert loop.ended
    assert not loop.post(lambda: None)
    with pytest.raises(LocalError, match="is closed") as caught:
        loop.call(lambda: None)
    assert caught.value.code == ErrorCode.MISUSE


def test_what_was_posted_before_the_end_still_happens(loop: Loop) -> None:
    answers: list[Future[int]] = [Future() for _ in range(3)]

    def last() -> None:
        loop.stop()  # from its own thread: returns at once
        for answer in answers:
            loop.post(lambda answer=answer: answer.set_result(1))  # type: ignore[misc]

    loop.post(last)
    assert [answer.result(DEADLINE_S) for answer in answers] == [1, 1, 1]
    until(lambda: loop.ended)


def test_calls_that_race_with_the_end_return_or_raise(loop: Loop) -> None:
    ends: list[str] = []

    def caller() -> None:
        while True:
            try:
                loop.call(lambda: None, timeout_s=DEADLINE_S)
            except LocalError as error:
                ends.append(error.reason)
                return

    threads = [threading.Thread(target=caller) for _ in range(4)]
    for thread in threads:
        thread.start()
    loop.stop()
    for thread in threads:
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
    assert len(ends) == 4


def test_a_fault_ends_the_endpoint_and_not_the_process(
    loop: Loop, owner: Owner, caplog: pytest.LogCaptureFixture
) -> None:
    left, right = socket.socketpair()
    gate = threading.Event()
    later: Future[int] = Future()

    def fail() -> None:
        raise IndexError("and another")

    def fault() -> None:
        loop.watch(left, 1, lambda _events: None)
        loop.post(lambda: later.set_result(1))
        loop.post(fail)
        gate.wait(DEADLINE_S)
        raise KeyError("lost")

    with right, caplog.at_level(logging.CRITICAL):
        loop.post(fault)
        gate.set()
        until(lambda: loop.ended)
        assert isinstance(owner.error, KeyError)
        assert later.result(DEADLINE_S) == 1, "whoever waits for a call that was posted is not left alone"
        assert right.recv(1) == b"", "its sockets are closed"
    left.close()


def test_a_loop_that_never_ran_gives_its_descriptors_back(owner: Owner) -> None:
    before = counts()
    loop = Loop("pdhandoff-unused", owner)
    assert counts().descriptors > before.descriptors
    loop.stop()
    assert counts() == before


def test_a_thread_that_does_not_end_is_named(loop: Loop) -> None:
    gate = threading.Event()

    def busy() -> None:
        gate.wait(DEADLINE_S)

    loop.post(busy)
    with pytest.raises(LocalError, match="pdhandoff-test did not end"):
        loop.stop(timeout_s=0.01)
    gate.set()
    until(lambda: loop.ended)


def test_forgetting_a_socket_twice_is_harmless(loop: Loop) -> None:
    left, right = socket.socketpair()
    with left, right:
        loop.call(lambda: loop.watch(left, 1, lambda _events: None))
        loop.call(lambda: loop.unwatch(left))
        loop.call(lambda: loop.unwatch(left))


def test_a_worker_does_jobs_in_order_and_reports_on_the_loop(loop: Loop) -> None:
    worker = Worker("pdhandoff-test-bytes", loop)
    worker.start()
    threads: list[str] = []
    results: list[object] = []
    finished = threading.Event()

    def fail(error: Exception) -> int:
        raise error

    def note(result: object) -> None:
        threads.append(threading.current_thread().name)
        results.append(result)
        if len(results) == 4:
            finished.set()

    worker.run(lambda: 1, note)
    worker.run(lambda: fail(LocalError(ErrorCode.MISUSE, "no")), note)
    worker.run(lambda: fail(IndexError("surprise")), note)
    worker.run(lambda: 2, note)
    assert finished.wait(DEADLINE_S)
    worker.stop()
    worker.stop()
    assert results[0] == 1
    assert isinstance(results[1], LocalError)
    assert isinstance(results[2], PdHandoffError)
    assert results[2].code == ErrorCode.INTERNAL
    assert "IndexError: surprise" in results[2].reason
    assert results[3] == 2, "a fault in a job costs that job and not the thread"
    assert set(threads) == {"pdhandoff-test"}
