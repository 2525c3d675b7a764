"""A GGUF model for the compiler: metadata, tensors and tokenizer."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import numpy as np

from llmc.models.config import ModelConfig
from llmc.models.convert import DTYPES, Array
from llmc.models.errors import ModelError
from llmc.models.mtp_layout import DEEPSEEK_MTP, MtpLayout
from llmc.models.registry import get_family
from llmc.models.sources.base import ArrayTensor, Checkpoint, ModelFiles, ModelSource, Tensor
from llmc.models.sources.gguf.activation import activation_values
from llmc.models.sources.gguf.architecture import NO_WEIGHTS, Architecture, Place
from llmc.models.sources.gguf.architectures import get_architecture
from llmc.models.sources.gguf.config import read_config
from llmc.models.sources.gguf.header import Entry, GgufFile
from llmc.models.sources.gguf.metadata import Metadata
from llmc.models.sources.gguf.part_names import LAYER
from llmc.models.sources.gguf.shards import open_shards, shard_paths
from llmc.models.sources.gguf.tensor import HeadRows, open_tensor
from llmc.models.sources.gguf.tokenizer.files import TokenizerFiles
from llmc.models.sources.gguf.tokenizer.vocabulary import has_tokenizer, read_vocabulary
from llmc.models.tokenizers.vocabulary import Vocabulary
from llmc.models.weight_map import WeightMap

_EMBEDDING = "token_embd.weight"


class GgufCheckpoint(Checkpoint):
    """The tensors of a model's files. rows: orders of q and k rows in the file. values: tensors stored as metadata."""

    config_name = "its metadata"

    def __init__(
        self,
        path: Path,
        tensors: Mapping[str, GgufFile],
        architecture: Architecture,
        rows: HeadRows | None,
        values: Mapping[str, Array],
    ) -> None:
        self.path = path
        self._architecture, self._rows, self._values = architecture, rows, values
        self._places = {
            ours: (place, file)
            for name, file in tensors.items()
            if name not in NO_WEIGHTS
            for ours, place in architecture.places(name, file.tensors[name].shape)
        }

    def weight_map(self, config: ModelConfig) -> WeightMap:
        return self._architecture.weights(self._architecture.layout, config)

    def _at(self, name: str) -> tuple[Place, GgufFile]:
        if name not in self._places:
            raise ModelError(f"{self.path} lacks the tensor {self.called(name)}")
        return self._places[name]

    def names(self) -> tuple[str, ...]:
        return tuple(sorted((*self._places, *self._values)))

    def _entry(self, name: str) -> Entry:
        place, file = self._at(name)
        return file.tensors[place.name]

    def shape(self, name: str) -> tuple[int, ...]:
        if name in self._values:
            return self._values[name].shape
        return self._at(name)[0].shape(self._entry(name).shape)

    def dtype(self, name: str) -> str:
        if name in self._values:
            return "f32"
        return self._entry(name).type.name.lower()

    def check_dtype(self, name: str) -> None:
        # Every type allowed in a header is readable.
        self.dtype(name)

    def tensor(self, name: str) -> Tensor:
        if name in self._values:
            return ArrayTensor(self._values[name])
        place, file = self._at(name)
        return open_tensor(file, place, self._rows if self._architecture.has_paired_rows(place.name) else None)

    def release(self) -> None:
        for file in {file for _, file in self._places.values()}:
            file.release()

    def called(self, name: str) -> str:
        return self._places[name][0].name if name in self._places else self._architecture.their_name(name)


