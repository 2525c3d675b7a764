"""The compiler, phase by phase: the file to read first.

(download →) load → trace → graphs (bind, plan memory, emit) → (tune) → kernels → weights → link → publish.

Where the cache has everything, neither torch nor TVM is imported: they take longer than all the rest.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path

from llmc import __version__
from llmc.cache_root import cache_root
from llmc.compiler import dump
from llmc.compiler.build import BuiltKernel, build_kernels
from llmc.compiler.config import CompileConfig, CompileReport, HubSource, Progress, no_progress
from llmc.compiler.dtypes import DTYPES
from llmc.compiler.graph.commands import CommandList, GraphShape
from llmc.compiler.graph.plan import plan_graphs
from llmc.compiler.graph.tracer import Tracer
from llmc.compiler.hub import locate
from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.ops.definition import NUM_SAMPLES, NUM_TOKENS
from llmc.compiler.phases import OnStep, Phase, PhaseClock, check_dump, drive
from llmc.compiler.resolve import Resolved, resolve
from llmc.compiler.resources import PeakMemory
from llmc.compiler.state import CompileState
from llmc.compiler.store import keys
from llmc.compiler.store.artifact import copied_files, copy_files, graphs_bin, reuse_weights
from llmc.compiler.store.cache import GraphCache, key_of
from llmc.compiler.store.cached_artifacts import artifacts_folder, mark_used
from llmc.compiler.store.graphs_writer import FileSums, ModelRecord
from llmc.compiler.store.output import check_output, refuse_another
from llmc.compiler.store.packed import record_weights, recorded_weights
from llmc.compiler.store.staging import staged_directory
from llmc.compiler.store.weights import plan_weights, write_weights
from llmc.compiler.weight_request import WeightRequest
from llmc.graphs_format import VERSION as FORMAT_VERSION
from llmc.hub_id import hub_id
from llmc.manifest import listed_files, write_manifest
from llmc.models import weight_map
from llmc.models.config import ModelConfig
from llmc.models.loader import Checkpoint, Parameter, check_checkpoint, load_parameters
from llmc.models.registry import get_family
from llmc.models.rope import checked_frequencies, cos_sin_table
from llmc.quantize import Recipe, Scheme

ROPE_TABLE = "rope.cos_sin"


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


def _download(state: CompileState, on_step: OnStep) -> None:
    found = locate(state.config.model, on_step)
    state.config = replace(state.config, model=found.path, source=found.source)


def _load(state: CompileState, _: OnStep) -> None:
    config = state.config
    resolved = state.resolved = resolve(config)
    # Before anything is traced or made in the sizes that config.json gives.
    state.checkpoint = Checkpoint(config.model)
    check_checkpoint(resolved.model, state.checkpoint)
    checked_frequencies(resolved.model, resolved.max_model_len)
    state.copied = copied_files(config.model, config.tokenizer)
    settings = {**manifest_settings(resolved, resolved.graph_components()), **manifest_source(config.source)}
    state.asked_for = {**settings, "tuned": config.tune_for is not None, "files": state.copied}
    if not config.overwrite:
        refuse_another(config.output, state.there, state.asked_for, config.model)
    if config.tune_for is not None:
        resolved.target.check_tunes_here()


def _trace(state: CompileState, _: OnStep) -> None:
    state.tracer = Tracer(state.resolved, state.cache, fresh=state.config.dump is not None)
    state.tracer.prepare(list(state.resolved.ladder))


def _graphs(state: CompileState, on_step: OnStep) -> None:
    resolved = state.resolved
    common = resolved.graph_components()
    state.graphs = plan_graphs(
        list(resolved.ladder), resolved.graph_params(), common, state.cache, state.tracer.bind, on_step
    )


def _tune(state: CompileState, on_step: OnStep) -> None:
    config = state.config
    assert config.tune_for is not None
    rows = most_rows(state.graphs.values())
    state.choices = state.resolved.target.tune(rows, state.cache, config.tune_for, config.num_jobs(), on_step)


def _kernels(state: CompileState, on_step: OnStep) -> None:
    target, num_jobs = state.resolved.target, state.config.num_jobs()
    state.kernels = build_kernels(state.specs, target, state.cache, num_jobs, on_step, state.variants)


def _weights(state: CompileState, on_step: OnStep) -> None:
    config, resolved = state.config, state.resolved
    state.staging = state.stack.enter_context(staged_directory(config.output))
    shapes = weight_shapes(resolved.model, resolved.max_model_len)
    requests = weight_requests(shapes, state.lists, resolved.act_dtype, resolved.recipe)
    layout = state.layout = plan_weights(requests, resolved.target)
    packed = state.staging / "weights.safetensors"
    weights_key = key_of(
        keys.weights_components(
            state.checkpoint.path,
            resolved.model,
            resolved.max_model_len,
            resolved.target,
            layout.header,
            quantized=bool(resolved.recipe.schemes),
        )
    )
    crcs = reuse_weights(config.output, recorded_weights(state.cache.root, weights_key), layout, packed)
    if crcs is None:
        parameters = model_parameters(resolved, state.checkpoint)
        crcs = write_weights(layout, parameters, resolved.target, packed, on_step, config.num_jobs())
        record_weights(state.cache.root, weights_key, crcs)
    if not config.overwrite:
        refuse_another(config.output, state.there, {"weights_crc32": crcs})
    state.crcs = crcs


def _link(state: CompileState, _: OnStep) -> None:
    target, staging, layout = state.resolved.target, state.staging, state.layout
    target.link([k.code for k in state.kernels], staging / target.code_name)
    code = (staging / target.code_name).read_bytes()
    sums = FileSums.of({target.code_name: code}, layout.header, layout.total_bytes)
    record, specs = model_record(state.resolved), [k.spec for k in state.kernels]
    tables = graphs_bin(record, specs, layout, state.crcs, state.graphs, target, sums)
    (staging / "graphs.bin").write_bytes(tables)
    copy_files(state.config.model, staging, state.copied)
    state.sizes = {
        "code": len(code),
        "weights": layout.total_bytes,
        "arena": max(of.arena_bytes for of in state.lists),
    }
    described = {
        **state.asked_for,
        "files": listed_files(staging, state.copied),
        "bytes": state.sizes,
        "kernels": [manifest_kernel(k) for k in state.kernels],
    }
    write_manifest(staging / "manifest.json", {**described, "weights_crc32": state.crcs})


def _publish(state: CompileState, _: OnStep) -> None:
    # Syncs and renames the staged directory.
    state.stack.close()


PHASES: tuple[Phase[CompileState], ...] = (
    Phase("download", _download, wanted=lambda state: hub_id(state.config.model) is not None),
    Phase("load", _load, dump=dump.settings),
    Phase("trace", _trace, dump=dump.traced),
    Phase("graphs", _graphs, dump=dump.graphs),
    Phase("tune", _tune, wanted=lambda state: state.config.tune_for is not None, dump=dump.choices),
    Phase("kernels", _kernels, dump=dump.kernels),
    Phase("weights", _weights, dump=dump.weights),
    Phase("link", _link),
    Phase("publish", _publish),
)
"""All of a compilation, in order."""


def compile_model(config: CompileConfig, progress: Progress = no_progress) -> CompileReport:
    """Compiles a checkpoint into an artifact. On failure `config.output` is as it was before.

    config.model: a directory, or a name on the hub, which is downloaded.
    """
    clock = PhaseClock(progress)
    check_dump(config.dump, config.output)
    with ExitStack() as stack:
        memory = stack.enter_context(PeakMemory())
        # staged_directory checks too; this one saves the minutes before it.
        there = check_output(config.output)
        state = CompileState(config, GraphCache(cache_root(config.cache_dir)), stack, there)
        drive(PHASES, state, clock, config.dump)
    resolved, kernels = state.resolved, state.kernels
    return CompileReport(
        artifact=config.output,
        target=resolved.target.name,
        num_prefill_graphs=len(resolved.ladder.prefill),
        num_decode_graphs=len(resolved.ladder.decode),
        num_mixed_graphs=len(resolved.ladder.mixed),
        num_kernels=len(kernels),
        kernels_compiled=sum(not k.cached for k in kernels),
        kernels_cached=sum(k.cached for k in kernels),
        code_bytes=state.sizes["code"],
        weight_bytes=state.sizes["weights"],
        arena_bytes=state.sizes["arena"],
        peak_memory_bytes=memory.peak_bytes,
        max_model_len=resolved.max_model_len,
        model_len=resolved.model_len,
        warnings=resolved.warnings(),
        phase_seconds=clock.seconds,
        tuned={spec.symbol(): state.choices[spec].gain for spec in state.variants},
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
