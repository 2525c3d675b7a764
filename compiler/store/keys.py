"""The components of every graph cache key, by name: the single place that defines what invalidates what.

A component is a string; `llmc cache why` shows those that differ. Imports neither torch nor tvm.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path

import llmc.buckets
import llmc.models
import llmc.quantize
from llmc import adapter_slot, graphs_format, kv_dtypes
from llmc.compiler.adapters import AdapterLimits
from llmc.compiler.config import HubSource
from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.ops.definition import GraphParams
from llmc.compiler.targets.base import Target
from llmc.models.config import ModelConfig
from llmc.quantize import Recipe
from llmc.version import __version__

_COMPILER = Path(__file__).parent.parent
_FORMAT = (Path(graphs_format.__file__), Path(kv_dtypes.__file__), Path(adapter_slot.__file__))
"""Define the order of inputs, codes and sizes of dtypes, and the layout of adapters."""
_MODELS = Path(str(llmc.models.__file__)).parent
_PACKAGES = (_COMPILER, _MODELS, *(Path(str(package.__file__)).parent for package in (llmc.buckets, llmc.quantize)))
_TRACE_SOURCES = (
    "graph/export.py",
    "graph/repeats.py",
    "graph/nodes.py",
    "graph/importer.py",
    "graph/lower.py",
    "graph/lowered.py",
    "graph/ir_spec.py",
    "graph/passes",
    "graph/commands.py",
    "ops",
    "dtypes.py",
)
_GRAPH_SOURCES = (
    *_TRACE_SOURCES,
    "adapters.py",
    "partition.py",
    "stages.py",
    "graph/line.py",
    "graph/norms.py",
    "graph/rotations.py",
    "graph/arena.py",
    "graph/emit.py",
    "graph/cuts.py",
    "graph/plan.py",
    "kernel_spec.py",
    "../quantize/formats",
)
_WEIGHT_SOURCES = ("store/weights.py", "weight_request.py", "partition.py", "dtypes.py")
_QUANTIZED_WEIGHT_SOURCES = (
    *_WEIGHT_SOURCES,
    "targets/quantized_rows.py",
    "../quantize/formats",
    "../quantize/checkpoints",
)
# Configuration fields that no graph depends on.
UNQUANTIZED = Recipe({})
_NOT_ARCHITECTURE = ("eos_token_ids", "bos_token_id", "dtype", "task")


@cache
def tool_version(distribution: str) -> str:
    """The installed version, found without importing the package."""
    return importlib.metadata.version(distribution)


@cache
def sources_digest(names: Sequence[str] = _GRAPH_SOURCES, of_target: Sequence[Path] = ()) -> str:
    """Digest of files and folders of the compiler, a target and models; independent of the installation path."""
    paths = [*(_COMPILER / name for name in names), *of_target]
    files = [file for path in paths for file in (sorted(path.glob("*.py")) if path.is_dir() else [path])]
    return _digest([*files, *sorted(_MODELS.rglob("*.py"))])


@cache
def compiler_digest(packages: Sequence[Path] = _PACKAGES) -> str:
    """Digest of every source that takes part in a compilation."""
    return _digest(file for package in packages for file in sorted(package.rglob("*.py")))


def _digest(files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.name}\0".encode() + file.read_bytes())
    return digest.hexdigest()


def architecture(model: ModelConfig) -> str:
    """The part of a model's configuration that graphs depend on, as JSON; equal for all fine-tunes of a model."""
    facts = {name: value for name, value in asdict(model).items() if name not in _NOT_ARCHITECTURE}
    return json.dumps(facts, sort_keys=True, default=str)


def _model_components(model: ModelConfig, max_model_len: int, act_dtype: str) -> dict[str, str]:
    return {
        "architecture": architecture(model),
        "max_model_len": str(max_model_len),
        "act_dtype": act_dtype,
        "torch": tool_version("torch"),
        "tvm": tool_version("apache-tvm"),
    }


def trace_components(model: ModelConfig, max_model_len: int, act_dtype: str) -> dict[str, str]:
    """The components of a lowered model; independent of buckets."""
    return {
        "kind": "trace",
        **_model_components(model, max_model_len, act_dtype),
        "sources": sources_digest(_TRACE_SOURCES, _FORMAT),
    }


