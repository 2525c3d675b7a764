"""An artifact's manifest, read back: what it was compiled from and for, as the compiler's own objects."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llmc.buckets import Bucket, BucketError, BucketLadder
from llmc.buckets.bucket import PHASES
from llmc.compiler.config import CompileError
from llmc.compiler.resolve import Resolved
from llmc.compiler.targets.cpu import Target
from llmc.models.config import ModelConfig, RopeScaling
from llmc.quantize import QuantizeError, Recipe, Scheme, WeightFormat, get_scheme


@dataclass(frozen=True)
class Described:
    """What a manifest says. buckets: in the order of graphs.bin; kernels: the manifest's entries, in that order too."""

    manifest: dict[str, Any]
    resolved: Resolved
    buckets: tuple[Bucket, ...]
    kernels: tuple[dict[str, Any], ...]


def ladder_of(buckets: tuple[Bucket, ...]) -> BucketLadder:
    """The ladder of some buckets. Raises BucketError."""
    return BucketLadder(**{phase: tuple(b for b in buckets if b.phase == phase) for phase in PHASES})


def most_tokens(buckets: Iterable[Bucket]) -> int:
    """New tokens of the largest prefill or mixed bucket."""
    return max((bucket.max_tokens for bucket in buckets if bucket.phase != "decode"), default=0)


def read_described(artifact: Path) -> Described:
    """Raises CompileError when `artifact` is none, or none whose manifest this version of llmc understands."""
    path = artifact / "manifest.json"
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CompileError(f"{artifact} is not an artifact: {path.name}: {error.strerror or error}") from None
    except (ValueError, RecursionError):
        raise CompileError(f"{path} is not JSON; compile the model again") from None
    try:
        return described(manifest)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        why = str(error) if isinstance(error, (BucketError, QuantizeError)) else f"{type(error).__name__}: {error}"
        raise CompileError(f"{path} does not describe an artifact of this llmc ({why}); compile it again") from None


def described(manifest: dict[str, Any]) -> Described:
    """Raises KeyError, TypeError, ValueError or AttributeError for what is no manifest."""
    buckets = tuple(Bucket.parse(text) for text in manifest["buckets"])
    target = {**manifest["target"], "instruction_sets": tuple(manifest["target"]["instruction_sets"])}
    resolved = Resolved(
        model=model_config(manifest["model"]),
        target=Target(**target),
        act_dtype=str(manifest["act_dtype"]),
        kv_dtype=str(manifest["kv_dtype"]),
        max_model_len=int(manifest["max_model_len"]),
        max_num_seqs=int(manifest["max_num_seqs"]),
        block_size=int(manifest["block_size"]),
        max_num_batched_tokens=int(manifest.get("max_num_batched_tokens") or most_tokens(buckets)),
        ladder=ladder_of(buckets),
        recipe=Recipe({n: _scheme(e) for n, e in manifest["weights"].items() if "scheme" in e}),
        cut_by=manifest.get("context", {}).get("cut_by"),
    )
    kernels = tuple(manifest["kernels"])
    for kernel in kernels:
        if not isinstance(kernel["symbol"], str) or not isinstance(kernel["key"], str):
            raise TypeError("a kernel without a name")
    return Described(manifest, resolved, buckets, kernels)


def model_config(fields: Mapping[str, Any]) -> ModelConfig:
    """The inverse of `asdict`, through JSON."""
    scaling = fields["rope_scaling"]
    lists = {name: tuple(fields[name]) for name in ("layer_windows", "eos_token_ids")}
    return ModelConfig(**{**fields, **lists, "rope_scaling": None if scaling is None else RopeScaling(**scaling)})


def _scheme(entry: Mapping[str, Any]) -> Scheme:
    return replace(get_scheme(entry["scheme"]), weight=WeightFormat(**entry["format"]))
