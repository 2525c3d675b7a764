"""The compiler, phase by phase: the file to read first.

load → graphs (trace, bind, plan memory, emit) → kernels → link → weights → artifact.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path

import torch
from torch import nn

from llmc import __version__
from llmc.buckets import BucketLadder, Limits, default_ladder, parse_spec
from llmc.compiler.artifact import (
    DTYPE_CODES,
    check_output,
    copy_tokenizer,
    graphs_bin,
    reuse_weights,
    staged_directory,
    write_manifest,
)
from llmc.compiler.build import BuiltKernel, build_kernels
from llmc.compiler.cache import GraphCache, cache_root, key_of
from llmc.compiler.config import CompileConfig, CompileError, CompileReport, Progress, no_progress
from llmc.compiler.graph import CommandList, round_up
from llmc.compiler.graphs_writer import ModelRecord
from llmc.compiler.kernels.spec import KernelSpec
from llmc.compiler.plan import GraphShape, plan_graphs
from llmc.compiler.targets.cpu import Target, resolve_target
from llmc.compiler.templates import GraphParams
from llmc.compiler.weights import WeightLayout, WeightRequest, plan_weights, write_weights
from llmc.models.config import ModelConfig, load_config
from llmc.models.loader import Checkpoint, load_parameters
from llmc.models.registry import build_model, get_family
from llmc.models.rope import cos_sin_table

DEFAULT_MAX_MODEL_LEN = 4096
HEAD_DIM_ALIGNMENT = 16


@dataclass(frozen=True)
class Resolved:
    """A CompileConfig with every "auto" decided."""

    model: ModelConfig
    target: Target
    act_dtype: str
    kv_dtype: str
    max_model_len: int
    max_num_seqs: int
    block_size: int
    ladder: BucketLadder


class PhaseClock:
    """Seconds by phase, and the caller's progress."""

    def __init__(self, progress: Progress) -> None:
        self.seconds: dict[str, float] = {}
        self._progress = progress

    @contextmanager
    def phase(self, name: str) -> Iterator[Callable[[int, int], None]]:
        start = time.perf_counter()
        self._progress(name, 0, 1)
        yield lambda done, total: self._progress(name, done, total)
        self.seconds[name] = round(time.perf_counter() - start, 3)


def resolve(config: CompileConfig) -> Resolved:
    """Decides dtypes, target, lengths and ladder. Raises CompileError, BucketError, TargetError or ModelError."""
    model = load_config(config.model)
    get_family(model.model_type)
    max_model_len = config.max_model_len or min(model.max_position_embeddings, DEFAULT_MAX_MODEL_LEN)
    act_dtype = config.dtype if config.dtype != "auto" else ("f32" if model.dtype == "f32" else "bf16")
    max_num_seqs = config.max_num_seqs
    if config.buckets is None:
        ladder = default_ladder(max_num_seqs, max_model_len, config.block_size)
    else:
        ladder = parse_spec(config.buckets, Limits(max_num_seqs, max_model_len, config.block_size))
        max_num_seqs = min(max_num_seqs, ladder.max_batch)
        if ladder.max_context < max_model_len and config.max_model_len is not None:
            raise CompileError(
                f"the largest decode bucket holds {ladder.max_context} tokens of context but max-model-len is "
                f"{max_model_len}; add a decode bucket or lower --max-model-len"
            )
        max_model_len = min(max_model_len, ladder.max_context)
    return Resolved(
        model=model,
        target=resolve_target(config.target),
        act_dtype=act_dtype,
        kv_dtype=config.kv_dtype if config.kv_dtype != "auto" else act_dtype,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        block_size=config.block_size,
        ladder=ladder,
    )


def sources_digest() -> str:
    """Digest of the sources that decide what a graph looks like: models and the compiler's lowering; no path in it."""
    here = Path(__file__).parent
    models = Path(get_family.__code__.co_filename).parent
    digest = hashlib.sha256()
    names = ("export.py", "lower.py", "emit.py", "templates.py", "plan.py")
    files = [here / name for name in names] + sorted((here / "passes").glob("*.py")) + sorted(models.rglob("*.py"))
    for file in files:
        digest.update(f"{file.name}\0".encode() + file.read_bytes())
    return digest.hexdigest()


