"""A checkpoint and a bundle of its architecture → an artifact: its weights are packed, nothing is compiled.

Needs neither torch nor TVM nor a linker.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from llmc.buckets.cost_table import CostTableError, artifact_key, table_name
from llmc.cache_root import cache_root
from llmc.compiler.config import HubSource, Progress, no_progress
from llmc.compiler.phases import PhaseClock
from llmc.compiler.pipeline import (
    manifest_source,
    manifest_weights,
    model_parameters,
    model_record,
    weight_shapes,
)
from llmc.compiler.store import keys
from llmc.compiler.store.artifact import copied_files, copy_files, reuse_weights
from llmc.compiler.store.bundle import Bundle, BundleError, Variant, tables_of
from llmc.compiler.store.cache import key_of
from llmc.compiler.store.output import check_output, refuse_another
from llmc.compiler.store.packed import record_weights, recorded_weights
from llmc.compiler.store.staging import staged_directory
from llmc.compiler.store.weights import plan_weights, write_weights
from llmc.compiler.targets.registry import native_target
from llmc.manifest import listed_files, write_manifest
from llmc.models.config import ModelConfig
from llmc.models.loader import Checkpoint, check_checkpoint
from llmc.models.read_config import load_config


@dataclass(frozen=True)
class ApplyReport:
    """What was made. costs: cost tables that this machine's folder did not have; seconds by phase."""

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
    source: HubSource | None = None,
) -> ApplyReport:
    """Compiles `model`, a checkpoint of the bundle's architecture, into `output`, which is as before on a failure.

    target: of the variant, "native" for the best one that this machine runs. tokenizer, overwrite, source: as in
    CompileConfig. Raises BundleError, CompileError and ModelError.
    """
    clock = PhaseClock(progress)
    with clock.phase("load"):
        there = check_output(output)
        variant = choose_variant(bundle, target)
        config = load_config(model)
        _check_architecture(bundle, variant, model, config)
        resolved = replace(variant.resolved, model=config)
        names = copied_files(model, tokenizer)
        described = {
            # Where the bundle's own model came from says nothing of this one.
            **{name: value for name, value in variant.described.manifest.items() if name != "source"},
            **manifest_source(source),
            "model": asdict(config),
            "files": names,
            "weights": manifest_weights(resolved),
        }
        if not overwrite:
            refuse_another(output, there, described, model)
        checkpoint = Checkpoint(model)
        check_checkpoint(config, checkpoint)
        patch, code = tables_of(bundle, variant), bundle.read(variant, "kernels.so")
        _check_weights(bundle, variant, config)
        layout = plan_weights(variant.requests, resolved.target)
    with staged_directory(output) as staging:
        with clock.phase("weights") as on_weight:
            packed = staging / "weights.safetensors"
            quantized = bool(resolved.recipe.schemes)
            components = keys.weights_components(
                checkpoint.path,
                config,
                resolved.max_model_len,
                resolved.target,
                layout.header,
                quantized=quantized,
            )
            weights_key = key_of(components)
            records = cache_root(cache_dir)
            crcs = reuse_weights(output, recorded_weights(records, weights_key), layout, packed)
            if crcs is None:
                parameters = model_parameters(resolved, checkpoint)
                crcs = write_weights(layout, parameters, resolved.target, packed, on_weight, jobs)
                record_weights(records, weights_key, crcs)
            if not overwrite:
                refuse_another(output, there, {"weights_crc32": crcs})
        with clock.phase("publish"):
            (staging / "graphs.bin").write_bytes(patch.with_weights(model_record(resolved), crcs))
            (staging / resolved.target.code_name).write_bytes(code)
            copy_files(model, staging, names)
            manifest = {**described, "files": listed_files(staging, names), "weights_crc32": crcs}
            write_manifest(staging / "manifest.json", manifest)
    return ApplyReport(
        artifact=output,
        target=resolved.target.name,
        num_graphs=len(variant.described.buckets),
        num_kernels=len(variant.described.kernels),
        weight_bytes=layout.total_bytes,
        costs=_keep_costs(bundle, manifest, cost_folder),
        phase_seconds=clock.seconds,
    )


def choose_variant(bundle: Bundle, target: str = "native") -> Variant:
    """The variant for a target by name, or the best one that this machine runs. Raises BundleError and TargetError."""
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


def _check_architecture(bundle: Bundle, variant: Variant, model: Path, config: ModelConfig) -> None:
    wanted = json.loads(bundle.architecture["architecture"])
    found = json.loads(keys.architecture(config))
    differ = [name for name in {**wanted, **found} if wanted.get(name) != found.get(name)]
    if differ:
        facts = "; ".join(f"{n} {_short(found.get(n))} where it has {_short(wanted.get(n))}" for n in differ[:4])
        raise BundleError(f"{model} is no model of the architecture of {bundle.path}: {facts}")


def _check_weights(bundle: Bundle, variant: Variant, config: ModelConfig) -> None:
    shapes = weight_shapes(config, variant.resolved.max_model_len)
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
    """Puts the bundle's cost tables where warm-ups look for them, but over none that is there."""
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
