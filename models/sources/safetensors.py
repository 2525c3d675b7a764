"""The tensors of safetensors files, mapped and read on demand."""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from llmc.models.brief import brief, brief_name
from llmc.models.convert import DTYPES
from llmc.models.errors import ModelError
from llmc.models.fields import Fields
from llmc.models.files import has_file, open_file
from llmc.models.sources.base import ArrayTensor, Checkpoint
from llmc.models.sources.mapped import release
from llmc.quantize.checkpoints import CARRIERS, StoredTensor
from llmc.regular_file import JsonError, parse_json

_DTYPES = {name.upper(): dtype for name, dtype in DTYPES.items()}
# Room for 100,000 tensors; as Python objects a header takes up to 30 times its size.
_MAX_HEADER_BYTES = 16 << 20
_MAX_DIMENSIONS, _MAX_DTYPE_LENGTH, _MAX_NAME_BYTES = 8, 16, 255
_AGAIN = "download the checkpoint again"


@dataclass(frozen=True)
class _Entry:
    """A tensor of a file. dtype: safetensors' name. begin, end: byte offsets in the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def _is_plain(name: str) -> bool:
    """Whether a shard may have this name. NUL and lone surrogates, impossible in paths, are not printable."""
    return Path(name).name == name != "" and name.isprintable() and len(name.encode()) <= _MAX_NAME_BYTES


class _File:
    """One mapped safetensors file with a fully checked header."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open_file(path) as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise ModelError(f"{path} does not exist; {_AGAIN}") from None
        except ValueError:
            raise ModelError(f"{path} is empty; {_AGAIN}") from None
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error.strerror}") from error
        self.entries = self._read_header()
        self._check_overlaps()

    def _broken(self, why: str) -> ModelError:
        return ModelError(f"{self.path} is truncated or corrupt ({why}); {_AGAIN}")

    def _read_header(self) -> dict[str, _Entry]:
        size = len(self._map)
        header_bytes = int.from_bytes(self._map[:8], "little")
        if size < 8 or header_bytes > size - 8:
            raise self._broken(f"a header of {header_bytes} bytes in a file of {size}")
        if header_bytes > _MAX_HEADER_BYTES:
            raise self._broken(f"a header of {header_bytes} bytes, more than {_MAX_HEADER_BYTES}")
        try:
            header = parse_json(self._map[8 : 8 + header_bytes])
        except JsonError as error:
            raise self._broken(f"the header is not JSON: {error}") from error
        if not isinstance(header, dict):
            raise self._broken("the header is not a JSON object")
        start = 8 + header_bytes
        return {name: self._entry(name, value, start) for name, value in header.items() if name != "__metadata__"}

    def _check_overlaps(self) -> None:
        """Raises ModelError if a byte belongs to two tensors."""
        by_place = sorted(self.entries.items(), key=lambda item: (item[1].begin, item[1].end))
        for (name, entry), (next_name, next_entry) in pairwise(by_place):
            if next_entry.begin < entry.end:
                raise self._broken(
                    f"tensor {brief_name(next_name)} begins at byte {next_entry.begin}, before tensor "
                    f"{brief_name(name)} ends at {entry.end}"
                )

    def _entry(self, name: str, value: Any, start: int) -> _Entry:
        malformed = self._broken(f"the header's entry of {brief_name(name)} is malformed")
        try:
            dtype, shape, (begin, end) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
        except (KeyError, TypeError, ValueError) as error:
            raise malformed from error
        numbers = (*shape, begin, end)
        if not isinstance(dtype, str) or not all(type(n) is int and 0 <= n < 1 << 63 for n in numbers):
            raise malformed
        if len(shape) > _MAX_DIMENSIONS or len(dtype) > _MAX_DTYPE_LENGTH or not dtype.isprintable():
            raise malformed
        if end < begin or start + end > len(self._map):
            raise self._broken(f"tensor {brief_name(name)} ends at byte {start + end} of {len(self._map)}")
        carrier = CARRIERS.get(dtype)
        if carrier is not None and math.prod(shape) * carrier.itemsize != end - begin:
            raise self._broken(
                f"tensor {brief_name(name)} of shape {list(shape)} and dtype {dtype} has {end - begin} bytes"
            )
        return _Entry(dtype, shape, start + begin, start + end)

    def check_dtype(self, name: str) -> None:
        """Raises ModelError for an unsupported dtype."""
        dtype = self.entries[name].dtype
        if dtype not in _DTYPES:
            raise ModelError(f"{self.path}: tensor {name} has dtype {dtype}, which is not one of {', '.join(_DTYPES)}")

    def load(self, name: str) -> ArrayTensor:
        self.check_dtype(name)
        entry = self.entries[name]
        return ArrayTensor(np.ndarray(entry.shape, _DTYPES[entry.dtype], self._map, entry.begin))

    def release(self) -> None:
        release(self._map)

    def stored(self, name: str) -> StoredTensor:
        """The tensor as bits, of any dtype."""
        entry = self.entries[name]
        carrier = CARRIERS.get(entry.dtype, np.dtype(np.uint8))
        return StoredTensor(entry.dtype, entry.shape, lambda: np.ndarray(entry.shape, carrier, self._map, entry.begin))


