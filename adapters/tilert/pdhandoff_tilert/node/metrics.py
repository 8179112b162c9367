"""What the node counts, in Prometheus' text format. Every node has a registry of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, final

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from pdhandoff.protocol.consumer import ConsumerStatistics
from pdhandoff_tilert.node.job import Ending, Stage
from pdhandoff_tilert.node.line import Line
from pdhandoff_tilert.node.refusals import code_name

__all__ = ["Gauges", "Metrics"]

_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_STEP: Final = (0, 1, 2, 3, 4, 6, 8, 16)
_P: Final = "pdhandoff_node_"


@final
class Metrics:
    """Any method from any thread."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            f"{_P}requests",
            "requests by how they ended: stop, length, abort, or the HTTP status and code of a refusal",
            ["outcome", "code"],
            registry=self.registry,
        )
        self._failures = Counter(
            f"{_P}handoff_failures",
            "announced handoffs that ended without success, by error code; many of one kind point at one cause",
            ["code"],
            registry=self.registry,
        )
        self._bytes = self._counter("landed_bytes", "bytes of rows that landed for requests")
        self._prompt = self._counter("prompt_tokens", "prompt tokens of requests that got output")
        self._output = self._counter("output_tokens", "output tokens, the first one of each request included")
        self._steps = self._counter("steps", "calls of the engine's step")
        self._drafted = self._counter("draft_tokens", "draft tokens that were verified")
        self._accepted = self._counter("draft_tokens_accepted", "draft tokens that were right")
        self._landing_s = self._histogram("landing_seconds", "from admission until the handoff was complete")
        self._first_s = self._histogram("first_token_seconds", "from admission until the first token was handed out")
        self._engine_s = self._histogram("engine_seconds", "how long a request held the engine")
        self._accepted_step = Histogram(
            f"{_P}accepted_per_step",
            "draft tokens accepted in one verify step",
            buckets=_STEP,
            registry=self.registry,
        )

    def ended(self, ending: Ending, *, prompt_tokens: int, output_tokens: int) -> None:
        """A request has ended, after its admission."""
        if ending.refusal is None:
            self._requests.labels(ending.finish_reason, "").inc()
        else:
            self._requests.labels(str(ending.refusal.status), ending.refusal.code).inc()
        if output_tokens:
            self._prompt.inc(prompt_tokens)
            self._output.inc(output_tokens)

    def refused(self, status: int, code: str) -> None:
        """A request was refused before its admission."""
        self._requests.labels(str(status), code).inc()

    def handoff_failed(self, code: int) -> None:
        """An announced handoff has ended without success."""
        self._failures.labels(code_name(code)).inc()

    def landed(self, seconds: float, nbytes: int) -> None:
        """A handoff is complete and checked."""
        self._landing_s.observe(seconds)
        self._bytes.inc(nbytes)

    def first_token(self, seconds: float) -> None:
        """Decoding of a request begins."""
        self._first_s.observe(seconds)

    def step(self, drafted: int, accepted: int) -> None:
        """The engine took a step."""
        self._steps.inc()
        if drafted:
            self._drafted.inc(drafted)
            self._accepted.inc(accepted)
            self._accepted_step.observe(accepted)

    def decoded(self, seconds: float) -> None:
        """A request has let go of the engine."""
        self._engine_s.observe(seconds)

    def text(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(_P + name, text, registry=self.registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(_P + name, text, buckets=_SECONDS, registry=self.registry)


@final
class Gauges:
    """What is read off when somebody asks.

    Args:
        line: the requests.
        healthy: whether the health page says so.
        landing: the consumer's statistics; None: it does not answer.
    """

    def __init__(
        self, *, line: Line, healthy: Callable[[], bool], landing: Callable[[], ConsumerStatistics | None]
    ) -> None:
        self._line = line
        self._healthy = healthy
        self._landing = landing

    def collect(self) -> Iterator[Metric]:
        """Called by the registry."""
        yield GaugeMetricFamily(f"{_P}healthy", "1: /health answers 200", value=float(self._healthy()))
        stages = GaugeMetricFamily(f"{_P}requests_present", "requests in the node, by stage", labels=["stage"])
        jobs = self._line.jobs()
        for stage in (Stage.WAITING, Stage.LANDED, Stage.PARKED, Stage.DECODING):
            stages.add_metric([stage.value], sum(job.stage is stage for job in jobs))
        yield stages
        yield GaugeMetricFamily(f"{_P}queue_limit", "requests that may wait", value=self._line.most)
        statistics = self._landing()
        if statistics is None:
            return
        book = statistics.book
        landing = GaugeMetricFamily(f"{_P}landing_bytes", "landing memory, by what it is used for", labels=["use"])
        for use, value in (
            ("free", book.free_bytes),
            ("granted", book.granted_bytes),
            ("ending", book.ending_bytes - book.quarantined_bytes),
            ("quarantined", book.quarantined_bytes),
        ):
            landing.add_metric([use], value)
        yield landing
        ended = CounterMetricFamily(f"{_P}consumer_failures", "handoffs that failed, by error code", labels=["code"])
        for code, count in statistics.failed.items():
            ended.add_metric([code_name(code)], count)
        yield ended
