"""Sensitivity of each linear layer to each format: the float model's divergence with only that layer rounded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from llmc.compiler.calibration.plan import Linear
from llmc.compiler.calibration.recipe.head import Head
from llmc.compiler.calibration.request import Progress
from llmc.compiler.calibration.rounding import Rounder, write_values
from llmc.compiler.calibration.running import Floats, LayerRunner, Moments
from llmc.compiler.calibration.task import Task
from llmc.compiler.calibration.tensor_files import byte_count
from llmc.compiler.calibration.threads import Workers
from llmc.compiler.calibration.work import Work
from llmc.quantize.checkpoints import StoredTensor
from llmc.quantize.export.base import has_whole_groups
from llmc.quantize.formats.base import GROUP_SIZES, WHOLE_ROW, WeightFormat
from llmc.quantize.formats.integers import Integers

_COSTS = "costs"


@dataclass(frozen=True)
class Choice:
    """Candidate formats of a linear layer; the last is None, unquantized. nbytes, costs: of each."""

    index: int
    linear: Linear
    formats: tuple[WeightFormat | None, ...]
    nbytes: tuple[int, ...]
    costs: tuple[float, ...]


def formats_of(task: Task, linear: Linear) -> tuple[WeightFormat, ...]:
    """4-bit formats with group sizes that divide its rows, the largest first, then 8-bit."""
    quant = task.config.quant
    sizes = [size for size in GROUP_SIZES if size != WHOLE_ROW] if quant.group_size is None else [quant.group_size]
    fours = [Integers(4, size, bool(quant.asymmetric)) for size in sorted(sizes, reverse=True)]
    return (*(format for format in fours if has_whole_groups(linear.k, format)), Integers(8))


def measure(task: Task, work: Work, crew: Workers, progress: Progress) -> tuple[Floats, list[Choice]]:
    """Returns the float model's last-layer output for the held-out windows, and the measured choices.

    Layers that `work` has are not measured again. Memory holds one stream per format of one layer.
    """
    model, windows, runner = task.model, task.windows, LayerRunner(task.model, task.windows.shape[1], crew)
    head = Head(model, task.parameters, crew)
    reference = runner.embed(windows[len(windows) - task.held_out :], task.parameters["embed.weight"])
    for index in range(model.num_layers):
        with runner.loaded(index, task.layer_values(index)) as layer:
            runner.run(layer, reference)
    first = work.done()
    stream = work.stream(first) if first else runner.embed(windows, task.parameters["embed.weight"])
    for index in range(first, model.num_layers):
        progress("measure", index, model.num_layers)
        costs = _of_layer(task, index, stream, reference, runner, Rounder(task.config, model, task.layout, crew), head)
        with runner.loaded(index, task.layer_values(index)) as layer:
            runner.run(layer, stream)
        tensors = {f"{_COSTS}.{kind}": StoredTensor.of(np.array(found, np.float32), "F32")
                   for kind, found in costs.items()}  # fmt: skip
        work.keep(index, tensors, stream)
    progress("measure", model.num_layers, model.num_layers)
    return reference, list(_choices(task, work))


def _of_layer(
    task: Task,
    index: int,
    stream: Floats,
    reference: Floats,
    runner: LayerRunner,
    rounder: Rounder,
    head: Head,
) -> dict[str, list[float]]:
    """Divergences by kind, one per format."""
    linears = {kind: linear for kind, linear in task.plan.layers[index].items() if linear.format is not None}
    values = task.layer_values(index)
    moments: dict[str, Moments] = {}
    if rounder.wants_moments:
        with runner.loaded(index, values) as layer:
            moments, _ = runner.moments(layer, stream[: task.calibrated], list(linears), rounder.wants_grams)
    held = stream[len(stream) - task.held_out :]
    costs = {}
    for kind, linear in linears.items():
        name = f"{kind}.weight"
        variants = []
        for quantized in rounder.each(values[name], formats_of(task, linear), moments.pop(kind, None)):
            variants.append(held.copy())
            changed = np.empty_like(values[name])
            write_values(quantized, changed)
            with runner.loaded(index, {**values, name: changed}) as layer:
                runner.run(layer, variants[-1])
        for behind in range(index + 1, task.model.num_layers):
            with runner.loaded(behind, task.layer_values(behind)) as layer:
                for variant in variants:
                    runner.run(layer, variant)
        costs[kind] = [head.divergence(reference, variant) for variant in variants]
    return costs


def _choices(task: Task, work: Work) -> Iterator[Choice]:
    stored = task.checkpoint.stored_tensors()
    for index, layer in enumerate(task.plan.layers):
        found = work.layer(index)
        for kind, linear in layer.items():
            if linear.format is None:
                continue
            formats = formats_of(task, linear)
            plain = sum(byte_count(stored[f"{prefix}.weight"]) for prefix, _ in linear.parts)
            nbytes = (*(_bytes(linear, format, task.layout.scale_dtype) for format in formats), plain)
            costs = (*(float(cost) for cost in found[f"{_COSTS}.{kind}"].load()), 0.0)
            yield Choice(index, linear, (*formats, None), nbytes, costs)


def _bytes(linear: Linear, format: WeightFormat, scale_dtype: str) -> int:
    of_scale = 4 if scale_dtype == "f32" else 2
    beside = sum(p.count * (of_scale if p.dtype == "f32" else 1) for p in format.planes(linear.k))
    return linear.n * (linear.k * format.bits // 8 + beside)
