from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdhandoff.errors import ErrorCode, LocalError
from pdhandoff.observe.trace import Event, Recorder, Recording, assign_lanes, decode_recording, write_trace


def ticking(step_ns: int = 1000) -> Callable[[], int]:
    ticks = count(0, step_ns)
    return lambda: next(ticks)


def span(start: int, end: int, track: str = "t") -> Event:
    return Event(name="x", track=track, start_ns=start, duration_ns=end - start)


def test_a_span_and_an_instant_carry_their_times_and_arguments() -> None:
    recorder = Recorder("prefill", clock=ticking())
    with recorder.span("write", "sender", handoff="a") as args:
        args["nbytes"] = 12
    recorder.instant("ready", "link", handoff="a")
    recording = recorder.recording()
    assert recording.process == "prefill"
    assert recording.pid == os.getpid()
    assert recording.events == (
        Event(name="write", track="sender", start_ns=0, duration_ns=1000, args={"handoff": "a", "nbytes": 12}),
        Event(name="ready", track="link", start_ns=2000, args={"handoff": "a"}),
    )
    assert [event.end_ns for event in recording.events] == [1000, 2000]


def test_a_span_is_recorded_when_its_body_raises() -> None:
    recorder = Recorder("p", clock=ticking())
    with pytest.raises(KeyError), recorder.span("write", "sender"):
        raise KeyError
    assert len(recorder.recording().events) == 1


def test_a_span_cannot_end_before_it_starts() -> None:
    with pytest.raises(LocalError, match="5 ns before it starts"):
        Recorder("p").add("write", "sender", 10, 5)


def test_the_newest_events_are_kept_and_the_others_counted() -> None:
    recorder = Recorder("p", capacity=3, clock=ticking())
    for number in range(10):
        recorder.instant("n", "t", number=number)
    recording = recorder.recording()
    assert [event.args["number"] for event in recording.events] == [7, 8, 9]
    assert recording.dropped == 7


def test_a_recorder_without_room_is_refused() -> None:
    with pytest.raises(LocalError) as refused:
        Recorder("p", capacity=0)
    assert refused.value.code == ErrorCode.CONFIG


def test_threads_record_into_one_recorder_without_loss() -> None:
    recorder = Recorder("p")

    def work() -> None:
        for _ in range(500):
            recorder.instant("n", threading.current_thread().name)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(recorder.recording().events) == 2000
    assert recorder.recording().dropped == 0


def test_a_recording_survives_the_way_to_another_process() -> None:
    recorder = Recorder("decode", clock=ticking())
    recorder.add("convert", "engine", 5, 9, handoff="a", exposed=True, ratio=0.5)
    assert decode_recording(recorder.recording().encode()) == recorder.recording()


@pytest.mark.parametrize("data", [b"", b"{}", b"[1]", b"\xff", b'{"process":"p","pid":1,"events":[],"more":1}'])
def test_garbage_is_no_recording(data: bytes) -> None:
    with pytest.raises(LocalError) as refused:
        decode_recording(data)
    assert refused.value.code == ErrorCode.MALFORMED


def test_overlapping_spans_get_lanes_of_their_own_and_nested_ones_share() -> None:
    events = [span(0, 10), span(5, 15), span(6, 9), span(10, 12), span(20, 30)]
    assert assign_lanes(events) == [0, 1, 0, 0, 0]


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), max_size=40))
def test_no_lane_holds_two_spans_that_merely_overlap(times: list[tuple[int, int]]) -> None:
    events = [span(start, start + length) for start, length in times]
    lanes = assign_lanes(events)
    for i, a in enumerate(events):
        for j, b in enumerate(events[:i]):
            if lanes[i] == lanes[j]:
                first, second = sorted((a, b), key=lambda event: (event.start_ns, -event.end_ns))
                assert second.start_ns >= first.end_ns or second.end_ns <= first.end_ns


def written(path: Path, *recordings: Recording) -> list[dict[str, Any]]:
    write_trace(recordings, path)
    rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return rows


def test_the_trace_file_merges_processes_on_one_time_axis(tmp_path: Path) -> None:
    prefill = Recording(process="prefill", pid=7, events=(span(5000, 9000, "engine"),))
    decode = Recording(
        process="decode", pid=8, dropped=2, events=(Event(name="ready", track="link", start_ns=9500, args={"n": 1}),)
    )
    rows = written(tmp_path / "trace.json", prefill, decode)
    drawn = [row for row in rows if row["ph"] != "M"]
    assert drawn == [
        {"name": "x", "cat": "engine", "ph": "X", "pid": 1, "tid": 0, "ts": 0.0, "dur": 4.0, "args": {}},
        {"name": "ready", "cat": "link", "ph": "i", "s": "t", "pid": 2, "tid": 0, "ts": 4.5, "args": {"n": 1}},
    ]
    names = {(row["name"], row["pid"]): row["args"] for row in rows if row["ph"] == "M"}
    assert names["process_name", 1] == {"name": "prefill"}
    assert names["process_labels", 2] == {"labels": "2 older events dropped"}
    assert names["thread_name", 2] == {"name": "link"}


def test_every_lane_of_the_trace_file_is_a_row_of_its_own(tmp_path: Path) -> None:
    events = (span(0, 10, "a"), span(5, 15, "a"), span(3, 4, "b"))
    rows = written(tmp_path / "trace.json", Recording(process="p", pid=1, events=events))
    threads = {row["tid"]: row["args"]["name"] for row in rows if row["name"] == "thread_name"}
    assert threads == {0: "a", 1: "a (2)", 2: "b"}
    order = [row["tid"] for row in rows if row["ph"] == "X"]
    assert order == [0, 1, 2]
    assert all(a <= b for a, b in pairwise(order))


def test_no_recordings_make_an_empty_trace_file(tmp_path: Path) -> None:
    assert written(tmp_path / "trace.json") == []
