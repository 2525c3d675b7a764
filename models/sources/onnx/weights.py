"""The tensors of a recovered model: rows of initializers, or values that the graph computes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from llmc.models.convert import DTYPES, Array
from llmc.models.errors import ModelError
from llmc.models.sources.base import ArrayTensor, Checkpoint, Tensor
from llmc.models.sources.onnx.blocks import BLOCK_TYPES, BlockMatrix
from llmc.models.sources.onnx.file import OnnxFile
from llmc.models.sources.onnx.rows import Matrix
from llmc.models.sources.reordered import RowsTaken
from llmc.models.sources.reshaped import Transposed

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, eq=False)
class Weight:
    """Rows of a matrix [rows, columns]; None for all."""

    matrix: Matrix
    rows: Array | None = None

    @property
    def shape(self) -> tuple[int, int]:
        count = self.matrix.shape[0] if self.rows is None else len(self.rows)
        return count, self.matrix.shape[1]

    def blocks(self, file: OnnxFile) -> BlockMatrix | None:
        """The integer matrix, if it is one."""
        return None if self.matrix.name is None else file.blocks.get(self.matrix.name)

    def stored(self, file: OnnxFile) -> Array:
        """The float matrix as stored."""
        if self.matrix.array is not None:
            return self.matrix.array
        assert self.matrix.name is not None
        return file.array(self.matrix.name)

    def tensor(self, file: OnnxFile) -> Tensor:
        rows = None if self.rows is None or np.array_equal(self.rows, np.arange(self.matrix.shape[0])) else self.rows
        blocks = self.blocks(file)
        if blocks is not None and not self.matrix.turned:
            return blocks.tensor(None if rows is None else rows.astype(np.int64))
        whole: Tensor = ArrayTensor(self.stored(file)) if blocks is None else blocks.tensor(None)
        if self.matrix.turned:
            whole = Transposed(whole)
        if rows is None:
            return whole
        return RowsTaken(whole, None, rows.astype(np.int32))


class OnnxCheckpoint(Checkpoint):
    """tensors: rows of matrices or vectors, by the names of `families/onnx.py`."""

    config_name = "its graph"

    def __init__(self, file: OnnxFile, tensors: dict[str, Weight | Array]) -> None:
        self.path, self._file, self._tensors = file.path, file, tensors

    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._tensors))

    def _find(self, name: str) -> Weight | Array:
        if name not in self._tensors:
            raise ModelError(f"{self.path} lacks the tensor {name}")
        return self._tensors[name]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._find(name).shape

    def dtype(self, name: str) -> str:
        found = self._find(name)
        if isinstance(found, Weight) and (blocks := found.blocks(self._file)) is not None:
            return blocks.type_name
        dtype = found.stored(self._file).dtype if isinstance(found, Weight) else found.dtype
        return _NAMES.get(dtype, str(dtype))

    def check_dtype(self, name: str) -> None:
        if self.dtype(name) not in (*DTYPES, *BLOCK_TYPES):
            raise ModelError(
                f"{self.path}: {self.called(name)} is of type {self.dtype(name)}; export the model in float32, float16 "
                "or bfloat16"
            )

    def tensor(self, name: str) -> Tensor:
        self.check_dtype(name)
        found = self._find(name)
        return found.tensor(self._file) if isinstance(found, Weight) else ArrayTensor(found)

    def release(self) -> None:
        self._file.release()

    def called(self, name: str) -> str:
        found = self._find(name)
        stored = found.matrix.name if isinstance(found, Weight) else None
        return name if stored is None else f"{stored} ({name})"
