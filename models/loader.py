"""Reads safetensors checkpoints: memory-mapped, as numpy arrays; nothing is read before it is asked for."""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llmc.models.config import ModelConfig
from llmc.models.convert import DTYPES, Array, convert
from llmc.models.errors import ModelError
from llmc.models.fields import Fields
from llmc.models.registry import get_family

_DTYPES = {name.upper(): dtype for name, dtype in DTYPES.items()}
_MAX_HEADER_BYTES = 100 << 20
_AGAIN = "download the checkpoint again"


@dataclass(frozen=True)
class _Entry:
    """A tensor of a file. dtype: safetensors' name. begin, end: bytes from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class _File:
    """One mapped safetensors file, its header fully checked."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise ModelError(f"{path} does not exist; {_AGAIN}") from None
        except ValueError:
            raise ModelError(f"{path} is empty; {_AGAIN}") from None
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error.strerror}") from error
        self.entries = self._read_header()

    def _broken(self, why: str) -> ModelError:
        return ModelError(f"{self.path} is truncated or corrupt ({why}); {_AGAIN}")

    def _read_header(self) -> dict[str, _Entry]:
        size = len(self._map)
        header_bytes = int.from_bytes(self._map[:8], "little")
        if size < 8 or header_bytes > min(size - 8, _MAX_HEADER_BYTES):
            raise self._broken(f"a header of {header_bytes} bytes in a file of {size}")
        try:
            header = json.loads(self._map[8 : 8 + header_bytes].decode("utf-8"))
        except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
            raise self._broken("the header is not JSON") from error
        if not isinstance(header, dict):
            raise self._broken("the header is not a JSON object")
        start = 8 + header_bytes
        return {name: self._entry(name, value, start) for name, value in header.items() if name != "__metadata__"}

    def _entry(self, name: str, value: Any, start: int) -> _Entry:
        try:
            dtype, shape, (begin, end) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
        except (KeyError, TypeError, ValueError) as error:
            raise self._broken(f"the header's entry of {name} is malformed") from error
        numbers = (*shape, begin, end)
        if not isinstance(dtype, str) or not all(type(n) is int and n >= 0 for n in numbers):
            raise self._broken(f"the header's entry of {name} is malformed")
        if end < begin or start + end > len(self._map):
            raise self._broken(f"tensor {name} ends at byte {start + end} of {len(self._map)}")
        if dtype in _DTYPES and math.prod(shape) * _DTYPES[dtype].itemsize != end - begin:
            raise self._broken(f"tensor {name} of shape {list(shape)} and dtype {dtype} has {end - begin} bytes")
        return _Entry(dtype, shape, start + begin, start + end)

    def load(self, name: str) -> Array:
        entry = self.entries[name]
        if entry.dtype not in _DTYPES:
            raise ModelError(
                f"{self.path}: tensor {name} has dtype {entry.dtype}, which is not one of {', '.join(_DTYPES)}"
            )
        return np.ndarray(entry.shape, _DTYPES[entry.dtype], self._map, entry.begin)


class Checkpoint:
    """The tensors of a checkpoint directory: model.safetensors, or the shards of model.safetensors.index.json.

    Opening reads headers only. Raises ModelError on a missing, truncated or corrupt file.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise ModelError(f"{self.path} is not a directory; pass the directory of a Hugging Face checkpoint")
        single, index = self.path / "model.safetensors", self.path / "model.safetensors.index.json"
        if single.exists():
            file = _File(single)
            self._files = dict.fromkeys(file.entries, file)
        elif index.exists():
            self._files = self._open_shards(index)
        elif any(self.path.glob("pytorch_model*.bin*")):
            raise ModelError(
                f"{self.path} holds pytorch_model.bin, which is not read because pickles can run code; convert it to "
                f"model.safetensors (load it with transformers and save_pretrained)"
            )
        else:
            raise ModelError(f"{self.path} holds neither model.safetensors nor model.safetensors.index.json; {_AGAIN}")

    def _open_shards(self, index: Path) -> dict[str, _File]:
        table = Fields.read(index).raw("weight_map")
        if not isinstance(table, dict) or not table or not all(isinstance(v, str) for v in table.values()):
            raise ModelError(f"{index}: weight_map is not an object of file names; {_AGAIN}")
        shards: dict[str, _File] = {}
        for file_name in sorted(set(table.values())):
            if Path(file_name).name != file_name:
                raise ModelError(f"{index}: shard {file_name!r} is not a plain file name")
            shards[file_name] = _File(self.path / file_name)
        # A tensor that only a shard knows is listed too, so that the weight map can object to it.
        files = {name: shard for shard in shards.values() for name in shard.entries}
        for name, file_name in table.items():
            if name not in shards[file_name].entries:
                raise ModelError(f"{shards[file_name].path} lacks the tensor {name} that {index.name} places in it")
            files[name] = shards[file_name]
        return files

    def names(self) -> tuple[str, ...]:
        """Names of all tensors, sorted."""
        return tuple(sorted(self._files))

    def _entry(self, name: str) -> _Entry:
        if name not in self._files:
            raise ModelError(f"{self.path} lacks the tensor {name}")
        return self._files[name].entries[name]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name).shape

    def dtype(self, name: str) -> str:
        """One of f32, f16, bf16, or another safetensors dtype in lower case."""
        return self._entry(name).dtype.lower()

    def load(self, name: str) -> Array:
        """The tensor, a read-only view of the mapped file. Raises ModelError on an unsupported dtype."""
        self._entry(name)
        return self._files[name].load(name)


@dataclass(frozen=True)
class Parameter:
    """A parameter of the model whose value is still in the checkpoint.

    dtype: what it is stored in, "f32" or "bf16". parts: f32, f16 or bf16 arrays, one below the other.
    """

    name: str
    dtype: str
    parts: tuple[Array, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(len(part) for part in self.parts), *self.parts[0].shape[1:])

    def read(self, first: int, out: Array) -> None:
        """Writes rows [first, first + len(out)) to `out`, which may be strided, converted to out's dtype."""
        start = 0
        for part in self.parts:
            begin, end = max(first, start), min(first + len(out), start + len(part))
            if begin < end:
                convert(part[begin - start : end - start], out[begin - first : end - first])
            start += len(part)

    def value(self) -> Array:
        """The whole parameter in its dtype, in memory of its own."""
        out = np.empty(self.shape, DTYPES[self.dtype])
        self.read(0, out)
        return out


def load_parameters(config: ModelConfig, checkpoint: Checkpoint, act_dtype: str) -> Iterator[Parameter]:
    """Every parameter in order; the buffer rope.cos_sin is not among them.

    Linear and embedding weights are stored in act_dtype ("f32" or "bf16"), norms and biases in float32. Raises
    ModelError before the first one if the checkpoint does not fit.
    """
    weights = get_family(config.model_type).weight_map(config)
    weights.check({name: checkpoint.shape(name) for name in checkpoint.names()}, str(checkpoint.path))
    for target in weights.targets:
        dtype = act_dtype if target.dtype == "act" else "f32"
        yield Parameter(target.name, dtype, tuple(checkpoint.load(source.name) for source in target.sources))
