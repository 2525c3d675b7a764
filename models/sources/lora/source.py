"""A model with LoRA adapters merged into its weights, in order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from llmc.models.brief import brief_name
from llmc.models.config import ModelConfig
from llmc.models.convert import Array
from llmc.models.errors import ModelError
from llmc.models.mtp_layout import MtpLayout
from llmc.models.registry import get_family
from llmc.models.sources.base import Checkpoint, ModelFiles, ModelSource, Tensor
from llmc.models.sources.lora.adapter import LoraAdapter, LowRank, Merged, weights_file
from llmc.models.sources.lora.experts import MergedRows, MergedStack, OfExperts, matrices_of, of_sources
from llmc.models.weight_map import WeightMap
from llmc.peft_experts import ExpertsError, changes_of
from llmc.peft_format import CONFIG, in_layer, is_unread

_LM_HEAD = "lm_head.weight"


@dataclass(frozen=True)
class Head:
    """The output projection's weight. name: in the checkpoint. embedding: the weight that it shares; None for none."""

    name: str
    embedding: str | None

    def is_parted(self, adapter: LoraAdapter) -> bool:
        """Whether an adapter changes one end of a model that ties both, or each in its own way."""
        changed = (*adapter.low_rank, *adapter.whole)
        return self.embedding is not None and any(
            self.is_called(name) or self.embedding in _names_of(name) for name in changed
        )

    def is_called(self, theirs: str) -> bool:
        """Whether an adapter means it. transformers calls it lm_head, whatever a checkpoint does."""
        return theirs == _LM_HEAD or self.name in _names_of(theirs)


def _names_of(theirs: str) -> tuple[str, str]:
    """What a checkpoint may call a tensor; some omit the first part of transformers' name."""
    return theirs, theirs.partition(".")[2]


