"""vLLM's metrics of this connector: the log line "KV Transfer metrics" and Prometheus.

vLLM calls all of this in its API server and has no handler around it, so nothing here raises.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, Final, final

from pdhandoff_vllm.hooks import LOG
from pdhandoff_vllm.tally import Tally

with warnings.catch_warnings():  # what vLLM's own packages complain about is not this one's matter
    warnings.simplefilter("ignore")
    from prometheus_client import Counter, Histogram
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

__all__ = ["HandoffPromMetrics", "HandoffStats"]

_SECONDS: Final = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
_COUNTERS: Final = {
    "ready": ("handoffs_ready", "Handoffs of this producer rank that a consumer confirmed."),
    "expired": ("blocks_expired", "Handoffs ended because they kept their blocks for too long."),
    "stuck": ("blocks_stuck", "Expired handoffs whose blocks went back although a write might still read them."),
    "tokens": ("handoff_tokens", "Prompt tokens handed off."),
    "nbytes": ("handoff_bytes", "Bytes of state handed off."),
}
_HISTOGRAMS: Final = {
    "seconds": ("handoff_seconds", "Seconds from the offer of a handoff to its confirmation."),
    "tail_seconds": ("handoff_tail_seconds", "Seconds from the first token to the confirmation of a handoff."),
}


@final
class HandoffStats(KVConnectorStats):  # type: ignore[misc]
    """A tally as vLLM carries it. `data` is the tally's."""

    def reset(self) -> None:
        """Start again from nothing."""
        self.data = Tally().data

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add another rank's, or another interval's."""
        total = Tally(self.data)
        if isinstance(other, HandoffStats):
            total.merge(Tally(other.data))
        self.data = total.data
        return self

    def reduce(self) -> dict[str, int | float]:
        """A few numbers for the log line."""
        return Tally(self.data).summary()

    def is_empty(self) -> bool:
        """Whether there is nothing to tell. Failures alone are something."""
        return Tally(self.data).empty


class HandoffPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """The same as counters and histograms.

    Args:
        prefix: what the names begin with: each class of connectors has its own, or two of them under MultiConnector
            could not both be registered.
        vllm_config: as vLLM gives it.
        metric_types: as vLLM gives it.
        labelnames: as vLLM gives it.
        per_engine_labelvalues: as vLLM gives it.
    """

    def __init__(
        self,
        prefix: str,
        vllm_config: Any,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._values = per_engine_labelvalues
        counter, histogram = metric_types[Counter], metric_types[Histogram]
        self._counters = {
            key: counter(name=f"vllm:{prefix}_{name}", documentation=text, labelnames=labelnames)
            for key, (name, text) in _COUNTERS.items()
        }
        self._failed = counter(
            name=f"vllm:{prefix}_handoffs_failed",
            documentation="Handoffs of this producer rank that failed, by the name of the error.",
            labelnames=[*labelnames, "error"],
        )
        self._histograms = {
            key: histogram(
                name=f"vllm:{prefix}_{name}", documentation=text, labelnames=labelnames, buckets=list(_SECONDS)
            )
            for key, (name, text) in _HISTOGRAMS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Record what one engine has counted since the last time."""
        try:
            self._observe(Tally(transfer_stats_data), self._values[engine_idx])
        except Exception:  # noqa: BLE001 - the boundary to vLLM, whose API server would end
            LOG.exception("metrics of handoffs could not be recorded")

    def _observe(self, tally: Tally, values: list[object]) -> None:
        for key, counter in self._counters.items():
            counter.labels(*values).inc(getattr(tally, key))
        for name, count in tally.failed.items():
            self._failed.labels(*values, name).inc(count)
        for key, histogram in self._histograms.items():
            for seconds in getattr(tally, key):
                histogram.labels(*values).observe(seconds)
