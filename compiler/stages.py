"""Pipeline parallelism: how the layers of a model are divided among stages. Imports neither torch nor tvm.

A stage has neighbouring layers. The first one has the embedding, too, the last one the final norm and the output
projection. Activations pass from stage to stage unchanged, so no result depends on the number of stages.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from itertools import accumulate

from llmc.compiler.config import CompileError
from llmc.compiler.dtypes import DTYPES
from llmc.compiler.partition import EMBEDDING, HEAD
from llmc.graphs_format import DTYPE_BYTES, MAX_RANKS
from llmc.models.config import ModelConfig
from llmc.models.registry import get_family
from llmc.models.weight_map import Target
from llmc.quantize import Recipe, layer_kind, layer_of


def check_stages(model: ModelConfig, stages: int, ranks: int) -> None:
    """Raises CompileError with one sentence if a model cannot have `stages` stages of `ranks` ranks each."""
    for present, what in (
        (model.pooled is not None or model.bidirectional, "gives vectors in place of text"),
        (model.streams is not None, "has several hidden vectors of a token"),
    ):
        if present:
            raise CompileError(
                f"{model.model_type} {what}, which --pipeline-parallel does not divide yet: leave it out"
            )
    if stages > model.num_layers:
        raise CompileError(
            f"pipeline-parallel is {stages}, but {model.model_type} has {model.num_layers} layers: choose at most "
            f"{model.num_layers} stages"
        )
    if stages * ranks > MAX_RANKS:
        raise CompileError(
            f"{stages} stages of {ranks} ranks are {stages * ranks} ranks, of which at most {MAX_RANKS} run a model "
            "together: choose fewer"
        )


def divide_layers(model: ModelConfig, recipe: Recipe, act_dtype: str, stages: int) -> tuple[int, ...]:
    """The number of layers of each stage. No layer reads keys and values of another stage.

    Raises CompileError if so many stages are not possible.
    """
    ends = stage_ends(bound_to(model))
    if stages > len(ends):
        most = f"choose at most {len(ends)}" if len(ends) > 1 else "leave out --pipeline-parallel"
        bound = "read keys and values of another layer have to be in its stage"
        if model.mlp_only_layers:
            bound = "have a feed-forward block alone have to be in the stage of another layer"
        raise CompileError(
            f"pipeline-parallel is {stages}, but layers of {model.model_type} that {bound}, so {model.num_layers} "
            f"layers make {len(ends)} at most: {most}"
        )
    return divided(_costs(model, recipe, act_dtype), stages, ends)


def bound_to(model: ModelConfig) -> list[int]:
    """For each layer, the one whose stage it has to be in, itself or an earlier one.

    It is the one whose keys and values it reads. Every stage has a layer of the KV cache: a layer without one goes with
    the layer before it, and the first one with one goes with all before it.
    """
    found: list[int] = []
    for layer in range(model.num_layers):
        if model.is_cached(layer):
            kv_layer = model.kv_layer(layer)
            found.append(0 if kv_layer == 0 else model.cached_layers[kv_layer])
        else:
            found.append(found[-1] if found else 0)
    return found


def stage_ends(bound_to: Sequence[int]) -> list[int]:
    """Numbers of leading layers behind which a stage may end, the last one that of all layers.

    bound_to: for each layer, the one whose stage it has to be in, itself or an earlier one.
    """
    first_bound = [*accumulate(reversed(bound_to), min)][::-1]  # of the layer or any behind it
    return [*(end for end in range(1, len(bound_to)) if first_bound[end] >= end), len(bound_to)]


def divided(costs: Sequence[float], stages: int, ends: Collection[int]) -> tuple[int, ...]:
    """How many neighbours of `costs` each stage gets, at least one, so that the largest sum is least.

    ends: the counts of leading costs behind which a stage may end, at least `stages` with that of all costs.
    """
    count, sums = len(costs), [0.0, *accumulate(costs)]
    # [end] → the largest sum, and where the last stage begins, if the stages so far have costs[:end].
    rounds: list[dict[int, tuple[float, int]]] = [{0: (0.0, 0)}]
    for _ in range(stages):
        before = rounds[-1]
        best: dict[int, tuple[float, int]] = {}
        for end in ends:
            choices = [
                (max(most, sums[end] - sums[start]), start) for start, (most, _) in before.items() if start < end
            ]
            if choices:
                best[end] = min(choices)
        rounds.append(best)
    found, end = [], count
    for best in reversed(rounds[1:]):
        start = best[end][1]
        found.append(end - start)
        end = start
    return tuple(reversed(found))


def _costs(model: ModelConfig, recipe: Recipe, act_dtype: str) -> list[float]:
    """The cost of each layer: its share of all bytes, which decode steps read, and of all FLOPs, which prefill takes.

    The embedding counts as part of the first layer, the output projection of the last.
    """
    bytes_of, flops_of = [0.0] * model.num_layers, [0.0] * model.num_layers
    targets = {target.name: target for target in get_family(model.model_type).weight_map(model).targets}
    for name, target in targets.items():
        layer, nbytes, flops = layer_of(name), _bytes(target, recipe, act_dtype), _flops(target, model)
        if name == EMBEDDING:
            bytes_of[0] += nbytes
        elif layer >= 0:
            bytes_of[layer] += nbytes
            flops_of[layer] += flops
    head = targets.get(HEAD, targets[EMBEDDING])
    bytes_of[-1] += _bytes(head, recipe, act_dtype)
    flops_of[-1] += _flops(head, model)
    all_bytes, all_flops = sum(bytes_of), sum(flops_of)
    return [nbytes / all_bytes + flops / all_flops for nbytes, flops in zip(bytes_of, flops_of, strict=True)]


def _bytes(target: Target, recipe: Recipe, act_dtype: str) -> float:
    elements = math.prod(target.shape)
    scheme = recipe.schemes.get(target.name)
    if scheme is not None:
        return elements * scheme.weight.bits_per_weight(target.shape[-1]) / 8
    return elements * DTYPE_BYTES[DTYPES[act_dtype if target.dtype == "act" else "f32"].code]


def _flops(target: Target, model: ModelConfig) -> float:
    """FLOPs of a token in a matrix."""
    if len(target.shape) < 2:
        return 0.0
    used = 1.0
    if model.experts is not None and layer_kind(target.name).startswith("mlp.experts."):
        used = model.experts.top_k / model.experts.count
    return 2 * math.prod(target.shape) * used
