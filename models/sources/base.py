"""What the compiler asks of a model, whatever format it lies in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from llmc.models.config import ModelConfig
from llmc.models.convert import Array, convert
from llmc.models.files import has_file, open_file
from llmc.models.sources.stored import Stored
from llmc.models.weight_map import WeightMap


class Tensor(ABC):
    """A tensor whose values are still in the model's files."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]: ...

    @abstractmethod
    def read(self, first: int, out: Array) -> None:
        """Writes rows [first, first + len(out)) to `out`, f32, bf16 or f16 and maybe strided, rounded to its dtype.

        Threads may read at once. Raises ModelError for values that are none.
        """

    @property
    def stored(self) -> Stored | None:
        """The same matrix in a format that kernels read; None where `read` is all there is."""
        return None


class ArrayTensor(Tensor):
    """An f32, f16 or bf16 array, in memory or mapped."""

    def __init__(self, array: Array) -> None:
        self.array = array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    def read(self, first: int, out: Array) -> None:
        convert(self.array[first : first + len(out)], out)


class Checkpoint(ABC):
    """The tensors of a model under the names that weight maps use, which are those of transformers.

    Opening one reads headers only. path: what errors call it. config_name: what errors call its configuration.
    """

    path: Path
    config_name: str

    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """Names of all tensors, sorted."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]: ...

    @abstractmethod
    def dtype(self, name: str) -> str:
        """How the tensor is stored: f32, f16, bf16, or the format's own name of another type in lower case."""

    @abstractmethod
    def check_dtype(self, name: str) -> None:
        """Raises ModelError unless the tensor is there in a type that `tensor` reads."""

    @abstractmethod
    def tensor(self, name: str) -> Tensor:
        """The tensor, not read yet. Raises ModelError, see `check_dtype`."""

    @abstractmethod
    def release(self) -> None:
        """Gives back the memory of what was read, which is read from the files again when it is asked for.

        Threads may read at the same time.
        """

    def weight_map(self, config: ModelConfig) -> WeightMap | None:
        """Where it has the parameters of the model; None where that is as the family says."""
        return None

    def adapted(self) -> frozenset[str]:
        """Names of tensors that adapters change: the model must read them."""
        return frozenset()

    def kv_scales(self, kv_dtype: str, num_layers: int, num_kv_heads: int) -> Array | None:
        """float32 [layers, 2, heads]: what keys, and values, of a KV cache of this type are divided by; None where the
        model states nothing of it. Raises ModelError."""
        return None

    def called(self, name: str) -> str:
        """What the files call the tensor."""
        return name

    def notes(self) -> tuple[str, ...]:
        """What of the files is not taken as it is, in sentences."""
        return ()


class ModelFiles(ABC):
    """The files beside the weights that an artifact copies: tokenizer, chat template, generation settings."""

    @abstractmethod
    def has(self, name: str) -> bool:
        """Raises ModelError where something else has the name, or what the file is made of is damaged."""

    @abstractmethod
    def open(self, name: str) -> BinaryIO:
        """The file to read from, at its start. Raises ModelError, and FileNotFoundError where there is none."""

    @abstractmethod
    def place(self, name: str) -> str:
        """What errors call the file."""


class FolderFiles(ModelFiles):
    """Files that lie in a directory."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def has(self, name: str) -> bool:
        return has_file(self._folder / name)

    def open(self, name: str) -> BinaryIO:
        return open_file(self._folder / name)

    def place(self, name: str) -> str:
        return str(self._folder / name)


class ModelSource(ABC):
    """A model at a path; nothing is read before it is asked for. Every method may raise ModelError.

    allow_unknown_config: fields of its configuration that llmc does not know are ignored, not refused. task, pooling:
    what the model is to do, of `task_names`.
    """

    def __init__(
        self, path: Path, *, allow_unknown_config: bool = False, task: str = "auto", pooling: str = "auto"
    ) -> None:
        self.path = path
        self.allow_unknown_config = allow_unknown_config
        self.task, self.pooling = task, pooling

    @abstractmethod
    def config(self) -> ModelConfig:
        """Raises ModelError on a missing or malformed field, on one that may matter and is not known, and on a model
        that is not supported."""

    @abstractmethod
    def ignored_config(self) -> tuple[str, ...]:
        """Sentences about what the configuration says that is not known."""

    @property
    @abstractmethod
    def is_quantized(self) -> bool:
        """Whether some of its tensors may be; without them `Tensor.stored` need not be looked for."""

    @abstractmethod
    def checkpoint(self) -> Checkpoint:
        """Its tensors, every header checked."""

    @abstractmethod
    def model_files(self) -> ModelFiles: ...

    @abstractmethod
    def weight_files(self) -> Iterator[Path]:
        """Files that hold the tensors, for the key of packed weights."""

    @abstractmethod
    def all_files(self) -> Iterator[Path]:
        """Files that have any part in an artifact of the model, for the key of a cached one."""