class MergedCheckpoint(Checkpoint):
    """The tensors of a model with adapters, by the checkpoint's own names.

    Where an adapter changes the output projection or the embedding, and both share a weight, each gets one of its own:
    an adapter of one leaves the other alone.
    """

    def __init__(
        self,
        base: Checkpoint,
        adapters: Sequence[LoraAdapter],
        weights: WeightMap,
        head: Head | None,
        unread: Sequence[str] = (),
    ) -> None:
        """weights: of the base. unread: prefixes of its parts that llmc does not run, whose changes are left out."""
        self.path, self.config_name = base.path, base.config_name
        self._base, self._adapters, self._head = base, tuple(adapters), head
        self._unread = tuple(unread)
        # Matrices [columns, rows]. `fan_in_fan_out` of an adapter tells of one of its modules, which may be any.
        self._turned = {source.name for source in weights.sources() if source.is_transposed}
        # A text model may be trained apart from one that has it as a part.
        self._in_layers = {name: source.name for source in weights.sources() if (name := in_layer(source.name))}
        self._targets = {target.name: target for target in weights.targets}
        self._experts = matrices_of(weights)
        # Of tensors of all experts, which no other changes are of; whether they are [experts, columns, rows].
        self._stacks: dict[str, tuple[bool, tuple[OfExperts, ...]]] = {}
        # Weights of the base by other names.
        self._copies: dict[str, str] = {}
        if head is not None and head.embedding is not None and any(map(head.is_parted, adapters)):
            self._copies[head.name] = head.embedding
        self._notes: tuple[str, ...] = ()
        # In place of the base's, by its names; under all changes.
        self._bases: dict[str, Tensor] = {}
        self._whole: dict[str, Tensor] = {}
        self._changes: dict[str, tuple[LowRank, ...]] = {}
        for adapter in adapters:
            self._take(self._read_part(adapter))

    def _read_part(self, adapter: LoraAdapter) -> LoraAdapter:
        """The adapter without changes of parts that llmc does not run. Raises ModelError if nothing is left."""

        def read(name: str) -> bool:
            return not is_unread(name, self._unread)

        low_rank = {name: change for name, change in adapter.low_rank.items() if read(name)}
        whole = {name: tensor for name, tensor in adapter.whole.items() if read(name)}
        parameters = tuple(one for one in adapter.parameters if read(one.module))
        of_all = len(adapter.low_rank) + len(adapter.whole) + len(adapter.parameters)
        left = of_all - len(low_rank) - len(whole) - len(parameters)
        if not left:
            return adapter
        if not (low_rank or whole or parameters):
            raise ModelError(f"{adapter.file} changes no part of the model that reads text; leave it out")
        name = adapter.file.parent.name
        self._notes += (f"the adapter {name} also changes parts that llmc does not run, which is left out ({left})",)
        return replace(adapter, low_rank=low_rank, whole=whole, parameters=parameters)

    def _take(self, adapter: LoraAdapter) -> None:
        for theirs, tensor in adapter.bases.items():
            name = self._own_name(adapter, theirs)
            self._check_shape(adapter, name, tensor.shape)
            self._bases[self._copies.get(name, name)] = tensor
        for theirs, tensor in adapter.whole.items():
            name = self._own_name(adapter, theirs)
            self._check_shape(adapter, name, tensor.shape)
            self._whole[name] = tensor
            self._changes.pop(name, None)
            self._stacks.pop(name, None)
        ranks = self._take_experts(adapter)
        for theirs, change in adapter.low_rank.items():
            name = self._own_name(adapter, theirs)
            if name in ranks:
                raise ModelError(f"{adapter.file} changes {brief_name(name)} twice; save the adapter again")
            ranks[name] = change.rank
            if change.length is not None and (change.turned or name in self._turned):
                raise ModelError(
                    f"{adapter.file}: {brief_name(theirs)} has lengths of DoRA for a matrix that llmc does not merge "
                    "them into"
                )
            if name in self._turned:
                change = replace(change, turned=not change.turned)
            self._check_shape(adapter, name, change.shape)
            self._add(name, change)
        merged = []
        if ranks:
            merged.append(f"matrices of rank {', '.join(map(str, sorted(set(ranks.values()))))}: {len(ranks)}")
        if adapter.whole:
            merged.append(f"whole tensors: {len(adapter.whole)}")
        self._notes += (f"the adapter {adapter.file.parent.name} is merged ({'; '.join(merged)})",)

    def _take_experts(self, adapter: LoraAdapter) -> dict[str, int]:
        """Takes the changes of experts that are one tensor; returns their ranks, by the model's own tensors."""
        ranks: dict[str, int] = {}
        try:
            changes = changes_of(adapter.parameters, self._experts)
        except ExpertsError as error:
            advice = error.advice or "give the model that the adapter was made for"
            raise ModelError(f"{adapter.file}: {error}; {advice}") from None
        for change in changes:
            scale = adapter.scale_of(change.parameter, change.rank)
            for source, of_source in of_sources(change, scale, self._targets[change.of.key]):
                if isinstance(of_source, LowRank):
                    self._add(source.name, of_source)
                else:
                    _, before = self._stacks.get(source.name, (False, ()))
                    self._stacks[source.name] = (source.turned, (*before, of_source))
                ranks[source.name] = change.rank
        return ranks

    def _add(self, name: str, change: LowRank) -> None:
        self._changes[name] = (*self._changes.get(name, ()), change)

    def _own_name(self, adapter: LoraAdapter, theirs: str) -> str:
        """The checkpoint's name for a tensor."""
        if self._head is not None and self._head.is_called(theirs):
            return self._head.name
        for name in _names_of(theirs):
            if name in self._names:
                return name
        if (found := self._in_layers.get(in_layer(theirs))) is not None:
            return found
        raise ModelError(
            f"{adapter.file} changes {brief_name(theirs)}, which the model has not; give the model that the "
            "adapter was made for"
        )

    @cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(self._base.names())

    def _check_shape(self, adapter: LoraAdapter, name: str, shape: tuple[int, ...]) -> None:
        if shape != self.shape(name):
            raise ModelError(
                f"{adapter.file} changes {self._base.called(name)} as a tensor of shape {list(shape)}, which "
                f"has {list(self.shape(name))} in {self._base.path}; give the model that the adapter was made for"
            )

    def weight_map(self, config: ModelConfig) -> WeightMap | None:
        return self._base.weight_map(config)

    def names(self) -> tuple[str, ...]:
        names = self._base.names()
        return (*names, *(name for name in self._copies if name not in names))

    def shape(self, name: str) -> tuple[int, ...]:
        return self._base.shape(self._copies.get(name, name))

    def dtype(self, name: str) -> str:
        return self._base.dtype(self._copies.get(name, name))

    def check_dtype(self, name: str) -> None:
        self._base.check_dtype(self._copies.get(name, name))

    def tensor(self, name: str) -> Tensor:
        tensor = self._whole[name] if name in self._whole else self._unchanged(self._copies.get(name, name))
        if (changes := self._changes.get(name)) is not None:
            return Merged(tensor, changes)
        if (stack := self._stacks.get(name)) is not None:
            turned, of_all = stack
            return MergedRows(tensor, of_all) if len(tensor.shape) == 2 else MergedStack(tensor, of_all, turned=turned)
        return tensor

    def _unchanged(self, name: str) -> Tensor:
        return self._bases[name] if name in self._bases else self._base.tensor(name)

    def release(self) -> None:
        self._base.release()
        for adapter in self._adapters:
            adapter.release()

    def kv_scales(self, kv_dtype: str, kv_heads: Mapping[int, int]) -> list[Array] | None:
        return self._base.kv_scales(kv_dtype, kv_heads)

    def called(self, name: str) -> str:
        return self._base.called(name)

    def notes(self) -> tuple[str, ...]:
        return (*self._base.notes(), *self._notes)

    def adapted(self) -> frozenset[str]:
        return frozenset((*self._whole, *self._changes, *self._stacks))


