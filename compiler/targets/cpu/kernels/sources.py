"""The file of each kernel template, and the digest of the sources that a kernel's code depends on. Imports no tvm."""

from __future__ import annotations

import ast
import hashlib
from functools import cache
from pathlib import Path

from llmc.compiler import kernel_spec
from llmc.compiler.kernel_spec import KernelSpecError
from llmc.compiler.ops.registry import brought_sources
from llmc.compiler.targets.elf import CODE_SOURCES

KIND = "cpu"
_FOLDER = Path(__file__).parent
_PACKAGE = str(__package__)
_COEFFICIENTS, _COEFFICIENTS_FILE = "llmc.compiler.targets.coefficients", str(_FOLDER.parents[1] / "coefficients.py")
"""Shared with other targets."""

TEMPLATE_FILES: dict[str, str] = {
    "embedding": "embedding",
    "embedding_quant": "embedding_quant",
    "rms_norm": "norm",
    "linear": "linear.kernel",
    "linear_quant": "linear.kernel",
    "adapter_shrink": "adapter_shrink",
    "adapter_expand": "adapter_expand",
    "adapter_samples": "adapter_samples",
    "adapter_pairs": "adapter_pairs",
    "adapter_pick": "adapter_pick",
    "activate": "activate",
    "quantize_rows": "quantize_rows",
    "permute_columns": "permute",
    "rope_kv_write": "rope",
    "paged_attention": "attention",
    "merge_attention": "attention_merge",
    "latent_kv_write": "latent_kv_write",
    "latent_attention": "latent_attention",
    "head_linear": "head_linear",
    "packed_head_linear": "head_linear",
    "gather_rows": "gather",
    "short_conv": "short_conv",
    "delta_rule": "delta_rule",
    "selective_state": "selective_state",
    "expert_order": "expert_order",
    "expert_gather": "expert_gather",
    "expert_linear": "expert_linear",
    "expert_linear_quant": "expert_linear",
    "expert_quantize": "expert_quantize",
    "expert_activate": "expert_activate",
    "expert_combine": "expert_combine",
    "fused": "fused",
}
"""The module of this package for each exact op name."""


def template_file(op: str) -> str:
    """The module that holds the template of `op`. Raises KernelSpecError."""
    if op not in TEMPLATE_FILES:
        raise KernelSpecError(f"no kernel template for op {op!r}; known ops: {', '.join(sorted(TEMPLATE_FILES))}")
    return TEMPLATE_FILES[op]


@cache
def source_files(op: str, folder: Path = _FOLDER) -> tuple[str, ...]:
    """Files below `folder` that a kernel's code depends on: its template, everything it imports in turn, and the
    target."""
    found: set[str] = set()
    brought = _brought(op)
    waiting = ["builder.py", "codegen.py"] if brought else [_module_file(template_file(op)), "codegen.py"]
    waiting += [name for file in brought for name in _imported(folder, str(file))]
    while waiting:
        if (name := waiting.pop()) not in found:
            found.add(name)
            waiting += _imported(folder, name)
    return tuple(sorted(found))


def _brought(op: str) -> tuple[Path, ...]:
    """Files of an op provided by another package."""
    return () if op in TEMPLATE_FILES else brought_sources(op, KIND)


def _module_file(module: str) -> str:
    return f"{module.replace('.', '/')}.py"


def _imported(folder: Path, name: str) -> list[str]:
    """Files of `folder` that the file `name` imports from, with the `__init__` files of their packages."""
    files = []
    for node in ast.walk(ast.parse((folder / name).read_bytes())):
        if isinstance(node, ast.ImportFrom) and node.module == _COEFFICIENTS:
            files.append(_COEFFICIENTS_FILE)
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith(f"{_PACKAGE}."):
            within = str(node.module).removeprefix(_PACKAGE).removeprefix(".")
            parts = within.split(".") if within else []
            packages = [".".join(parts[: i + 1]) for i in range(len(parts))]
            for module in packages + [f"{within}.{a.name}".removeprefix(".") for a in node.names]:
                files += [_module_file(module), _module_file(f"{module}.__init__")]
    return [file for file in files if (folder / file).is_file()]


@cache
def source_digest(op: str, folder: Path = _FOLDER, of_format: tuple[Path, ...] = ()) -> str:
    """sha256 of the op and of all sources its kernels depend on. of_format: sources of the weight format that they
    read."""
    digest = hashlib.sha256(op.encode())
    files = [folder / name for name in source_files(op, folder)]
    for file in (Path(kernel_spec.__file__), *files, *CODE_SOURCES, *_brought(op), *of_format):
        data = file.read_bytes()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()