def open_safetensors(path: Path) -> dict[str, ArrayTensor]:
    """All tensors of one file by name, not read yet. Raises ModelError."""
    file = _File(path)
    return {name: file.load(name) for name in sorted(file.entries)}


class SafetensorsCheckpoint(Checkpoint):
    """The tensors of a checkpoint directory: model.safetensors, or the shards of model.safetensors.index.json.

    Opening reads headers only. Raises ModelError on a missing, truncated or corrupt file.
    """

    config_name = "config.json"

    def __init__(self, path: Path) -> None:
        self.path = path
        single, index = self.path / "model.safetensors", self.path / "model.safetensors.index.json"
        if has_file(single):
            file = _File(single)
            self._files = dict.fromkeys(file.entries, file)
        elif has_file(index):
            self._files = self._open_shards(index)
        elif any(self.path.glob("pytorch_model*.bin*")):
            raise ModelError(
                f"{self.path} holds pytorch_model.bin, which is not read because pickles can run code; convert it to "
                f"model.safetensors (load it with transformers and save_pretrained)"
            )
        else:
            raise ModelError(f"{self.path} holds neither model.safetensors nor model.safetensors.index.json; {_AGAIN}")

    def _open_shards(self, index: Path) -> dict[str, _File]:
        table = Fields.read(index, _MAX_HEADER_BYTES).raw("weight_map")
        if not isinstance(table, dict) or not table or not all(isinstance(v, str) for v in table.values()):
            raise ModelError(f"{index}: weight_map is not an object of file names; {_AGAIN}")
        shards: dict[str, _File] = {}
        for file_name in sorted(set(table.values())):
            if not _is_plain(file_name):
                raise ModelError(f"{index}: shard {brief(file_name)} is not a plain file name; {_AGAIN}")
            shards[file_name] = _File(self.path / file_name)
        # A tensor known only to a shard is listed as well, so that the weight map can reject it.
        files = {name: shard for shard in shards.values() for name in shard.entries}
        for name, file_name in table.items():
            if name not in shards[file_name].entries:
                raise ModelError(
                    f"{shards[file_name].path} lacks the tensor {brief_name(name)} that {index.name} places in it; "
                    f"{_AGAIN}"
                )
            files[name] = shards[file_name]
        return files

    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._files))

    def _entry(self, name: str) -> _Entry:
        if name not in self._files:
            raise ModelError(f"{self.path} lacks the tensor {name}")
        return self._files[name].entries[name]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name).shape

    def dtype(self, name: str) -> str:
        return self._entry(name).dtype.lower()

    def check_dtype(self, name: str) -> None:
        self._entry(name)
        self._files[name].check_dtype(name)

    def stored_tensors(self) -> dict[str, StoredTensor]:
        """All tensors by name, as bits; reads only headers."""
        return {name: file.stored(name) for name, file in self._files.items()}

    def tensor(self, name: str) -> ArrayTensor:
        """A read-only view of the mapped file."""
        self._entry(name)
        return self._files[name].load(name)

    def release(self) -> None:
        for file in set(self._files.values()):
            file.release()
