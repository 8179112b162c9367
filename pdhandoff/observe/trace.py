"""Recordings of spans and instants, and the trace file made of them.

A recorder belongs to one process. Times are nanoseconds on the monotonic clock, which on Linux all processes of one
host share: recordings of one host are merged by putting them side by side. The file is JSON in the Trace Event Format,
which Perfetto and Chrome's tracing page load.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias, final

import msgspec

from pdhandoff.errors import ErrorCode, LocalError

__all__ = ["Event", "Recorder", "Recording", "Value", "assign_lanes", "decode_recording", "write_trace"]

Value: TypeAlias = str | int | float | bool
"what an argument of an event may be"


@final
class Event(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Something that took a while (a span), or that happened at one moment (an instant)."""

    name: str
    track: str
    "the row of the trace that it is drawn in: a thread, an engine, a device"
    start_ns: int
    "monotonic"
    duration_ns: int | None = None
    "None for an instant"
    args: dict[str, Value] = {}

    @property
    def end_ns(self) -> int:
        """When it was over; the start of an instant."""
        return self.start_ns + (self.duration_ns or 0)


@final
class Recording(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one recorder saw."""

    process: str
    "a name for people: 'prefill', 'decode'"
    pid: int
    events: tuple[Event, ...]
    "in the order in which they ended"
    dropped: int = 0
    "older events that did not fit"

    def encode(self) -> bytes:
        """JSON, for `decode_recording` in another process."""
        return msgspec.json.encode(self)


def decode_recording(data: bytes) -> Recording:
    """The recording that `Recording.encode` wrote.

    Raises:
        LocalError: the bytes are no recording.
    """
    try:
        return msgspec.json.decode(data, type=Recording)
    except msgspec.DecodeError as error:
        raise LocalError(ErrorCode.MALFORMED, f"these bytes are no recording: {error}") from error


@final
class Recorder:
    """Collects events from any thread. Holds the newest `capacity` of them and counts what it dropped.

    Args:
        process: a name for people.
        capacity: most events held.
        clock: monotonic nanoseconds.
    """

    def __init__(self, process: str, *, capacity: int = 1 << 16, clock: Callable[[], int] = time.monotonic_ns) -> None:
        if capacity <= 0:
            raise LocalError(ErrorCode.CONFIG, f"a recorder needs a capacity above 0, got {capacity}")
        self._process = process
        self._clock = clock
        self._lock = threading.Lock()
        self._events: deque[Event] = deque(maxlen=capacity)
        self._seen = 0

    @contextmanager
    def span(self, name: str, track: str, **args: Value) -> Iterator[dict[str, Value]]:
        """Record the body of a `with` statement, also when it raises. Arguments can be added to the dict it gives."""
        start = self._clock()
        try:
            yield args
        finally:
            self.add(name, track, start, self._clock(), **args)

    def instant(self, name: str, track: str, **args: Value) -> None:
        """Record that something happened now."""
        self._append(Event(name=str(name), track=track, start_ns=self._clock(), args=args))

    def add(self, name: str, track: str, start_ns: int, end_ns: int, **args: Value) -> None:
        """Record a span whose times are known already. Raises LocalError when it ends before it starts."""
        if end_ns < start_ns:
            raise LocalError(ErrorCode.MISUSE, f"span {name!r} ends {start_ns - end_ns} ns before it starts")
        self._append(Event(name=str(name), track=track, start_ns=start_ns, duration_ns=end_ns - start_ns, args=args))

    def recording(self) -> Recording:
        """What has been recorded so far."""
        with self._lock:
            events, seen = tuple(self._events), self._seen
        return Recording(process=self._process, pid=os.getpid(), events=events, dropped=seen - len(events))

    def _append(self, event: Event) -> None:
        with self._lock:
            self._events.append(event)
            self._seen += 1


def assign_lanes(events: Sequence[Event]) -> list[int]:
    """For each event, a lane in which it overlaps no other unless one lies wholly inside the other.

    Trace viewers draw the spans of one row as a stack of calls, so spans that merely overlap need rows of their own.
    Returns lane numbers from 0, in the order of `events`; as few lanes as the greedy choice gives.
    """
    lanes: list[list[int]] = []  # per lane: ends of the spans that are still open, outermost first
    result = [0] * len(events)
    order = sorted(range(len(events)), key=lambda i: (events[i].start_ns, -events[i].end_ns))
    for index in order:
        event = events[index]
        lane = next((lane for lane, ends in enumerate(lanes) if _fits(ends, event)), len(lanes))
        if lane == len(lanes):
            lanes.append([])
        lanes[lane].append(event.end_ns)
        result[index] = lane
    return result


def _fits(ends: list[int], event: Event) -> bool:
    """Whether a lane can take an event: after closing what has ended, it is empty or the event lies inside."""
    while ends and ends[-1] <= event.start_ns:
        ends.pop()
    return not ends or event.end_ns <= ends[-1]


def write_trace(recordings: Iterable[Recording], path: Path) -> None:
    """Write recordings of one host as one trace file, which Perfetto and Chrome's tracing page load.

    Args:
        recordings: of different processes, or of one process under different names.
        path: the file; its folder must exist.
    """
    rows: list[dict[str, object]] = []
    recordings = list(recordings)
    origin = min((event.start_ns for recording in recordings for event in recording.events), default=0)
    for number, recording in enumerate(recordings, 1):
        rows.extend(_process_rows(recording, number, origin))
    document = {"displayTimeUnit": "ms", "traceEvents": rows}
    path.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=0) + b"\n")


def _process_rows(recording: Recording, number: int, origin_ns: int) -> Iterator[dict[str, object]]:
    labels = f"{recording.dropped} older events dropped" if recording.dropped else f"pid {recording.pid}"
    yield _metadata("process_name", number, 0, {"name": recording.process})
    yield _metadata("process_labels", number, 0, {"labels": labels})
    yield _metadata("process_sort_index", number, 0, {"sort_index": number})
    tracks: dict[str, list[Event]] = {}
    for event in recording.events:
        tracks.setdefault(event.track, []).append(event)
    thread = 0
    for track, events in tracks.items():
        lanes = assign_lanes(events)
        for lane in range(max(lanes) + 1):
            name = track if lane == 0 else f"{track} ({lane + 1})"
            yield _metadata("thread_name", number, thread + lane, {"name": name})
            yield _metadata("thread_sort_index", number, thread + lane, {"sort_index": thread + lane})
        for event, lane in zip(events, lanes, strict=True):
            yield _event_row(event, number, thread + lane, origin_ns)
        thread += max(lanes) + 1


def _metadata(kind: str, process: int, thread: int, args: Mapping[str, object]) -> dict[str, object]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": args}


def _event_row(event: Event, process: int, thread: int, origin_ns: int) -> dict[str, object]:
    row: dict[str, object] = {
        "name": event.name,
        "cat": event.track,
        "pid": process,
        "tid": thread,
        "ts": (event.start_ns - origin_ns) / 1e3,
        "args": event.args,
    }
    if event.duration_ns is None:
        return row | {"ph": "i", "s": "t"}
    return row | {"ph": "X", "dur": event.duration_ns / 1e3}
