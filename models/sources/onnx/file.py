"""One mapped ONNX file, and its external data files; every location is checked before reading."""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from llmc.models.brief import brief, brief_name
from llmc.models.convert import Array
from llmc.models.errors import ModelError
from llmc.models.files import open_file, open_followed
from llmc.models.sources.mapped import release
from llmc.models.sources.onnx.blocks import BlockMatrix, block_matrices
from llmc.models.sources.onnx.wire import read_skeleton

if TYPE_CHECKING:
    import onnx

DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype(np.float32),
    2: np.dtype(np.uint8),
    3: np.dtype(np.int8),
    6: np.dtype(np.int32),
    7: np.dtype(np.int64),
    9: np.dtype(np.bool_),
    10: np.dtype(np.float16),
    11: np.dtype(np.float64),
    16: np.dtype(ml_dtypes.bfloat16),
}
"""By number in TensorProto."""
OLDEST_OPSET = 13
_EXTERNAL = 1
_AGAIN = "export the model again, or download it again"
_MAX_DIMENSIONS = 8


@dataclass(frozen=True)
class _Place:
    """Bytes [begin, end) of a mapped file. path: of the file."""

    path: Path
    data: mmap.mmap
    begin: int
    end: int


SENTENCE = "sentence_embedding"
_POOLED = (SENTENCE, "pooler_output")
"""Outputs that are made of another output, by a pooling that llmc has of its own."""


