"""Settings of published checkpoints: each is read, with tensors as its method stores them, or refused with a reason."""

from __future__ import annotations

import fnmatch
import json
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmc.quantize import QuantizeError
from llmc.quantize.checkpoints import StoredTensor, find_stored, quantization_settings

from support.paths import SHARED
from support.stored_checkpoints import Tensors, named

CONFIGS = SHARED / "configs"
N, K = 128, 256
_SHAPES = {
    "F32": np.float32,
    "F16": np.float16,
    "BF16": np.uint16,
    "U8": np.uint8,
    "F8_E4M3": np.uint8,
    "I32": np.int32,
}
PARTS = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj", "mlp.gate", "mlp.experts.7.up_proj",
         "mlp.shared_experts.up_proj")  # fmt: skip


def header(dtype: str, *shape: int, fill: int = 1) -> StoredTensor:
    return StoredTensor(dtype, shape, lambda: np.full(shape, fill, _SHAPES[dtype]))


def fp8(prefix: str, scale: str, shape: tuple[int, ...], *others: str) -> Tensors:
    more = {leaf: header("F32") for leaf in others}
    return named(prefix, weight=header("F8_E4M3", N, K), **{scale: header("F32", *shape)}, **more)


def nvfp4(prefix: str, *others: str) -> Tensors:
    more = {leaf: header("F32") for leaf in ("weight_scale_2", *others)}
    return named(prefix, weight=header("U8", N, K // 2), weight_scale=header("F8_E4M3", N, K // 16), **more)


def mxfp8(prefix: str) -> Tensors:
    return named(prefix, weight=header("F8_E4M3", N, K), weight_scale=header("U8", N, K // 32))


def gptq(prefix: str) -> Tensors:
    return named(prefix, qweight=header("I32", K // 8, N), qzeros=header("I32", 1, N // 8, fill=0x77777777),
                 scales=header("F16", 1, N), g_idx=header("I32", K, fill=0))  # fmt: skip


def packed(prefix: str) -> Tensors:
    shape = StoredTensor("I64", (2,), lambda: np.array([N, K]))
    return named(prefix, weight_packed=header("I32", N, K // 8), weight_scale=header("BF16", N, K // 32),
                 weight_shape=shape)  # fmt: skip


def mxfp4(prefix: str) -> Tensors:
    return named(prefix, weight_packed=header("U8", N, K // 2), weight_scale=header("U8", N, K // 32))


def experts(prefix: str) -> Tensors:
    return {f"{prefix}_blocks": header("U8", 4, N, K // 32, 16), f"{prefix}_scales": header("U8", 4, N, K // 32)}


def settings_of(path: Path) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """config.json and hf_quant_config.json of a model."""
    value = json.loads(path.read_text())
    return ({}, value) if path.name.endswith("hf_quant_config.json") else (value, None)


def left(settings: Mapping[str, Any]) -> list[str]:
    lists = (settings.get(name) for name in ("modules_to_not_convert", "exclude_modules", "ignore"))
    return [path for paths in lists for path in paths or ()]


def is_left(name: str, paths: list[str]) -> bool:
    for path in paths:
        if path.startswith("re:"):
            if re.match(path[3:], name):
                return True
        elif "*" in path:
            if any(fnmatch.fnmatchcase(name, wanted) for wanted in (path, f"{path}.*", f"*.{path}")):
                return True
        elif f".{path}." in f".{name}.":
            return True
    return False


def modules(settings: Mapping[str, Any]) -> list[str]:
    """Linear layers that the settings may mean: some of any decoder, and some of those that they name."""
    roots = ("model.layers", "language_model.model.layers")
    names = [f"{root}.{layer}.{part}" for root in roots for layer in (0, 1, 11) for part in PARTS]
    named_ones = [path for path in left(settings) if path.endswith("_proj") and not path.startswith("re:")]
    return [*dict.fromkeys([*names, *named_ones[:20]]), "lm_head"]


def quantized(name: str, settings: Mapping[str, Any]) -> Tensors | None:
    """The tensors of a module as its settings have them stored; None: it is a plain one."""
    if is_left(name, left(settings)):
        return None
    method = settings.get("quant_method", "modelopt")
    algorithm = settings.get("quant_algo")
    if algorithm == "MIXED_PRECISION":
        listed = settings["quantized_layers"]
        parents = [name[:end] for end in range(len(name), 0, -1) if end == len(name) or name[end] == "."]
        algorithm = next((listed[parent]["quant_algo"] for parent in parents if parent in listed), None)
        if algorithm is None:
            return None
    elif name == "lm_head" and method in ("fp8", "gptq", "modelopt"):
        return None
    if method == "fp8":
        return fp8(name, "weight_scale_inv", (1, 2))
    if method == "fbgemm_fp8":
        return fp8(name, "weight_scale", (N, 1))
    if method == "gptq":
        return gptq(name)
    if method == "mxfp4":
        return experts(name) if name.endswith("down_proj") else None
    if method == "compressed-tensors":
        by_format = {"pack-quantized": packed, "mxfp4-pack-quantized": mxfp4}
        format = settings["format"]
        return fp8(name, "weight_scale", (N, 1)) if format == "float-quantized" else by_format[format](name)
    if algorithm == "FP8":
        return fp8(name, "weight_scale", (), "input_scale")
    if algorithm == "MXFP8":
        return mxfp8(name)
    return nvfp4(name, *(["input_scale"] if algorithm == "NVFP4" else []))


def files() -> list[Path]:
    found = []
    for path in sorted(CONFIGS.rglob("*.json")):
        value = json.loads(path.read_text()) if path.stat().st_size < 1 << 20 else None
        if isinstance(value, dict) and quantization_settings(*settings_of(path)) is not None:
            found.append(path)
    return found


def read(path: Path) -> tuple[str, int]:
    """The method, and how many modules were found; checks that they are the right ones."""
    config, beside = settings_of(path)
    settings = quantization_settings(config, beside)
    assert settings is not None
    tensors: Tensors = {}
    expected, linears = set(), []
    listed = [
        f"{name}.5.up_proj" if name.endswith("experts") else name for name in settings.get("quantized_layers", ())
    ]
    for name in dict.fromkeys([*modules(settings), *listed[:30]]):
        stored = quantized(name, settings)
        if settings.get("quant_method") != "mxfp4" or stored is None:
            linears.append(name)
        if stored is not None:
            expected.add(name)
        tensors |= stored or named(name, weight=header("BF16", N, K))
    found = find_stored(config, tensors, linears, beside)
    assert found is not None
    assert {*found.matrices, *found.experts} == expected
    for matrix in [*found.matrices.values(), *(stack[0] for stack in found.experts.values())][:8]:
        assert matrix.values(3, 5).shape == (5, K)
        _ = matrix.activation
    return found.method, len(expected)


@pytest.mark.skipif(not CONFIGS.is_dir(), reason="no settings of published checkpoints beside the checkout")
def test_settings_of_published_checkpoints() -> None:
    methods: Counter[str] = Counter()
    refused: dict[str, str] = {}
    for path in files():
        try:
            method, count = read(path)
            assert count > 0, path
            methods[method] += 1
        except QuantizeError as error:
            refused[path.name] = str(error)
    mixture = "quant_method fp8 and quant_algo too"
    assert all(mixture in why for why in refused.values()), refused
    assert set(refused) == {f"nvidia--DeepSeek-V4-{size}-NVFP4_config.json" for size in ("Flash", "Pro")}
    assert methods.keys() == {"compressed-tensors", "fbgemm_fp8", "fp8", "gptq", "modelopt", "mxfp4"}
    assert sum(methods.values()) > 50
