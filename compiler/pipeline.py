"""The compiler, phase by phase: the file to read first.

(download →) load → trace → graphs (bind, plan memory, emit) → (tune) → kernels → weights → link → publish.

`compile_model` runs them all. `extend.py` (adds buckets) and `bundle_apply.py` (applies a bundle) select from the same
list, with variants of phases that reuse existing results.
If the cache has everything, neither torch nor TVM is imported: that would take longer than all the rest.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from llmc.buckets import Bucket
from llmc.cache_root import cache_root
from llmc.compiler import dump, verify
from llmc.compiler.adapters import record
from llmc.compiler.build import build_kernels
from llmc.compiler.config import CompileConfig, CompileError, CompileReport, HubSource, Progress, no_progress
from llmc.compiler.graph.demands import kernels_of, most_rows, pooled_weights, weight_requests
from llmc.compiler.graph.plan import plan_graphs
from llmc.compiler.graph.tracer import Tracer
from llmc.compiler.hub import locate
from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.notes import notes
from llmc.compiler.partition import of_one_rank, shared_weights
from llmc.compiler.phases import OnStep, Phase, PhaseClock, drive
from llmc.compiler.resolve import resolve
from llmc.compiler.resources import PeakMemory
from llmc.compiler.state import CompileState, compilation
from llmc.compiler.store import described, keys
from llmc.compiler.store.artifact import copied_files, copy_files, graphs_bin
from llmc.compiler.store.cache import key_of
from llmc.compiler.store.cached_artifacts import artifacts_folder, mark_used
from llmc.compiler.store.carried import reuse_weights
from llmc.compiler.store.conversions import conversions, types_of
from llmc.compiler.store.graphs_writer import FileSums
from llmc.compiler.store.output import check_output, refuse_another
from llmc.compiler.store.packed import Packed, record_weights, recorded_weights
from llmc.compiler.store.reads import Reads
from llmc.compiler.store.staging import staged_directory
from llmc.compiler.store.weights import plan_weights, write_weights
from llmc.held_artifact import hold
from llmc.hub_id import hub_id
from llmc.manifest import listed_files, write_manifest
from llmc.models.loader import check_checkpoint
from llmc.models.registry import get_family
from llmc.models.rope import checked_frequencies
from llmc.models.sources.registry import open_source

_MOST_TRIES = 3
"""Compilations for the cache, where a collection removes the results."""


def _download(state: CompileState, on_step: OnStep) -> None:
    found = locate(state.config.model, on_step)
    state.config = replace(state.config, model=found.path, source=found.source)


def _load(state: CompileState, _: OnStep) -> None:
    config = state.config
    resolved = state.resolved = resolve(config)
    state.buckets = tuple(resolved.ladder)
    open_model(state)
    asked_for = {**described.settings(resolved), **described.origin(config.source, config.merge_lora)}
    settle(state, {**asked_for, "tuned": config.tune_for is not None})
    if config.tune_for is not None:
        resolved.target.check_tunes_here()


def open_model(state: CompileState) -> None:
    """Reads a checkpoint's headers and checks that it has all that its config states, before any expensive work."""
    config, resolved = state.config, state.resolved
    state.source = config.open_source()
    state.checkpoint, state.files = state.source.checkpoint(), state.source.model_files()
    check_checkpoint(resolved.model, state.checkpoint)
    for rope in resolved.model.ropes:
        checked_frequencies(rope, resolved.max_model_len)
    state.copied = copied_files(state.files, config.tokenizer)


def settle(state: CompileState, asked_for: Mapping[str, object]) -> None:
    """Fills in the manifest known so far. It must match an artifact at the output, unless that may be replaced."""
    config = state.config
    state.manifest = {**asked_for, "files": state.copied}
    if not config.overwrite:
        refuse_another(config.output, state.there, state.manifest, state.files)


def _trace(state: CompileState, _: OnStep) -> None:
    state.tracer = Tracer(state.resolved, state.cache, fresh=state.config.dump is not None)
    state.tracer.prepare(state.buckets)


