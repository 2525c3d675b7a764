"""The number of replicas, from running and waiting requests and KV blocks in use."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def wanted_replicas(
    loads: Mapping[Any, float], kv_uses: Mapping[Any, float], *, current: int, target_load: float, kv_high: float
) -> int:
    """The number of replicas for these loads.

    loads, kv_uses: by replica. Adds one replica if blocks run short, because sequences would be preempted.
    """
    by_load = math.ceil(sum(loads.values()) / target_load)
    mean_use = sum(kv_uses.values()) / len(kv_uses) if kv_uses else 0.0
    return max(by_load, current + 1 if mean_use > kv_high else 0)


class Scaling:
    """A Ray Serve scaling policy.

    Scales up at once; down when fewer have sufficed for down_delay_s, to the most that were needed in that time.
    """

    def __init__(self, target_load: float, kv_high: float, down_delay_s: float) -> None:
        self._target_load, self._kv_high, self._down_delay_s = target_load, kv_high, down_delay_s

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """context: AutoscalingContext. Returns (number of replicas, state for the next call)."""
        metrics = context.aggregated_metrics or {}
        current = context.target_num_replicas
        wanted = wanted_replicas(
            metrics.get("load", {}), metrics.get("kv_use", {}),
            current=context.current_num_replicas, target_load=self._target_load, kv_high=self._kv_high,
        )  # fmt: skip
        wanted = min(max(wanted, context.capacity_adjusted_min_replicas), context.capacity_adjusted_max_replicas)
        if wanted >= current:
            return wanted, {}
        now = context.current_time or 0.0
        state = context.policy_state or {}
        since, most = state.get("fewer_since", now), max(wanted, state.get("most_wanted", wanted))
        if now - since >= self._down_delay_s:
            return most, {}
        return current, {"fewer_since": since, "most_wanted": most}
