"""Rounds one decoder layer after another; what goes into a layer comes from the rounded ones before it."""

from __future__ import annotations

from llmc.compiler.calibration.plan import Plan
from llmc.compiler.calibration.request import Progress
from llmc.compiler.calibration.rounding import Rounder
from llmc.compiler.calibration.running import LayerRunner
from llmc.compiler.calibration.task import Task
from llmc.compiler.calibration.threads import Workers
from llmc.compiler.calibration.work import Work


def round_layers(task: Task, plan: Plan, work: Work, crew: Workers, progress: Progress) -> None:
    """Rounds the layers that `work` has not, and keeps them there with what leaves the last one."""
    windows, model, first = task.windows, task.model, work.done()
    rounder = Rounder(task.config, model, task.layout, crew)
    runner = LayerRunner(model, windows.shape[1], crew)
    if first:
        stream = work.stream(first)
    else:
        stream = runner.embed(windows, task.parameters["embed.weight"])
    for index in range(first, model.num_layers):
        progress("layers", index, model.num_layers)
        linears = plan.layers[index]
        kinds = [kind for kind, linear in linears.items() if linear.format is not None]
        values = task.layer_values(index)
        moments = {}
        if len(windows) and rounder.wants_moments:
            with runner.loaded(index, values) as layer:
                moments = runner.moments(layer, stream[: task.calibrated], kinds, rounder.wants_grams)
        rounded = rounder.round(linears, values, moments, task.vectors(index))
        if len(windows):
            with runner.loaded(index, rounded.values) as layer:
                runner.run(layer, stream)
        work.keep(index, task.tensors(index, rounded), stream)
    progress("layers", model.num_layers, model.num_layers)