class MergedSource(ModelSource):
    def __init__(self, base: ModelSource, adapters: Sequence[Path]) -> None:
        super().__init__(base.path, allow_unknown_config=base.allow_unknown_config)
        self._base, self._adapters = base, tuple(adapters)

    @cached_property
    def _read(self) -> list[LoraAdapter]:
        return [LoraAdapter.read(path) for path in self._adapters]

    def config(self) -> ModelConfig:
        """Where an adapter changes one of two tied ends, each has a weight of its own."""
        self.check_adapters()
        config = self._base.config()
        if not config.tie_word_embeddings or config.pooled is not None:
            return config
        head = _head_of(_weights_of(config, self._base.checkpoint()), tied=True)
        parted = head is not None and any(map(head.is_parted, self._read))
        return replace(config, tie_word_embeddings=False) if parted else config

    def ignored_config(self) -> tuple[str, ...]:
        return self._base.ignored_config()

    @property
    def is_quantized(self) -> bool:
        return self._base.is_quantized

    def check_adapters(self) -> None:
        self._base.check_adapters()

    def checkpoint(self) -> MergedCheckpoint:
        return self._over(self._base.checkpoint())

    def mtp_layout(self) -> MtpLayout | None:
        return self._base.mtp_layout()

    def mtp_checkpoint(self) -> MergedCheckpoint:
        return self._over(self._base.mtp_checkpoint())

    def _over(self, base: Checkpoint) -> MergedCheckpoint:
        config = self._base.config()
        weights = _weights_of(config, base)
        unread = () if config.pooled is not None else get_family(config.model_type).unread_modules(config)
        return MergedCheckpoint(base, self._read, weights, _head_of(weights, config.tie_word_embeddings), unread)

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


def _weights_of(config: ModelConfig, base: Checkpoint) -> WeightMap:
    shapes = {name: base.shape(name) for name in base.names()}
    return base.weight_map(config) or get_family(config.model_type).weight_map_of(config, shapes)


def _head_of(weights: WeightMap, tied: bool) -> Head | None:
    """None for a model without an output projection."""
    if not weights.head:
        return None
    embeddings = [target.sources[0].name for target in weights.targets if target.name == "embed.weight"]
    return Head(f"{weights.head}.weight", embeddings[0] if tied else None)
