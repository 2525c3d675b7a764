"""Rounds decoder layers one at a time; a layer's calibration input comes from the rounded layers before it."""

from __future__ import annotations

import numpy as np

from llmc.compiler.calibration.experts import Tally, round_experts, scale_inputs
from llmc.compiler.calibration.plan import Plan
from llmc.compiler.calibration.request import Progress
from llmc.compiler.calibration.rounding import Rounder
from llmc.compiler.calibration.running import LayerRunner, Moments
from llmc.compiler.calibration.task import Task
from llmc.compiler.calibration.threads import Workers
from llmc.compiler.calibration.work import Work
from llmc.quantize.checkpoints import StoredTensor


def round_layers(task: Task, plan: Plan, work: Work, crew: Workers, progress: Progress) -> tuple[str, ...]:
    """Rounds the layers that `work` lacks, and stores each there with its output. Returns notes."""
    windows, model, first = task.windows, task.model, work.done()
    rounder = Rounder(task.config, model, task.layout, crew)
    if not len(windows):
        _round_matrices(task, plan, work, rounder, progress)
        return ()
    runner = LayerRunner(model, windows.shape[1], crew)
    if first:
        stream = work.stream(first)
    else:
        stream = runner.embed(windows, task.parameters["embed.weight"])
    for index in range(first, model.num_layers):
        progress("layers", index, model.num_layers)
        linears = plan.layers[index]
        wanted = [linear for linear in linears.values() if linear.format is not None]
        kinds = [linear.kind for linear in wanted if not linear.of_experts]
        routes = rounder.wants_moments and len(kinds) < len(wanted)
        values = task.layer_values(index)
        moments: dict[str, Moments] = {}
        routed, tally = None, Tally()
        if rounder.wants_moments:
            some = stream[: task.calibrated]
            with runner.loaded(index, values) as layer:
                moments, routed = runner.moments(layer, some, kinds, rounder.wants_grams, routed=routes)
        changed: set[str] = set()
        if routed is not None and model.experts is not None:
            changed = scale_inputs(rounder, runner, model.experts, linears, values, moments, routed)
        rounded = rounder.round(linears, values, moments, task.vectors(index))
        rounded.changed |= changed
        if routed is not None and model.experts is not None:
            tally = round_experts(rounder, runner, model.experts, linears, rounded, routed)
        with runner.loaded(index, rounded.values) as layer:
            runner.run(layer, stream)
        work.note(index, tally.record())
        work.keep(index, task.tensors(index, rounded), stream)
    progress("layers", model.num_layers, model.num_layers)
    return sum((Tally.of(work.noted(index)) for index in range(model.num_layers)), Tally()).notes()


def _round_matrices(task: Task, plan: Plan, work: Work, rounder: Rounder, progress: Progress) -> None:
    """Rounds matrices without running layers, one in memory at a time; works for any kind of layer."""
    count = task.model.num_layers
    nothing = np.empty((0, 1, task.model.hidden_size), np.float32)
    for index in range(work.done(), count):
        progress("layers", index, count)
        tensors: dict[str, StoredTensor] = {}
        for kind, linear in plan.layers[index].items():
            if linear.format is not None:
                name = f"{kind}.weight"
                values = {name: task.parameters[f"layers.{index}.{name}"].value()}
                tensors |= task.tensors(index, rounder.round({kind: linear}, values, {}, {}))
        work.keep(index, tensors, nothing)
    progress("layers", count, count)
