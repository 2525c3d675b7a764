"""AWQ checkpoints against numbers packed one at a time, in the three orders of AutoAWQ."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from llmc.quantize import QuantizeError
from llmc.quantize.checkpoints import StoredTensor

from support.stored_checkpoints import (
    PREFIX,
    Integers,
    Tensors,
    check_rows,
    find,
    find_one,
    gemm_tensors,
    named,
    packed_rows,
    tensor,
    whole,
    word,
)

N, K = 40, 256


def config(version: str | None = "gemm", group_size: int = 64, **changes: Any) -> dict[str, Any]:
    given = {"quant_method": "awq", "bits": 4, "group_size": group_size, "zero_point": True, "version": version}
    return given | changes


def padded(values: NDArray[Any], group_size: int) -> NDArray[Any]:
    """Columns of groups up to whole words, of which small groups have two or four at a time."""
    step = 8 * {32: 4, 64: 2}.get(group_size, 1)
    width = -(-values.shape[1] // step) * step
    return np.pad(values, ((0, 0), (0, width - values.shape[1])))


def gemv(data: Integers, group_size: int) -> Tensors:
    return named(PREFIX, qweight=tensor(packed_rows(data.numbers, 4)),
                 qzeros=tensor(packed_rows(padded(data.zero, group_size), 4)),
                 scales=tensor(padded(data.scale, group_size)))  # fmt: skip


def gemv_fast(data: Integers, group_size: int) -> Tensors:
    """[N / 4, K] words of 16 bits. Four rows by 64 columns are 256 numbers in 64 words; in a row, the number in place p
    of 32 is column 8 * (p // 2 % 4) + 2 * (p // 8) + p % 2 before eight of them are put even ones first.
    """
    n, k = data.numbers.shape
    words = np.zeros((n // 4, k), np.int64)
    for block in range(n // 4):
        for step in range(k // 64):
            run = []
            for row in range(4):
                for half in range(2):
                    base = 64 * step + 32 * half
                    first = [8 * (p // 2 % 4) + 2 * (p // 8) + p % 2 for p in range(32)]
                    second = [first[8 * eight + i] for eight in range(4) for i in (0, 2, 4, 6, 1, 3, 5, 7)]
                    run += [data.numbers[4 * block + row, base + column] for column in second]
            for i in range(64):
                words[block, 64 * step + i] = word(run[4 * i : 4 * i + 4], 4)
    scale = padded(data.scale, group_size)
    scaled = -(scale.astype(np.float32) * padded(data.zero, group_size)).astype(np.float16)
    return named(PREFIX, qweight=tensor(words.astype(np.uint16).view(np.int16)), qzeros=tensor(scaled.T),
                 scales=tensor(scale.T))  # fmt: skip


def tensors_of(version: str, data: Integers, group_size: int) -> Tensors:
    if version == "gemm":
        return gemm_tensors(data)
    return gemv(data, group_size) if version == "gemv" else gemv_fast(data, group_size)


@pytest.mark.parametrize("group_size", [32, 64, 128, -1])
@pytest.mark.parametrize("version", ["gemm", "gemv", "gemv_fast"])
def test_values(version: str, group_size: int) -> None:
    data = Integers.random(N, K, 4, group_size, symmetric=False)
    matrix = find_one(config(version, group_size), tensors_of(version, data, group_size))
    assert matrix.shape == (N, K)
    assert matrix.columns is None
    np.testing.assert_array_equal(whole(matrix), data.values)
    check_rows(matrix, data.values)


@pytest.mark.parametrize("version", ["gemm", "gemv", "gemv_fast"])
def test_without_zero_points_of_its_own(version: str) -> None:
    data = Integers.random(N, K, 4, 64, symmetric=True)
    matrix = find_one(config(version, zero_point=False), tensors_of(version, data, 64))
    assert matrix.rows(0, 4).zero is None
    np.testing.assert_array_equal(whole(matrix), data.values)
    data.zero[2, 1] = 9
    matrix = find_one(config(version, zero_point=False), tensors_of(version, data, 64))
    with pytest.raises(QuantizeError, match="holds the zero point 9, not the 8 of symmetric numbers"):
        matrix.rows(0, 4)


def test_groups_without_a_scale() -> None:
    data = Integers.random(N, K, 4, 64, symmetric=False)
    data.scale[3] = 0
    matrix = find_one(config("gemv_fast"), gemv_fast(data, 64))
    assert not matrix.values(3, 1).any()


@pytest.mark.parametrize("given", [config(None), config("GEMM"), config(None, checkpoint_format="gemm")])
def test_names_of_the_first_layout(given: dict[str, Any]) -> None:
    data = Integers.random(N, K, 4, 64, symmetric=False)
    np.testing.assert_array_equal(whole(find_one(given, gemm_tensors(data))), data.values)


def test_modules_that_are_left() -> None:
    tensors = gemm_tensors(Integers.random(N, K, 4, 64, symmetric=False))
    plain = tensor(np.zeros((N, K), np.float16))
    tensors |= {"model.layers.0.mlp.gate.weight": plain, "model.layers.0.mlp.gate_proj.weight": plain}
    linears = [PREFIX, "model.layers.0.mlp.gate", "model.layers.0.mlp.gate_proj"]
    with pytest.raises(QuantizeError, match=r"'model\.layers\.0\.mlp\.gate_proj' is quantized"):
        find(config(modules_to_not_convert=["gate"]), tensors, linears=linears)
    found = find(config(modules_to_not_convert=["gate", "mlp.gate_proj"]), tensors, linears=linears)
    assert list(found.matrices) == [PREFIX]
    with pytest.raises(QuantizeError, match=rf"leaves '{PREFIX}' as it is, but the checkpoint has {PREFIX}.qweight"):
        find(config(modules_to_not_convert=["self_attn"]), tensors)


def test_an_output_projection_of_either_kind() -> None:
    tensors = gemm_tensors(Integers.random(N, K, 4, 64, symmetric=False))
    linears = [PREFIX, "lm_head"]
    plain = tensors | {"lm_head.weight": tensor(np.zeros((64, K), np.float16))}
    assert "lm_head" not in find(config(), plain, linears=linears).matrices
    packed = tensors | {name.replace(PREFIX, "lm_head"): value for name, value in tensors.items()}
    assert "lm_head" in find(config(), packed, linears=linears).matrices


REFUSED: list[tuple[str, dict[str, Any], dict[str, StoredTensor | None], str]] = [
    ("gemm", {"version": "marlin"}, {}, "version is 'marlin', not one of gemm, gemv, gemv_fast"),
    ("gemm", {"bits": 8}, {}, "bits is 8, not one of 4"),
    ("gemm", {"group_size": 16}, {}, "in groups of 16"),
    ("gemm", {"backend": "llm-awq"}, {}, "backend is 'llm-awq'"),
    ("gemm", {}, {"qzeros": None}, f"{PREFIX}.qzeros is missing beside {PREFIX}.qweight"),
    ("gemm", {"version": "gemv"}, {}, r"groups of 64|shape"),
    ("gemv", {"group_size": 96}, {}, "in groups of 96"),
    ("gemv_fast", {}, {"qweight": tensor(np.zeros((10, 96), np.int32))}, "qweight has dtype 'I32', not I16"),
    ("gemv_fast", {}, {"qweight": tensor(np.zeros((10, 96), np.int16))}, "96 columns, which is not a multiple of 64"),
    ("gemv_fast", {}, {"qzeros": tensor(np.full((16, 40), 3, np.float16))}, "makes no zero point from 0 to 15"),
]  # fmt: skip


@pytest.mark.parametrize(("version", "changed", "changes", "message"), REFUSED, ids=[row[3] for row in REFUSED])
def test_refused(version: str, changed: dict[str, Any], changes: dict[str, StoredTensor | None], message: str) -> None:
    tensors = tensors_of(version, Integers.random(N, K, 4, 64, symmetric=False), 64)
    for leaf, other in changes.items():
        tensors.pop(f"{PREFIX}.{leaf}")
        if other is not None:
            tensors[f"{PREFIX}.{leaf}"] = other
    with pytest.raises(QuantizeError, match=message):
        find(config(version) | changed, tensors).matrices[PREFIX].rows(0, N)
