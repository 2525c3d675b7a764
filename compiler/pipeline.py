"""The compiler, phase by phase: the file to read first.

(download →) load → trace → graphs (bind, plan memory, emit) → (tune) → kernels → weights → link → publish.

Where the cache has everything, neither torch nor TVM is imported: they take longer than all the rest.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from llmc import __version__
from llmc.buckets import Bucket
from llmc.compiler import keys
from llmc.compiler.artifact import (
    copied_files,
    copy_files,
    graphs_bin,
    reuse_weights,
)
from llmc.compiler.build import BuiltKernel, build_kernels
from llmc.compiler.cache import GraphCache, cache_root, key_of
from llmc.compiler.cached_artifacts import artifacts_folder, mark_used
from llmc.compiler.config import CompileConfig, CompileReport, HubSource, Progress, no_progress
from llmc.compiler.dtypes import DTYPES
from llmc.compiler.graph import CommandList, GraphShape
from llmc.compiler.graphs_writer import FileSums, ModelRecord
from llmc.compiler.hub import locate
from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.ops.definition import NUM_SAMPLES, NUM_TOKENS, GraphParams
from llmc.compiler.output import check_output, refuse_another
from llmc.compiler.packed import record_weights, recorded_weights
from llmc.compiler.plan import needed_graphs, plan_graphs
from llmc.compiler.resolve import Resolved, resolve
from llmc.compiler.resources import PeakMemory
from llmc.compiler.staging import staged_directory
from llmc.compiler.targets.base import Choice
from llmc.compiler.tvm_import import import_tvm
from llmc.compiler.weight_request import WeightRequest
from llmc.compiler.weights import plan_weights, write_weights
from llmc.graphs_format import VERSION as FORMAT_VERSION
from llmc.hub_id import hub_id
from llmc.manifest import listed_files, write_manifest
from llmc.models import weight_map
from llmc.models.config import ModelConfig
from llmc.models.loader import Checkpoint, Parameter, check_checkpoint, load_parameters
from llmc.models.registry import get_family
from llmc.models.rope import checked_frequencies, cos_sin_table
from llmc.quantize import Recipe, Scheme

if TYPE_CHECKING:
    from llmc.compiler.lowered import Lowered

ROPE_TABLE = "rope.cos_sin"


class PhaseClock:
    """Seconds by phase, and the caller's progress."""

    def __init__(self, progress: Progress) -> None:
        self.seconds: dict[str, float] = {}
        self._progress = progress

    @contextmanager
    def phase(self, name: str) -> Iterator[Callable[[int, int], None]]:
        start, extent = time.perf_counter(), 1

        def advance(done: int, total: int) -> None:
            nonlocal extent
            extent = max(1, total)
            self._progress(name, done, total)

        self._progress(name, 0, 0)
        yield advance
        self._progress(name, extent, extent)
        self.seconds[name] = round(time.perf_counter() - start, 3)


class Tracer:
    """Binds graphs that the cache lacks to the lowered model, which is traced once and then cached too."""

    def __init__(self, resolved: Resolved, cache: GraphCache) -> None:
        self._resolved = resolved
        self._cache = cache
        self._lowered: Lowered | None = None

    def prepare(self, buckets: Sequence[Bucket]) -> None:
        """Traces the model, or reads what was traced, if the cache lacks a graph of `buckets`."""
        resolved = self._resolved
        needed = needed_graphs(buckets, resolved.graph_params(), resolved.graph_components())
        if not all(self._cache.has(key_of(components)) for _, components in needed.values()):
            self._lowered = self._quantized(self._lower())

    def bind(self, shape: GraphShape, params: GraphParams) -> CommandList:
        if self._lowered is None:
            # An entry of the cache was damaged.
            self._lowered = self._quantized(self._lower())
        from llmc.compiler.emit import emit
        from llmc.compiler.passes import bind_bucket

        return emit(bind_bucket(self._lowered.module, shape.tokens, shape.samples), self._lowered, params)

    def _quantized(self, lowered: Lowered) -> Lowered:
        if not self._resolved.recipe.schemes:
            return lowered
        from llmc.compiler.passes.quantize import quantize_linears

        return quantize_linears(lowered, self._resolved.recipe, self._resolved.target)

    def _lower(self) -> Lowered:
        components = self._resolved.trace_components()
        key = key_of(components)
        payload = self._cache.get(key)
        if payload is not None:
            import_tvm()
            from llmc.compiler.lowered import from_bytes

            return from_bytes(payload)
        lowered = self._trace()
        from llmc.compiler.lowered import to_bytes

        payload = to_bytes(lowered)
        if payload is not None:
            self._cache.put(key, payload, components, {"model_type": self._resolved.model.model_type})
        return lowered

    def _trace(self) -> Lowered:
        # torch first: TVM binds to it when both are there.
        import torch

        from llmc.compiler.export import export_model
        from llmc.compiler.lower import lower
        from llmc.models.registry import build_model

        with torch.device("meta"):
            model = build_model(self._resolved.model, self._resolved.act_dtype, self._resolved.max_model_len)
        return lower(export_model(model))


