"""The linear layers to quantize, the tensors that form them, and the producers that absorb their scales."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from llmc.compiler.calibration.request import CalibrationConfig
from llmc.compiler.config import CompileError
from llmc.models.config import ModelConfig
from llmc.models.registry import get_family
from llmc.models.weight_map import Rows, Shape, Target, WeightMap
from llmc.quantize.export.base import Layout
from llmc.quantize.formats.base import WHOLE_ROW, WeightFormat
from llmc.quantize.recipe import HEAD, Recipe

_EMBEDDING, _HEAD_WEIGHT = "embed.weight", "lm_head.weight"
_WEIGHT, _OF_EXPERTS = ".weight", ".mlp.experts."
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
    matrices: blocks of rows of a stack of experts.
    """

    kind: str
    k: int
    parts: tuple[tuple[str, int], ...]
    format: WeightFormat | None
    rows: Rows | None = field(default=None, compare=False)
    matrices: int = 1

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
    moved: the parameters that are written as other tensors than they are read from, by name: the tensors of experts.
    others: prefixes of the output projection, and of the matrices of modules that llmc does not use, as of images.
    unfit: number of requested layers that the layout cannot hold.
    never: prefixes of the linear layers that are never quantized: small ones, and those outside decoder layers.
    """

    layers: tuple[Mapping[str, Linear], ...]
    sources: Mapping[str, tuple[str, ...]]
    unfit: int = 0
    never: tuple[str, ...] = ()
    moved: Mapping[str, Target] = field(default_factory=dict)
    others: tuple[str, ...] = ()

    @property
    def dropped(self) -> set[str]:
        """Names of the tensors that are read but not written."""
        moved = {source for name in self.moved for source in self.sources[name]}
        return moved | {f"{prefix}.weight" for prefix in self.formats}

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
        return list(dict.fromkeys((HEAD, *left, *self.never, *self.others)))

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


def plan_of(
    config: CalibrationConfig, model: ModelConfig, weights: WeightMap, shapes: Mapping[str, Shape], layout: Layout
) -> Plan:
    """Plans a request. weights: the map of the checkpoint, whose tensors have `shapes`.

    Raises QuantizeError if `config` skips a layer that the model lacks. Raises CompileError for a matrix that cannot be
    written in a linear layer's shape.
    """
    head = _EMBEDDING if model.tie_word_embeddings else _HEAD_WEIGHT
    moved = _moved(model, weights, layout.stacks)
    written = [moved.get(target.name, target) for target in weights.targets]
    matrices = [target for target in written if target.is_linear or target.name == head]
    recipe = Recipe.of(config.quant, [target.name for target in matrices], head)
    layers, unfit = [], 0
    for index in range(model.num_layers):
        found, prefix = {}, f"layers.{index}."
        for target in (target for target in matrices if target.name.startswith(prefix)):
            kind = target.name.removeprefix(prefix).removesuffix(_WEIGHT)
            stacked = bool(layout.stacks) and kind in (GATE_UP, DOWN)
            if not stacked and not layout.stacks:
                _check_plain(target, layout)
            leaf = layout.stacks if stacked else _WEIGHT
            parts = tuple((source.name.removesuffix(leaf), source.shape[0]) for source in target.sources)
            k = target.shape[1]
            wanted = recipe.schemes.get(target.name) if stacked or not layout.stacks else None
            format: WeightFormat | None = None
            if wanted is not None:
                formats = [layout.format_of(rows, k, layout.wanted.format) for _, rows in parts]
                format = None if None in formats else formats[0]
                unfit += len(parts) if format is None else 0
            if stacked and format is None:
                raise CompileError(f"--format {layout.name} holds all experts or none; leave --skip {kind} out")
            rows = _paired_rows(target) if target.pairs else target.rows
            found[kind] = Linear(kind, k, parts, format, rows, target.matrices)
        layers.append(found)
    sources = {target.name: tuple(source.name for source in target.sources) for target in weights.targets}
    alone = (t for t in written if t.precise or (t.is_linear and not t.name.startswith("layers.")))
    never = dict.fromkeys(source.name.removesuffix(_WEIGHT) for target in alone for source in target.sources)
    known = {name for names in sources.values() for name in names}
    unknown = (name for name, shape in sorted(shapes.items()) if name not in known and len(shape) == 2)
    unused = (*sources.get(_HEAD_WEIGHT, ()), *(name for name in unknown if name.endswith(_WEIGHT)))
    others = tuple(name.removesuffix(_WEIGHT) for name in unused)
    return Plan(tuple(layers), sources, unfit, tuple(never), moved, others)


def _moved(model: ModelConfig, weights: WeightMap, stacks: str) -> dict[str, Target]:
    """The experts' targets to write, by name, if they are not those of the checkpoint.

    Each matrix of an expert is a linear layer; with `stacks`, those of all experts are a tensor, whose name ends so.
    """

    def fits(target: Target) -> bool:
        if target.dtype != "act":
            return True
        return target.sources[0].name.endswith(stacks) if stacks else _fault(target) is None

    def parted(targets: WeightMap) -> tuple[list[Target], list[Target]]:
        """(those of experts, the others)."""
        of = [target for target in targets.targets if _OF_EXPERTS in target.name]
        return of, [target for target in targets.targets if _OF_EXPERTS not in target.name]

    own, others = parted(weights)
    if all(map(fits, own)):
        return {}
    for candidate in get_family(model.model_type).weight_maps(model):
        found, rest = parted(candidate)
        if rest == others and all(map(fits, found)):
            return {target.name: target for target in found if target not in own}
    if stacks:
        raise CompileError(
            f"{model.model_type} has no experts in tensors NAME{stacks}; use --format compressed-tensors"
        )
    return {}


def _paired_rows(target: Target) -> Rows:
    """Row i of the model's matrix is row [i] of a stored one, whose blocks have pairs of rows."""
    rows = np.arange(target.shape[0], dtype=np.int32).reshape(target.pairs, -1, 2)
    return rows.transpose(0, 2, 1).ravel()


def _fault(target: Target, *, transposed: bool = False) -> str | None:
    """The tensor that keeps a rounded matrix from being stored as linear layers; None if it can be. transposed: also
    where it was stored as [columns, rows]."""
    whole = target.rows is None or len(target.rows) == sum(source.shape[0] for source in target.sources)
    changed = target.pairs or target.of_rows is not None or target.plus
    odd = [
        source.name
        for source in target.sources
        if not source.name.endswith(_WEIGHT)
        or (source.stored is not None and not (transposed and source.is_transposed))
    ]
    return (odd or [target.sources[0].name])[0] if odd or changed or not whole else None


def _check_plain(target: Target, layout: Layout) -> None:
    """Raises CompileError if rounded numbers of the matrix cannot be written."""
    if (name := _fault(target, transposed=layout.packs)) is not None:
        if not layout.packs and _fault(target, transposed=True) is None:
            raise CompileError(
                f"the checkpoint has {name} transposed, as loaders of this family expect what is called so; numbers "
                "that are packed have names of their own: give --scheme w4a16, w8a16 or mxfp4"
            )
        raise CompileError(
            f"the checkpoint has {name} in another shape than a linear layer's, which llmc quantize -o does not write; "
            "llmc compile --quant rounds it"
        )
