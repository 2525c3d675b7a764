"""The manifest's description of an artifact, for people and tools: written from the compiler's objects, and read back.

The runtime does not read it. It contains no time, place or speed: equal inputs give equal bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from llmc.buckets import Bucket, BucketError, BucketLadder
from llmc.buckets.bucket import PROMPT_PHASES, REQUIRED_PHASES
from llmc.compiler.adapters import limits_of
from llmc.compiler.config import CompileError, HubSource
from llmc.compiler.resolved import Resolved
from llmc.compiler.store import keys
from llmc.compiler.store.cache import key_of
from llmc.compiler.targets.base import TargetError
from llmc.compiler.targets.registry import target_of
from llmc.compiler.weight_request import WeightRequest
from llmc.graphs_format import (
    PHASES,
    VERSION_OF_ADAPTERS,
    VERSION_OF_KV_LAYERS,
    VERSION_OF_PLACED_ROWS,
    VERSION_OF_RANKS,
    VERSION_OF_STAGES,
    VERSION_OF_STATE_LAYERS,
    VERSION_OF_TOTALS,
    VERSION_WITHOUT_ADAPTERS,
)
from llmc.graphs_records import layers_differ
from llmc.images.form import ImageForm, ImageFormError
from llmc.manifest import ManifestError, read_manifest
from llmc.models import weight_map
from llmc.models.config import ModelConfig
from llmc.models.errors import ModelError
from llmc.models.registry import get_family
from llmc.models.sources.lora.adapter import weights_file
from llmc.quantize import QuantizeError, Recipe, Scheme
from llmc.quantize.formats.registry import format_of
from llmc.quantize.recipe import ROUNDED
from llmc.quantize.scheme import recorded_scheme
from llmc.shown import shown
from llmc.version import __version__

_NEEDED = (
    "model", "target", "act_dtype", "kv_dtype", "max_model_len", "max_num_seqs", "block_size", "buckets", "weights",
    "files", "bytes", "kernels",
)  # fmt: skip


def settings(resolved: Resolved) -> dict[str, object]:
    """The request, and the tools that fulfilled it."""
    components = resolved.graph_components()
    return {
        "format_version": version_with(resolved.ladder, resolved),
        "llmc_version": __version__,
        "fingerprint": key_of(components),
        "model": asdict(resolved.model),
        "target": resolved.target.record(),
        "act_dtype": resolved.act_dtype,
        "kv_dtype": resolved.kv_dtype,
        **({"kv_scales": resolved.kv_scales} if resolved.kv_scales else {}),
        "max_model_len": resolved.max_model_len,
        "context": {"model_len": resolved.model_len, "cut_by": resolved.cut_by},
        "max_num_seqs": resolved.max_num_seqs,
        **({"speculate": resolved.speculate} if resolved.speculate else {}),
        **({"tensor_parallel": resolved.ranks} if resolved.ranks > 1 else {}),
        **({"expert_parallel": True} if resolved.by_expert else {}),
        **({"pipeline_parallel": list(resolved.stage_layers)} if resolved.stage_layers else {}),
        "block_size": resolved.block_size,
        "max_num_batched_tokens": resolved.max_num_batched_tokens,
        "buckets": [str(b) for b in resolved.ladder],
        "tools": {name: keys.tool_version(name) for name in ("torch", "apache-tvm")},
        "weights": weights(resolved),
        "graph_components": components,
        **({"images": resolved.images.as_json()} if resolved.images is not None else {}),
    }


def version_with(buckets: Iterable[Bucket], resolved: Resolved) -> int:
    """The lowest version of FORMAT.md that supports an artifact with these buckets."""
    if resolved.model.states == "placed":
        return VERSION_OF_PLACED_ROWS
    if resolved.state_layers():
        return VERSION_OF_STATE_LAYERS
    if layers_differ(resolved.kv_layer_records()):
        return VERSION_OF_KV_LAYERS
    if resolved.stage_layers:
        return VERSION_OF_STAGES
    if resolved.model.states != "none" or any(bucket.total for bucket in buckets):
        return VERSION_OF_TOTALS
    if resolved.ranks > 1:
        return VERSION_OF_RANKS
    return VERSION_WITHOUT_ADAPTERS if resolved.adapters is None else VERSION_OF_ADAPTERS


def origin(source: HubSource | None, adapters: Sequence[Path] = ()) -> dict[str, object]:
    """The hub commit of a model, and the LoRA adapters merged into it. Nothing for a local directory, whose path is
    meaningless elsewhere."""
    merged = [{"name": path.name, "sha256": _sha256(weights_file(path))} for path in adapters]
    return {
        **({} if source is None else {"source": asdict(source)}),
        **({"merged_lora": merged} if merged else {}),
    }


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def weights(resolved: Resolved) -> dict[str, object]:
    """Every weight, by name."""
    targets = get_family(resolved.model.model_type).weight_map(resolved.model).targets
    return {target.name: _weight(target, resolved.recipe) for target in targets}


def _weight(target: weight_map.Target, recipe: Recipe) -> dict[str, object]:
    """A weight's sources, logical shape and, if it is quantized or reordered, how."""
    entry: dict[str, object] = {"sources": [source.name for source in target.sources], "shape": list(target.shape)}
    scheme = recipe.schemes.get(target.name)
    if scheme is not None:
        entry |= {"scheme": scheme.name, "format": scheme.weight.record(), "method": recipe.method(target.name)}
    if target.name in recipe.act_order:
        entry["act_order"] = True
    if target.name in recipe.rows_of:
        entry["rows_of"] = recipe.rows_of[target.name]
    return entry