def weight_shapes(model: ModelConfig, max_model_len: int) -> dict[str, tuple[int, ...]]:
    """Logical shapes of all that the graphs may read as a weight, by name."""
    targets = get_family(model.model_type).weight_map(model).targets
    return {**{target.name: target.shape for target in targets}, ROPE_TABLE: (max_model_len, model.rotary_dim)}


def weight_requests(
    shapes: Mapping[str, tuple[int, ...]], graphs: Iterable[CommandList], act_dtype: str, recipe: Recipe
) -> list[WeightRequest]:
    """The weights that commands read: matrices of linear layers packed, in the activation dtype or quantized; the
    rest f32.
    """
    used: dict[str, KernelSpec] = {}
    for commands in graphs:
        for command in commands.commands:
            for operand in command.operands:
                # A part of a quantized weight comes with the weight.
                if operand.kind == "weight" and operand.name in shapes:
                    used.setdefault(operand.name, command.spec)
                    if command.spec.op == "linear":
                        used[operand.name] = command.spec
    requests = []
    for name, spec in used.items():
        shape, parts = shapes[name], 2 if spec.as_dict().get("gated") else 1
        if name in recipe.schemes:
            requests.append(WeightRequest(name, shape, "u8", True, recipe.schemes[name].weight, parts))
            continue
        matrix, packed = len(shape) == 2 and spec.op in ("linear", "embedding"), spec.op == "linear"
        requests.append(WeightRequest(name, shape, act_dtype if matrix else "f32", matrix and packed, parts=parts))
    return requests


def model_parameters(resolved: Resolved, checkpoint: Checkpoint) -> Iterator[Parameter]:
    """Everything that graphs may read as a weight."""
    yield from load_parameters(resolved.model, checkpoint, resolved.act_dtype)
    yield Parameter(ROPE_TABLE, "f32", (cos_sin_table(resolved.model, resolved.max_model_len),))


def model_record(resolved: Resolved) -> ModelRecord:
    """What graphs.bin says of the model."""
    model = resolved.model
    keys_bytes, values_bytes = resolved.target.kv_block_bytes(
        model.num_kv_heads, model.head_dim, resolved.block_size, resolved.kv_dtype
    )
    return ModelRecord(
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        block_size=resolved.block_size,
        kv_dtype=DTYPES[resolved.kv_dtype].code,
        vocab_size=model.vocab_size,
        max_model_len=resolved.max_model_len,
        max_num_seqs=resolved.max_num_seqs,
        act_dtype=DTYPES[resolved.act_dtype].code,
        sliding_window=model.sliding_window or 0,
        eos=tuple(model.eos_token_ids),
        bos=-1 if model.bos_token_id is None else model.bos_token_id,
        key_block_bytes=keys_bytes,
        value_block_bytes=values_bytes,
    )


