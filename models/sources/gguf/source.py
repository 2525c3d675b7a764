"""A model in GGUF: its metadata, tensors and tokenizer as the compiler asks for them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import numpy as np

from llmc.models.config import ModelConfig
from llmc.models.convert import DTYPES, Array
from llmc.models.errors import ModelError
from llmc.models.sources.base import Checkpoint, ModelFiles, ModelSource, Tensor
from llmc.models.sources.gguf.architectures import ROPE_FACTORS, Architecture, Place, get_architecture
from llmc.models.sources.gguf.config import read_config
from llmc.models.sources.gguf.header import Entry, GgufFile
from llmc.models.sources.gguf.metadata import Metadata
from llmc.models.sources.gguf.shards import open_shards, shard_paths
from llmc.models.sources.gguf.tensor import HeadRows, open_tensor
from llmc.models.sources.gguf.tokenizer.files import TokenizerFiles
from llmc.models.sources.gguf.tokenizer.vocabulary import has_tokenizer, read_vocabulary
from llmc.models.sources.reshaped import Shifted
from llmc.models.tokenizers.vocabulary import Vocabulary

_EMBEDDING = "token_embd.weight"


class GgufCheckpoint(Checkpoint):
    """The tensors of a model's files. rows: of q and k, where the file has them in another order."""

    config_name = "its metadata"

    def __init__(
        self, path: Path, tensors: dict[str, GgufFile], architecture: Architecture, rows: HeadRows | None
    ) -> None:
        self.path = path
        self._architecture, self._rows = architecture, rows
        self._places = {
            ours: (place, file)
            for name, file in tensors.items()
            if name != ROPE_FACTORS
            for ours, place in architecture.places(name, file.tensors[name].shape)
        }

    def _at(self, name: str) -> tuple[Place, GgufFile]:
        if name not in self._places:
            raise ModelError(f"{self.path} lacks the tensor {self.called(name)}")
        return self._places[name]

    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._places))

    def _entry(self, name: str) -> Entry:
        place, file = self._at(name)
        return file.tensors[place.name]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._at(name)[0].shape(self._entry(name).shape)

    def dtype(self, name: str) -> str:
        return self._entry(name).type.name.lower()

    def check_dtype(self, name: str) -> None:
        # Every type that a header may have is read.
        self._entry(name)

    def tensor(self, name: str) -> Tensor:
        place, file = self._at(name)
        tensor = open_tensor(file, place, self._rows if self._architecture.has_paired_rows(place.name) else None)
        plus = self._architecture.norm_plus
        return Shifted(tensor, -plus) if plus and name.endswith("norm.weight") else tensor

    def release(self) -> None:
        for file in {file for _, file in self._places.values()}:
            file.release()

    def called(self, name: str) -> str:
        return self._architecture.their_name(name)


class GgufSource(ModelSource):
    """A GGUF file, or the first of several."""

    @cached_property
    def _files(self) -> tuple[GgufFile, ...]:
        return open_shards(self.path)

    @cached_property
    def _tensors(self) -> dict[str, GgufFile]:
        """The file of every tensor."""
        return {name: file for file in self._files for name in file.tensors}

    @property
    def _metadata(self) -> Metadata:
        return self._files[0].metadata

    @cached_property
    def _architecture(self) -> Architecture:
        name = self._metadata.text("general.architecture")
        experts = self._metadata.integer(f"{name}.expert_count", 0, minimum=0)
        return get_architecture(name, str(self.path), experts)

    @cached_property
    def _vocabulary(self) -> Vocabulary | None:
        if not has_tokenizer(self._metadata):
            return None
        return read_vocabulary(self._metadata, self._shapes().get(_EMBEDDING, (0,))[0])

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: file.tensors[name].shape for name, file in self._tensors.items()}

    @cached_property
    def _config(self) -> tuple[ModelConfig, tuple[str, ...]]:
        """(the configuration, what of the metadata is ignored)."""
        architecture, vocabulary = self._architecture, self._vocabulary
        ends, bos = (vocabulary.ends, vocabulary.bos) if vocabulary is not None else ((), None)
        return read_config(
            self._metadata,
            architecture,
            self._shapes(),
            self._dtype(),
            ends,
            bos,
            self._rope_factors(),
            allow_unknown=self.allow_unknown_config,
        )

    def config(self) -> ModelConfig:
        return self._config[0]

    def ignored_config(self) -> tuple[str, ...]:
        return self._config[1]

    @property
    def is_quantized(self) -> bool:
        return True

    def _dtype(self) -> str:
        """Of the type that most elements have; what is quantized has more bits than bf16 at most."""
        elements: Counter[str] = Counter()
        for name, file in self._tensors.items():
            entry = file.tensors[name]
            elements[entry.type.name.lower()] += math.prod(entry.shape)
        most = max(elements, key=lambda name: elements[name], default="f32")
        return most if most in DTYPES else "bf16"

    def _rope_factors(self) -> Array | None:
        file = self._tensors.get(ROPE_FACTORS)
        if file is None:
            return None
        shape = file.tensors[ROPE_FACTORS].shape
        # No head is as large; the shape is checked before anything of its size is made.
        if len(shape) != 1 or shape[0] > 1 << 15:
            raise ModelError(f"{file.path}: tensor {ROPE_FACTORS} has shape {list(shape)}, which is no list of factors")
        factors = np.empty(shape, np.float32)
        open_tensor(file, Place(ROPE_FACTORS)).read(0, factors)
        return factors

    def checkpoint(self) -> GgufCheckpoint:
        config = self.config()
        rows = HeadRows(config.head_dim, config.rope.dim)
        return GgufCheckpoint(self.path, self._tensors, self._architecture, rows)

    def model_files(self) -> ModelFiles:
        return TokenizerFiles(self._metadata, self._vocabulary)

    def weight_files(self) -> Iterator[Path]:
        yield from shard_paths(self.path)

    def all_files(self) -> Iterator[Path]:
        yield from shard_paths(self.path)