def _graphs(state: CompileState, on_step: OnStep) -> None:
    resolved = state.resolved
    common, params = resolved.graph_components(), resolved.graph_params()
    state.graphs = plan_graphs(state.buckets, params, common, state.cache, state.tracer.bind, on_step)
    requests = weight_requests(resolved.weight_shapes(), state.lists, resolved.act_dtype, resolved.recipe)
    state.layout = plan_weights(resolved.requests(requests), resolved.target)
    model = resolved.model_record()
    drawing = () if model.vector_width else resolved.target.sampling_kernels(model.vocab_size)
    state.specs = sorted({*drawing, *kernels_of(state.lists)}, key=KernelSpec.symbol)


def _tune(state: CompileState, on_step: OnStep) -> None:
    config = state.config
    assert config.tune_for is not None
    rows = most_rows(state.graphs.values())
    state.choices = state.resolved.target.tune(rows, state.cache, config.tune_for, config.num_jobs(), on_step)
    state.variants = {spec: choice.variant for spec, choice in state.choices.items() if choice.variant is not None}


def make_kernels(state: CompileState, on_step: OnStep) -> None:
    """Compiles each of `specs`, or takes it from the cache."""
    target, num_jobs = state.resolved.target, state.config.num_jobs()
    state.kernels = build_kernels(state.specs, target, state.cache, num_jobs, on_step, state.variants)


def _weights(state: CompileState, on_step: OnStep) -> None:
    config, resolved, layout, records = state.config, state.resolved, state.layout, state.cache.root
    file = stage(state) / "weights.safetensors"
    weights_key = key_of(
        keys.weights_components(
            state.source.weight_files(),
            resolved.model,
            resolved.max_model_len,
            resolved.target,
            layout.header,
            quantized=bool(resolved.recipe.schemes),
            order=resolved.recipe.order(),
            kv_scales=resolved.kv_scale_values,
            gates="" if resolved.adapters is None else resolved.adapters.gates,
            by_expert=resolved.by_expert,
            draft_tokens=config.draft_tokens,
        )
    )
    known = recorded_weights(records, weights_key)
    if known is None or reuse_weights(config.output, known.crcs, layout, file) is None:
        whole = list(resolved.whole_parameters(state.checkpoint))
        parameters = list(resolved.parameters(whole))
        reads = Reads(state.checkpoint.release)
        crcs = write_weights(layout, parameters, resolved.target, file, on_step, config.num_jobs(), reads)
        types = types_of(check_checkpoint(resolved.model, state.checkpoint), state.checkpoint)
        requests = (of_one_rank(weight.request) for weight in layout.weights)
        known = Packed(crcs, conversions(requests, whole, types, config.num_jobs(), reads))
        record_weights(records, weights_key, known)
    if not config.overwrite:
        refuse_another(config.output, state.there, {"weights_crc32": known.crcs})
    state.crcs = known.crcs
    state.conversions = {name: one.record() for name, one in known.conversions.items()}


def stage(state: CompileState) -> Path:
    """A directory for everything written from now on; publishing moves it to the output."""
    staged = staged_directory(state.config.output, keeps_others=state.in_place)
    state.staging = state.stack.enter_context(staged)
    return state.staging


def link(state: CompileState, _: OnStep) -> None:
    """Links the code, unless it exists already, and writes the tables that name its kernels."""
    target, layout = state.resolved.target, state.layout
    file = state.staging / target.code_name
    if state.code is None:
        target.link([kernel.code for kernel in state.kernels], file)
        state.code = file.read_bytes()
    else:
        file.write_bytes(state.code)
    (state.staging / "graphs.bin").write_bytes(tables(state, state.specs, state.buckets, state.code))
    arena_bytes = max(of.arena_bytes for of in state.lists)
    sizes = {"code": len(state.code), "weights": layout.total_bytes, "arena": arena_bytes}
    state.manifest |= {
        "bytes": sizes,
        "kernels": [kernel.described() for kernel in state.kernels],
        "weight_parts": described.weight_parts(weight.request for weight in layout.weights),
        **_pools(state),
    }
    write_files(state)


def tables(state: CompileState, specs: list[KernelSpec], buckets: Iterable[Bucket], code: bytes) -> bytes:
    """graphs.bin of an artifact with these kernels and buckets."""
    resolved, layout = state.resolved, state.layout
    sums = FileSums.of({resolved.target.code_name: code}, layout.header, layout.total_bytes)
    graphs = {bucket: state.graphs[bucket] for bucket in buckets}
    shared = 0 if resolved.ranks == 1 else shared_weights(weight.name for weight in layout.weights)
    model = replace(resolved.model_record(), num_shared_weights=shared)
    stages, kv_layers, states = resolved.stage_records(), resolved.kv_layer_records(), resolved.state_layers()
    return graphs_bin(model, specs, layout, state.crcs, graphs, resolved.target, sums, stages, kv_layers, states)


