"""Counters and gauges: declared with a sentence each, changed from any thread, read as a frozen snapshot."""

from __future__ import annotations

import enum
import threading
from collections.abc import Iterable
from typing import NamedTuple, final

import msgspec

from pdhandoff.errors import ErrorCode, LocalError

__all__ = ["Counters", "Metric", "MetricKind", "Reading"]


@final
class MetricKind(enum.Enum):
    """How a number moves."""

    COUNTER = "counter"
    "only up"
    GAUGE = "gauge"
    "up and down"


class Metric(NamedTuple):
    """One number that is kept."""

    name: str
    help: str
    "what it counts, with its unit, and what to do when it moves"
    kind: MetricKind = MetricKind.COUNTER


@final
class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """One number at one moment."""

    name: str
    help: str
    kind: MetricKind
    value: int


@final
class Counters:
    """A fixed set of numbers. A name that was never declared is refused: a typing error would count for nobody.

    Args:
        metrics: the numbers to keep; all start at 0. Names must differ.
    """

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics: dict[str, Metric] = {}
        for metric in metrics:
            if metric.name in self._metrics:
                raise LocalError(ErrorCode.CONFIG, f"metric {metric.name!r} is declared twice")
            self._metrics[metric.name] = metric
        self._values = dict.fromkeys(self._metrics, 0)
        self._lock = threading.Lock()

    def add(self, name: str, amount: int = 1) -> None:
        """Add to a number. Raises LocalError for an unknown name, and when a counter would go down."""
        metric = self._find(name)
        if amount < 0 and metric.kind is MetricKind.COUNTER:
            raise LocalError(
                ErrorCode.MISUSE, f"counter {name!r} only goes up: declare it as a gauge to take {-amount} off"
            )
        with self._lock:
            self._values[name] += amount

    def set(self, name: str, value: int) -> None:
        """Set a gauge. Raises LocalError for an unknown name and for a counter."""
        if self._find(name).kind is not MetricKind.GAUGE:
            raise LocalError(ErrorCode.MISUSE, f"counter {name!r} cannot be set: declare it as a gauge")
        with self._lock:
            self._values[name] = value

    def statistics(self) -> tuple[Reading, ...]:
        """All numbers at one moment, in the order in which they were declared."""
        with self._lock:
            values = dict(self._values)
        return tuple(
            Reading(name=metric.name, help=metric.help, kind=metric.kind, value=values[metric.name])
            for metric in self._metrics.values()
        )

    def _find(self, name: str) -> Metric:
        metric = self._metrics.get(name)
        if metric is None:
            raise LocalError(
                ErrorCode.MISUSE, f"no metric {name!r} is declared here (there is {', '.join(self._metrics)})"
            )
        return metric