def compile_model(config: CompileConfig, progress: Progress = no_progress) -> CompileReport:
    """Compiles a checkpoint into an artifact. On failure `config.output` is as it was before.

    config.model: a directory, or a name on the hub, which is downloaded.
    """
    clock = PhaseClock(progress)
    cache = GraphCache(cache_root(config.cache_dir))
    with ExitStack() as stack:
        memory = stack.enter_context(PeakMemory())
        # staged_directory checks too; this one saves the minutes before it.
        there = check_output(config.output)
        if hub_id(config.model) is not None:
            with clock.phase("download") as on_mib:
                found = locate(config.model, on_mib)
                config = replace(config, model=found.path, source=found.source)
        with clock.phase("load"):
            resolved = resolve(config)
            # Before anything is traced or made in the sizes that config.json gives.
            checkpoint = Checkpoint(config.model)
            check_checkpoint(resolved.model, checkpoint)
            checked_frequencies(resolved.model, resolved.max_model_len)
            names = copied_files(config.model, config.tokenizer)
            common = resolved.graph_components()
            tuned = config.tune_for is not None
            settings = {**manifest_settings(resolved, common), **manifest_source(config.source)}
            asked_for = {**settings, "tuned": tuned, "files": names}
            if not config.overwrite:
                refuse_another(config.output, there, asked_for, config.model)
            if config.tune_for is not None:
                resolved.target.check_tunes_here()
        tracer = Tracer(resolved, cache)
        with clock.phase("trace"):
            tracer.prepare(list(resolved.ladder))
        with clock.phase("graphs") as on_graph:
            graphs = plan_graphs(list(resolved.ladder), resolved.graph_params(), common, cache, tracer.bind, on_graph)
            command_lists = list({id(c): c for _, c in graphs.values()}.values())
        specs = sorted({c.spec for of in command_lists for c in of.commands}, key=KernelSpec.symbol)
        choices: dict[KernelSpec, Choice] = {}
        if config.tune_for is not None:
            with clock.phase("tune") as on_step:
                rows = most_rows(graphs.values())
                choices = resolved.target.tune(rows, cache, config.tune_for, config.num_jobs(), on_step)
        variants = {spec: choice.variant for spec, choice in choices.items() if choice.variant is not None}
        with clock.phase("kernels") as on_kernel:
            kernels = build_kernels(specs, resolved.target, cache, config.num_jobs(), on_kernel, variants)
        with clock.phase("weights") as on_weight:
            staging = stack.enter_context(staged_directory(config.output))
            shapes = weight_shapes(resolved.model, resolved.max_model_len)
            layout = plan_weights(
                weight_requests(shapes, command_lists, resolved.act_dtype, resolved.recipe),
                resolved.target,
            )
            packed = staging / "weights.safetensors"
            weights_key = key_of(
                keys.weights_components(
                    checkpoint.path,
                    resolved.model,
                    resolved.max_model_len,
                    resolved.target,
                    layout.header,
                    quantized=bool(resolved.recipe.schemes),
                )
            )
            crcs = reuse_weights(config.output, recorded_weights(cache.root, weights_key), layout, packed)
            if crcs is None:
                parameters = model_parameters(resolved, checkpoint)
                crcs = write_weights(layout, parameters, resolved.target, packed, on_weight, config.num_jobs())
                record_weights(cache.root, weights_key, crcs)
            if not config.overwrite:
                refuse_another(config.output, there, {"weights_crc32": crcs})
        with clock.phase("link"):
            code_name = resolved.target.code_name
            resolved.target.link([k.code for k in kernels], staging / code_name)
            code = (staging / code_name).read_bytes()
            sums = FileSums.of({code_name: code}, layout.header, layout.total_bytes)
            tables = graphs_bin(model_record(resolved), specs, layout, crcs, graphs, resolved.target, sums)
            (staging / "graphs.bin").write_bytes(tables)
            copy_files(config.model, staging, names)
            sizes = {
                "code": len(code),
                "weights": layout.total_bytes,
                "arena": max(of.arena_bytes for of in command_lists),
            }
            described = {
                **asked_for,
                "files": listed_files(staging, names),
                "bytes": sizes,
                "kernels": [manifest_kernel(k) for k in kernels],
            }
            write_manifest(staging / "manifest.json", {**described, "weights_crc32": crcs})
        with clock.phase("publish"):
            # Syncs and renames the staged directory.
            stack.close()
    return CompileReport(
        artifact=config.output,
        target=resolved.target.name,
        num_prefill_graphs=len(resolved.ladder.prefill),
        num_decode_graphs=len(resolved.ladder.decode),
        num_mixed_graphs=len(resolved.ladder.mixed),
        num_kernels=len(kernels),
        kernels_compiled=sum(not k.cached for k in kernels),
        kernels_cached=sum(k.cached for k in kernels),
        code_bytes=sizes["code"],
        weight_bytes=sizes["weights"],
        arena_bytes=sizes["arena"],
        peak_memory_bytes=memory.peak_bytes,
        max_model_len=resolved.max_model_len,
        model_len=resolved.model_len,
        warnings=resolved.warnings(),
        phase_seconds=clock.seconds,
        tuned={spec.symbol(): choices[spec].gain for spec in variants},
    )


