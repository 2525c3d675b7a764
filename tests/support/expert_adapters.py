"""Adapters of experts that are one tensor, as PEFT's `ParamWrapper` saves them, and their products by definition."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from support.tiny_models import reference_model

PREFIX = "base_model.model."
BEFORE_SWAP = "0.17.0"
"""A version of PEFT that takes every parameter for [experts, inputs, outputs]."""


def add_experts(
    adapter: Path,
    model: Path,
    parameters: Sequence[str],
    *,
    rank: int = 4,
    seed: int = 0,
    size: float = 1.0,
    version: str = "0.21.2",
    **config: Any,
) -> Path:
    """Adds changes of the parameters whose names end in one of `parameters` to an adapter. version: of PEFT. size: of
    products, of a weight's about."""
    rng, tensors = np.random.default_rng(seed), load_file(adapter / "adapter_model.safetensors")
    found = reference_model(model)
    wrapped: dict[str, int] = {}
    for module, name, value in _parameters(found, parameters):
        experts, columns, rows = value.shape
        if _is_swapped(found, module, version):
            columns, rows = rows, columns
        nested = f"{PREFIX}{module}{'.base_layer' * (_count(found, module, parameters) - 1 - wrapped.get(module, 0))}"
        wrapped[module] = wrapped.get(module, 0) + 1
        r = next((r for end, r in config.get("rank_pattern", {}).items() if f"{module}.{name}".endswith(end)), rank)
        a, b = rng.standard_normal((r * experts, columns)), rng.standard_normal((rows, r * experts))
        tensors[f"{nested}.lora_A.weight"] = (a * columns**-0.5).astype(np.float32)
        tensors[f"{nested}.lora_B.weight"] = (b * size * r**-0.5).astype(np.float32)
    save_file(tensors, adapter / "adapter_model.safetensors")
    settings = json.loads((adapter / "adapter_config.json").read_text())
    settings |= {"target_parameters": list(parameters), "peft_version": version, "r": rank, "lora_alpha": rank}
    (adapter / "adapter_config.json").write_text(json.dumps({**settings, **config}))
    return adapter


def add_products(found: Any, adapter: Path) -> None:
    """Adds to transformers' model what an adapter changes of parameters."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    targets = config.get("target_parameters", [])
    tensors, taken = load_file(adapter / "adapter_model.safetensors"), dict[str, int]()
    for module, name, value in list(_parameters(found, targets)):
        nested = f"{PREFIX}{module}{'.base_layer' * (_count(found, module, targets) - 1 - taken.get(module, 0))}"
        taken[module] = taken.get(module, 0) + 1
        a, b = (tensors[f"{nested}.lora_{side}.weight"].astype(np.float64) for side in "AB")
        a, b = a.reshape(len(value), -1, a.shape[1]), b.reshape(len(b), -1, len(value))
        to = "eoi" if _is_swapped(found, module, config["peft_version"]) else "eio"
        scale = _number(config.get("alpha_pattern", {}), module, name, config["lora_alpha"]) / a.shape[1]
        product: NDArray[np.float64] = np.einsum(f"ore,eri->{to}", b, a)
        with torch.no_grad():
            value.copy_((value.double() + scale * torch.from_numpy(product)).to(value.dtype))


def is_of_parameter(module: str, targets: Sequence[str]) -> bool:
    """Whether a module of an adapter's tensors wraps one of `target_parameters`."""
    return any(module.replace(".base_layer", "").endswith(target.rpartition(".")[0]) for target in targets)


def _parameters(found: Any, ends: Sequence[str]) -> Iterator[tuple[str, str, torch.nn.Parameter]]:
    """(module, name, value), in PEFT's order."""
    for module_name, module in found.named_modules():
        for name, value in module.named_parameters(recurse=False):
            if f"{module_name}.{name}".endswith(tuple(ends)):
                yield module_name, name, value


def _count(found: Any, module: str, ends: Sequence[str]) -> int:
    return sum(of == module for of, _, _ in _parameters(found, ends))


def _is_swapped(found: Any, module: str, version: str) -> bool:
    """Whether PEFT takes a module's parameters for [experts, outputs, inputs]."""
    return version != BEFORE_SWAP and not getattr(found.get_submodule(module), "is_transposed", False)


def _number(patterns: Mapping[str, float], module: str, name: str, default: float) -> float:
    return next((value for end, value in patterns.items() if f"{module}.{name}".endswith(end)), default)
