"""A model's own layer for multi-token prediction, read from the model's files as a drafting head."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from llmc.models.config import ModelConfig
from llmc.models.convert import Array
from llmc.models.errors import ModelError
from llmc.models.families.mtp import MTP
from llmc.models.mtp_layout import MtpLayout
from llmc.models.one_layer import last_attention, one_layer
from llmc.models.registry import get_family
from llmc.models.sources.base import Checkpoint, ModelFiles, ModelSource
from llmc.models.sources.joined import JoinedCheckpoint
from llmc.models.weight_map import WeightMap


class MtpSource(ModelSource):
    """The layer of `model`, as that is compiled. Of several layers, it is the first, which also guesses further on."""

    def __init__(self, model: ModelSource) -> None:
        super().__init__(model.path, allow_unknown_config=model.allow_unknown_config)
        self._model = model

    @cached_property
    def _layer(self) -> tuple[MtpLayout, ModelConfig]:
        """(names of the layer's tensors, the model with that layer alone): it is like the last one with attention."""
        config, layout = self._model.config(), self._model.mtp_layout()
        if config.pooled is not None:
            raise ModelError(
                f"{self.path} is compiled to give vectors, and --mtp is for models that write text; leave it out"
            )
        if layout is None:
            raise ModelError(
                f"{self.path}: llmc knows no layer for multi-token prediction of {config.model_type} models; leave out "
                "--mtp, or give a smaller model as --draft"
            )
        number = last_attention(config)
        if number is None:
            raise ModelError(
                f"{self.path} has no layer with attention, as its layer for multi-token prediction has; leave out --mtp"
            )
        return layout.of_model(config.num_layers), one_layer(config, number)

    def config(self) -> ModelConfig:
        return replace(self._layer[1], model_type=MTP.model_type, states="taken")

    def ignored_config(self) -> tuple[str, ...]:
        return ()

    @property
    def is_quantized(self) -> bool:
        return self._model.is_quantized

    def checkpoint(self) -> Checkpoint:
        layout, alone = self._layer
        return _MtpCheckpoint(self._model.mtp_checkpoint(), alone, layout)

    def model_files(self) -> ModelFiles:
        return self._model.model_files()

    def weight_files(self) -> Iterator[Path]:
        yield from self._model.weight_files()

    def all_files(self) -> Iterator[Path]:
        yield from self._model.all_files()


class _MtpCheckpoint(JoinedCheckpoint):
    """Those tensors of a model that its layer for multi-token prediction reads. alone: the model with one layer."""

    def __init__(self, model: Checkpoint, alone: ModelConfig, layout: MtpLayout) -> None:
        super().__init__(model, {})
        shapes = {name: model.shape(name) for name in model.names()}
        if f"{layout.join}.weight" not in shapes:
            raise ModelError(
                f"{self.path} has no layer for multi-token prediction, which has the tensor "
                f"{model.called(f'{layout.join}.weight')}; "
                "leave out --mtp, or download the model again if it should have one"
            )
        # A checkpoint's own map may follow how the model's first layer is stored, and this one may be stored otherwise.
        own = model.weight_map(alone)
        *others, usual = get_family(alone.model_type).weight_maps(alone)
        of_model = [*others, usual] if own is None else [own, *others, usual]
        maps = [layout.weight_map(alone, one) for one in of_model]
        named = (found for found in maps if all(source.name in shapes for source in found.sources()))
        self._map = next(named, maps[-1 if own is None else 0])
        self._read = frozenset(source.name for source in self._map.sources())

    def names(self) -> tuple[str, ...]:
        return tuple(name for name in super().names() if name in self._read)

    def weight_map(self, config: ModelConfig) -> WeightMap:
        return self._map

    def adapted(self) -> frozenset[str]:
        return frozenset()

    def kv_scales(self, kv_dtype: str, kv_heads: Mapping[int, int]) -> list[Array] | None:
        return None
