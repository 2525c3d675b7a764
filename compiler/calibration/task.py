"""Everything known about a request before expensive work begins."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from llmc.compiler.calibration.gguf.file import check_writable
from llmc.compiler.calibration.plan import Plan, plan_of
from llmc.compiler.calibration.request import CalibrationConfig
from llmc.compiler.calibration.rounding import RoundedLayer
from llmc.compiler.calibration.running import Values
from llmc.compiler.calibration.text import calibration_windows
from llmc.compiler.config import CompileError
from llmc.models.loader import Parameter, check_checkpoint, load_parameters
from llmc.models.sources.folder import FolderSource
from llmc.models.sources.folder_checkpoint import FolderCheckpoint
from llmc.models.sources.registry import open_source
from llmc.quantize.checkpoints import StoredTensor
from llmc.quantize.export.base import Wanted
from llmc.quantize.export.bits import stored_scale
from llmc.quantize.export.gguf import Gguf
from llmc.quantize.export.registry import get_layout, layout_class
from llmc.version import __version__

_NAMES = {"f32": "F32", "f16": "F16", "bf16": "BF16"}
_MOST_MEASURED = 4096
"""Most tokens on which divergences are measured."""


class Task:
    """Everything known before expensive work begins."""

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
        self._check_parts()
        checkpoint = source.checkpoint()
        if not isinstance(checkpoint, FolderCheckpoint):
            raise CompileError(
                f"{config.model} has linear layers behind its pooling, in folders of their own, which llmc quantize -o "
                "does not write; llmc compile --quant rounds the model"
            )
        self.checkpoint = checkpoint
        format = layout_class(config.layout).format_for(config.quant)
        if config.layout == Gguf.name:
            check_writable(self.model)
        self.layout = get_layout(config.layout, Wanted(format, config.act_bits, self.model.dtype))
        weights, shapes = check_checkpoint(self.model, checkpoint), {n: checkpoint.shape(n) for n in checkpoint.names()}
        self.plan: Plan = plan_of(config, self.model, weights, shapes, self.layout)
        if not self.plan.formats:
            raise CompileError(
                f"--format {config.layout} holds none of this model's layers in groups of {format.group_size}, "
                "or all are skipped; use --format compressed-tensors or another --group-size"
            )
        self.parameters: dict[str, Parameter] = {p.name: p for p in load_parameters(self.model, checkpoint, "f32")}

    def _check_parts(self) -> None:
        """Raises CompileError for methods unsupported with mixtures of experts or latent attention."""
        config = self.config
        if self.model.streams is not None and (config.method != "rtn" or config.target_kl is not None):
            raise CompileError(
                f"{config.model} has several hidden vectors of a token, through which llmc quantize follows no text "
                "yet; give --method rtn without --target-kl"
            )
        for what, part in (("experts", self.model.experts), ("latent attention", self.model.latent)):
            if part is None:
                continue
            if config.target_kl is not None:
                raise CompileError(f"{config.model} has {what}, for which --target-kl chooses nothing; leave it out")
            if config.method == "smoothquant":
                raise CompileError(
                    f"{config.model} has {what}, whose inputs other layers read, too, so --method smoothquant has "
                    "nothing to move; give --method rtn, gptq or awq"
                )
            if config.layout == Gguf.name:
                raise CompileError(
                    f"{config.model} has {what}, which --format {config.layout} does not hold; leave it out"
                )

    @cached_property
    def windows(self) -> NDArray[np.int32]:
        """Token windows of the calibration text; empty for a method that needs none."""
        config = self.config
        if (config.method == "rtn" and config.target_kl is None) or config.text is None:
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
        """A key of everything that the output bytes depend on."""
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
        """Stored dtypes of a layer's norms and biases."""
        prefix = f"layers.{index}."
        return {
            name.removeprefix(prefix): self.checkpoint.dtype(sources[-1])
            for name, sources in self.plan.sources.items()
            if name.startswith(prefix)
        }

    @property
    def held_out(self) -> int:
        """Number of windows at the end reserved for measuring divergence; 0 without a target."""
        if self.config.target_kl is None:
            return 0
        count, length = self.windows.shape
        return min(count // 4, max(1, _MOST_MEASURED // length)) or 1

    @property
    def calibrated(self) -> int:
        """Number of windows at the start used for calibration; a single window serves both purposes."""
        return max(len(self.windows) - self.held_out, min(1, len(self.windows)))

    def tensors(self, index: int, layer: RoundedLayer) -> dict[str, StoredTensor]:
        """The tensors with which a rounded layer replaces the checkpoint's."""
        found: dict[str, StoredTensor] = {}
        for kind, matrix in layer.matrices.items():
            first, linear = 0, self.plan.layers[index][kind]
            if linear.rows is not None:
                matrix = matrix.taken(np.argsort(linear.rows))
            for prefix, rows in linear.parts:
                part = matrix.rows(slice(first, first + rows))
                found |= self.layout.tensors(prefix, part, linear.matrices)
                first += rows
        for name in sorted(layer.changed):
            first = 0
            for source in self.plan.sources[f"layers.{index}.{name}"]:
                rows = self.checkpoint.shape(source)[0]
                array, dtype = stored_scale(layer.values[name][first : first + rows], self.checkpoint.dtype(source))
                found[source] = StoredTensor.of(array, dtype)
                first += rows
        return found

    def moved_tensors(self, plan: Plan) -> dict[str, StoredTensor]:
        """What is not quantized of the experts that were one tensor; read when it is written."""
        found: dict[str, StoredTensor] = {}
        for name, target in plan.moved.items():
            parameter, dtype, first = self.parameters[name], self.checkpoint.dtype(plan.sources[name][0]), 0
            for source in target.sources:
                if source.name.removesuffix(".weight") not in plan.formats:
                    found[source.name] = _rows_of(parameter, first, source.shape, dtype)
                first += source.shape[0]
        return found


def _rows_of(parameter: Parameter, first: int, shape: tuple[int, ...], dtype: str) -> StoredTensor:
    """Rows of a parameter from `first` on, in the dtype that they were stored in."""

    def load() -> NDArray[Any]:
        values = np.empty(shape, np.float32)
        parameter.read(first, values)
        return stored_scale(values, dtype)[0]

    return StoredTensor(_NAMES[dtype], shape, load)


def _stamp(found: os.stat_result) -> tuple[int, int]:
    return found.st_size, found.st_mtime_ns
