"""A mapped file of tensors: what all formats have in common."""

from __future__ import annotations

import mmap
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from llmc.models.convert import DTYPES
from llmc.models.errors import ModelError
from llmc.models.files import open_file
from llmc.models.sources.base import ArrayTensor
from llmc.models.sources.mapped import release
from llmc.quantize.checkpoints import CARRIERS, StoredTensor

AGAIN = "download the checkpoint again"
MOST_ELEMENTS = 1 << 59
"""No array has more, of 8 bytes each, even if one of its sizes is 0 and the others count alone."""
_DTYPES = {name.upper(): dtype for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of a file. dtype: safetensors' name. begin, end: byte offsets in the file.

    strides: bytes from one number to the next, by dimension; None if all numbers follow one another.
    """

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int
    strides: tuple[int, ...] | None = None


class TensorFile(ABC):
    """Opening maps the file and checks all that it says of its tensors. Raises ModelError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open_file(path) as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise ModelError(f"{path} does not exist; {AGAIN}") from None
        except ValueError:
            raise ModelError(f"{path} is empty; {AGAIN}") from None
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error.strerror}") from error
        self.entries = self._read_entries()

    @abstractmethod
    def _read_entries(self) -> Mapping[str, TensorEntry]:
        """All tensors by name, with every byte that they need inside the file. Raises ModelError."""

    def _broken(self, why: str) -> ModelError:
        return ModelError(f"{self.path} is truncated or corrupt ({why}); {AGAIN}")

    def check_dtype(self, name: str) -> None:
        """Raises ModelError for an unsupported dtype."""
        dtype = self.entries[name].dtype
        if dtype not in _DTYPES:
            raise ModelError(f"{self.path}: tensor {name} has dtype {dtype}, which is not one of {', '.join(_DTYPES)}")

    def load(self, name: str) -> ArrayTensor:
        """A read-only view of the mapped file."""
        self.check_dtype(name)
        entry = self.entries[name]
        return ArrayTensor(np.ndarray(entry.shape, _DTYPES[entry.dtype], self._map, entry.begin, entry.strides))

    def release(self) -> None:
        release(self._map)

    def stored(self, name: str) -> StoredTensor:
        """The tensor as bits, of any dtype."""
        entry = self.entries[name]
        carrier = CARRIERS.get(entry.dtype, np.dtype(np.uint8))
        place = (self._map, entry.begin, entry.strides)
        return StoredTensor(entry.dtype, entry.shape, lambda: np.ndarray(entry.shape, carrier, *place))