class OnnxFile:
    """A model, and the locations of its tensors.

    model: the protobuf, without data of large tensors. opset: of ONNX's own operators. blocks: integer matrices,
    presented with shape and dtype of float initializers.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._maps: dict[Path, mmap.mmap] = {path: _map(path, followed=True)}
        skeleton = read_skeleton(memoryview(self._maps[path]), str(path))
        self.model = _parsed(skeleton.model, path)
        self.opset = self._opset()
        self.initializers: dict[str, onnx.TensorProto] = {}
        self.blocks: Mapping[str, BlockMatrix] = {}
        self._places: dict[str, _Place] = {}
        for tensor in self.model.graph.initializer:
            self._add(tensor, skeleton.places.get(tensor.name))
        self._take_constants()
        self.blocks = block_matrices(self)

    @property
    def output_names(self) -> tuple[str, ...]:
        return tuple(value.name for value in self.model.graph.output)

    @property
    def read_outputs(self) -> tuple[str, ...]:
        """The outputs that are read: those that are pooled from others only if there are no others."""
        return tuple(name for name in self.output_names if name not in _POOLED) or self.output_names

    def _opset(self) -> int:
        import onnx

        versions = [entry.version for entry in self.model.opset_import if entry.domain in ("", "ai.onnx")]
        if len(versions) != 1:
            raise self._wrong("it does not say which opset of ONNX it uses")
        newest = onnx.defs.onnx_opset_version()
        if not OLDEST_OPSET <= versions[0] <= newest:
            raise ModelError(
                f"{self.path} uses opset {versions[0]} of ONNX, and llmc reads {OLDEST_OPSET} to {newest}; export the "
                "model again with one of these"
            )
        return int(versions[0])

    def _take_constants(self) -> None:
        """Makes initializers of matrices that are constants of nodes."""
        graph = self.model.graph
        for i in reversed(range(len(graph.node))):
            node = graph.node[i]
            value = next((a.t for a in node.attribute if node.op_type == "Constant" and a.name == "value"), None)
            if value is None or len(value.dims) != 2 or len(node.output) != 1:
                continue
            tensor = graph.initializer.add()
            tensor.CopyFrom(value)
            tensor.name = node.output[0]
            self._add(tensor, None)
            del graph.node[i]

    def _wrong(self, why: str) -> ModelError:
        return ModelError(f"{self.path} is not an ONNX model that can be read ({why}); {_AGAIN}")

    def _add(self, tensor: onnx.TensorProto, raw: tuple[int, int] | None) -> None:
        name = tensor.name
        if not name or name in self.initializers:
            raise self._wrong(f"two tensors are called {brief(name)}" if name else "a tensor has no name")
        called = f"tensor {brief_name(name)}"
        if len(tensor.dims) > _MAX_DIMENSIONS or min(tensor.dims, default=1) < 0:
            raise self._wrong(f"{called} has the shape {brief(list(tensor.dims))}")
        self.initializers[name] = tensor
        if tensor.data_location == _EXTERNAL:
            self._places[name] = self._external(tensor, called)
        elif raw is not None:
            self._places[name] = _Place(self.path, self._maps[self.path], *raw)
        else:
            return
        if tensor.data_type not in DTYPES:
            raise ModelError(
                f"{self.path}: {called} is of the ONNX type {tensor.data_type}, which is not supported; export the "
                "model in float32, float16 or bfloat16"
            )
        place, wanted = self._places[name], math.prod(tensor.dims) * DTYPES[tensor.data_type].itemsize
        if place.end - place.begin != wanted:
            raise ModelError(
                f"{place.path} has {place.end - place.begin} bytes of {called}, whose shape "
                f"{brief(list(tensor.dims))} takes {wanted}; {_AGAIN}"
            )

    def _external(self, tensor: onnx.TensorProto, called: str) -> _Place:
        entries = {entry.key: entry.value for entry in tensor.external_data}
        location = PurePosixPath(entries.get("location", ""))
        if not location.parts or location.is_absolute() or ".." in location.parts or "\0" in str(location):
            raise self._wrong(f"{called} lies in {brief(str(location))}, which is not a file beside the model")
        path = self.path.parent / location
        if path not in self._maps:
            try:
                self._maps[path] = _map(path)
            except FileNotFoundError:
                raise ModelError(
                    f"{self.path} keeps its weights in {path}, which does not exist; put that file beside the model"
                ) from None
        size = len(self._maps[path])
        numbers = [entries.get(key, "") for key in ("offset", "length")]
        if not all(text.isdecimal() and len(text) < 19 for text in numbers if text):
            raise self._wrong(f"{called} lies at {brief(numbers)}")
        begin = int(numbers[0] or 0)
        end = begin + int(numbers[1]) if numbers[1] else size
        if not begin <= end <= size:
            raise ModelError(
                f"{path} has {size} bytes, but {called} lies at {begin} to {end}: it is truncated; {_AGAIN}"
            )
        return _Place(path, self._maps[path], begin, end)

    def shape(self, name: str) -> tuple[int, ...]:
        block = self.blocks.get(name)
        return tuple(self.initializers[name].dims) if block is None else block.shape

    def dtype(self, name: str) -> np.dtype[Any] | None:
        """The dtype; None for an unsupported type."""
        if name in self.blocks:
            return self.blocks[name].scales.dtype
        return DTYPES.get(self.initializers[name].data_type)

    def array(self, name: str) -> Array:
        """The values; for large tensors a view of the file. Raises ModelError."""
        import onnx

        place = self._places.get(name)
        if place is not None:
            dtype = DTYPES[self.initializers[name].data_type]
            count = (place.end - place.begin) // dtype.itemsize
            return np.frombuffer(place.data, dtype, count, place.begin).reshape(self.shape(name))
        try:
            found: Array = np.asarray(onnx.numpy_helper.to_array(self.initializers[name]))
        except Exception as error:
            raise self._wrong(f"tensor {brief_name(name)}: {brief(str(error))}") from None
        return found

    def files(self) -> tuple[Path, ...]:
        """The model file, then its data files."""
        return tuple(self._maps)

    def release(self) -> None:
        for data in self._maps.values():
            release(data)


def _map(path: Path, *, followed: bool = False) -> mmap.mmap:
    """followed: the path may be a link to anywhere, because a user gave it."""
    try:
        with open_followed(path) if followed else open_file(path) as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        if not followed:
            raise
        raise ModelError(f"{path} does not exist; name the .onnx file that is there") from None
    except ValueError:
        raise ModelError(f"{path} is empty; {_AGAIN}") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error


def _parsed(data: bytes, path: Path) -> onnx.ModelProto:
    """The parsed model with its local functions inlined. Raises ModelError."""
    import onnx
    import onnx.inliner

    model = onnx.ModelProto()
    try:
        model.ParseFromString(data)
        if len(model.functions):
            model = onnx.inliner.inline_local_functions(model)
    except Exception as error:
        # Exceptions of Protobuf and ONNX, which share no base.
        raise ModelError(f"{path} is not an ONNX model ({brief(str(error))}); {_AGAIN}") from None
    return model
