"""Quantized checkpoints, packed one element and one bit at a time, after the published layouts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.quantize.checkpoints import StoredCheckpoint, StoredMatrix, StoredTensor, find_stored

Tensors = dict[str, StoredTensor]
PREFIX = "model.layers.0.self_attn.q_proj"
_DTYPES = {
    "float32": "F32",
    "float16": "F16",
    "int8": "I8",
    "uint8": "U8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
}


def tensor(array: NDArray[Any], dtype: str | None = None) -> StoredTensor:
    """dtype: safetensors' name where the array holds the bits of another type."""
    return StoredTensor.of(np.ascontiguousarray(array), dtype or _DTYPES[str(array.dtype)])


def bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The upper halves of values."""
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def named(prefix: str, **tensors: StoredTensor) -> Tensors:
    return {f"{prefix}.{leaf}": value for leaf, value in tensors.items()}


def find(config: Mapping[str, Any], tensors: Mapping[str, StoredTensor], **given: Any) -> StoredCheckpoint:
    """What find_stored finds by these quantization settings."""
    found = find_stored({"quantization_config": config}, tensors, **given)
    assert found is not None
    return found


def find_one(config: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> StoredMatrix:
    found = find(config, tensors)
    assert list(found.matrices) == [PREFIX]
    assert found.parts == set(tensors)
    return found.matrices[PREFIX]


def word(numbers: Sequence[int], bits: int) -> int:
    """Numbers side by side, the first in the lowest bits, set bit by bit."""
    value = 0
    for i, number in enumerate(numbers):
        for bit in range(bits):
            if int(number) >> bit & 1:
                value |= 1 << (i * bits + bit)
    return value


def words(numbers: Sequence[int], bits: int) -> list[int]:
    """The same cut into signed words of 32 bits."""
    value, count = word(numbers, bits), -(-len(numbers) * bits // 32)
    cut = [value >> (32 * i) & 0xFFFFFFFF for i in range(count)]
    return [part - (1 << 32) if part >> 31 else part for part in cut]


def packed_rows(numbers: NDArray[Any], bits: int) -> NDArray[np.int32]:
    """[N, words] of [N, K]."""
    return np.array([words(list(row), bits) for row in numbers], np.int32)


@dataclass(frozen=True)
class Integers:
    """numbers [N, K], zero [N, G], scale [N, G] and the group of each column, in the weight's own order."""

    numbers: NDArray[np.int64]
    zero: NDArray[np.int64]
    scale: NDArray[np.float16]
    group: NDArray[np.int64]

    @classmethod
    def random(
        cls, n: int, k: int, bits: int, group_size: int, *, symmetric: bool, ordered: bool = False, least_zero: int = 0
    ) -> Integers:
        rng = np.random.default_rng(n + k + bits)
        size = k if group_size == -1 else group_size
        group = np.arange(k) // size
        if ordered:
            rng.shuffle(group)
        top = 1 << bits
        zero = np.full((n, k // size), top // 2) if symmetric else rng.integers(least_zero, top, (n, k // size))
        scale = rng.uniform(0.001, 0.1, (n, k // size)).astype(np.float16)
        return cls(rng.integers(0, top, (n, k)), zero, scale, group)

    @property
    def values(self) -> NDArray[np.float32]:
        """Exact: products of small integers and float16 fit."""
        wide = (self.numbers - self.zero[:, self.group]) * self.scale.astype(np.float64)[:, self.group]
        return wide.astype(np.float32)


def gptq_tensors(data: Integers, bits: int, minus_one: int, prefix: str = PREFIX) -> Tensors:
    return named(
        prefix,
        qweight=tensor(packed_rows(data.numbers, bits).T),
        qzeros=tensor(packed_rows(data.zero.T - minus_one, bits)),
        scales=tensor(data.scale.T),
        g_idx=tensor(data.group.astype(np.int32)),
    )


def gemm_tensors(data: Integers, prefix: str = PREFIX) -> Tensors:
    """AWQ's first layout. Eight columns of [K, N] in a word: the one in place i is column ORDER[i] of them."""
    order = (0, 2, 4, 6, 1, 3, 5, 7)

    def interleaved(numbers: NDArray[Any]) -> NDArray[np.int32]:
        rows = []
        for row in numbers:
            placed = [row[8 * block + order[i]] for block in range(len(row) // 8) for i in range(8)]
            rows.append(placed)
        return packed_rows(np.array(rows), 4)

    return named(prefix, qweight=tensor(interleaved(data.numbers.T)), qzeros=tensor(interleaved(data.zero.T)),
                 scales=tensor(data.scale.T))  # fmt: skip


def gptq_config(**changes: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": False, **changes}


def whole(matrix: StoredMatrix) -> NDArray[np.float32]:
    """All values, read in uneven pieces."""
    n, first, pieces = matrix.shape[0], 0, []
    for count in (1, 3, 13, n):
        count = min(count, n - first)
        pieces.append(matrix.values(first, count))
        first += count
    return np.concatenate(pieces)


def check_rows(matrix: StoredMatrix, expected: NDArray[np.float32]) -> None:
    """rows() in the order of stored columns stands for the same values."""
    rows, (n, k) = matrix.rows(0, matrix.shape[0]), matrix.shape
    size = k if matrix.format.group_size == -1 else matrix.format.group_size
    assert rows.numbers.dtype == np.uint8
    assert rows.numbers.shape == (n, k)
    assert rows.scale.dtype == np.float32
    assert rows.scale.shape == (n, matrix.format.groups(k))
    assert (rows.zero is not None) == matrix.format.asymmetric
    assert int(rows.numbers.max()) < 1 << matrix.format.bits
    columns = np.arange(k) if matrix.columns is None else matrix.columns
    assert sorted(columns) == list(range(k))
    if matrix.format.kind == "int":
        middle = 1 << (matrix.format.bits - 1)
        zero = np.full(rows.scale.shape, middle) if rows.zero is None else rows.zero
        for j in range(k):
            value = (rows.numbers[:, j].astype(np.float64) - zero[:, j // size]) * rows.scale[:, j // size]
            np.testing.assert_array_equal(value.astype(np.float32), expected[:, columns[j]])


def text_tensor(value: Any) -> StoredTensor:
    """JSON as bytes, as bitsandbytes keeps it."""
    return tensor(np.frombuffer(json.dumps(value).encode(), np.uint8))
