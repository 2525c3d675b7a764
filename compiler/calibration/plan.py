"""Which linear layers of a model are quantized, what tensors they are made of, and what takes their scales."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from llmc.compiler.calibration.request import CalibrationConfig
from llmc.models.config import ModelConfig
from llmc.models.weight_map import WeightMap
from llmc.quantize.export.base import Layout
from llmc.quantize.formats.base import WHOLE_ROW, WeightFormat
from llmc.quantize.recipe import HEAD, Recipe

_EMBEDDING, _HEAD_WEIGHT = "embed.weight", "lm_head.weight"
BEFORE = {
    "attention.qkv": "attention_norm",
    "attention.out": "attention.qkv",
    "mlp.gate_up": "mlp_norm",
    "mlp.down": "mlp.gate_up",
}
"""The linear layers of a decoder layer, in order, and what makes the input of each, up to what mixes no channels."""


@dataclass(frozen=True)
class Linear:
    """parts: prefixes of the checkpoint's layers and their rows, one below the other. format: None: left as it is."""

    kind: str
    k: int
    parts: tuple[tuple[str, int], ...]
    format: WeightFormat | None

    @property
    def n(self) -> int:
        return sum(rows for _, rows in self.parts)


@dataclass(frozen=True)
class Plan:
    """layers: of each decoder layer the linear layers by kind. sources: of every parameter, the checkpoint's names.
    unfit: how many of the checkpoint's layers were to be quantized, but the layout does not hold them."""

    layers: tuple[Mapping[str, Linear], ...]
    sources: Mapping[str, tuple[str, ...]]
    unfit: int = 0

    @property
    def formats(self) -> dict[str, WeightFormat]:
        """Of every quantized layer of the checkpoint, by prefix."""
        linears = [linear for layer in self.layers for linear in layer.values()]
        return {prefix: linear.format for linear in linears if linear.format for prefix, _ in linear.parts}

    def with_formats(self, formats: Mapping[tuple[int, str], WeightFormat | None]) -> Plan:
        """The plan with other formats of its quantized layers, by index and kind."""
        layers = tuple(
            {kind: replace(linear, format=formats.get((index, kind), linear.format)) for kind, linear in layer.items()}
            for index, layer in enumerate(self.layers)
        )
        return replace(self, layers=layers)

    @property
    def left(self) -> list[str]:
        """Prefixes of linear layers that stay as they are, the output projection among them."""
        linears = [linear for layer in self.layers for linear in layer.values()]
        return [HEAD, *(prefix for linear in linears if not linear.format for prefix, _ in linear.parts)]

    def notes(self, layout: Layout) -> tuple[str, ...]:
        """What is not as it was asked for."""
        formats = self.formats.values()
        whole = sum(format.group_size == WHOLE_ROW != layout.wanted.format.group_size for format in formats)
        size = layout.wanted.format.group_size
        said = []
        if whole:
            said.append(f"{whole} layers have rows that are no whole groups of {size}: each row is one group there")
        if self.unfit:
            said.append(
                f"{self.unfit} layers have rows that are no whole groups of {size}: they stay as they are, for "
                f"{layout.name} has no such groups"
            )
        return tuple(said)


def plan_of(config: CalibrationConfig, model: ModelConfig, weights: WeightMap, layout: Layout) -> Plan:
    """Raises QuantizeError when `config` skips what the model does not have."""
    head = _EMBEDDING if model.tie_word_embeddings else _HEAD_WEIGHT
    matrices = [t for t in weights.targets if t.dtype == "act" and (t.name != _EMBEDDING or t.name == head)]
    recipe = Recipe.of(config.quant, [target.name for target in matrices], head)
    by_name = {target.name: target for target in weights.targets}
    layers, unfit = [], 0
    for index in range(model.num_layers):
        found = {}
        for kind in BEFORE:
            target = by_name[f"layers.{index}.{kind}.weight"]
            parts = tuple((source.name.removesuffix(".weight"), source.shape[0]) for source in target.sources)
            k = target.shape[1]
            wanted = recipe.schemes.get(target.name)
            format: WeightFormat | None = None
            if wanted is not None:
                formats = [layout.format_of(rows, k, layout.wanted.format) for _, rows in parts]
                format = None if None in formats else formats[0]
                unfit += len(parts) if format is None else 0
            found[kind] = Linear(kind, k, parts, format)
        layers.append(found)
    sources = {target.name: tuple(source.name for source in target.sources) for target in weights.targets}
    return Plan(tuple(layers), sources, unfit)
