from __future__ import annotations

import threading

import pytest

from pdhandoff.errors import LocalError
from pdhandoff.observe.metrics import Counters, Metric, MetricKind, Reading

LATE = Metric("late_messages", "Messages for handoffs that have ended. Harmless; many mean a slow link.")
ACTIVE = Metric("active", "Handoffs that hold an extent.", MetricKind.GAUGE)


def test_numbers_move_and_are_read_together() -> None:
    counters = Counters([LATE, ACTIVE])
    counters.add("late_messages")
    counters.add("late_messages", 2)
    counters.set("active", 5)
    counters.add("active", -1)
    assert counters.statistics() == (
        Reading(name="late_messages", help=LATE.help, kind=MetricKind.COUNTER, value=3),
        Reading(name="active", help=ACTIVE.help, kind=MetricKind.GAUGE, value=4),
    )


def test_a_reading_does_not_change_afterwards() -> None:
    counters = Counters([LATE])
    before = counters.statistics()
    counters.add("late_messages")
    assert before[0].value == 0


def test_a_name_that_was_never_declared_is_refused() -> None:
    with pytest.raises(LocalError, match=r"late_mesages.*late_messages"):
        Counters([LATE]).add("late_mesages")


def test_a_counter_only_goes_up() -> None:
    counters = Counters([LATE])
    with pytest.raises(LocalError, match="only goes up"):
        counters.add("late_messages", -1)
    with pytest.raises(LocalError, match="cannot be set"):
        counters.set("late_messages", 1)
    assert counters.statistics()[0].value == 0


def test_a_name_is_declared_once() -> None:
    with pytest.raises(LocalError, match="declared twice"):
        Counters([LATE, LATE])


def test_threads_count_without_loss() -> None:
    counters = Counters([LATE])

    def work() -> None:
        for _ in range(2000):
            counters.add("late_messages")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counters.statistics()[0].value == 8000
