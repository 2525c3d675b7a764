"""A server, a model and traffic to plan for."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from llmc.buckets.cost import ModelShape
from llmc.buckets.demand import ServerModel
from llmc.buckets.step_cost import AssumedCost, StepCosts
from llmc.buckets.trace import Trace, collect
from llmc.buckets.trace_lines import Request

SHAPE = ModelShape(hidden=64, intermediate=128, layers=2, heads=4, kv_heads=2, head_dim=16, vocab=100)


def made_up_trace(count: int = 400, seed: int = 0) -> Trace:
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(0.2, count)).tolist()
    prompts = np.clip(rng.lognormal(5, 1, count).astype(int), 1, 3000).tolist()
    outputs = rng.integers(1, 120, count).tolist()
    return collect(Path("made-up"), [Request(*row) for row in zip(arrivals, prompts, outputs, strict=True)])


SERVER = ServerModel(max_model_len=2048, max_num_seqs=8)


ASSUMED = StepCosts.of_model(AssumedCost(), "assumed")
"""Costs of plans where none are measured."""
