"""Kernels in which a group works on a row or a head: numbers are those of the reference target."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.targets.elf.codegen import compile_object
from llmc.compiler.targets.gpu.cuda import cuda_text
from llmc.compiler.targets.gpu.opencl import OpenClTarget
from llmc.compiler.targets.reference.backend import named
from llmc.compiler.targets.reference.kernels.kv_pools import key_pool, value_pool
from llmc.compiler.targets.reference.kernels.registry import build_kernel
from llmc.compiler.targets.reference.kernels.rows_int8 import Int8Rows
from llmc.tvm_import import import_tvm

from support.cuda import host_library, pointers
from support.tensor_layers import call_kernel

REFERENCE = named("reference")
pytestmark = pytest.mark.skipif(not REFERENCE.runs_here(), reason="the reference target's code is of another machine")

_TOKENS, _BLOCK, _BLOCKS = 3, 4, 5
_INT8 = {"group_size": -1, "sum_factor": 1}
_ROPE: dict[str, Any] = {
    "num_heads": 4, "num_kv_heads": 2, "head_dim": 80, "rotary_dim": 80, "kv_dtype": "f32", "block_size": _BLOCK,
    "qk_norm": False, "norm_eps": 1e-6,
}  # fmt: skip
_LATENT: dict[str, Any] = {
    "num_heads": 3, "rank": 72, "rotary_dim": 16, "query_dim": 40, "kv_dtype": "f32", "block_size": _BLOCK,
    "norm_eps": 1e-6, "key_scales": 2,
}  # fmt: skip
_CHOICE: dict[str, Any] = {
    "experts": 130, "rows": 0, "top_k": 6, "groups": 1, "top_groups": 1, "best_of_group": 1, "normalised": True,
    "least_sum": 1e-12, "scale": 1.5,
}  # fmt: skip


def _norm(dim: int, act: str, **more: Any) -> KernelSpec:
    return KernelSpec.of("norm", "rms_norm", dim=dim, act_dtype=act, eps=1e-5, rows=0, **more)


def _quantize(dim: int, act: str, group_size: int, op: str = "quantize_rows", **more: Any) -> KernelSpec:
    more |= {"dim": dim, "act_dtype": act, "group_size": group_size, "sum_factor": 1, "rows": 0}
    return KernelSpec.of("other", op, **more)


def _rope(**more: Any) -> KernelSpec:
    return KernelSpec.of("rope", "rope_kv_write", **{**_ROPE, **more})


def _latent(**more: Any) -> KernelSpec:
    return KernelSpec.of("rope", "latent_kv_write", **{**_LATENT, **more})


def _choice(**more: Any) -> KernelSpec:
    return KernelSpec.of("other", "choose_experts", **{**_CHOICE, **more})


_SPECS = {
    "norm": _norm(96, "f32"),
    "norm of 256 items": _norm(2304, "bf16"),
    "norm that does not fill its items": _norm(2305, "f16"),
    "norm of more than is kept": _norm(16500, "f32"),
    "norm to int8": _norm(2304, "i8", **_INT8),
    "quantized": _quantize(100, "f32", -1),
    "quantized of 16 bits": _quantize(2306, "bf16", -1),
    "quantized in groups": _quantize(1088, "bf16", 64),
    "quantized in groups that do not fill": _quantize(1100, "f32", 32),
    "quantized in groups of no whole words": _quantize(60, "f32", 6),
    "quantized in groups of a long row": _quantize(17000, "f32", 128),
    "rows of experts": _quantize(96, "f32", 32, "expert_quantize", experts=4, top_k=2),
    "rope": _rope(),
    "rope of a part": _rope(rotary_dim=32, kv_dtype="bf16"),
    "no rope": _rope(rotary_dim=0, kv_dtype="f16"),
    "rope of normed heads": _rope(qk_norm=True, kv_dtype="int8"),
    "norm of rotated heads": _rope(qk_norm=True, norm_rotated=True),
    "norm of rotated heads without weights": _rope(norm_rotated=True, kv_dtype="fp8_e4m3"),
    "stated scales": _rope(kv_dtype="int8", kv_scales=True),
    "keys of another layer": _rope(num_kv_heads=0, qk_norm=True),
    "wide heads": _rope(head_dim=256, rotary_dim=256, kv_dtype="fp8_e5m2"),
    "latent": _latent(),
    "latent in int8": _latent(kv_dtype="int8"),
    "latent in bf16": _latent(kv_dtype="bf16", key_scales=1),
    "experts": _choice(),
    "few experts": _choice(experts=5, top_k=5, normalised=False),
    "experts of groups": _choice(experts=96, groups=8, top_groups=3),
    "experts of groups by two": _choice(
        experts=96, groups=8, top_groups=4, best_of_group=2, added_sum=0.5, scaled=True
    ),
}
_ROUNDING = {"f32": 3e-6, "bf16": 8e-3, "f16": 1e-3}
"""Most error where a sum of squares has another order, by what is written."""


@pytest.fixture(scope="module")
def on_gpu(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return ctypes.CDLL(str(host_library([cuda_text(spec) for spec in _SPECS.values()], tmp_path_factory.mktemp("k"))))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    import_tvm()
    path = tmp_path_factory.mktemp("plain") / "plain.so"
    codes = [compile_object(build_kernel(spec), "x86_64-unknown-linux-gnu", "x86-64") for spec in _SPECS.values()]
    REFERENCE.link(codes, path)
    return ctypes.CDLL(str(path))


def _operands(spec: KernelSpec) -> dict[str, np.ndarray]:
    """By name. What a kernel writes has other numbers before."""
    p: dict[str, Any] = spec.as_dict()
    random = np.random.default_rng(7)

    def floats(*shape: int) -> np.ndarray:
        return (2 * random.standard_normal(shape)).astype(np.float32)

    def stored(dtype: str, *shape: int) -> np.ndarray:
        numbers = floats(*shape)
        if dtype == "bf16":
            return (numbers.view(np.uint32) >> 16).astype(np.uint16)
        return numbers.astype(np.float16) if dtype == "f16" else numbers

    if spec.op == "choose_experts":
        choice, experts = floats(_TOKENS, p["experts"]), floats(p["experts"])
        choice[1, 3] = choice[1, 4] = choice[1].max()
        choice[2, 1] = np.nan
        out = np.full((_TOKENS, 2 * int(p["top_k"])), 77, np.int32)
        return {"choice": choice, "scores": floats(*choice.shape), "expert_scales": experts, "out": out}
    positions = np.array([0, 5, 17], np.int32)
    of_tokens = {"positions": positions, "slot_mapping": np.array([9, 0, 18], np.int32)}
    if spec.op == "latent_kv_write":
        width = int(p["rank"]) + int(p["rotary_dim"])
        pool = key_pool(str(p["kv_dtype"]), 1, width, _BLOCK, int(p["key_scales"]))
        return of_tokens | {
            "q": floats(_TOKENS, p["num_heads"], p["query_dim"]), "kv": floats(_TOKENS, width),
            "norm": floats(p["rank"]), "cos_sin": floats(18, p["rotary_dim"]),
            "k_pool": stored(pool.dtype, _BLOCKS * _BLOCK * width) if pool.largest is None else random.integers(
                0, 255, _BLOCKS * _BLOCK * (width + 8)).astype(np.uint8),
            "out": floats(_TOKENS, p["num_heads"], p["rotary_dim"]),
        }  # fmt: skip
    if spec.op == "rope_kv_write":
        heads, kv_heads, head_dim = int(p["num_heads"]), int(p["num_kv_heads"]), int(p["head_dim"])
        pools = {}
        for name, of in (("k_pool", key_pool), ("v_pool", value_pool)):
            pool = of(str(p["kv_dtype"]), max(1, kv_heads), head_dim, _BLOCK)
            positions_of = _BLOCKS * _BLOCK * max(1, kv_heads)
            pools[name] = (
                stored(pool.dtype, positions_of * pool.width)
                if pool.largest is None
                else random.integers(0, 255, positions_of * (pool.width + 4)).astype(np.uint8)
            )
        return of_tokens | pools | {
            "qkv": floats(_TOKENS, heads + 2 * kv_heads, head_dim), "q_norm": floats(head_dim),
            "k_norm": floats(head_dim), "cos_sin": floats(18, max(1, int(p["rotary_dim"]))),
            "kv_scales": np.abs(floats(2 * max(1, kv_heads))) / 50, "out": floats(_TOKENS, heads, head_dim),
        }  # fmt: skip
    dim, act = int(p["dim"]), str(p["act_dtype"])
    rows = _TOKENS * int(p.get("top_k", 1))
    if spec.op == "rms_norm" and act != "i8":
        return {"x": floats(rows, dim), "weight": floats(dim), "out": stored(act, rows, dim + dim % 2)}
    out = np.zeros((rows, _int8_rows(spec).words), np.int32)
    given = floats(rows, dim) if act == "i8" else stored(act, rows, dim + (dim % 2 if act != "f32" else 0))
    return {"x": given, "weight": floats(dim), "index": np.array([rows, 0], np.int32), "out": out}


def _int8_rows(spec: KernelSpec) -> Int8Rows:
    dim, size = (int(spec.as_dict()[name]) for name in ("dim", "group_size"))
    return Int8Rows(dim, 1 if size < 0 else -(-dim // size))


@pytest.mark.parametrize("name", list(_SPECS))
def test_numbers_are_those_of_the_reference(name: str, on_gpu: ctypes.CDLL, plain: ctypes.CDLL) -> None:
    spec = _SPECS[name]
    names = [operand for _, operand, _ in pointers(cuda_text(spec))[:-1]]
    given, expected = ({name: _operands(spec)[name] for name in names} for _ in range(2))
    before = {name: array.copy() for name, array in given.items()}
    call_kernel(on_gpu, spec, list(given.values()), _TOKENS, groups=2)
    scalars = np.array([_TOKENS, 1, 1, 1, 1, 0, 0, 0], np.int64)
    addresses = [ctypes.c_void_p(array.ctypes.data) for array in expected.values()]
    plain[spec.symbol()](*addresses, ctypes.c_void_p(scalars.ctypes.data), 0, 1)
    assert "double" not in OpenClTarget().text(spec)
    p = spec.as_dict()
    adds_squares = "eps" in p or "rank" in p or p.get("qk_norm") or p.get("norm_rotated")
    for operand, found in given.items():
        wanted, as_before = expected[operand], before[operand].view(np.uint8)
        written = operand in ("out", "k_pool", "v_pool")
        assert (wanted.view(np.uint8) != as_before).any() == written
        if written and adds_squares:
            _check_close(spec, operand, found, wanted)
        else:
            np.testing.assert_array_equal(found.view(np.uint8), wanted.view(np.uint8))


def _check_close(spec: KernelSpec, operand: str, found: np.ndarray, wanted: np.ndarray) -> None:
    """Numbers are close, and bytes are neighbours at most."""
    if found.dtype == np.uint8:
        p = spec.as_dict()
        of_latent = spec.op == "latent_kv_write"
        pool = (
            key_pool(str(p["kv_dtype"]), 1, int(p["rank"]) + int(p["rotary_dim"]), _BLOCK, int(p["key_scales"]))
            if of_latent
            else {"k_pool": key_pool, "v_pool": value_pool}[operand](
                str(p["kv_dtype"]), int(p["num_kv_heads"]), int(p["head_dim"]), _BLOCK
            )
        )
        of_numbers = _BLOCK * pool.width
        scales = _BLOCK * 4 * (int(p["key_scales"]) if of_latent else 1)
        parts, expected = (array.reshape(-1, of_numbers + scales) for array in (found, wanted))
        assert np.abs(parts[:, :of_numbers].astype(int) - expected[:, :of_numbers]).max() <= 1
        one, other = (np.ascontiguousarray(array[:, of_numbers:]).view(np.float32) for array in (parts, expected))
        np.testing.assert_allclose(one, other, rtol=1e-6)
        return
    if found.dtype == np.int32:
        rows = _int8_rows(spec)
        numbers, others = (array[:, : rows.number_words].copy().view(np.int8).astype(int) for array in (found, wanted))
        assert np.abs(numbers - others).max() <= 1
        one, other = (array[:, rows.number_words].copy().view(np.float32) for array in (found, wanted))
        np.testing.assert_allclose(one, other, rtol=1e-6)
        assert (numbers.sum(1) == found[:, rows.number_words + 1]).all()
        return
    dtype = "f16" if found.dtype == np.float16 else "f32" if found.dtype == np.float32 else "bf16"
    one, other = (
        (array.astype(np.uint32) << 16).view(np.float32) if dtype == "bf16" else array.astype(np.float32)
        for array in (found, wanted)
    )
    np.testing.assert_allclose(one, other, rtol=_ROUNDING[dtype], atol=_ROUNDING[dtype])
