"""From a model and a request to a quantized checkpoint: a decoder layer at a time, each seen once."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from llmc import __version__
from llmc.compiler.calibration.checkpoint import write_checkpoint
from llmc.compiler.calibration.estimate import estimate
from llmc.compiler.calibration.gguf.file import check_writable, write_gguf
from llmc.compiler.calibration.plan import Plan, plan_of
from llmc.compiler.calibration.request import CalibrationConfig, CalibrationReport, Estimate, Progress
from llmc.compiler.calibration.rounding import RoundedLayer, Rounder
from llmc.compiler.calibration.running import LayerRunner, Values
from llmc.compiler.calibration.text import calibration_windows
from llmc.compiler.calibration.threads import Workers, workers
from llmc.compiler.calibration.work import Work, work_folder
from llmc.compiler.config import CompileError, no_progress
from llmc.compiler.store.staging import staged_directory
from llmc.models.fields import Fields
from llmc.models.loader import Parameter, check_checkpoint, load_parameters
from llmc.models.sources.folder import FolderSource
from llmc.models.sources.registry import open_source
from llmc.models.sources.safetensors import SafetensorsCheckpoint
from llmc.quantize.checkpoints import StoredTensor
from llmc.quantize.export.base import Wanted
from llmc.quantize.export.bits import stored_scale
from llmc.quantize.export.gguf import Gguf
from llmc.quantize.export.registry import get_layout, layout_class


class _Task:
    """All that is known before anything heavy is done."""

    def __init__(self, config: CalibrationConfig) -> None:
        self.config = config
        source = open_source(config.model)
        if not isinstance(source, FolderSource):
            raise CompileError(
                f"{config.model} has no config.json to write on; pass a directory in Hugging Face's format"
            )
        if source.is_quantized:
            raise CompileError(f"{config.model} is quantized already; pass the model that it was made of")
        output = config.output
        if os.path.lexists(output) and not (output.is_dir() and not any(output.iterdir())):
            raise CompileError(f"{output} exists; choose another -o or remove it")
        self.source, self.model = source, source.config()
        checkpoint = source.checkpoint()
        assert isinstance(checkpoint, SafetensorsCheckpoint)
        self.checkpoint = checkpoint
        format = layout_class(config.layout).format_for(config.quant)
        if config.layout == Gguf.name:
            check_writable(self.model)
        self.layout = get_layout(config.layout, Wanted(format, config.act_bits, self.model.dtype))
        self.plan: Plan = plan_of(config, self.model, check_checkpoint(self.model, checkpoint), self.layout)
        if not self.plan.formats:
            raise CompileError(
                f"--format {config.layout} holds none of this model's layers in groups of {format.group_size}, "
                "or all are skipped; use --format compressed-tensors or another --group-size"
            )
        self.parameters: dict[str, Parameter] = {p.name: p for p in load_parameters(self.model, checkpoint, "f32")}

    @cached_property
    def windows(self) -> NDArray[np.int32]:
        """Of the calibration text; none for a method without."""
        config = self.config
        if config.method == "rtn" or config.text is None:
            return np.empty((0, 1), np.int32)
        files, longest = self.source.model_files(), self.model.max_position_embeddings
        windows = calibration_windows(files, config.text, config.samples, config.sample_tokens, longest)
        if windows.max() >= self.model.vocab_size:
            raise CompileError(
                f"the tokenizer makes token {windows.max()} of the text, but the model has {self.model.vocab_size}; "
                "take the tokenizer of this model"
            )
        return windows

    def key(self) -> str:
        """Of everything that decides the bytes of the output."""
        files = [(file.name, *_stamp(file.stat())) for file in self.source.all_files()]
        config = {**asdict(self.config), "model": "", "output": "", "text": "", "jobs": 0}
        tokens = hashlib.sha256(self.windows.tobytes()).hexdigest()
        known = [__version__, torch.__version__, np.__version__, config, files, tokens, self.windows.shape]
        return hashlib.sha256(json.dumps(known, default=str).encode()).hexdigest()

    def layer_values(self, index: int) -> Values:
        prefix = f"layers.{index}."
        names = [name for name in self.parameters if name.startswith(prefix)]
        return {name.removeprefix(prefix): self.parameters[name].value() for name in names}

    def vectors(self, index: int) -> dict[str, str]:
        """What norms and biases of a layer are stored in."""
        prefix = f"layers.{index}."
        return {
            name.removeprefix(prefix): self.checkpoint.dtype(sources[-1])
            for name, sources in self.plan.sources.items()
            if name.startswith(prefix)
        }

    def tensors(self, index: int, layer: RoundedLayer) -> dict[str, StoredTensor]:
        """What a rounded layer puts in the place of the checkpoint's tensors."""
        found: dict[str, StoredTensor] = {}
        for kind, matrix in layer.matrices.items():
            first = 0
            for prefix, rows in self.plan.layers[index][kind].parts:
                found |= self.layout.tensors(prefix, matrix.rows(slice(first, first + rows)))
                first += rows
        for name in sorted(layer.changed):
            first = 0
            for source in self.plan.sources[f"layers.{index}.{name}"]:
                (rows,) = self.checkpoint.shape(source)
                array, dtype = stored_scale(layer.values[name][first : first + rows], self.checkpoint.dtype(source))
                found[source] = StoredTensor.of(array, dtype)
                first += rows
        return found


