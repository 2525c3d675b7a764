"""A llama.cpp architecture: the family that reads it, and its tensor names in llmc and in the file."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from llmc.models.config import ModelConfig
from llmc.models.layout import Layout
from llmc.models.sources.gguf.part_names import LAYER, expert_names, inverse, layer_names, whole_names
from llmc.models.weight_map import WeightMap

_OUR_NUMBER = re.compile(r"\.(\d+)\.", re.ASCII)
_PAIRED = re.compile(r"blk\.\d+\.attn_[qk]\.(weight|bias)", re.ASCII)
ROPE_FACTORS = "rope_freqs.weight"
"""Divisors of the rotary frequencies; configuration, not a weight."""
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
"""longrope's divisors, for long and for short texts."""
NO_WEIGHTS = frozenset({ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS})
_ONE_ROW = "ffn_gate_inp_shexp.weight"
"""A one-row matrix that files store as a vector."""
_BY_HEAD = frozenset({"attn_k_b.weight", "attn_v_b.weight"})
"""Per-head matrices that are one matrix here."""


@dataclass(frozen=True)
class Place:
    """A tensor of a file, or a part of it.

    expert: number of an expert, or of a matrix, in a tensor of several; None for the whole tensor. one_row: a one-row
    matrix, whatever its stored shape. by_head: stacked per-head matrices.
    """

    name: str
    expert: int | None = None
    one_row: bool = False
    by_head: bool = False

    def shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """The part's shape, given the stored tensor's."""
        if self.expert is not None:
            return stored[1:]
        if self.by_head:
            return (math.prod(stored[:-1]), stored[-1])
        return (1, *stored) if self.one_row and len(stored) == 1 else stored


@dataclass(frozen=True)
class Architecture:
    """The mapping of a llama.cpp architecture.

    model_type: of the family.
    layout: of the file. It differs from the family's, because converters split or merge tensors; unless stated
    otherwise, names are Llama's.
    paired: rows of q and k have the order of `HeadRows`. whole_heads: of whole heads, also where a part is rotated.
    gated: of feed-forward blocks.
    others: names of layer parts that differ from most architectures.
    mixture: the architecture used if there are experts.
    truncated: yarn rounds its range to whole elements.
    of_layers, of_model: names of tensors that few architectures have, theirs → ours; {} in ours numbers the matrices of
    one tensor.
    scaled: weights are those of a checkpoint times factors that the file does not say.
    tiled: value heads of gated delta nets are in the order of `DeltaNet.tiled`.
    weights: makes the weight map of the layout.
    """

    name: str
    model_type: str
    layout: Layout = field(default_factory=Layout)
    paired: bool = False
    whole_heads: bool = False
    gated: bool = True
    others: Mapping[str, str] = field(default_factory=dict)
    mixture: Architecture | None = None
    truncated: bool = True
    of_layers: Mapping[str, str] = field(default_factory=dict)
    of_model: Mapping[str, str] = field(default_factory=dict)
    scaled: bool = False
    tiled: bool = False
    weights: Callable[[Layout, ModelConfig], WeightMap] = Layout.weight_map

    def fitted(self, names: Container[str]) -> Architecture:
        """The mapping for a file with these tensors: some files merge two or three parts."""
        layout = self.layout
        # Of gated delta nets, that tensor is no attention's.
        if "blk.0.attn_qkv.weight" in names and "attn_qkv.weight" not in self.of_layers:
            layout = replace(layout, qkv=("self_attn.qkv_proj",))
        if "blk.0.ffn_up.weight" in names and "blk.0.ffn_gate.weight" not in names and self.gated:
            layout = replace(layout, gate_up=("mlp.gate_up_proj",))
        if any(f"blk.{i}.ffn_gate_up_exps.weight" in names for i in (0, 1)):
            layout = replace(layout, expert_gate_up=("mlp.experts.{}.gate_up_proj.weight",))
        if "blk.0.attn_norm_2.weight" in names:
            # The second of Falcon's two norms is attention's.
            others = {"attn_norm": layout.mlp_norm, "attn_norm_2": layout.attention_norm}
            return replace(self, layout=layout, others=others)
        return replace(self, layout=replace(layout, parted_latent="blk.0.attn_k_b.weight" in names))

    @cached_property
    def _whole(self) -> Mapping[str, str]:
        return {**whole_names(self.layout), **self.of_model}

    @cached_property
    def layer(self) -> Mapping[str, str]:
        """Names of layer tensors, theirs → ours."""
        return {**layer_names(self.layout, self.others, gated=self.gated), **self.of_layers}

    @cached_property
    def experts(self) -> Mapping[str, str]:
        """Names of tensors of all experts, theirs → ours with {} for the expert's number."""
        return expert_names(self.layout, gated=self.gated)

    def has_paired_rows(self, name: str) -> bool:
        """Whether rows of the file's tensor `name` are paired."""
        return self.paired and _PAIRED.fullmatch(name) is not None

    def places(self, name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, Place]]:
        """Our name for the file's tensor, or for each of its parts; its own name if there is none."""
        found = LAYER.fullmatch(name)
        if found is None:
            ours = self._whole.get(name, name)
            if "{}" in ours and len(shape) == 3:
                yield from ((ours.format(i), Place(name, i)) for i in range(shape[0]))
            else:
                yield ours, Place(name)
            return
        prefix, part = self.layout.layer.format(found[1]), found[2]
        if part in self.experts and len(shape) == (2 if part.endswith("bias") else 3):
            for expert in range(shape[0]):
                yield f"{prefix}.{self.experts[part].format(expert)}", Place(name, expert)
        elif part in self.layer:
            yield f"{prefix}.{self.layer[part]}", Place(name, one_row=part == _ONE_ROW, by_head=part in _BY_HEAD)
        else:
            yield name, Place(name)

    @cached_property
    def _theirs(self) -> Mapping[str, str]:
        return {**inverse(self.layer), **inverse(self.experts), **inverse(self._whole)}

    @cached_property
    def _our_layer(self) -> re.Pattern[str]:
        return re.compile(re.escape(self.layout.layer).replace(r"\{\}", r"(\d+)") + r"\.(.+)", re.ASCII)

    def their_name(self, name: str) -> str:
        """The file's name for our tensor `name`."""
        found = self._our_layer.fullmatch(name)
        if found is None:
            return self._theirs.get(name) or self._theirs.get(_OUR_NUMBER.sub(".{}.", name), name)
        part = self._theirs.get(found[2]) or self._theirs.get(_OUR_NUMBER.sub(".{}.", found[2]))
        return name if part is None else f"blk.{found[1]}.{part}"
