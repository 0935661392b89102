"""What the service counts of itself and of what it shows, as Prometheus reads it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TypeAlias

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

SECONDS = (0.005, 0.02, 0.1, 0.2, 0.5, 1, 5)
Figures: TypeAlias = Mapping[str, Mapping[str, int]]
"""How much there is of each of `FAMILIES`, by the value of its label."""
FAMILIES: Mapping[str, tuple[str, str]] = {
    "jobs": ("state", "Jobs by their state."),
    "checkpoints": ("doctor", "Checkpoints that are there, by what doctor found."),
    "checkpoint_bytes": ("seal", "Bytes of the checkpoints that are there, by their seal."),
}
"""What is counted when it is read, with its label and what it is."""


class Metrics:
    """The figures of one service.

    Args:
        figures: Returns what there is; asked whenever somebody reads the figures.
    """

    def __init__(self, figures: Callable[[], Figures]) -> None:
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
        self.registry.register(_Counted(figures))

    def text(self) -> bytes:
        """Returns the figures in Prometheus' text format."""
        return generate_latest(self.registry)


class _Counted(Collector):
    """Counts what there is when it is read: what the database has, whoever wrote it."""

    def __init__(self, figures: Callable[[], Figures]) -> None:
        self.figures = figures

    def collect(self) -> Iterator[Metric]:
        figures = self.figures()
        for family in self.describe():
            for value, count in sorted(figures.get(family.name.removeprefix("statekit_"), {}).items()):
                family.add_metric((value,), count)
            yield family

    def describe(self) -> Iterator[GaugeMetricFamily]:
        for name, (label, meaning) in FAMILIES.items():
            yield GaugeMetricFamily(f"statekit_{name}", meaning, labels=(label,))