def _stamp(found: os.stat_result) -> tuple[int, int]:
    return found.st_size, found.st_mtime_ns


def estimate_of(config: CalibrationConfig) -> tuple[Estimate, tuple[str, ...]]:
    """What the request takes, and notes; nothing is written. Raises what `quantize_checkpoint` raises for bad input."""
    task = _Task(config)
    shape = task.windows.shape if len(task.windows) else (0, 0)
    found = estimate(config, task.model, task.plan, task.layout, task.checkpoint.stored_tensors(), shape)
    return found, task.plan.notes(task.layout)


def quantize_checkpoint(config: CalibrationConfig, progress: Progress = no_progress) -> CalibrationReport:
    """Writes the quantized checkpoint, whole or not at all. Raises CompileError, ModelError and QuantizeError.

    A request that was killed goes on behind its last finished layer, and gives the same bytes.
    """
    start = time.monotonic()
    task = _Task(config)
    progress("layers", 0, 0)
    with work_folder(config.output, task.key()) as work:
        resumed = work.done()
        with workers(config.jobs) as crew:
            _round_layers(task, work, resumed, crew, progress)
        size = _write(task, work, progress)
    return CalibrationReport(
        output=config.output,
        method=config.method,
        scheme=f"{config.quant.scheme} in {task.layout.wanted.format.describe()}",
        layers=task.model.num_layers,
        resumed=resumed,
        tokens=task.windows.size,
        seconds=time.monotonic() - start,
        output_bytes=size,
        notes=task.plan.notes(task.layout),
    )


def _write(task: _Task, work: Work, progress: Progress) -> int:
    """The bytes of the weights."""
    config, files = task.config, task.source.model_files()
    tensors, settings = _all_tensors(task, work), task.layout.settings(task.plan.formats, task.plan.left)

    def on_part(done: int, total: int) -> None:
        progress("write", done, total)

    if config.layout == Gguf.name:
        names = [name for sources in task.plan.sources.values() for name in sources]
        return write_gguf(config.output, config.model.name, task.model, files, names, tensors, settings, on_part)
    values = Fields.read(config.model / "config.json").values
    with staged_directory(config.output) as folder:
        return write_checkpoint(folder, values, settings, tensors, files, on_part)


def _round_layers(task: _Task, work: Work, first: int, crew: Workers, progress: Progress) -> None:
    windows, model = task.windows, task.model
    rounder = Rounder(task.config, model, task.layout, crew)
    runner = LayerRunner(model, windows.shape[1], crew)
    if first:
        stream = work.stream(first)
    else:
        stream = runner.embed(windows, task.parameters["embed.weight"])
    for index in range(first, model.num_layers):
        progress("layers", index, model.num_layers)
        linears = task.plan.layers[index]
        kinds = [kind for kind, linear in linears.items() if linear.format is not None]
        values = task.layer_values(index)
        moments = {}
        if len(windows):
            with runner.loaded(index, values) as layer:
                moments = runner.moments(layer, stream, kinds, rounder.wants_grams)
        rounded = rounder.round(linears, values, moments, task.vectors(index))
        if len(windows):
            with runner.loaded(index, rounded.values) as layer:
                runner.run(layer, stream)
        work.keep(index, task.tensors(index, rounded), stream)
    progress("layers", model.num_layers, model.num_layers)


def _all_tensors(task: _Task, work: Work) -> Mapping[str, StoredTensor]:
    """Those of the checkpoint, with the quantized ones in their places."""
    gone = {f"{prefix}.weight" for prefix in task.plan.formats}
    found = {name: tensor for name, tensor in task.checkpoint.stored_tensors().items() if name not in gone}
    for index in range(task.model.num_layers):
        found |= work.layer(index)
    return found