def graph_components(
    model: ModelConfig,
    max_model_len: int,
    params: GraphParams,
    recipe: Recipe = UNQUANTIZED,
    adapters: AdapterLimits | None = None,
    ranks: int = 1,
    stage_layers: Sequence[int] = (),
) -> dict[str, str]:
    """The components of all command lists of an artifact.

    model: as one rank has it. stage_layers: number of layers of each stage.
    """
    quantization = {"quantization": recipe.describe()} if recipe.schemes else {}
    return {
        **quantization,
        **({} if adapters is None else {"adapters": adapters.describe()}),
        **({} if ranks == 1 else {"ranks": str(ranks)}),
        **({"stages": " ".join(map(str, stage_layers))} if stage_layers else {}),
        "kind": "graph",
        **_model_components(model, max_model_len, params.act_dtype),
        "kv_dtype": params.kv_dtype,
        **({"kv_scales": "checkpoint"} if params.kv_scales else {}),
        "block_size": str(params.block_size),
        "layouts": params.target.layout_key(),
        "sources": sources_digest(_GRAPH_SOURCES, (*_FORMAT, *params.target.graph_sources())),
    }


def shape_components(common: Mapping[str, str], shape: Mapping[str, int]) -> dict[str, str]:
    """The components of one command list: `graph_components`, and the rows it is bound to."""
    return {**common, **{f"shape.{name}": str(value) for name, value in shape.items()}}


def kernel_components(spec: KernelSpec, target: Target, variant: str | None = None) -> dict[str, str]:
    """The components of a kernel's code. The template's sources stand for its IR and its default schedule; another
    variant is added."""
    return {
        **({} if variant is None else {"schedule": variant}),
        "kind": "kernel",
        "op": spec.op,
        "params": json.dumps(spec.params),
        "target": target.code_key(),
        "template": target.template_digest(spec),
        "tvm": tool_version("apache-tvm"),
    }


def weights_components(
    weight_files: Iterable[Path],
    model: ModelConfig,
    max_model_len: int,
    target: Target,
    header: bytes,
    *,
    quantized: bool = False,
    order: str = "",
    kv_scales: tuple[float, ...] = (),
    gates: str = "",
    by_expert: bool = False,
    draft_tokens: tuple[int, ...] = (),
) -> dict[str, str]:
    """The components of packed weights; a checkpoint's files count by path, size and modification time.

    header: of the packed file, which defines its layout.
    quantized: whether any weight is.
    order: see `Recipe.order`.
    kv_scales: from a file beside the model.
    gates: how gate and up of gated layers are packed (`AdapterLimits.gates`), if not separately.
    by_expert: each rank holds whole experts.
    draft_tokens: see `CompileConfig`.
    The sources include all of models/, and thus the readers of every format.
    """
    # Copies may keep names, sizes and times. Inodes are unique, and no tool sets the change time.
    stats = [(file, file.stat()) for file in weight_files]
    files = [(str(f.resolve()), s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_dev, s.st_ino) for f, s in stats]
    return {
        **({"order": order} if order else {}),
        **({"gates": gates} if gates else {}),
        **({"experts": "whole"} if by_expert else {}),
        **({"kv_scales": json.dumps(kv_scales)} if kv_scales else {}),
        **({"draft_tokens": json.dumps(draft_tokens)} if draft_tokens else {}),
        **({} if model.pooled is None else {"pooled": str(model.pooled)}),
        **({} if model.multipliers is None else {"multipliers": str(model.multipliers)}),
        "kind": "weights",
        "files": json.dumps(files),
        "layout": hashlib.sha256(header).hexdigest(),
        "tables": f"{model.rope_tables} {model.alibi} {max_model_len}",
        "sources": sources_digest(
            _QUANTIZED_WEIGHT_SOURCES if quantized else _WEIGHT_SOURCES,
            tuple(target.weight_sources(quantized=quantized)),
        ),
    }


def artifact_components(
    model_files: Iterable[Path], target: Target, source: HubSource | None = None, dtype: str = "auto"
) -> dict[str, str]:
    """The components of an artifact with default settings except `dtype`; every file of the model counts.

    source: the model's hub commit, which determines all its files.
    """
    files = [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in model_files]
    return {
        "kind": "artifact",
        "files": json.dumps(files if source is None else asdict(source)),
        "target": target.code_key(),
        "dtype": dtype,
        "sources": compiler_digest(),
        "torch": tool_version("torch"),
        "tvm": tool_version("apache-tvm"),
        "version": __version__,
    }


def tuning_components(
    spec: KernelSpec, target: Target, machine: Mapping[str, str], rows: int, search: Iterable[Path]
) -> dict[str, str]:
    """The components of a measured schedule: the kernel, the machine, and how it was measured (the sources
    `search`)."""
    return {
        **kernel_components(spec, target),
        "kind": "tuning",
        "rows": str(rows),
        "search": _digest(search),
        **{f"machine.{name}": value for name, value in machine.items()},
    }
