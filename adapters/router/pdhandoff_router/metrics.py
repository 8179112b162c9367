"""What the router counts, in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, final

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

from pdhandoff_router.decode_pool import DecodePool
from pdhandoff_router.servers import Servers

__all__ = ["Metrics"]

_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_P: Final = "pdhandoff_router_"


@final
class Metrics:
    """Counters of one router, and gauges that are read off when somebody asks.

    Args:
        pool: the decode nodes.
        groups: the vLLM servers.
    """

    def __init__(self, pool: DecodePool, groups: tuple[Servers, ...]) -> None:
        self._pool = pool
        self._groups = groups
        self.registry = CollectorRegistry()
        self._requests = Counter(
            f"{_P}requests",
            "requests by the path that ran and how they ended: ok, broken_off, or the code of a refusal",
            ["path", "outcome"],
            registry=self.registry,
        )
        self.retries = Counter(f"{_P}retries", "handoffs that were tried anew", registry=self.registry)
        self._prompt = Counter(f"{_P}prompt_tokens", "prompt tokens of handed-off requests", registry=self.registry)
        self._output = Counter(f"{_P}output_tokens", "output tokens of handed-off requests", registry=self.registry)
        self._queue_s = self._histogram("queue_seconds", "how long requests waited for a decode node")
        self._first_s = self._histogram("first_token_seconds", "from both legs' start to the first token")
        self.registry.register(self)

    def ended(self, path: str, outcome: str) -> None:
        """A request has ended."""
        self._requests.labels(path, outcome).inc()

    def tokens(self, prompt: int, output: int) -> None:
        """A handed-off request has ended."""
        self._prompt.inc(prompt)
        self._output.inc(output)

    def waited(self, seconds: float) -> None:
        """A request got a decode node."""
        self._queue_s.observe(seconds)

    def first_token(self, seconds: float) -> None:
        """A request got its first token."""
        self._first_s.observe(seconds)

    def text(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self.registry)

    def describe(self) -> list[Metric]:
        """Called by the registry: nothing to say before collection."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Called by the registry."""
        yield GaugeMetricFamily(f"{_P}queued", "requests that wait for a decode node", value=self._pool.queued)
        held = GaugeMetricFamily(f"{_P}node_requests", "requests on a decode node", labels=["node"])
        most = GaugeMetricFamily(f"{_P}node_credits", "requests that a decode node may have", labels=["node"])
        usable = GaugeMetricFamily(f"{_P}node_usable", "1: the decode node is used", labels=["node"])
        for node in self._pool.nodes.values():
            held.add_metric([node.name], node.held)
            most.add_metric([node.name], node.credits)
            usable.add_metric([node.name], float(node.usable()))
        answering = GaugeMetricFamily(f"{_P}server_usable", "1: the server answers", labels=["kind", "server"])
        for group in self._groups:
            for server in group.members:
                answering.add_metric([group.kind, server.name], float(not server.problem))
        yield from (held, most, usable, answering)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(_P + name, text, buckets=_SECONDS, registry=self.registry)
