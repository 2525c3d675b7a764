"""Pipeline parallelism: how the layers of a model are divided among stages. Imports neither torch nor tvm.

A stage has neighbouring layers. The first one has the embedding, too, the last one the final norm and the output
projection. Activations pass from stage to stage unchanged, so no result depends on the number of stages.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import accumulate

from llmc.compiler.config import CompileError
from llmc.compiler.dtypes import DTYPES
from llmc.compiler.partition import EMBEDDING, HEAD
from llmc.graphs_format import DTYPE_BYTES, MAX_RANKS
from llmc.models.config import ModelConfig
from llmc.models.registry import get_family
from llmc.models.weight_map import Target
from llmc.quantize import Recipe, layer_kind

_LAYER = re.compile(r"^layers\.(\d+)\.")


def layer_of(weight: str) -> int:
    """The layer of a weight, by its name; −1 for none."""
    found = _LAYER.match(weight)
    return -1 if found is None else int(found[1])


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
    """The number of layers of each stage. Raises CompileError if a layer reads keys and values of another stage."""
    found = divided(_costs(model, recipe, act_dtype), stages)
    ends = list(accumulate(found))
    for layer in range(model.num_layers):
        made_by = model.kv_layer(layer)
        if any(made_by < end <= layer for end in ends):
            raise CompileError(
                f"layer {layer} of {model.model_type} reads keys and values of layer {made_by}, which is in another of "
                f"{stages} stages: choose fewer, or leave out --pipeline-parallel"
            )
    return found


def divided(costs: Sequence[float], stages: int) -> tuple[int, ...]:
    """How many neighbours of `costs` each stage gets, at least one, so that the largest sum is least."""
    count, sums = len(costs), [0.0, *accumulate(costs)]
    # [end] → the largest sum, and where the last stage begins, if the stages so far have costs[:end].
    rounds: list[dict[int, tuple[float, int]]] = [{0: (0.0, 0)}]
    for stage in range(1, stages + 1):
        before = rounds[-1]
        rounds.append(
            {
                end: min(
                    (max(most, sums[end] - sums[start]), start) for start, (most, _) in before.items() if start < end
                )
                for end in range(stage, count - stages + stage + 1)
            }
        )
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
