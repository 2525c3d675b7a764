"""Metrics about the server's own buckets: proposed and applied changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


class ReplanCollector(Collector):
    """Reads the state at each collection. state: see `Replanner`."""

    def __init__(self, state: Callable[[], dict[str, Any]]) -> None:
        self._state = state

    def describe(self) -> list[Metric]:
        """Returns no names, so that registering does not collect."""
        return []

    def collect(self) -> Iterator[Metric]:
        state = self._state()
        proposal = state["proposal"] or {"saving": 0.0, "changes": []}
        adds = sum(change["action"] == "add" for change in proposal["changes"])
        for name, text, value in (
            ("llmc_replan_steps", "Steps that buckets are planned for; old ones fade", state["num_steps"]),
            ("llmc_replan_shapes", "Shapes of these steps", state["num_shapes"]),
            ("llmc_replan_graphs_off", "Graphs that are compiled and not in use", len(state["off"])),
            ("llmc_replan_proposed_additions", "Buckets that the last proposal adds", adds),
            ("llmc_replan_proposed_retirements", "Buckets that it retires", len(proposal["changes"]) - adds),
            ("llmc_replan_proposed_saving_ratio", "What it is predicted to save, 0 to 1", proposal["saving"]),
            ("llmc_replan_trial", "1 while a change is tried", int(state["trial"] is not None)),
        ):
            yield GaugeMetricFamily(name, text, value)
        yield CounterMetricFamily("llmc_replan_lost_steps", "Steps that no room was left for", state["lost_steps"])
        decisions = CounterMetricFamily("llmc_replan_decisions", "What was decided about buckets", labels=("kind",))
        for kind, count in state["counts"].items():
            decisions.add_metric((kind,), count)
        yield decisions
        shapes = GaugeMetricFamily(
            "llmc_replan_shape_steps",
            "Steps by shape, those that came most; old ones fade. context: of the longest sequence, in whole blocks",
            labels=("phase", "sequences", "tokens", "context", "bucket"),
        )
        steps: dict[tuple[str, ...], float] = {}
        for row in state["top_shapes"]:
            key = (row["phase"], str(row["sequences"]), str(row["tokens"]), str(row["context"]), row["bucket"] or "")
            steps[key] = steps.get(key, 0.0) + row["steps"]
        for labels, count in steps.items():
            shapes.add_metric(labels, count)
        yield shapes
