"""rotated_attention has the bits of rope_kv_write and paged_attention in turn: results, partial ones and the cache."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.targets.gpu.attention_split import PARTITION, num_partitions, one_group, partial_floats
from llmc.compiler.targets.gpu.cuda import cuda_text
from llmc.compiler.targets.gpu.launch import launch_of
from llmc.compiler.targets.gpu.opencl import OpenClTarget
from llmc.compiler.targets.gpu.tensor_attention import tensor_attention
from llmc.compiler.targets.reference.kernels.kv_pools import key_pool, value_pool

from support.cuda import host_library, pointers
from support.paged_attention import attention_params

_POSITIONS = (0, 127, 128, 15, 16, 300, 255, 383)
"""Of the token of each sequence: a block's and a partition's first one and last one, and behind several partitions."""
_SEGMENTS = num_partitions(max(_POSITIONS) + 1) + 1  # of the last one nobody has keys
_HELD = len(_POSITIONS) + 2  # rows of buffers, of which the last ones are padding
_HALVES = {"bf16": np.uint16, "f16": np.float16}


@dataclass(frozen=True)
class _Case:
    """attention: parameters. rotary: rotated elements. more: of rope_kv_write. reads: whether keys and values are those
    of another layer. on_tensor_cores: whether attention is."""

    attention: dict[str, Any]
    rotary: int
    on_tensor_cores: bool
    more: dict[str, Any]
    reads: bool = False

    def _spec(self, op: str, segments: int, **more: Any) -> KernelSpec:
        return KernelSpec.of("attention", op, **self.attention, segments=segments, **more)

    @property
    def _rotation(self) -> dict[str, Any]:
        return {"rotary_dim": self.rotary, "qk_norm": False, "norm_eps": 1e-6, **self.more}

    def write(self) -> KernelSpec:
        shared = ("num_heads", "head_dim", "kv_dtype", "block_size")
        kv_heads = 0 if self.reads else self.attention["num_kv_heads"]
        params = {**{name: self.attention[name] for name in shared}, "num_kv_heads": kv_heads, **self._rotation}
        return KernelSpec.of("rope", "rope_kv_write", **params)

    def attend(self, segments: int) -> KernelSpec:
        return self._spec("paged_attention", segments)

    def rotated(self, segments: int) -> KernelSpec:
        reads = {"reads_cache": True} if self.reads else {}
        return self._spec("rotated_attention", segments, **self._rotation, **reads)


def _case(
    *sizes: Any, rotary: int, tensor: bool = False, reads: bool = False, more: dict[str, Any] | None = None, **own: Any
) -> _Case:
    return _Case(attention_params(*sizes, **own), rotary, tensor, more or {}, reads)


_NORMS = {"qk_norm": True}
_CASES = {
    "llama": _case(8, 2, 64, "bf16", "bf16", 16, 0, rotary=64, tensor=True),
    "qwen3": _case(4, 1, 128, "f16", "f16", 128, 0, rotary=128, tensor=True, more=_NORMS),
    "gemma3": _case(4, 2, 256, "bf16", "bf16", 16, 150, rotary=256, tensor=True, more=_NORMS, score_cap=20.0),
    "a part of odd pieces, sinks": _case(14, 2, 80, "f16", "bf16", 16, 140, rotary=32, tensor=True, sinks=True),
    "norm of rotated heads, chunks": _case(
        3, 3, 48, "bf16", "f16", 16, 0, rotary=48, tensor=True, more={"norm_rotated": True}, chunk=200
    ),
    "another layer's keys, several units": _case(18, 1, 32, "bf16", "bf16", 16, 0, rotary=16, tensor=True, reads=True),
    "plain": _case(6, 2, 24, "f32", "f32", 16, 0, rotary=24),
    "no rotation": _case(5, 1, 40, "f32", "f16", 48, 0, rotary=0, bias="distance"),
    "norm of rotated heads by weights": _case(
        4, 4, 80, "f32", "bf16", 16, 0, rotary=32, more={"norm_rotated": True, **_NORMS}
    ),
    "int8, norms": _case(8, 2, 128, "bf16", "int8", 16, 0, rotary=128, more=_NORMS),
    "int8, stated scales, a window": _case(8, 1, 96, "f16", "int8", 16, 130, rotary=64, more={"kv_scales": True}),
    "fp8, sinks": _case(3, 1, 100, "f32", "fp8_e4m3", 32, 0, rotary=100, sinks=True),
    "another layer's keys, plain": _case(11, 1, 32, "f32", "f32", 16, 0, rotary=32, reads=True, more=_NORMS),
}  # fmt: skip


_QUICK = ("llama", "qwen3", "plain", "int8, norms")


def _library(case: _Case, folder: Path) -> ctypes.CDLL:
    specs = [case.write(), *(of(segments) for of in (case.attend, case.rotated) for segments in (0, _SEGMENTS))]
    return ctypes.CDLL(str(host_library([cuda_text(spec) for spec in specs], folder)))


def _operands(case: _Case) -> dict[str, NDArray[Any]]:
    """By name. What nobody wrote is no number, in a cache of floats."""
    p, random = case.attention, np.random.default_rng(3)
    heads, kv_heads, dim, block = (int(p[name]) for name in ("num_heads", "num_kv_heads", "head_dim", "block_size"))

    def floats(*shape: int) -> NDArray[Any]:
        return (2 * random.standard_normal(shape)).astype(np.float32)

    positions = np.array(_POSITIONS, np.int32)
    needed = positions // block + 1
    order = 1 + random.permutation(int(needed.sum())).astype(np.int32)
    tables, used = np.zeros((_HELD, int(needed.max()) + 1), np.int32), 0
    for row, count in enumerate(needed):
        tables[row, :count] = order[used : used + count]
        used += count
    slots = tables[np.arange(len(positions)), positions // block] * block + positions % block
    pools = {}
    for name, of in (("k_pool", key_pool), ("v_pool", value_pool)):
        pool = of(str(p["kv_dtype"]), kv_heads, dim, block)
        count, scales = (used + 1) * kv_heads, 0 if pool.largest is None else 4 * block
        numbers = floats(count, block * pool.width)
        if pool.dtype == "bf16":
            pools[name] = (numbers.view(np.uint32) >> 16).astype(np.uint16)
        elif pool.largest is None:
            pools[name] = numbers.astype(_HALVES.get(pool.dtype, np.float32))
        else:
            pools[name] = random.integers(1, 127, (count, block * pool.width + scales)).astype(np.uint8)
            found = np.abs(floats(count, block)) + np.float32(0.01)
            pools[name][:, block * pool.width :] = found.view(np.uint8)
        if pool.largest is None and not case.reads:
            rows = pools[name].reshape(used + 1, kv_heads, block, pool.width)
            rows[slots // block, :, slots % block] = np.nan if pool.dtype != "bf16" else 0x7FC0
    whole, act = (_HELD, heads * dim), str(p["act_dtype"])
    out = np.full(whole, 77, _HALVES.get(act, np.float32))
    all_heads = heads + (0 if case.reads else 2 * kv_heads)
    padding = np.full(_HELD - len(positions), 1 << 20, np.int32)  # an index far outside
    return pools | {
        "qkv": floats(_HELD, all_heads * dim), "q": np.full(whole, 77, np.float32), "q_norm": floats(dim),
        "k_norm": floats(dim), "kv_scales": np.abs(floats(2 * kv_heads)) / 30,
        "cos_sin": floats(max(_POSITIONS) + 1, max(1, case.rotary)), "positions": np.append(positions, padding),
        "slot_mapping": np.append(slots.astype(np.int32), padding), "block_tables": tables,
        "token_seq": np.append(np.arange(len(positions), dtype=np.int32), padding), "slopes": np.abs(floats(heads)),
        "sinks": floats(heads), "out": out,
        "partials": np.full(_HELD * heads * _SEGMENTS * partial_floats(dim), np.nan, np.float32),
    }  # fmt: skip


def _call(library: ctypes.CDLL, spec: KernelSpec, operands: dict[str, NDArray[Any]], groups: int) -> None:
    names = [name for _, name, _ in pointers(cuda_text(spec))[:-1]]
    if spec.op == "rope_kv_write":
        operands = {**operands, "out": operands["q"]}
    scalars = np.zeros(8, np.int32)
    scalars[:4] = len(_POSITIONS), len(_POSITIONS), len(_POSITIONS), operands["block_tables"].shape[1]
    arguments: list[Any] = [ctypes.c_void_p(operands[name].ctypes.data) for name in names]
    arguments += [ctypes.c_int32(0) for _ in names]
    arguments.append(ctypes.c_void_p(scalars.ctypes.data))
    addresses = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(one) for one in arguments))
    getattr(library, f"run_{spec.symbol()}")(addresses, groups, launch_of(spec, tensor_cores=True).items)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in _QUICK else pytest.mark.slow) for name in _CASES]
)
def test_bits_are_those_of_both_kernels(name: str, tmp_path: Path) -> None:
    case = _CASES[name]
    library = _library(case, tmp_path)
    for segments, groups in ((0, 1), (0, 7), (_SEGMENTS, 5), (_SEGMENTS, 500)):
        assert (tensor_attention(case.rotated(segments)) is not None) == case.on_tensor_cores
        before, pair, rotated = (_operands(case) for _ in range(3))
        _call(library, case.write(), pair, 3)
        _call(library, case.attend(segments), pair, 5)
        _call(library, case.rotated(segments), rotated, groups)
        for operand, found in rotated.items():
            wanted, as_before = pair[operand].view(np.uint8), before[operand].view(np.uint8)
            changes = operand == ("partials" if segments else "out") or (operand.endswith("_pool") and not case.reads)
            assert (found.view(np.uint8) != as_before).any() == changes, operand
            if operand != "q":
                np.testing.assert_array_equal(found.view(np.uint8), wanted, operand)
        if not segments:
            assert np.isfinite(rotated["out"][: len(_POSITIONS)].astype(np.float32)).all()
            assert (rotated["out"][len(_POSITIONS) :] == 77).all()


def test_a_group_meets_between_writing_keys_and_reading_them() -> None:
    """By a barrier for memory of any kind, which OpenCL asks for."""
    for case in _CASES.values():
        for text in (OpenClTarget().text(case.rotated(_SEGMENTS)), cuda_text(case.rotated(_SEGMENTS))):
            found = text.count("llmc_sync_written();")
            assert found == (0 if case.reads else 1)
            if found:
                last = max(text.rindex(f"{pool}[(") for pool in ("k_pool", "v_pool") if f"{pool}[(" in text)
                assert text.index("slot_mapping[") < text.index("llmc_sync_written();") < last


def test_cases_of_keys_have_one_group_for_each_kv_head() -> None:
    """As the target asks for, if it has to write."""
    for case in _CASES.values():
        sizes = (case.attention[name] for name in ("num_heads", "num_kv_heads", "head_dim"))
        assert one_group(*sizes) != case.reads
    assert {position % PARTITION for position in _POSITIONS} >= {0, PARTITION - 1}