def graph_components(resolved: Resolved, params: GraphParams) -> dict[str, str]:
    """What a command list depends on besides its shape, by name."""
    architecture = asdict(resolved.model)
    for irrelevant in ("eos_token_ids", "bos_token_id", "dtype"):
        architecture.pop(irrelevant, None)
    return {
        "kind": "graph",
        "architecture": json.dumps(architecture, sort_keys=True, default=str),
        "max_model_len": str(resolved.max_model_len),
        "act_dtype": params.act_dtype,
        "kv_dtype": params.kv_dtype,
        "block_size": str(params.block_size),
        "tiles": f"{params.target.lanes} {params.target.row_tile} {params.target.panel_columns}",
        "sources": sources_digest(),
        "torch": importlib.metadata.version("torch"),
        "tvm": importlib.metadata.version("apache-tvm"),
    }


class Tracer:
    """Traces and lowers the model when the first graph is missing from the cache, and binds every further one."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._lowered: object = None

    def bind(self, shape: GraphShape, params: GraphParams) -> CommandList:
        from llmc.compiler.emit import emit
        from llmc.compiler.export import export_model
        from llmc.compiler.lower import Lowered, lower
        from llmc.compiler.passes import bind_bucket

        if not isinstance(self._lowered, Lowered):
            self._lowered = lower(export_model(self._model))
        return emit(bind_bucket(self._lowered.module, shape.tokens, shape.samples), self._lowered, params)


def weight_requests(model: nn.Module, graphs: list[CommandList], act_dtype: str) -> list[WeightRequest]:
    """The weights that commands read: matrices of linear layers packed, in the activation dtype; the rest f32."""
    used: dict[str, KernelSpec] = {}
    for commands in graphs:
        for command in commands.commands:
            for operand in command.operands:
                if operand.kind == "weight":
                    used.setdefault(operand.name, command.spec)
                    if command.spec.op == "linear":
                        used[operand.name] = command.spec
    shapes = {
        name: tuple(t.shape) for name, t in {**dict(model.named_parameters()), **dict(model.named_buffers())}.items()
    }
    requests = []
    for name, spec in used.items():
        shape = shapes[name]
        matrix = len(shape) == 2 and spec.op in ("linear", "embedding")
        requests.append(WeightRequest(name, shape, act_dtype if matrix else "f32", matrix and spec.op == "linear"))
    return requests


def model_record(resolved: Resolved) -> ModelRecord:
    model = resolved.model
    return ModelRecord(
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        head_dim_padded=round_up(model.head_dim, HEAD_DIM_ALIGNMENT),
        block_size=resolved.block_size,
        kv_dtype=DTYPE_CODES[resolved.kv_dtype],
        vocab_size=model.vocab_size,
        max_model_len=resolved.max_model_len,
        max_num_seqs=resolved.max_num_seqs,
        panel_columns=resolved.target.panel_columns,
        act_dtype=DTYPE_CODES[resolved.act_dtype],
        sliding_window=model.sliding_window or 0,
        eos=tuple(model.eos_token_ids),
        bos=-1 if model.bos_token_id is None else model.bos_token_id,
    )


def compile_model(config: CompileConfig, progress: Progress = no_progress) -> CompileReport:
    """Compiles a checkpoint into an artifact. On failure `config.output` is as it was before."""
    from llmc.compiler.kernels.pipeline import link_shared

    clock = PhaseClock(progress)
    cache = GraphCache(cache_root(config.cache_dir))
    with clock.phase("load"):
        # staged_directory checks too; this one saves the minutes before it.
        check_output(config.output)
        resolved = resolve(config)
        checkpoint = Checkpoint(config.model)
        with torch.device("meta"):
            model = build_model(resolved.model, resolved.act_dtype, resolved.max_model_len)
    with clock.phase("graphs") as on_graph:
        params = GraphParams(
            target=resolved.target,
            row_tile=0,
            sample_row_tile=0,
            act_dtype=resolved.act_dtype,
            kv_dtype=resolved.kv_dtype,
            block_size=resolved.block_size,
            packed_embedding=resolved.model.tie_word_embeddings,
        )
        components = graph_components(resolved, params)
        graphs = plan_graphs(list(resolved.ladder), params, components, cache, Tracer(model).bind, on_graph)
    with clock.phase("kernels") as on_kernel:
        command_lists = list({id(c): c for _, c in graphs.values()}.values())
        specs = sorted({c.spec for of in command_lists for c in of.commands}, key=KernelSpec.symbol)
        kernels = build_kernels(specs, resolved.target, cache, config.num_jobs(), on_kernel)
    layout = plan_weights(weight_requests(model, command_lists, resolved.act_dtype), resolved.target.panel_columns)
    with staged_directory(config.output) as staging:
        with clock.phase("weights") as on_weight:
            packed = staging / "weights.safetensors"
            weights_key = key_of(weights_components(checkpoint, resolved, layout))
            if not reuse_weights(config.output, weights_key, layout.total_bytes, packed):
                parameters = chain(
                    load_parameters(resolved.model, checkpoint, resolved.act_dtype),
                    [("rope.cos_sin", cos_sin_table(resolved.model, resolved.max_model_len))],
                )
                write_weights(layout, parameters, resolved.target.panel_columns, packed, on_weight)
        with clock.phase("link"):
            link_shared([k.code for k in kernels], staging / "kernels.so")
            tables = graphs_bin(model_record(resolved), specs, layout, graphs, resolved.target.isa_level)
            (staging / "graphs.bin").write_bytes(tables)
            copied = copy_tokenizer(config.model, staging)
            report = CompileReport(
                artifact=config.output,
                target=resolved.target.name,
                num_prefill_graphs=len(resolved.ladder.prefill),
                num_decode_graphs=len(resolved.ladder.decode),
                num_kernels=len(kernels),
                kernels_compiled=sum(not k.cached for k in kernels),
                kernels_cached=sum(k.cached for k in kernels),
                code_bytes=(staging / "kernels.so").stat().st_size,
                weight_bytes=layout.total_bytes,
                arena_bytes=max(of.arena_bytes for of in command_lists),
                phase_seconds=clock.seconds,
            )
            described = manifest(resolved, kernels, components, report, copied)
            reusable = {"weights_key": weights_key, "weights_mtime_ns": packed.stat().st_mtime_ns}
            write_manifest(staging / "manifest.json", {**described, **reusable})
    return report


def weights_components(checkpoint: Checkpoint, resolved: Resolved, layout: WeightLayout) -> dict[str, str]:
    """What packed weights are made of, by name; a checkpoint's files count by size and time of change."""
    files = [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in sorted(checkpoint.path.glob("*.safetensors"))]
    sources = (Path(__file__).with_name(name).read_bytes() for name in ("weights.py", "packing.py"))
    return {
        "kind": "weights",
        "files": json.dumps(files),
        "layout": hashlib.sha256(layout.header).hexdigest(),
        "rope": f"{resolved.model.rope_theta} {resolved.model.rope_scaling}",
        "sources": hashlib.sha256(b"".join(sources)).hexdigest(),
        "models": sources_digest(),
    }


