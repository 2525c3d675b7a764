"""The linear layers to quantize, the tensors that form them, and the producers that absorb their scales."""

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
"""The sole producer of a linear layer's input, up to ops that mix no channels; read by no other layer."""
GATE_UP, DOWN = "mlp.experts.gate_up", "mlp.experts.down"
"""Kinds of the stacked matrices of all experts."""


@dataclass(frozen=True)
class Linear:
    """A linear layer to be rounded.

    parts: prefixes and rows of the checkpoint layers that form it, stacked.
    format: None to leave it unquantized.
    rows: row i of the model's matrix is row rows[i] of the parts; None for identity.
    """

    kind: str
    k: int
    parts: tuple[tuple[str, int], ...]
    format: WeightFormat | None
    rows: Rows | None = field(default=None, compare=False)

    @property
    def of_experts(self) -> bool:
        """Whether it holds one matrix per expert, each seeing only the tokens that chose it."""
        return self.kind in (GATE_UP, DOWN)

    @property
    def n(self) -> int:
        return sum(rows for _, rows in self.parts)


@dataclass(frozen=True)
class Plan:
    """What is quantized, and how.

    layers: per decoder layer, its linear layers by kind.
    sources: checkpoint names of every parameter.
    unfit: number of requested layers that the layout cannot hold.
    precise: prefixes of small matrices in layers, which are never quantized.
    """

    layers: tuple[Mapping[str, Linear], ...]
    sources: Mapping[str, tuple[str, ...]]
    unfit: int = 0
    precise: tuple[str, ...] = ()

    @property
    def formats(self) -> dict[str, WeightFormat]:
        """Formats of the quantized checkpoint layers, by prefix."""
        linears = [linear for layer in self.layers for linear in layer.values()]
        return {prefix: linear.format for linear in linears if linear.format for prefix, _ in linear.parts}

    def with_formats(self, formats: Mapping[tuple[int, str], WeightFormat | None]) -> Plan:
        """The plan with other formats for its quantized layers, by (index, kind)."""
        layers = tuple(
            {kind: replace(linear, format=formats.get((index, kind), linear.format)) for kind, linear in layer.items()}
            for index, layer in enumerate(self.layers)
        )
        return replace(self, layers=layers)

    @property
    def left(self) -> list[str]:
        """Prefixes of the linear layers left unquantized, including the output projection."""
        linears = [linear for layer in self.layers for linear in layer.values()]
        left = (prefix for linear in linears if not linear.format for prefix, _ in linear.parts)
        return [HEAD, *left, *self.precise]

    def notes(self, layout: Layout) -> tuple[str, ...]:
        """Notes on where the result differs from the request."""
        formats = self.formats.values()
        whole = sum(format.group_size == WHOLE_ROW != layout.wanted.format.group_size for format in formats)
        size = layout.wanted.format.group_size
        said = []
        if whole:
            said.append(f"{whole} layers have rows that are not whole groups of {size}: each row is one group there")
        if self.unfit:
            said.append(
                f"{self.unfit} layers have rows that are not whole groups of {size}: they stay as they are, for "
                f"{layout.name} has no such groups"
            )
        return tuple(said)


def plan_of(config: CalibrationConfig, model: ModelConfig, weights: WeightMap, layout: Layout) -> Plan:
    """Plans a request. Raises QuantizeError if `config` skips a layer that the model lacks. Raises CompileError for a
    matrix that the checkpoint does not store in a linear layer's shape."""
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
    """Raises CompileError unless a rounded matrix can replace the stored one under its name and shape."""
    whole = target.rows is None or len(target.rows) == sum(source.shape[0] for source in target.sources)
    changed = target.pairs or target.of_rows is not None or target.plus
    odd = [source.name for source in target.sources if source.stored is not None or not source.name.endswith(".weight")]
    if odd or changed or not whole:
        raise CompileError(
            f"the checkpoint has {(odd or [target.sources[0].name])[0]} in another shape than a linear layer's, which "
            "llmc quantize -o does not write; llmc compile --quant rounds it"
        )