def most_rows(graphs: Iterable[tuple[GraphShape, CommandList]]) -> dict[KernelSpec, int]:
    """The most rows of tokens or samples that any graph calls a kernel with; of those that have rows."""
    most: dict[KernelSpec, int] = {}
    for shape, commands in graphs:
        by_scalar = {NUM_TOKENS: shape.tokens, NUM_SAMPLES: shape.samples}
        for spec in {command.spec for command in commands.commands}:
            rows = by_scalar.get(int(spec.as_dict().get("rows", -1)))
            if rows is not None:
                most[spec] = max(most.get(spec, 0), rows)
    return most


def manifest_settings(resolved: Resolved, components: Mapping[str, str]) -> dict[str, object]:
    """What a manifest says of what was asked for, and of what made it; for people and tools, the runtime reads none.

    Nothing of when, where and how fast: the same inputs make the same bytes.
    """
    return {
        "format_version": FORMAT_VERSION,
        "llmc_version": __version__,
        "fingerprint": key_of(components),
        "model": asdict(resolved.model),
        "target": resolved.target.record(),
        "act_dtype": resolved.act_dtype,
        "kv_dtype": resolved.kv_dtype,
        "max_model_len": resolved.max_model_len,
        "context": {"model_len": resolved.model_len, "cut_by": resolved.cut_by},
        "max_num_seqs": resolved.max_num_seqs,
        "block_size": resolved.block_size,
        "max_num_batched_tokens": resolved.max_num_batched_tokens,
        "buckets": [str(b) for b in resolved.ladder],
        "tools": {name: keys.tool_version(name) for name in ("torch", "apache-tvm")},
        "weights": manifest_weights(resolved),
        "graph_components": dict(components),
    }


def manifest_source(source: HubSource | None) -> dict[str, object]:
    """Which commit of the hub a model is; nothing for a directory, whose place says nothing elsewhere."""
    return {} if source is None else {"source": asdict(source)}


def manifest_kernel(kernel: BuiltKernel) -> dict[str, object]:
    """A kernel in the manifest's list, which is in the order of graphs.bin."""
    return {
        "symbol": kernel.spec.symbol(),
        "op": kernel.spec.op,
        "key": kernel.key,
        "components": kernel.components,
    }


def manifest_weights(resolved: Resolved) -> dict[str, object]:
    """Every weight in the manifest's list, by name."""
    schemes = resolved.recipe.schemes
    targets = get_family(resolved.model.model_type).weight_map(resolved.model).targets
    return {target.name: _manifest_weight(target, schemes.get(target.name)) for target in targets}


def _manifest_weight(target: weight_map.Target, scheme: Scheme | None) -> dict[str, object]:
    """Where a weight comes from, its logical shape and, where it is quantized, how."""
    entry: dict[str, object] = {"sources": [source.name for source in target.sources], "shape": list(target.shape)}
    return entry if scheme is None else {**entry, "scheme": scheme.name, "format": asdict(scheme.weight)}


def compile_cached(model: Path, progress: Progress = no_progress, source: HubSource | None = None) -> Path:
    """Compiles a model directory for this machine with the default buckets, once; returns the cached artifact.

    source: the commit of the hub that the directory holds.
    """
    target = resolve(CompileConfig(model=model, output=model)).target
    output = artifacts_folder(cache_root(None)) / key_of(keys.artifact_components(model, target, source))
    if not (output / "graphs.bin").is_file():
        output.parent.mkdir(parents=True, exist_ok=True)
        config = CompileConfig(model=model, output=output, source=source)
        for warning in compile_model(config, progress).warnings:
            logging.getLogger(__name__).warning("llmc: warning: %s", warning)
    mark_used(output)
    return output
