from __future__ import annotations

from pathlib import Path

import pytest

from pdhandoff.errors import LocalError
from pdhandoff.observe.handoffs import group_by_handoff, handoff_times
from pdhandoff.observe.steps import HANDOFF, Step
from pdhandoff.observe.timeline import MAX_HANDOFFS, draw_timeline
from pdhandoff.observe.trace import Event, Recording

MS = 1_000_000


def event(step: Step, start_ms: float, length_ms: float | None = None, *, handoff: str = "a") -> Event:
    duration = None if length_ms is None else int(length_ms * MS)
    return Event(name=step.value, track="t", start_ns=int(start_ms * MS), duration_ns=duration, args={HANDOFF: handoff})


def recordings(handoff: str = "a", *, shift_ms: float = 0.0) -> tuple[Recording, Recording]:
    """Two chunks, a busy engine, a conversion: 2 + 1 ms exposed, 5 ms waited."""
    prefill = (
        event(Step.PREFILL, shift_ms, 10, handoff=handoff),
        event(Step.PREFILL, shift_ms + 10, 10, handoff=handoff),
        event(Step.GATHER, shift_ms + 20, 0.5, handoff=handoff),
        event(Step.WRITE, shift_ms + 20.5, 1, handoff=handoff),
    )
    decode = (
        event(Step.LANDED, shift_ms + 21.6, handoff=handoff),
        event(Step.READY, shift_ms + 22, handoff=handoff),
        event(Step.WAIT, shift_ms + 22, 5, handoff=handoff),
        event(Step.CONVERT, shift_ms + 27, 1, handoff=handoff),
        event(Step.DECODE, shift_ms + 28, 3, handoff=handoff),
    )
    return Recording(process="prefill", pid=1, events=prefill), Recording(process="decode", pid=2, events=decode)


def test_what_is_exposed_leaves_out_the_wait_for_a_busy_engine() -> None:
    (events,) = group_by_handoff(recordings()).values()
    times = handoff_times("a", events)
    assert times.chunks == 2
    assert times.prefill_end_ns == 20 * MS
    assert times.runnable_ns == 28 * MS
    assert times.waited_ns == 5 * MS
    assert times.exposed_ns == 3 * MS
    assert (times.start_ns, times.end_ns) == (0, 31 * MS)


def test_without_a_conversion_a_handoff_may_decode_when_it_is_ready() -> None:
    times = handoff_times("a", [event(Step.PREFILL, 0, 4), event(Step.READY, 6)])
    assert times.exposed_ns == 2 * MS


def test_a_wait_that_began_under_prefill_counts_only_from_its_end() -> None:
    times = handoff_times("a", [event(Step.PREFILL, 0, 4), event(Step.WAIT, 1, 4), event(Step.CONVERT, 5, 1)])
    assert times.waited_ns == 1 * MS
    assert times.exposed_ns == 1 * MS


@pytest.mark.parametrize("missing", [Step.PREFILL, Step.READY])
def test_a_handoff_that_failed_has_no_exposed_time(missing: Step) -> None:
    events = [event(Step.PREFILL, 0, 4), event(Step.READY, 6), event(Step.WRITE, 4, 1)]
    assert handoff_times("a", [e for e in events if e.name != missing]).exposed_ns is None


def test_events_are_grouped_by_handoff_and_others_left_out() -> None:
    stray = Event(name="heartbeat", track="link", start_ns=0)
    late, early = recordings("late", shift_ms=50), recordings("early")
    groups = group_by_handoff([*late, Recording(process="x", pid=3, events=(stray,)), *early])
    assert list(groups) == ["early", "late"]
    assert {len(events) for events in groups.values()} == {9}


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, MAX_HANDOFFS + 2])
def test_the_picture_is_drawn(tmp_path: Path, count: int) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "timeline.png"
    recorded = [r for number in range(count) for r in recordings(f"request {number}", shift_ms=20.0 * number)]
    failed = Recording(process="p", pid=4, events=(event(Step.PREFILL, 1, 2, handoff="failed"),))
    draw_timeline([*recorded, failed], path)
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = (int.from_bytes(data[at : at + 4], "big") for at in (16, 20))
    assert 1500 < width < 2500
    assert 400 < height < 5000


def test_a_picture_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LocalError, match="handoff=label"):
        draw_timeline([Recording(process="p", pid=1, events=())], tmp_path / "timeline.png")