class GgufSource(ModelSource):
    """A GGUF file, or the first of several."""

    @cached_property
    def _files(self) -> tuple[GgufFile, ...]:
        return open_shards(self.path)

    @cached_property
    def _tensors(self) -> dict[str, GgufFile]:
        """The file of each tensor."""
        return {name: file for file in self._files for name in file.tensors}

    @property
    def _metadata(self) -> Metadata:
        return self._files[0].metadata

    @cached_property
    def _architecture(self) -> Architecture:
        found = get_architecture(self._metadata.text("general.architecture"), str(self.path))
        if found.mixture is not None and self._metadata.integer(f"{found.name}.expert_count", 0, minimum=0):
            found = found.mixture
        return found.fitted(self._tensors)

    @cached_property
    def _vocabulary(self) -> Vocabulary | None:
        if not has_tokenizer(self._metadata):
            return None
        return read_vocabulary(self._metadata, self._shapes().get(_EMBEDDING, (0,))[0])

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: file.tensors[name].shape for name, file in self._tensors.items()}

    @cached_property
    def _config(self) -> tuple[ModelConfig, tuple[str, ...]]:
        """(configuration, ignored metadata)."""
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
            task=self.task,
            pooling=self.pooling,
            rank_prompt=self.rank_prompt,
        )

    def config(self) -> ModelConfig:
        return self._config[0]

    def ignored_config(self) -> tuple[str, ...]:
        return self._config[1]

    @property
    def is_quantized(self) -> bool:
        return True

    def check_adapters(self) -> None:
        if self._architecture.scaled:
            raise ModelError(
                f"{self.path}: weights of {self._architecture.name} are a checkpoint's times factors that no adapter "
                "has; give the checkpoint that the adapter was made for"
            )

    def _dtype(self) -> str:
        """The type of most elements; quantized tensors count as bf16."""
        elements: Counter[str] = Counter()
        for name, file in self._tensors.items():
            entry = file.tensors[name]
            elements[entry.type.name.lower()] += math.prod(entry.shape)
        most = max(elements, key=lambda name: elements[name], default="f32")
        return most if most in DTYPES else "bf16"

    def _rope_factors(self) -> dict[str, Array]:
        """Factors by tensor name."""
        found = {}
        for name in sorted(NO_WEIGHTS & self._tensors.keys()):
            file = self._tensors[name]
            shape = file.tensors[name].shape
            # No head is that large; the shape is checked before allocating.
            if len(shape) != 1 or shape[0] > 1 << 15:
                raise ModelError(f"{file.path}: tensor {name} has shape {list(shape)}, which is not a list of factors")
            found[name] = np.empty(shape, np.float32)
            open_tensor(file, Place(name)).read(0, found[name])
        return found

    def checkpoint(self) -> GgufCheckpoint:
        return self._checkpoint_of(self._of_model(self.config()))

    def _checkpoint_of(self, tensors: Mapping[str, GgufFile]) -> GgufCheckpoint:
        config = self.config()
        # Unrotated heads are ordered like fully rotated ones.
        whole = config.rope.theta is None or self._architecture.whole_heads
        rows = HeadRows(config.head_dim, config.head_dim if whole else config.rope.dim)
        values = activation_values(self._metadata, config)
        return GgufCheckpoint(self.path, tensors, self._architecture, rows, values)

    def mtp_layout(self) -> MtpLayout | None:
        found = get_family(self._architecture.model_type).mtp
        # Files name it in one way, whatever the family does.
        return None if found is None else replace(DEEPSEEK_MTP, state_first=found.state_first)

    def mtp_checkpoint(self) -> GgufCheckpoint:
        return self._checkpoint_of(self._tensors)

    def tower_config(self) -> ModelConfig | None:
        raise ModelError(
            f"{self.path}: images are not read with GGUF files yet; leave out --images, or give the directory of the "
            "model in Hugging Face's format"
        )

    def _of_model(self, config: ModelConfig) -> dict[str, GgufFile]:
        """Tensors without layers after the last (multi-token prediction), if metadata mention any."""
        if not self._metadata.integer(f"{self._architecture.name}.nextn_predict_layers", 0, minimum=0):
            return self._tensors
        layers = {name: LAYER.fullmatch(name) for name in self._tensors}
        return {
            name: file
            for name, file in self._tensors.items()
            if (layer := layers[name]) is None or int(layer[1]) < config.num_layers
        }

    def model_files(self) -> ModelFiles:
        return TokenizerFiles(self._metadata, self._vocabulary)

    def weight_files(self) -> Iterator[Path]:
        yield from shard_paths(self.path)

    def all_files(self) -> Iterator[Path]:
        yield from shard_paths(self.path)
