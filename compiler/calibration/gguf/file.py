"""Writes the file: metadata, then tensors one by one, with only one in memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.compiler.calibration.gguf.metadata import add_config, architecture_of, rope_factors
from llmc.compiler.calibration.gguf.tokenizer import add_tokenizer
from llmc.compiler.config import CompileError
from llmc.distribution import NAME
from llmc.models.config import ModelConfig
from llmc.models.sources.base import ModelFiles
from llmc.models.sources.gguf.architecture import ROPE_FACTORS, Architecture
from llmc.models.sources.gguf.tensor import HeadRows
from llmc.quantize.checkpoints import StoredTensor
from llmc.quantize.checkpoints.floats import widened

_FILE_TYPES = {"Q8_0": "MOSTLY_Q8_0", "Q4_0": "MOSTLY_Q4_0", "Q4_1": "MOSTLY_Q4_1", "MXFP4": "MOSTLY_MXFP4_MOE"}
_SUFFIX = ".weight"


def check_writable(model: ModelConfig) -> None:
    """Raises CompileError if the package is missing or the format cannot represent the model."""
    try:
        import gguf  # noqa: F401
    except ImportError:
        raise CompileError(f"--format gguf needs the gguf package; pip install '{NAME}[gguf]'") from None
    architecture_of(model)


def write_gguf(
    path: Path,
    name: str,
    model: ModelConfig,
    files: ModelFiles,
    names: Sequence[str],
    tensors: Mapping[str, StoredTensor],
    types: Mapping[str, str],
    on_tensor: Callable[[int, int], None],
) -> int:
    """Writes a GGUF file, whole or not at all; returns the bytes of all tensors.

    names: transformers' names of the model's tensors. types: GGUF types of quantized layers, by prefix.
    """
    from gguf import GGML_QUANT_VERSION, GGUFWriter, LlamaFileType

    architecture = architecture_of(model)
    partial = path.with_name(f"{path.name}.partial")
    writer = GGUFWriter(partial, architecture.name)
    writer.add_type("model")
    writer.add_name(name)
    add_config(writer, model)
    writer.add_quantization_version(GGML_QUANT_VERSION)
    writer.add_file_type(LlamaFileType[_FILE_TYPES[next(iter(types.values()))]])
    add_tokenizer(writer, files, model)
    factors = rope_factors(model)
    wanted = [_Entry(source, tensors[source], types.get(source.removesuffix(_SUFFIX)), architecture, model)
              for source in names]  # fmt: skip
    for entry in wanted:
        entry.describe(writer)
    if factors is not None:
        writer.add_tensor_info(ROPE_FACTORS, factors.shape, factors.dtype, factors.nbytes)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for done, entry in enumerate(wanted):
            on_tensor(done, len(wanted))
            writer.write_tensor_data(entry.data())
        if factors is not None:
            writer.write_tensor_data(factors)
        writer.close()
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.rename(path)
    finally:
        partial.unlink(missing_ok=True)
    on_tensor(len(wanted), len(wanted))
    return sum(entry.nbytes for entry in wanted)


class _Entry:
    """A tensor of the file. type: of its blocks; None for plain numbers, with vectors in F32."""

    def __init__(
        self, source: str, stored: StoredTensor, type: str | None, architecture: Architecture, model: ModelConfig
    ) -> None:
        self._stored, self._type, self._model = stored, type, model
        self.name = architecture.their_name(source)
        self._paired = architecture.has_paired_rows(self.name)
        self._widened = type is None and len(stored.shape) == 1

    @property
    def _carrier(self) -> np.dtype[Any]:
        if self._widened:
            return np.dtype(np.float32)
        return np.dtype({"F32": np.float32, "F16": np.float16, "BF16": np.uint16, "U8": np.uint8}[self._stored.dtype])

    @property
    def nbytes(self) -> int:
        return int(np.prod(self._stored.shape)) * self._carrier.itemsize

    def describe(self, writer: Any) -> None:
        from gguf import GGMLQuantizationType

        name = "F32" if self._widened else self._type or self._stored.dtype
        writer.add_tensor_info(
            self.name, self._stored.shape, self._carrier, self.nbytes, raw_dtype=GGMLQuantizationType[name]
        )

    def data(self) -> NDArray[Any]:
        found = self._stored.load()
        if self._widened:
            found = widened(self._stored.dtype, found)
        if not self._paired:
            return found
        rows = HeadRows(self._model.head_dim, self._model.rope.dim).stored(np.arange(len(found)))
        ordered = np.empty_like(found)
        ordered[rows] = found
        return ordered
