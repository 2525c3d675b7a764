"""Which linear layers of a model are quantized, what tensors they are made of, and what takes their scales."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from llmc.compiler.calibration.request import CalibrationConfig
from llmc.compiler.config import CompileError
from llmc.models.config import ModelConfig
from llmc.models.weight_map import Rows, Target, WeightMap
from llmc.quantize.export.base import Layout
from llmc.quantize.formats.base import WHOLE_ROW, WeightFormat
from llmc.quantize.recipe import HEAD, Recipe

_EMBEDDING, _HEAD_WEIGHT = "embed.weight", "lm_head.weight"
BEFORE = {
    "attention.qkv": "attention_norm",
    "attention.out": "attention.qkv",
    "mlp.gate_up": "mlp_norm",
    "mlp.down": "mlp.gate_up",
    "attention.q": "attention.q_norm",
    "mlp.shared.down": "mlp.shared.gate_up",
}
"""What alone makes the input of a linear layer, up to what mixes no channels, and is read by no other one."""
GATE_UP, DOWN = "mlp.experts.gate_up", "mlp.experts.down"
"""The matrices of all experts."""


@dataclass(frozen=True)
class Linear:
    """parts: prefixes of the checkpoint's layers and their rows, one below the other. format: None: left as it is.
    rows: row i of the model's matrix is row rows[i] of the parts; None: in that order."""

    kind: str
    k: int
    parts: tuple[tuple[str, int], ...]
    format: WeightFormat | None
    rows: Rows | None = field(default=None, compare=False)

    @property
    def of_experts(self) -> bool:
        """Whether it is many matrices, each of which sees the tokens that chose its expert."""
        return self.kind in (GATE_UP, DOWN)

    @property
    def n(self) -> int:
        return sum(rows for _, rows in self.parts)


@dataclass(frozen=True)
class Plan:
    """layers: of each decoder layer the linear layers by kind. sources: of every parameter, the checkpoint's names.
    unfit: how many of the checkpoint's layers were to be quantized, but the layout does not hold them. precise:
    prefixes of small matrices in layers, which are never quantized."""

    layers: tuple[Mapping[str, Linear], ...]
    sources: Mapping[str, tuple[str, ...]]
    unfit: int = 0
    precise: tuple[str, ...] = ()

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
        left = (prefix for linear in linears if not linear.format for prefix, _ in linear.parts)
        return [HEAD, *left, *self.precise]

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
    """Raises QuantizeError when `config` skips what the model does not have, CompileError for matrices that a
    checkpoint has in another shape than a linear layer's."""
    head = _EMBEDDING if model.tie_word_embeddings else _HEAD_WEIGHT
    act = [t for t in weights.targets if t.dtype == "act" and (t.name != _EMBEDDING or t.name == head)]
    matrices = [target for target in act if not target.precise]
    recipe = Recipe.of(config.quant, [target.name for target in matrices], head)
    layers, unfit = [], 0
    for index in range(model.num_layers):
        found, prefix = {}, f"layers.{index}."
        for target in (target for target in matrices if target.name.startswith(prefix)):
            _check_plain(target)
            kind = target.name.removeprefix(prefix).removesuffix(".weight")
            parts = tuple((source.name.removesuffix(".weight"), source.shape[0]) for source in target.sources)
            k = target.shape[1]
            wanted = recipe.schemes.get(target.name)
            format: WeightFormat | None = None
            if wanted is not None:
                formats = [layout.format_of(rows, k, layout.wanted.format) for _, rows in parts]
                format = None if None in formats else formats[0]
                unfit += len(parts) if format is None else 0
            found[kind] = Linear(kind, k, parts, format, target.rows)
        layers.append(found)
    sources = {target.name: tuple(source.name for source in target.sources) for target in weights.targets}
    small = (t for t in act if t.precise and t.name.startswith("layers."))
    precise = dict.fromkeys(source.name.removesuffix(".weight") for target in small for source in target.sources)
    return Plan(tuple(layers), sources, unfit, tuple(precise))


def _check_plain(target: Target) -> None:
    """What is written in the place of a matrix has its name and shape."""
    whole = target.rows is None or len(target.rows) == sum(source.shape[0] for source in target.sources)
    changed = target.pairs or target.of_rows is not None or target.plus
    odd = [source.name for source in target.sources if source.stored is not None or not source.name.endswith(".weight")]
    if odd or changed or not whole:
        raise CompileError(
            f"the checkpoint has {(odd or [target.sources[0].name])[0]} in another shape than a linear layer's, which "
            "llmc quantize -o does not write; llmc compile --quant rounds it"
        )
