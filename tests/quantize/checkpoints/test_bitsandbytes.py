"""bitsandbytes checkpoints, against numbers packed one at a time and against the library where it is installed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from llmc.quantize import QuantizeError
from llmc.quantize.checkpoints import StoredTensor
from llmc.quantize.checkpoints.base import Kind
from llmc.quantize.checkpoints.floats import TABLES

from support.stored_checkpoints import PREFIX, Tensors, check_rows, find, find_one, named, tensor, text_tensor, whole

N, K = 12, 192
FOUR = {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": "nf4"}
EIGHT = {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_skip_modules": ["lm_head"]}


def four_bits(kind: Kind, nested: bool) -> tuple[Tensors, NDArray[np.float32]]:
    rng = np.random.default_rng(5)
    numbers, blocks = rng.integers(0, 16, (N, K)), N * K // 64
    packed = [numbers.flat[2 * i] * 16 + numbers.flat[2 * i + 1] for i in range(N * K // 2)]
    state: dict[str, Any] = {"quant_type": kind, "blocksize": 64, "dtype": "bfloat16", "shape": [N, K]}
    tensors = named(PREFIX, weight=tensor(np.array(packed, np.uint8)[:, None]))
    tensors |= {f"{PREFIX}.weight.quant_map": tensor(TABLES[kind])}
    if nested:
        state |= {"nested_blocksize": 32, "nested_dtype": "float32", "nested_offset": 0.25}
        table, outer = np.linspace(-1, 1, 256).astype(np.float32), rng.uniform(0.1, 0.2, 2).astype(np.float32)
        code = rng.integers(0, 256, blocks).astype(np.uint8)
        absmax = np.array([table[code[i]] * outer[i // 32] + np.float32(0.25) for i in range(blocks)], np.float32)
        tensors |= {f"{PREFIX}.weight.absmax": tensor(code), f"{PREFIX}.weight.nested_absmax": tensor(outer),
                    f"{PREFIX}.weight.nested_quant_map": tensor(table)}  # fmt: skip
    else:
        absmax = rng.uniform(0.1, 0.2, blocks).astype(np.float32)
        tensors |= {f"{PREFIX}.weight.absmax": tensor(absmax)}
    tensors |= {f"{PREFIX}.weight.quant_state.bitsandbytes__{kind}": text_tensor(state)}
    expected = np.empty((N, K), np.float32)
    for i in range(N * K):
        expected.flat[i] = TABLES[kind][numbers.flat[i]] * absmax[i // 64]
    return tensors, expected


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_four_bits(kind: Kind, nested: bool) -> None:
    tensors, expected = four_bits(kind, nested)
    matrix = find_one(FOUR, tensors)
    assert (matrix.format.kind, matrix.format.bits, matrix.format.group_size) == (kind, 4, 64)
    np.testing.assert_array_equal(whole(matrix), expected)
    check_rows(matrix, expected)


@pytest.mark.slow
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_values_are_those_of_the_library(kind: Kind, nested: bool) -> None:
    torch = pytest.importorskip("torch")
    functional = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed").functional
    weight = torch.randn(N, K, generator=torch.Generator().manual_seed(1))
    packed, state = functional.quantize_4bit(weight, quant_type=kind, blocksize=64, compress_statistics=nested)
    expected = functional.dequantize_4bit(packed, state).numpy()
    stored = {f"{PREFIX}.weight.{leaf}": tensor(value.numpy()) for leaf, value in state.as_dict(packed=True).items()}
    matrix = find_one(FOUR, {f"{PREFIX}.weight": tensor(packed.numpy()), **stored})
    np.testing.assert_array_equal(whole(matrix), expected)


def eight_bits() -> tuple[Tensors, NDArray[np.int8], NDArray[np.float32]]:
    rng = np.random.default_rng(6)
    numbers, largest = rng.integers(-127, 128, (N, K)).astype(np.int8), rng.uniform(1, 2, N).astype(np.float32)
    tensors = named(PREFIX, weight=tensor(numbers), SCB=tensor(largest), weight_format=tensor(np.array(0, np.uint8)))
    return tensors, numbers, largest


def test_eight_bits() -> None:
    tensors, numbers, largest = eight_bits()
    matrix = find_one(EIGHT, tensors)
    exact = numbers * largest[:, None].astype(np.float64) / 127
    np.testing.assert_allclose(whole(matrix), exact, rtol=2e-7)
    check_rows(matrix, whole(matrix))


def test_modules_that_are_left() -> None:
    tensors = eight_bits()[0] | {"lm_head.weight": tensor(np.zeros((64, K), np.float16))}
    assert list(find(EIGHT, tensors, linears=[PREFIX, "lm_head"]).matrices) == [PREFIX]
    with pytest.raises(QuantizeError, match="leaves"):
        find(EIGHT | {"llm_int8_skip_modules": [PREFIX]}, tensors)


REFUSED: list[tuple[dict[str, Any], dict[str, StoredTensor | None], str]] = [
    ({"load_in_8bit": True}, {}, "load_in_4bit is True, not true, or load_in_8bit, and not both"),
    ({}, {"quant_state.bitsandbytes__nf4": tensor(np.zeros(20, np.uint8))}, "bitsandbytes__nf4 is not JSON"),
    ({}, {"quant_state.bitsandbytes__nf4": text_tensor([])}, "which is not an object"),
    ({}, {"quant_state.bitsandbytes__nf4": text_tensor({"shape": [12]})}, r"shape is \[12\], not that of a matrix"),
    (
        {},
        {"quant_state.bitsandbytes__nf4": text_tensor({"shape": [12, 192], "quant_type": "fp4"})},
        "quant_type is 'fp4'",
    ),
    (
        {},
        {"quant_state.bitsandbytes__nf4": text_tensor({"shape": [12, 96], "quant_type": "nf4", "blocksize": 64})},
        "rows of 96 numbers, which are not whole blocks of 64",
    ),
    (
        {},
        {"quant_state.bitsandbytes__nf4": text_tensor({"shape": [6, 192], "quant_type": "nf4", "blocksize": 64})},
        r"weight has shape \[1152, 1\], not \[576, 1\]",
    ),
    ({}, {"quant_state.bitsandbytes__nf4": None}, "the checkpoint has no tensor PREFIX.weight.quant_state"),
    ({}, {"absmax": None}, "weight.absmax is missing beside"),
    ({}, {"absmax": tensor(np.full(36, np.nan, np.float32))}, "weight.absmax holds the scale nan"),
    ({}, {"absmax": tensor(np.full(36, -1, np.float32))}, "weight.absmax holds the scale -1.0"),
    ({}, {"quant_map": tensor(np.zeros(16, np.float32))}, "quant_map is not the table of nf4"),
]


@pytest.mark.parametrize(("config", "changes", "message"), REFUSED, ids=[row[2] for row in REFUSED])
def test_refused(config: dict[str, Any], changes: dict[str, StoredTensor | None], message: str) -> None:
    tensors, _ = four_bits("nf4", nested=False)
    for leaf, other in changes.items():
        del tensors[f"{PREFIX}.weight.{leaf}"]
        if other is not None:
            tensors[f"{PREFIX}.weight.{leaf}"] = other
    with pytest.raises(QuantizeError, match=message):
        find(FOUR | config, tensors).matrices[PREFIX].rows(0, N)


def test_weights_that_are_tiled() -> None:
    tensors = eight_bits()[0] | named(PREFIX, weight_format=tensor(np.array(1, np.uint8)))
    with pytest.raises(QuantizeError, match="is tiled for a kernel"):
        find_one(EIGHT, tensors).rows(0, 1)
