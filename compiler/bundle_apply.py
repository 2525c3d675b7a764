"""Makes an artifact from a checkpoint and a bundle of its architecture: weights are packed, nothing is compiled.

Needs no torch, no TVM and no linker.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from llmc.buckets.cost_table import CostTableError, artifact_key, table_name
from llmc.compiler import pipeline
from llmc.compiler.config import CompileConfig, Progress, no_progress
from llmc.compiler.phases import OnStep, PhaseClock, chosen, drive
from llmc.compiler.pipeline import PHASES
from llmc.compiler.state import CompileState, compilation
from llmc.compiler.store import described, keys
from llmc.compiler.store.bundle import Bundle, BundleError, Variant, tables_of
from llmc.compiler.store.graphs_patch import GraphsPatch
from llmc.compiler.store.weights import plan_weights
from llmc.compiler.targets.registry import native_target
from llmc.models.config import ModelConfig
from llmc.models.rank_prompts import prompt_name
from llmc.models.tasks import pooling_name


@dataclass(frozen=True)
class ApplyReport:
    """The result of applying a bundle. costs: cost tables that were new to this machine. seconds: by phase."""

    artifact: Path
    target: str
    num_graphs: int
    num_kernels: int
    weight_bytes: int
    costs: int
    phase_seconds: dict[str, float] = field(default_factory=dict)

    def as_dict(self) -> dict[str, object]:
        return {**asdict(self), "artifact": str(self.artifact)}


def apply_bundle(
    bundle: Bundle,
    model: Path,
    output: Path,
    *,
    target: str = "native",
    jobs: int = 1,
    cost_folder: Path | None = None,
    cache_dir: Path | None = None,
    tokenizer: str = "auto",
    overwrite: bool = False,
    progress: Progress = no_progress,
) -> ApplyReport:
    """Compiles `model`, a checkpoint of the bundle's architecture, into `output`. On failure `output` is unchanged.

    target: of the variant; "native" means the best that this machine runs. Others: as in CompileConfig. Raises
    BundleError, CompileError, HubError or ModelError.
    """
    config = CompileConfig(
        model, output, target=target, jobs=jobs, cache_dir=cache_dir, tokenizer=tokenizer, overwrite=overwrite
    )
    application, clock = _Application(bundle), PhaseClock(progress)
    with compilation(config) as state:
        names = ("download", "load", "weights", "link", "publish")
        drive(chosen(PHASES, names, load=application.load, link=application.link), state, clock)
    return ApplyReport(
        artifact=output,
        target=state.resolved.target.name,
        num_graphs=len(state.manifest["buckets"]),
        num_kernels=len(state.manifest["kernels"]),
        weight_bytes=state.layout.total_bytes,
        costs=_keep_costs(bundle, state.manifest, cost_folder),
        phase_seconds=clock.seconds,
    )


_ORIGIN = ("source", "merged_lora")
"""Manifest fields on the origin of the weights."""


@dataclass
class _Application:
    """A compilation's phases, with graphs and kernels taken from a bundle."""

    bundle: Bundle
    tables: GraphsPatch = field(init=False)

    def load(self, state: CompileState, _: OnStep) -> None:
        """Takes resolved settings, graphs and kernels from the variant."""
        bundle = self.bundle
        variant = choose_variant(bundle, state.config.target)
        task, pooled = variant.resolved.model.task, variant.resolved.model.pooled
        config = state.config = replace(
            state.config,
            task="generate" if task is None else task.name,
            pooling=pooling_name(pooled) if task is not None and task.name == "embed" else "auto",
            rank_prompt=prompt_name(task) if task is not None and task.name == "rank" else "auto",
        )
        model = config.open_source().config()
        _check_architecture(bundle, config.model, model)
        resolved = state.resolved = replace(variant.resolved, model=model)
        pipeline.open_model(state)
        # The origin of the bundle's own model does not apply to this one.
        own = {name: value for name, value in variant.described.manifest.items() if name not in _ORIGIN}
        of_model = {"model": asdict(model), "weights": described.weights(resolved)}
        pipeline.settle(state, {**own, **described.origin(config.source, config.merge_lora), **of_model})
        self.tables, state.code = tables_of(bundle, variant), bundle.read(variant, "kernels.so")
        _check_weights(bundle, variant, resolved.weight_shapes())
        state.layout = plan_weights(variant.requests, resolved.target)

    def link(self, state: CompileState, _: OnStep) -> None:
        """Patches the facts of the weights into the bundle's tables; all else is unchanged."""
        resolved = state.resolved
        (state.staging / "graphs.bin").write_bytes(self.tables.with_weights(resolved.model_record(), state.crcs))
        (state.staging / resolved.target.code_name).write_bytes(state.code or b"")
        pipeline.write_files(state)


def choose_variant(bundle: Bundle, target: str = "native") -> Variant:
    """The variant for the target called `target`, or the best for this machine. Raises BundleError or TargetError."""
    names = ", ".join(v.resolved.target.name for v in bundle.variants)
    if target != "native":
        for variant in bundle.variants:
            if variant.resolved.target.name == target:
                return variant
        raise BundleError(f"{bundle.path} has no variant for {target}; it has {names}")
    here = native_target()
    able = [v for v in bundle.variants if v.resolved.target.runs_here()]
    if not able:
        raise BundleError(f"{bundle.path} is for {names}, and this machine is {here.name}: create one with its target")
    return max(able, key=lambda v: (v.resolved.target == here, v.resolved.target.level))


def _check_architecture(bundle: Bundle, model: Path, config: ModelConfig) -> None:
    wanted = json.loads(bundle.architecture["architecture"])
    found = json.loads(keys.architecture(config))
    differ = [name for name in {**wanted, **found} if wanted.get(name) != found.get(name)]
    if differ:
        facts = "; ".join(f"{n} {_short(found.get(n))} where it has {_short(wanted.get(n))}" for n in differ[:4])
        raise BundleError(f"{model} is not a model of the architecture of {bundle.path}: {facts}")


def _check_weights(bundle: Bundle, variant: Variant, shapes: Mapping[str, tuple[int, ...]]) -> None:
    for request in variant.requests:
        if shapes.get(request.name) != request.shape:
            raise BundleError(
                f"{bundle.path} has weight {request.name[:80]!a} of shape {request.shape}, and its model has "
                f"{shapes.get(request.name)}: create the bundle again"
            )


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}…"


def _keep_costs(bundle: Bundle, manifest: dict[str, object], folder: Path | None) -> int:
    """Saves the bundle's cost tables where warm-ups look for them, without overwriting any. Returns the number
    saved."""
    kept = 0
    if folder is None:
        return 0
    key = artifact_key(manifest)
    for table in bundle.costs:
        path = folder / table_name(table.artifact, table.machine)
        if table.artifact == key and not path.exists():
            try:
                table.write(path)
            except CostTableError:
                return kept  # a warm-up will measure
            kept += 1
    return kept
