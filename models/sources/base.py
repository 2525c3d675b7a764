"""The compiler's interface to a model in any file format."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from llmc.images.form import ImageForm
from llmc.models.config import ModelConfig
from llmc.models.convert import Array, convert
from llmc.models.files import has_file, open_file
from llmc.models.mtp_layout import MtpLayout
from llmc.models.sources.stored import Stored
from llmc.models.weight_map import WeightMap


class Tensor(ABC):
    """A tensor whose values stay in the model's files until read."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]: ...

    @abstractmethod
    def read(self, first: int, out: Array) -> None:
        """Writes rows [first, first + len(out)) to `out` (f32, bf16 or f16, possibly strided), rounded to its dtype.

        Thread-safe. Raises ModelError for invalid values.
        """

    @property
    def stored(self) -> Stored | None:
        """The matrix in a format that kernels read directly; None if only `read` is possible."""
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
    """The tensors of a model, under transformers' names, which weight maps use.

    Opening reads headers only. path, config_name: names of checkpoint and configuration in errors.
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
        """The stored dtype: f32, f16, bf16, or another type's own name in lower case."""

    @abstractmethod
    def check_dtype(self, name: str) -> None:
        """Raises ModelError unless the tensor exists in a dtype that `tensor` reads."""

    @abstractmethod
    def tensor(self, name: str) -> Tensor:
        """The tensor, not read yet. Raises ModelError as `check_dtype` does."""

    @abstractmethod
    def release(self) -> None:
        """Releases memory of read data, which is read again from the files on demand.

        Threads may read concurrently.
        """

    def weight_map(self, config: ModelConfig) -> WeightMap | None:
        """The sources of the model's parameters; None if the family's own map applies."""
        return None

    def adapted(self) -> frozenset[str]:
        """Names of tensors that adapters change; the model must read them."""
        return frozenset()

    def kv_scales(self, kv_dtype: str, kv_heads: Mapping[int, int]) -> list[Array] | None:
        """Per layer, float32 [2, heads]: the divisors of keys and values for a KV cache of this dtype.

        kv_heads: their number, by layer. None if the model states none. Raises ModelError.
        """
        return None

    def called(self, name: str) -> str:
        """The tensor's name in the files."""
        return name

    def notes(self) -> tuple[str, ...]:
        """Sentences on data that is not used exactly as stored."""
        return ()


class ModelFiles(ABC):
    """Files beside the weights that an artifact copies: tokenizer, chat template, generation settings."""

    @abstractmethod
    def has(self, name: str) -> bool:
        """Whether the file exists. Raises ModelError if something else has its name, or its source is damaged."""

    @abstractmethod
    def open(self, name: str) -> BinaryIO:
        """Opens the file at its start. Raises ModelError, and FileNotFoundError if there is none."""

    @abstractmethod
    def place(self, name: str) -> str:
        """The file's name in errors."""


class FolderFiles(ModelFiles):
    """Files in a directory."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def has(self, name: str) -> bool:
        return has_file(self._folder / name)

    def open(self, name: str) -> BinaryIO:
        return open_file(self._folder / name)

    def place(self, name: str) -> str:
        return str(self._folder / name)


class ModelSource(ABC):
    """A model at a path; nothing is read before it is needed. Every method may raise ModelError.

    allow_unknown_config: ignore unknown fields of its configuration instead of refusing them. task, pooling,
    rank_prompt: the requested use, from `task_names`.
    """

    def __init__(
        self,
        path: Path,
        *,
        allow_unknown_config: bool = False,
        task: str = "auto",
        pooling: str = "auto",
        rank_prompt: str = "auto",
    ) -> None:
        self.path = path
        self.allow_unknown_config = allow_unknown_config
        self.task, self.pooling, self.rank_prompt = task, pooling, rank_prompt

    @abstractmethod
    def config(self) -> ModelConfig:
        """Raises ModelError for a missing or malformed field, an unknown one that may matter, or an unsupported
        model."""

    @abstractmethod
    def ignored_config(self) -> tuple[str, ...]:
        """Sentences on what the model's configuration says and llmc does not do."""

    @property
    @abstractmethod
    def is_quantized(self) -> bool:
        """Whether some tensors may be quantized; otherwise `Tensor.stored` need not be tried."""

    def check_adapters(self) -> None:  # noqa: B027, as most models take them
        """Raises ModelError if what adapters add to a checkpoint's weights cannot be added to these."""

    @abstractmethod
    def checkpoint(self) -> Checkpoint:
        """The model's tensors, with every header checked."""

    def mtp_layout(self) -> MtpLayout | None:
        """Names of its layer for multi-token prediction in `mtp_checkpoint`; None if llmc knows none."""
        return None

    def mtp_checkpoint(self) -> Checkpoint:
        """The model's tensors, with those of that layer."""
        return self.checkpoint()

    def tower_config(self) -> ModelConfig | None:
        """The configuration of the model that makes rows of its images; None if llmc sees no images with it."""
        return None

    def placed_config(self) -> ModelConfig:
        """The configuration of a text model in whose texts rows of images take the place of tokens."""
        return replace(self.config(), states="placed")

    def tower_checkpoint(self) -> Checkpoint:
        """The tensors of that model, among others."""
        return self.checkpoint()

    def image_form(self) -> ImageForm | None:
        """What images become before this model reads them; None unless it is a tower."""
        return None

    @abstractmethod
    def model_files(self) -> ModelFiles: ...

    @abstractmethod
    def weight_files(self) -> Iterator[Path]:
        """Files that hold the tensors, for the key of packed weights."""

    @abstractmethod
    def all_files(self) -> Iterator[Path]:
        """All files that affect an artifact of the model, for the key of a cached artifact."""
