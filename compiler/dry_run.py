"""Predicts the result of a compilation from a model's configuration, without reading weights.

The full-size model is traced on the meta device and bound to one bucket. So an error that stops a compilation before
its kernels stops this too, with the same message.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from llmc.buckets.planner import Resources
from llmc.cache_root import cache_root
from llmc.compiler.compile_times import learned
from llmc.compiler.config import CompileConfig, Progress, no_progress
from llmc.compiler.graph.commands import CommandList, Site
from llmc.compiler.graph.demands import kernels_of, of_stages, weight_requests
from llmc.compiler.graph.plan import plan_graphs
from llmc.compiler.graph.tracer import Tracer
from llmc.compiler.ops.attention import PAGED_ATTENTION
from llmc.compiler.ops.experts import EXPERTS, WEIGHTS
from llmc.compiler.ops.latent import LATENT_ATTENTION
from llmc.compiler.resolve import resolve
from llmc.compiler.resolved import Resolved
from llmc.compiler.store.cache import GraphCache
from llmc.compiler.store.weights import plan_weights
from llmc.graphs_format import PHASES
from llmc.graphs_records import kv_block_bytes, state_bytes
from llmc.model_path import onnx_graph
from llmc.models.config import ModelConfig
from llmc.models.registry import get_family
from llmc.models.rope import checked_frequencies
from llmc.models.sources.base import ModelSource
from llmc.models.sources.config_file import ConfigFileSource
from llmc.models.sources.folder_checkpoint import format_of
from llmc.models.sources.registry import open_source

_MULTIPLIED = (
    "linear", "gated_linear", "activated_linear", "linear_quant", "gated_linear_quant", "activated_linear_quant",
    "head_linear", "packed_head_linear",
)  # fmt: skip
"""Ops that multiply every row by their `weight`."""


@dataclass(frozen=True)
class DryRun:
    """Predicted properties of an artifact.

    flops_per_token: of the matrices, for a token whose logits are computed.
    attention_flops_per_token: of scores and values, after max_model_len tokens.
    weight_bytes: size of weights.safetensors; each of `ranks` ranks reads rank_weight_bytes of it, or less.
    stage_layers, stage_weight_bytes: number of layers of each stage, and what its ranks read; empty for a single one.
    FLOPs are per rank of a stage, over all stages; kv_bytes_per_token is of one rank,
    and so is state_bytes: of the states that a sequence has, however long it is.
    commands, kernels: of the smallest decode bucket.
    compile_s: estimated, from an empty cache.
    notes: sentences.
    """

    model_type: str
    parameters: int
    flops_per_token: int
    attention_flops_per_token: int
    weight_bytes: int
    ranks: int
    stage_layers: tuple[int, ...]
    stage_weight_bytes: tuple[int, ...]
    rank_weight_bytes: int
    kv_bytes_per_token: int
    state_bytes: int
    act_dtype: str
    kv_dtype: str
    target: str
    max_model_len: int
    model_len: int
    buckets: dict[str, tuple[str, ...]]
    commands: int
    kernels: int
    compile_s: float
    notes: tuple[str, ...]

    @property
    def num_buckets(self) -> int:
        return sum(map(len, self.buckets.values()))

    def as_dict(self) -> dict[str, object]:
        return {**asdict(self), "num_buckets": self.num_buckets}


def describable(path: Path, **asked: Any) -> ModelSource:
    """The model at `path`: a config.json of any name, a folder that has one (weights optional), or a GGUF or ONNX file.

    asked: see `ModelSource`. Raises ModelError.
    """
    if path.is_file() and path.suffix == ".json":
        return ConfigFileSource(path, **asked)
    has_weights = path.is_dir() and (any(path.glob("*.safetensors*")) or format_of(path) is not None)
    if path.is_dir() and onnx_graph(path) is None and not has_weights:
        return ConfigFileSource(path / "config.json", **asked)
    return open_source(path, **asked)


def dry_run(config: CompileConfig, progress: Progress = no_progress) -> DryRun:
    """config.model: see `describable`; config.output is ignored. Raises what a compilation raises before kernels."""
    source = describable(
        config.model,
        allow_unknown_config=config.allow_unknown_config,
        task=config.task,
        pooling=config.pooling,
        rank_prompt=config.rank_prompt,
    )
    resolved = resolve(config, source)
    for rope in resolved.model.ropes:
        checked_frequencies(rope, resolved.max_model_len)
    quantized_by = source.quantized_by() if isinstance(source, ConfigFileSource) else None
    smallest = min(resolved.ladder.decode or resolved.ladder.prefill, key=lambda bucket: (bucket.batch, bucket.seq))
    progress("trace", 0, 0)
    cache = GraphCache(cache_root(config.cache_dir))
    tracer = Tracer(resolved, cache)
    graphs = plan_graphs(
        [smallest], resolved.graph_params(), resolved.graph_components(), cache, tracer.bind, lambda done, count: None
    )
    progress("trace", 1, 1)
    (_, commands), *_ = graphs.values()
    requests = weight_requests(resolved.weight_shapes(), [commands], resolved.act_dtype, resolved.recipe)
    model, record, sites = resolved.model, resolved.model_record(), tracer.sites()
    stage_bytes = tuple(_weight_bytes(resolved, part) for part in of_stages(commands))
    layers = resolved.kv_layer_records(), resolved.stage_records(), resolved.state_layers()
    return DryRun(
        model_type=model.model_type,
        parameters=num_parameters(model),
        flops_per_token=_matrix_flops(sites),
        attention_flops_per_token=_attention_flops(sites, resolved.max_model_len),
        weight_bytes=plan_weights(resolved.requests(requests), resolved.target).total_bytes,
        ranks=resolved.num_ranks,
        stage_layers=resolved.stage_layers,
        rank_weight_bytes=max(stage_bytes),
        stage_weight_bytes=stage_bytes if resolved.stage_layers else (),
        kv_bytes_per_token=kv_block_bytes(record, *layers) // resolved.block_size,
        state_bytes=state_bytes(record, *layers),
        act_dtype=resolved.act_dtype,
        kv_dtype=resolved.kv_dtype,
        target=resolved.target.name,
        max_model_len=resolved.max_model_len,
        model_len=resolved.model_len,
        buckets={phase: tuple(map(str, getattr(resolved.ladder, phase))) for phase in PHASES},
        commands=len(commands.commands),
        kernels=len(kernels_of([commands])),
        compile_s=learned(Resources()).compile_s(len(tuple(resolved.ladder))),
        notes=(*resolved.warnings(), *_quantized_notes(quantized_by, resolved)),
    )


def _weight_bytes(resolved: Resolved, commands: CommandList) -> int:
    """Bytes of the weights that commands of one rank read."""
    requests = weight_requests(resolved.weight_shapes(), [commands], resolved.act_dtype, resolved.recipe)
    return plan_weights(requests, resolved.target).total_bytes


def num_parameters(model: ModelConfig) -> int:
    """The number of elements of all weights in a checkpoint."""
    return sum(math.prod(target.shape) for target in get_family(model.model_type).weight_map(model).targets)


def _matrix_flops(sites: Iterable[Site]) -> int:
    """2 FLOPs per matrix element; for experts, only those that a token uses."""
    total = 0
    for site in sites:
        shapes = site.attributes.get("weight_shapes", {})
        if site.op in _MULTIPLIED:
            total += 2 * math.prod(shapes["weight"])
        elif site.op == EXPERTS.name:
            taken = site.attributes["widths"]["chosen"] // 2
            of_all = sum(math.prod(shapes[weight]) for weight in WEIGHTS)
            total += 2 * of_all * taken // site.attributes["num_experts"]
    return total


def _attention_flops(sites: Iterable[Site], context: int) -> int:
    """FLOPs of scores and of weighted values, for one token with `context` tokens in view."""
    total = 0
    for site in sites:
        a = site.attributes
        if site.op == PAGED_ATTENTION.name:
            seen = min(context, a["window"] or context, a.get("chunk", 0) or context)
            total += 4 * a["num_heads"] * a["head_dim"] * seen
        elif site.op == LATENT_ATTENTION.name:
            # Scores have a part (rotated) that values lack.
            total += 2 * (2 * a["widths"]["q"] + a["widths"]["q_rotated"]) * context
    return total


def _quantized_notes(method: str | None, resolved: Resolved) -> tuple[str, ...]:
    if method is None:
        return ()
    return (
        f"the weights are quantized ({method}), and only their files tell how: their bytes are those of "
        f"{resolved.act_dtype}",
    )