def manifest(
    resolved: Resolved,
    kernels: list[BuiltKernel],
    components: dict[str, str],
    report: CompileReport,
    copied: list[str],
) -> dict[str, object]:
    """What people and tools want to know of an artifact; the runtime does not read it."""
    return {
        "format_version": 1,
        "llmc_version": __version__,
        "fingerprint": key_of(components),
        "model": asdict(resolved.model),
        "target": asdict(resolved.target),
        "act_dtype": resolved.act_dtype,
        "kv_dtype": resolved.kv_dtype,
        "max_model_len": resolved.max_model_len,
        "max_num_seqs": resolved.max_num_seqs,
        "block_size": resolved.block_size,
        "buckets": [str(b) for b in resolved.ladder],
        "bytes": {"code": report.code_bytes, "weights": report.weight_bytes, "arena": report.arena_bytes},
        "files": copied,
        "tools": {name: importlib.metadata.version(name) for name in ("torch", "apache-tvm")},
        "weights": {
            target.name: [source.name for source in target.sources]
            for target in get_family(resolved.model.model_type).weight_map(resolved.model).targets
        },
        "graph_components": components,
        "kernels": [
            {"symbol": k.spec.symbol(), "op": k.spec.op, "key": k.key, "components": k.components} for k in kernels
        ],
    }


def compile_cached(model: Path, progress: Progress = no_progress) -> Path:
    """Compiles a model directory for this machine with the default buckets, once; returns the cached artifact."""
    stat = [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in sorted(model.iterdir()) if f.is_file()]
    resolved = resolve(CompileConfig(model=model, output=model))
    key = key_of(
        {
            "files": json.dumps(stat),
            "target": json.dumps(asdict(resolved.target)),
            "sources": sources_digest(),
            "version": __version__,
        }
    )
    output = cache_root(None) / "artifacts" / key
    if not (output / "graphs.bin").is_file():
        output.parent.mkdir(parents=True, exist_ok=True)
        compile_model(CompileConfig(model=model, output=output), progress)
    return output
