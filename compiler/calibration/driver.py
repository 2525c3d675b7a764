"""From a model and a request to a quantized checkpoint: one decoder layer at a time, each loaded once."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from llmc.compiler.calibration.checkpoint import write_checkpoint
from llmc.compiler.calibration.estimate import estimate
from llmc.compiler.calibration.gguf.file import write_gguf
from llmc.compiler.calibration.layers import round_layers
from llmc.compiler.calibration.plan import Plan
from llmc.compiler.calibration.recipe.search import find_recipe
from llmc.compiler.calibration.request import CalibrationConfig, CalibrationReport, Estimate, Progress
from llmc.compiler.calibration.task import Task
from llmc.compiler.calibration.threads import workers
from llmc.compiler.calibration.work import Work, work_folder
from llmc.compiler.config import CompileError, no_progress
from llmc.compiler.store.staging import staged_directory
from llmc.models.fields import Fields
from llmc.quantize.checkpoints import StoredTensor
from llmc.quantize.export.gguf import Gguf

_TIED, _TEXT = "tie_word_embeddings", "text_config"


def estimate_of(config: CalibrationConfig) -> tuple[Estimate, tuple[str, ...]]:
    """Estimates a request, with notes; writes nothing. Raises what `quantize_checkpoint` raises for bad input."""
    if config.target_kl is not None:
        raise CompileError("--dry-run does not know what --target-kl takes; leave out one of them")
    task = Task(config)
    shape = task.windows.shape if len(task.windows) else (0, 0)
    found = estimate(config, task.model, task.plan, task.layout, task.checkpoint.stored_tensors(), shape)
    return found, task.plan.notes(task.layout)


def quantize_checkpoint(config: CalibrationConfig, progress: Progress = no_progress) -> CalibrationReport:
    """Writes the quantized checkpoint, whole or not at all. Raises CompileError, ModelError and QuantizeError.

    A killed request resumes after its last finished layer, and gives the same bytes.
    """
    start = time.monotonic()
    task = Task(config)
    progress("layers", 0, 0)
    with work_folder(config.output, task.key()) as work:
        plan, rounded, found = task.plan, work, None
        told: tuple[str, ...] = ()
        resumed = work.done()
        with workers(config.jobs) as crew:
            if config.target_kl is None:
                told = round_layers(task, plan, work, crew, progress)
            else:
                found = find_recipe(task, work, crew, progress)
                plan, rounded, resumed = found.plan, found.rounded, found.resumed
        size = _write(task, plan, rounded, progress)
    return CalibrationReport(
        output=config.output,
        method=config.method,
        scheme="mixed" if found else f"{config.quant.scheme} in {task.layout.wanted.format.describe()}",
        layers=task.model.num_layers,
        resumed=resumed,
        tokens=task.windows.size,
        seconds=time.monotonic() - start,
        output_bytes=size,
        notes=(*task.plan.notes(task.layout), *told) if found is None else (),
        recipe=None if found is None else found.recipe,
    )


def _write(task: Task, plan: Plan, work: Work, progress: Progress) -> int:
    """Writes the checkpoint; returns the bytes of the weights."""
    config, files = task.config, task.source.model_files()
    tensors, settings = _all_tensors(task, plan, work), task.layout.settings(plan.formats, plan.left)

    def on_part(done: int, total: int) -> None:
        progress("write", done, total)

    if config.layout == Gguf.name:
        names = [name for sources in plan.sources.values() for name in sources]
        return write_gguf(config.output, config.model.name, task.model, files, names, tensors, settings, on_part)
    values = Fields.read(config.model / "config.json").values
    if not task.model.tie_word_embeddings:
        values = _untied(values)
    with staged_directory(config.output) as folder:
        return write_checkpoint(folder, values, settings, tensors, files, on_part)


def _untied(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """A config that ties nothing. Readers that believe one that does would drop the checkpoint's own projection."""
    found = {name: False if name == _TIED else value for name, value in values.items()}
    text = found.get(_TEXT)
    return {**found, _TEXT: _untied(text)} if isinstance(text, dict) else found


def _all_tensors(task: Task, plan: Plan, work: Work) -> Mapping[str, StoredTensor]:
    """The checkpoint's tensors, with the quantized ones in place."""
    dropped = plan.dropped
    found = {name: tensor for name, tensor in task.checkpoint.stored_tensors().items() if name not in dropped}
    found |= task.moved_tensors(plan)
    for index in range(task.model.num_layers):
        found |= work.layer(index)
    return found
