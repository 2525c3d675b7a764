"""Metrics about images in prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from llmc.runtime.images.tower import TowerStats


class ImageCollector(Collector):
    """Reads the counters at each collection."""

    def __init__(self, stats: TowerStats, num_waiting: Callable[[], int]) -> None:
        self._stats, self._num_waiting = stats, num_waiting

    def describe(self) -> list[Metric]:
        """Returns no names, so that registering does not collect."""
        return []

    def collect(self) -> Iterator[Metric]:
        stats = self._stats
        yield CounterMetricFamily("llmc_images_encoded", "Images that were encoded", stats.images)
        yield CounterMetricFamily("llmc_images_reused", "Images whose rows were still there", stats.reused)
        yield CounterMetricFamily("llmc_image_encode_seconds", "Time in which images were encoded", stats.seconds)
        yield GaugeMetricFamily("llmc_image_requests_waiting", "Requests that wait for images", self._num_waiting())
