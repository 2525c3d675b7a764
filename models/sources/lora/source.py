"""A model with LoRA adapters merged into its weights, in order."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from llmc.models.brief import brief_name
from llmc.models.config import ModelConfig
from llmc.models.convert import Array
from llmc.models.errors import ModelError
from llmc.models.sources.base import Checkpoint, ModelFiles, ModelSource, Tensor
from llmc.models.sources.lora.adapter import LoraAdapter, LowRank, Merged, weights_file
from llmc.models.weight_map import WeightMap
from llmc.peft_format import CONFIG


class MergedCheckpoint(Checkpoint):
    """low_rank, whole: by the checkpoint's own names."""

    def __init__(self, base: Checkpoint, adapters: Sequence[LoraAdapter]) -> None:
        self.path, self.config_name = base.path, base.config_name
        self._base, self._adapters = base, tuple(adapters)
        self._notes: tuple[str, ...] = ()
        self._whole: dict[str, Tensor] = {}
        self._changes: dict[str, tuple[LowRank, ...]] = {}
        for adapter in adapters:
            self._take(adapter)

    def _take(self, adapter: LoraAdapter) -> None:
        names = frozenset(self._base.names())
        for theirs, tensor in adapter.whole.items():
            name = _own_name(adapter, theirs, names)
            self._check_shape(adapter, name, tensor.shape)
            self._whole[name] = tensor
            self._changes.pop(name, None)
        for theirs, change in adapter.low_rank.items():
            name = _own_name(adapter, theirs, names)
            self._check_shape(adapter, name, change.shape)
            self._changes[name] = (*self._changes.get(name, ()), change)
        merged = []
        if adapter.low_rank:
            merged.append(f"matrices of rank {', '.join(map(str, adapter.ranks))}: {len(adapter.low_rank)}")
        if adapter.whole:
            merged.append(f"whole tensors: {len(adapter.whole)}")
        self._notes += (f"the adapter {adapter.file.parent.name} is merged ({'; '.join(merged)})",)

    def _check_shape(self, adapter: LoraAdapter, name: str, shape: tuple[int, ...]) -> None:
        if shape != self._base.shape(name):
            raise ModelError(
                f"{adapter.file} changes {self._base.called(name)} as a tensor of shape {list(shape)}, which "
                f"has {list(self._base.shape(name))} in {self._base.path}; give the model that the adapter was made for"
            )

    def weight_map(self, config: ModelConfig) -> WeightMap | None:
        return self._base.weight_map(config)

    def names(self) -> tuple[str, ...]:
        return self._base.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._base.shape(name)

    def dtype(self, name: str) -> str:
        return self._base.dtype(name)

    def check_dtype(self, name: str) -> None:
        self._base.check_dtype(name)

    def tensor(self, name: str) -> Tensor:
        tensor = self._whole[name] if name in self._whole else self._base.tensor(name)
        changes = self._changes.get(name)
        return tensor if changes is None else Merged(tensor, changes)

    def release(self) -> None:
        self._base.release()
        for adapter in self._adapters:
            adapter.release()

    def kv_scales(self, kv_dtype: str, num_layers: int, num_kv_heads: int) -> Array | None:
        return self._base.kv_scales(kv_dtype, num_layers, num_kv_heads)

    def called(self, name: str) -> str:
        return self._base.called(name)

    def notes(self) -> tuple[str, ...]:
        return (*self._base.notes(), *self._notes)

    def adapted(self) -> frozenset[str]:
        return frozenset((*self._whole, *self._changes))


class MergedSource(ModelSource):
    def __init__(self, base: ModelSource, adapters: Sequence[Path]) -> None:
        super().__init__(base.path, allow_unknown_config=base.allow_unknown_config)
        self._base, self._adapters = base, tuple(adapters)

    def config(self) -> ModelConfig:
        return self._base.config()

    def ignored_config(self) -> tuple[str, ...]:
        return self._base.ignored_config()

    @property
    def is_quantized(self) -> bool:
        return self._base.is_quantized

    def checkpoint(self) -> MergedCheckpoint:
        return MergedCheckpoint(self._base.checkpoint(), [LoraAdapter.read(path) for path in self._adapters])

    def model_files(self) -> ModelFiles:
        return self._base.model_files()

    def weight_files(self) -> Iterator[Path]:
        yield from self._base.weight_files()
        yield from self._adapter_files()

    def all_files(self) -> Iterator[Path]:
        yield from self._base.all_files()
        yield from self._adapter_files()

    def _adapter_files(self) -> Iterator[Path]:
        yield from (file for path in self._adapters for file in (path / CONFIG, weights_file(path)))


def _own_name(adapter: LoraAdapter, theirs: str, names: Collection[str]) -> str:
    """The checkpoint's name for a tensor; some omit the first part of transformers' name."""
    for name in (theirs, theirs.partition(".")[2]):
        if name in names:
            return name
    raise ModelError(
        f"{adapter.file} changes {brief_name(theirs)}, which the model has not; give the model that the "
        "adapter was made for"
    )
