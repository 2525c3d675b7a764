"""Shared by families with experts: their config fields, and the two ways in which checkpoints store experts.

Published checkpoints have one tensor per matrix and expert; others have one for all experts of a layer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmc.models.config import Experts
from llmc.models.errors import ModelError
from llmc.models.fields import Fields
from llmc.models.layout import LLAMA_LAYOUT, Layout
from llmc.models.standard import layer_count


def stacked(layout: Layout = LLAMA_LAYOUT, experts: str = "mlp.experts") -> Layout:
    """The layout of checkpoints with one tensor for all experts."""
    return replace(layout, expert_gate_up=(f"{experts}.gate_up_proj",), expert_down=f"{experts}.down_proj")


def apart(
    layout: Layout, experts: str = "mlp.experts", names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> Layout:
    """The layout of checkpoints with a linear layer per matrix and expert, as tools that quantize linear layers write
    models whose experts are one tensor. names: of gate, up and down."""
    gate, up, down = (f"{experts}.{{}}.{name}" for name in names)
    biases = bool(layout.expert_down_bias)
    return replace(
        layout,
        expert_gate_up=(f"{gate}.weight", f"{up}.weight"),
        expert_down=f"{down}.weight",
        expert_gate_up_bias=(f"{gate}.bias", f"{up}.bias") if biases else (),
        expert_down_bias=f"{down}.bias" if biases else "",
        experts_in_pairs=False,
        experts_turned=False,
        down_turned=False,
        experts_joined=False,
    )


_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_TOP_KS = ("num_experts_per_tok", "moe_k")


def _name(fields: Fields, names: tuple[str, ...]) -> str:
    """The first of `names` that is present, or the first."""
    return next((name for name in names if fields.has(name)), names[0])


def read_experts(fields: Fields, *, intermediate_size: str, **choices: Any) -> Experts:
    """intermediate_size: name of the field. choices: fields of Experts set by the family; `layers` defaults to all.
    Raises ModelError."""
    count, top_k = _name(fields, _COUNTS), _name(fields, _TOP_KS)
    if "layers" not in choices:
        choices["layers"] = tuple(range(layer_count(fields)))
    inner = fields.integer(intermediate_size)
    found = Experts(count=fields.integer(count), top_k=fields.integer(top_k), intermediate_size=inner, **choices)
    if found.count % found.groups or found.top_groups > found.groups:
        raise ModelError(
            f"{fields.origin}: {found.top_groups} of {found.groups} groups of {found.count} experts cannot be chosen"
        )
    of_group = found.count // found.groups
    if found.top_k > found.top_groups * of_group:
        raise ModelError(
            f"{fields.origin}: {top_k} {found.top_k} is more than {found.top_groups * of_group}, the experts that may "
            "be chosen"
        )
    return found


def read_sigmoid_experts(fields: Fields) -> Experts:
    """Experts like DeepSeek-V3's, with leading plain layers, and shared experts merged into one."""
    first = fields.integer("first_k_dense_replace", 0, minimum=0)
    shared = fields.integer("n_shared_experts", 0, minimum=0) * fields.integer("moe_intermediate_size")
    return sigmoid_experts(fields, layers=tuple(range(first, layer_count(fields))), shared_size=shared)


def sigmoid_experts(fields: Fields, **choices: Any) -> Experts:
    """Experts with sigmoid scores, a bias for the choice, and groups. choices: as in `read_experts`. Raises
    ModelError."""
    groups = fields.integer("n_group", 1)
    experts = read_experts(
        fields,
        intermediate_size="moe_intermediate_size",
        scores="sigmoid",
        choice_bias=True,
        groups=groups,
        top_groups=fields.integer("topk_group", 1),
        best_of_group=2,
        normalised=fields.flag("norm_topk_prob", True),
        least_sum=1e-20,
        scale=fields.number("routed_scaling_factor", 1.0),
        **choices,
    )
    if groups > 1 and experts.count < 2 * groups:
        raise ModelError(f"{fields.origin}: n_group {groups} leaves groups of less than two of {experts.count} experts")
    return experts


def sparse_layers(fields: Fields) -> tuple[int, ...]:
    """Layers with experts, according to mlp_only_layers and decoder_sparse_step."""
    step = fields.integer("decoder_sparse_step", 1)
    plain = fields.integers("mlp_only_layers") if fields.has("mlp_only_layers") else ()
    return tuple(i for i in range(layer_count(fields)) if i not in plain and (i + 1) % step == 0)
