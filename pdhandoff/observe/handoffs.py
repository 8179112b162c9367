"""What recordings say about each handoff: when prefill ended, when decode might start, how much of that was exposed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import final

import msgspec

from pdhandoff.observe.steps import HANDOFF, Step
from pdhandoff.observe.trace import Event, Recording

__all__ = ["HandoffTimes", "group_by_handoff", "handoff_times"]


@final
class HandoffTimes(msgspec.Struct, frozen=True, kw_only=True):
    """One handoff as recorded on one host. Times are monotonic nanoseconds; None where nothing of that was recorded."""

    label: str
    start_ns: int
    "its first event"
    end_ns: int
    "the end of its last event"
    chunks: int
    "prefill chunks"
    prefill_end_ns: int | None
    "its last chunk has been computed"
    runnable_ns: int | None
    "decode may start: converted, or READY where nothing is converted"
    waited_ns: int
    "of the time between these two: how long the decode engine was busy with other requests"

    @property
    def exposed_ns(self) -> int | None:
        """How much longer the request took because its state had to move: what was not hidden behind prefill."""
        if self.prefill_end_ns is None or self.runnable_ns is None:
            return None
        return max(0, self.runnable_ns - self.prefill_end_ns - self.waited_ns)


def group_by_handoff(recordings: Iterable[Recording]) -> dict[str, list[Event]]:
    """The events of each handoff, by label, from all recordings; handoffs and events in order of time."""
    events = sorted((event for recording in recordings for event in recording.events), key=lambda event: event.start_ns)
    groups: dict[str, list[Event]] = {}
    for event in events:
        label = event.args.get(HANDOFF)
        if label is not None:
            groups.setdefault(str(label), []).append(event)
    return groups


def handoff_times(label: str, events: Sequence[Event]) -> HandoffTimes:
    """Sum up the events of one handoff, at least one."""
    prefill = [event for event in events if event.name == Step.PREFILL]
    prefill_end = max((event.end_ns for event in prefill), default=None)
    runnable = max((event.end_ns for event in events if event.name in {Step.CONVERT, Step.READY}), default=None)
    waited = 0
    if prefill_end is not None and runnable is not None:
        waits = (event for event in events if event.name == Step.WAIT)
        waited = sum(max(0, min(wait.end_ns, runnable) - max(wait.start_ns, prefill_end)) for wait in waits)
    return HandoffTimes(
        label=label,
        start_ns=min(event.start_ns for event in events),
        end_ns=max(event.end_ns for event in events),
        chunks=len(prefill),
        prefill_end_ns=prefill_end,
        runnable_ns=runnable,
        waited_ns=waited,
    )
