"""What the service counts of itself, as Prometheus reads it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

SECONDS = (0.005, 0.02, 0.1, 0.2, 0.5, 1, 5)


class Metrics:
    """The figures of one service.

    Args:
        jobs: Returns for each state how many jobs there are; asked whenever somebody reads the figures.
    """

    def __init__(self, jobs: Callable[[], Mapping[str, int]]) -> None:
        self.registry = CollectorRegistry(auto_describe=True)
        self.requests = Counter(
            "statekit_requests",
            "Requests that were answered.",
            ("method", "route", "status"),
            registry=self.registry,
        )
        self.seconds = Histogram(
            "statekit_request_seconds",
            "How long an answer took to begin.",
            ("route",),
            buckets=SECONDS,
            registry=self.registry,
        )
        self.running = Gauge("statekit_requests_running", "Requests being answered.", registry=self.registry)
        self.registry.register(_Jobs(jobs))

    def text(self) -> bytes:
        """Returns the figures in Prometheus' text format."""
        return generate_latest(self.registry)


class _Jobs(Collector):
    """Counts jobs when it is read: what the database has, whoever wrote it."""

    def __init__(self, jobs: Callable[[], Mapping[str, int]]) -> None:
        self.jobs = jobs

    def collect(self) -> Iterator[Metric]:
        family = GaugeMetricFamily("statekit_jobs", "Jobs by their state.", labels=("state",))
        for state, count in sorted(self.jobs().items()):
            family.add_metric((state,), count)
        yield family

    def describe(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("statekit_jobs", "Jobs by their state.", labels=("state",))