def weight_parts(requests: Iterable[WeightRequest]) -> dict[str, int]:
    """Number of parts of each weight packed in several; its stored shape does not always tell."""
    return {request.name: request.parts for request in requests if request.parts > 1}


@dataclass(frozen=True)
class Described:
    """The content of a manifest. buckets: in the order of graphs.bin. kernels: the manifest's entries, in the same
    order."""

    manifest: dict[str, Any]
    resolved: Resolved
    buckets: tuple[Bucket, ...]
    kernels: tuple[dict[str, Any], ...]


def ladder_of(buckets: tuple[Bucket, ...], model: ModelConfig) -> BucketLadder:
    """The ladder of some of a model's buckets. Raises BucketError."""
    phases = REQUIRED_PHASES if model.pooled is None else PROMPT_PHASES
    return BucketLadder(**{phase: tuple(b for b in buckets if b.phase == phase) for phase in PHASES}, phases=phases)


def most_tokens(buckets: Iterable[Bucket]) -> int:
    """New tokens of the largest prefill or mixed bucket."""
    return max((bucket.max_tokens for bucket in buckets if bucket.phase != "decode"), default=0)


def read_described(artifact: Path) -> Described:
    """Reads a manifest. Raises CompileError if `artifact` is none, or if this llmc cannot read its manifest."""
    try:
        return described(read_manifest(artifact), str(artifact / "manifest.json"))
    except ManifestError as error:
        raise CompileError(str(error)) from None


def described(manifest: dict[str, Any], where: str) -> Described:
    """The content of a manifest that passed `checked_manifest`. Raises CompileError that begins with `where`."""
    missing = [name for name in _NEEDED if manifest.get(name) is None]
    try:
        if missing:
            raise BucketError(f"it has no {missing[0]}")
        return _described(manifest)
    except (BucketError, ImageFormError, ModelError, QuantizeError, TargetError) as error:
        raise CompileError(f"{where} does not describe an artifact of this llmc ({error}); compile it again") from None


def _described(manifest: dict[str, Any]) -> Described:
    buckets = tuple(Bucket.parse(text) for text in manifest["buckets"])
    model, ranks = model_config(manifest["model"]), int(manifest.get("tensor_parallel") or 1)
    recipe = _recipe(manifest["weights"], model)
    resolved = Resolved(
        model=model,
        target=target_of(manifest["target"]),
        act_dtype=str(manifest["act_dtype"]),
        kv_dtype=str(manifest["kv_dtype"]),
        max_model_len=int(manifest["max_model_len"]),
        max_num_seqs=int(manifest["max_num_seqs"]),
        block_size=int(manifest["block_size"]),
        max_num_batched_tokens=int(manifest.get("max_num_batched_tokens") or most_tokens(buckets)),
        ladder=ladder_of(buckets, model),
        recipe=recipe,
        cut_by=(manifest.get("context") or {}).get("cut_by"),
        kv_scales=manifest.get("kv_scales"),
        adapters=limits_of(manifest),
        speculate=int(manifest.get("speculate") or 0),
        ranks=ranks,
        by_expert=bool(manifest.get("expert_parallel")),
        stage_layers=tuple(manifest.get("pipeline_parallel") or ()),
        images=None if manifest.get("images") is None else ImageForm.from_json(manifest["images"]),
    )
    return Described(manifest, resolved, buckets, tuple(manifest["kernels"]))


def model_config(fields: Mapping[str, Any]) -> ModelConfig:
    """The inverse of `asdict`, through JSON."""
    return TypeAdapter(ModelConfig).validate_python(fields)


def _recipe(weights: Mapping[str, Mapping[str, Any]], model: ModelConfig) -> Recipe:
    recipe = Recipe(
        {name: _scheme(name, entry) for name, entry in weights.items() if entry.get("scheme") is not None},
        {name: str(entry["method"]) for name, entry in weights.items() if entry.get("method", ROUNDED) != ROUNDED},
        frozenset(name for name, entry in weights.items() if entry.get("act_order")),
        {name: str(entry["rows_of"]) for name, entry in weights.items() if entry.get("rows_of") is not None},
    )
    for name in sorted(recipe.act_order - recipe.schemes.keys()):
        raise QuantizeError(f"weight {shown(name)} is in act-order and has no scheme")
    if recipe.rows_of:
        makes = {target.name: target.makes for target in get_family(model.model_type).weight_map(model).targets}
        for name, of in recipe.rows_of.items():
            if of not in recipe.act_order or makes.get(name) != of:
                raise QuantizeError(f"rows of {shown(name)} are not columns of {shown(of)} in act-order")
    return recipe


def _scheme(name: str, entry: Mapping[str, Any]) -> Scheme:
    if entry.get("format") is None:
        raise QuantizeError(f"weight {name} has a scheme and no format")
    return recorded_scheme(entry["scheme"], format_of(entry["format"]))