def _pools(state: CompileState) -> dict[str, object]:
    """The manifest's record of adapters; the graphs tell which layers have a pool."""
    resolved = state.resolved
    if resolved.adapters is None:
        return {}
    linears = resolved.adapter_linears()
    with_pool = (linears[name] for name in pooled_weights(state.lists))
    unread = get_family(resolved.model.model_type).unread_modules(resolved.model)
    return {"lora": record(resolved.adapters, with_pool, resolved.left_out(), unread)}


def write_files(state: CompileState) -> None:
    """Writes the model's files, then the manifest, which lists them."""
    copy_files(state.files, state.staging, state.copied)
    state.manifest |= {"files": listed_files(state.staging, state.copied), "weights_crc32": state.crcs}
    if state.conversions is not None:
        state.manifest["weights_converted"] = state.conversions
    write_manifest(state.staging / "manifest.json", state.manifest)


def _publish(state: CompileState, _: OnStep) -> None:
    config = state.config
    if not state.in_place:
        # Another compilation may have put an artifact there meanwhile.
        there = check_output(config.output)
        if not config.overwrite:
            refuse_another(config.output, there, state.manifest, state.files)
    # Syncs and renames the staged directory.
    state.stack.close()


PHASES: tuple[Phase[CompileState], ...] = (
    Phase("download", _download, wanted=lambda state: hub_id(state.config.model) is not None),
    Phase("load", _load, dump=dump.settings),
    Phase("trace", _trace, dump=dump.traced),
    Phase("graphs", _graphs, dump=dump.graphs),
    Phase("tune", _tune, wanted=lambda state: state.config.tune_for is not None, dump=dump.choices),
    Phase("kernels", make_kernels, verify=verify.kernels, dump=dump.kernels),
    Phase("weights", _weights, verify=verify.weights, dump=dump.weights),
    Phase("link", link, verify=verify.link),
    Phase("publish", _publish),
)
"""All phases of a compilation, in order."""


def compile_model(config: CompileConfig, progress: Progress = no_progress) -> CompileReport:
    """Compiles a model into an artifact. On failure `config.output` is unchanged.

    config.model: a directory, a GGUF file, or a hub name, which is downloaded.
    """
    clock = PhaseClock(progress)
    with PeakMemory() as memory, compilation(config) as state:
        drive(PHASES, state, clock, config.dump)
    resolved, kernels, sizes = state.resolved, state.kernels, state.manifest["bytes"]
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
        notes=(*notes(resolved, state.checkpoint, state.conversions), *resolved.target.notes(state.specs)),
        phase_seconds=clock.seconds,
        tuned={spec.symbol(): state.choices[spec].gain for spec in state.variants},
    )


def compile_cached(
    model: Path,
    progress: Progress = no_progress,
    source: HubSource | None = None,
    dtype: str = "auto",
    cache_dir: Path | None = None,
) -> Path:
    """Compiles a model once for this machine, with the default buckets; returns the cached artifact, which
    collections leave until this process ends.

    source: the hub commit of the model. dtype: as in CompileConfig. cache_dir: None for the user's cache. Raises
    CompileError, also if each compilation is collected before it is held.
    """
    target = resolve(CompileConfig(model=model, output=model)).target
    output = artifacts_folder(cache_root(cache_dir)) / key_of(
        keys.artifact_components(open_source(model).all_files(), target, source, dtype)
    )
    # A collection may remove what was just compiled, but hardly twice.
    for _ in range(_MOST_TRIES):
        if hold(output):
            break
        output.parent.mkdir(parents=True, exist_ok=True)
        config = CompileConfig(model=model, output=output, source=source, dtype=dtype, cache_dir=cache_dir)
        report, log = compile_model(config, progress), logging.getLogger(__name__)
        for warning in report.warnings:
            log.warning("llmc: warning: %s", warning)
        for said in report.notes:
            log.warning("llmc: note: %s", said)
    else:
        if not hold(output):
            raise CompileError(f"{output} is removed as fast as it is compiled: stop `llmc cache gc`, and try again")
    mark_used(output)
    return output
