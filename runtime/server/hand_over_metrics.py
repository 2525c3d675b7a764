"""Metrics about KV blocks that go from server to server."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from .hand_over import HandOverCounts


class HandOverCollector(Collector):
    """Reads the counters at each collection."""

    def __init__(self, counts: HandOverCounts) -> None:
        self._counts = counts

    def describe(self) -> list[Metric]:
        """Returns no names, so that registering does not collect."""
        return []

    def collect(self) -> Iterator[Metric]:
        counts = self._counts
        for name, text, sent, received in (
            ("llmc_handovers", "Prompts whose KV blocks were handed over", counts.sent, counts.received),
            ("llmc_handover_blocks", "KV blocks handed over", counts.sent_blocks, counts.received_blocks),
            ("llmc_handover_bytes", "Bytes of KV blocks handed over", counts.sent_bytes, counts.received_bytes),
        ):
            family = CounterMetricFamily(name, text, labels=("direction",))
            family.add_metric(("sent",), sent)
            family.add_metric(("received",), received)
            yield family
        yield CounterMetricFamily(
            "llmc_handover_seconds", "Time from asking for KV blocks to the last one", counts.received_s
        )
        yield CounterMetricFamily(
            "llmc_handovers_shared", "Prompts whose KV blocks were received through shared memory", counts.shared
        )
        fallbacks = CounterMetricFamily(
            "llmc_handover_fallbacks", "Prompts computed here since their KV blocks did not come", labels=("reason",)
        )
        for reason, count in sorted(counts.fallbacks.items()):
            fallbacks.add_metric((reason,), count)
        yield fallbacks
