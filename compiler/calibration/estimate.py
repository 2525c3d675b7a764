"""Estimates the cost of quantizing a model, from its shapes and the measured speed of one small product."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

import numpy as np

from llmc.compiler.calibration.plan import Linear, Plan
from llmc.compiler.calibration.request import CalibrationConfig, Estimate
from llmc.compiler.calibration.tensor_files import byte_count
from llmc.compiler.calibration.threads import workers
from llmc.models.config import ModelConfig
from llmc.quantize.checkpoints import StoredTensor
from llmc.quantize.export.base import Layout
from llmc.quantize.methods.awq import ALPHAS
from llmc.quantize.methods.grids import SHRINKS

_SIZE, _TIMES = 512, 8
_GRID_OPERATIONS, _ELEMENTWISE = 16, 16  # operations per element and range; slowness relative to products
_SCALE_BYTES = {"f32": 4, "f16": 2, "bf16": 2}


def _rate() -> float:
    """Operations per second of one thread in float32 matrix products."""
    one = np.ones((_SIZE, _SIZE), np.float32)
    with workers(1):
        best = np.inf
        for _ in range(_TIMES):
            start = time.perf_counter()
            _ = one @ one
            best = min(best, time.perf_counter() - start)
    return 2 * _SIZE**3 / best


def _rounding_operations(config: CalibrationConfig, linear: Linear, count: int) -> float:
    """Operations to round a linear. count: number of matrices in it, each rounded separately."""
    return count * _of_one(config, linear, linear.n // count)


def _of_one(config: CalibrationConfig, linear: Linear, n: int) -> float:
    k = linear.k
    grids = len(SHRINKS) * (2 if linear.format is not None and linear.format.bits == 4 else 1)
    searched = _GRID_OPERATIONS * _ELEMENTWISE * n * k
    if config.method == "gptq":
        return 2.0 * k**3 + 2 * n * k * k + grids * searched
    if config.method == "awq":
        return (len(ALPHAS) + 1) * 2.0 * n * k * k + (len(ALPHAS) + 2 * grids) * searched
    return float(searched)


def _seen(linear: Linear, model: ModelConfig, tokens: int) -> int:
    """Tokens whose inputs are examined, over all matrices; for an expert at least as many as its columns."""
    if not linear.of_experts or model.experts is None:
        return tokens
    return max(tokens * model.experts.top_k, model.experts.count * linear.k)


def estimate(
    config: CalibrationConfig,
    model: ModelConfig,
    plan: Plan,
    layout: Layout,
    tensors: Mapping[str, StoredTensor],
    windows: tuple[int, ...],
) -> Estimate:
    """windows: token counts of the calibration windows."""
    count, length = windows
    tokens = count * length
    # If layers differ, the largest one stands for all.
    largest = max(plan.layers, key=lambda layer: sum(linear.n * linear.k for linear in layer.values()), default={})
    linears = list(largest.values())
    wanted = [linear for linear in linears if linear.format is not None]
    of_layer = sum(linear.n * linear.k for linear in linears)
    grams = config.method in ("gptq", "awq")
    count_of = {linear.kind: model.experts.count if linear.of_experts and model.experts else 1 for linear in linears}
    operations = sum(_rounding_operations(config, linear, count_of[linear.kind]) for linear in wanted)
    attention = 4.0 * count * length**2 * model.num_heads * model.head_dim
    operations += 2 * (2.0 * of_layer * tokens + attention) if tokens else 0
    operations += sum(2.0 * linear.k**2 * _seen(linear, model, tokens) for linear in wanted) if grams else 0
    threads = config.jobs or len(os.sched_getaffinity(0))
    stream = 4 * tokens * model.hidden_size
    squares = [4 * linear.k**2 for linear in wanted] if grams else [0]
    inputs = 4 * min(count, 8) * length * sum(linear.k for linear in linears) if tokens else 0
    if grams and any(linear.of_experts for linear in wanted):
        inputs += stream  # the experts' inputs, for every token
    # GPTQ holds two float64 copies while it computes a factor.
    extra = 4 * max(squares) if config.method == "gptq" else 0
    output = sum(map(byte_count, tensors.values()))
    for index, layer in enumerate(plan.layers):
        for kind, linear in layer.items():
            if linear.format is None:
                continue
            planes = linear.format.planes(linear.k)
            output += linear.n * linear.k * linear.format.bits // 8
            output += sum(
                linear.n * p.count * (_SCALE_BYTES[layout.scale_dtype] if p.dtype == "f32" else 1) for p in planes
            )
            output -= sum(byte_count(tensors[name]) for name in plan.sources[f"layers.{index}.{kind}.weight"])
    return Estimate(
        seconds=model.num_layers * operations / _rate() / threads,
        memory_bytes=2 * 4 * of_layer + stream + sum(squares) + extra + inputs + (300 << 20),
        work_bytes=output + stream,
        output_bytes=output,
        tokens=tokens,
    )
