"""The llmc ops of mixtures of experts; `ops.py` has the others. E experts, k per token."""

# torch reads op schemas from the annotations, so they must be types, not strings.

import torch
import torch.nn.functional as F
from torch import Tensor

from llmc.models.activations import activated
from llmc.models.ops import llmc_op, torch_act_dtype


@llmc_op("choose_experts")
def choose_experts(
    choice: Tensor,
    scores: Tensor,
    top_k: int,
    groups: int = 1,
    top_groups: int = 1,
    best_of_group: int = 1,
    normalised: bool = False,
    least_sum: float = 0.0,
    scale: float = 1.0,
    expert_scales: Tensor | None = None,
    added_sum: float = 0.0,
) -> Tensor:
    """Chooses the experts with the largest `choice` float32 [T, E], weighted by `scores` float32 [T, E]. Returns i32
    [T, 2 k]: ids, best first, then the bits of the weights.

    Ties go to the first. groups: number of equal groups; only the `top_groups` best are eligible. A group's score is
    its best expert's, or the sum of its best two (best_of_group). normalised: weights are divided by their sum, at
    least `least_sum`, plus `added_sum`. scale: factor of all weights. expert_scales: float32 [E], a further factor of
    each expert's, or None.
    """
    if top_groups < groups:
        members = choice.view(len(choice), groups, -1)
        of_group = members.topk(best_of_group, dim=-1).values.sum(-1)
        best = _best(of_group, top_groups)
        barred = torch.ones_like(of_group, dtype=torch.bool).scatter(1, best, value=False)
        choice = members.masked_fill(barred[..., None], float("-inf")).reshape(choice.shape)
    ids = _best(choice, top_k)
    weights = scores.gather(1, ids)
    if normalised:
        weights = weights / (weights.sum(-1, keepdim=True).clamp(min=least_sum) + added_sum)
    if scale != 1.0:
        weights = weights * scale
    if expert_scales is not None:
        weights = weights * expert_scales[ids]
    return torch.cat((ids.int(), weights.contiguous().view(torch.int32)), dim=-1)


def _best(values: Tensor, count: int) -> Tensor:
    return values.argsort(dim=-1, descending=True, stable=True)[:, :count]


@choose_experts.register_fake
def _(
    choice: Tensor,
    scores: Tensor,
    top_k: int,
    groups: int = 1,
    top_groups: int = 1,
    best_of_group: int = 1,
    normalised: bool = False,
    least_sum: float = 0.0,
    scale: float = 1.0,
    expert_scales: Tensor | None = None,
    added_sum: float = 0.0,
) -> Tensor:
    return choice.new_empty((choice.shape[0], 2 * top_k), dtype=torch.int32)


@llmc_op("held_experts")
def held_experts(chosen: Tensor, places: Tensor) -> Tensor:
    """What `choose_experts` chose, i32 [T, 2 k], by the places float32 [E] of experts among those that are here.

    The place of an expert that is elsewhere is how many are here.
    """
    top_k = chosen.shape[1] // 2
    return torch.cat((places[chosen[:, :top_k].long()].int(), chosen[:, top_k:]), dim=-1)


@held_experts.register_fake
def _(chosen: Tensor, places: Tensor) -> Tensor:
    return torch.empty_like(chosen)


@llmc_op("experts")
def experts(
    x: Tensor,
    chosen: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    residual: Tensor | None,
    num_experts: int,
    gate_limit: float = 0.0,
    gate_gain: float = 1.0,
    act_dtype: str = "f32",
    some: bool = False,
    activation: str = "silu",
    gated: bool = True,
) -> Tensor:
    """The weighted sum of the chosen experts' outputs for x act [T, D], plus residual [T, D]: float32 [T, D].

    chosen: from `choose_experts`. gate_up [E 2 I, D] (gate before up), down [E D, I], gate_up_bias [E 2 I] and
    down_bias [E D] are stacked by expert. An expert computes down(activation(gate) · up), with the inner activation in
    act_dtype. If not gated, gate_up is [E I, D], and an expert computes down(activation(up)). With a gate_limit:
    down(gate · sigmoid(gate_gain · gate) · (up + 1)), gate clamped to at most the limit, up to ± the limit. some: ids
    of E belong to experts of another rank, which add nothing (`held_experts`).
    """
    top_k = chosen.shape[1] // 2
    ids, weights = chosen[:, :top_k], chosen[:, top_k:].contiguous().view(torch.float32)
    first_size, size = gate_up.shape[0] // num_experts, down.shape[0] // num_experts
    results = x.new_zeros((x.shape[0], top_k, size), dtype=torch.float32)
    for expert in ids[ids < num_experts].unique().tolist():
        rows, places = (ids == expert).nonzero(as_tuple=True)
        first = slice(expert * first_size, (expert + 1) * first_size)
        second = slice(expert * size, (expert + 1) * size)
        bias = None if gate_up_bias is None else gate_up_bias[first]
        made = expert_inner(x[rows], gate_up[first], bias, gate_limit, gate_gain, activation, gated=gated)
        act = made.to(torch_act_dtype(act_dtype))
        results[rows, places] = F.linear(
            act.float(), down[second].float(), None if down_bias is None else down_bias[second]
        )
    out = (results * weights[..., None]).sum(1)
    return out if residual is None else out + residual


def expert_inner(
    x: Tensor,
    gate_up: Tensor,
    bias: Tensor | None,
    gate_limit: float,
    gate_gain: float,
    activation: str = "silu",
    *,
    gated: bool = True,
) -> Tensor:
    """The inner activation float32 [T, I] of one expert. x: act [T, D]. gate_up: [2 I, D], or [I, D] if not gated.
    Limits: as in `experts`."""
    made = F.linear(x.float(), gate_up.float(), bias)
    if not gated:
        return activated(made, activation)
    gate, up = made.chunk(2, dim=-1)
    if not gate_limit:
        return activated(gate, activation) * up
    gate, up = gate.clamp(max=gate_limit), up.clamp(min=-gate_limit, max=gate_limit)
    return gate * torch.sigmoid(gate * gate_gain) * (up + 1)


@experts.register_fake
def _(
    x: Tensor,
    chosen: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    residual: Tensor | None,
    num_experts: int,
    gate_limit: float = 0.0,
    gate_gain: float = 1.0,
    act_dtype: str = "f32",
    some: bool = False,
    activation: str = "silu",
    gated: bool = True,
) -> Tensor:
    return x.new_empty((x.shape[0], down.shape[0] // num_experts), dtype=torch.float32)
