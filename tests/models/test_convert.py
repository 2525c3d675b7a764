"""Conversions of weights: the bits that torch makes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from llmc.models.convert import DTYPES, convert
from llmc.models.eager import as_tensor
from llmc.models.loader import Parameter

TORCH = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
# Zeros, subnormals, ties and their neighbours, the edge of overflow, infinities, quiet and signalling NaNs.
PATTERNS = [0, 1, 0x007FFFFF, 0x3F808000, 0x3F807FFF, 0x3F808001, 0x3F818000, 0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF]
# The same of f16: the least subnormal number and its half, the least normal one, and 65504 to 65536.
PATTERNS += [0x33800000, 0x33000000, 0x33000001, 0x33C00000, 0x387FC000, 0x387FE000, 0x38800000, 0x477FE000]
PATTERNS += [0x477FEFFF, 0x477FF000, 0x47800000, 0x3F801000, 0x3F801001, 0x3F803000]
PATTERNS += [0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0x7F80FFFF, 0x7FA12345]


def bits(array: NDArray[Any]) -> NDArray[Any]:
    return array.view(np.uint16 if array.itemsize == 2 else np.uint32)


def all_patterns(dtype: str) -> NDArray[Any]:
    """Every 16-bit value, or chosen and random 32-bit ones of both signs."""
    if dtype != "f32":
        return np.arange(1 << 16).astype(np.uint16).view(DTYPES[dtype])
    random = np.random.default_rng(0).integers(0, 1 << 32, 100_000, dtype=np.uint32)
    chosen = np.array(PATTERNS, np.uint32)
    return np.concatenate((chosen, chosen | 0x80000000, random)).view(np.float32)


@pytest.mark.parametrize("out_dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_same_bits_as_torch(dtype: str, out_dtype: str) -> None:
    source = all_patterns(dtype)
    out = np.empty(source.shape, DTYPES[out_dtype])
    convert(source, out)
    expected = as_tensor(source).to(TORCH[out_dtype])
    assert expected.dtype == TORCH[out_dtype]
    found, wanted = bits(out), expected.view(torch.int16 if out.itemsize == 2 else torch.int32).numpy()
    wanted = wanted.view(found.dtype)
    nan = np.isnan(out.astype(np.float32))
    assert np.array_equal(nan, expected.isnan().numpy())
    assert np.array_equal(found[~nan], wanted[~nan])
    if out_dtype == "bf16":
        assert np.array_equal(found, wanted)


def test_strided_rows_are_converted_in_place() -> None:
    source = np.random.default_rng(1).normal(size=(5, 7)).astype(np.float32)
    scratch = np.zeros((5, 12), DTYPES["bf16"])
    convert(source, scratch[:, :7])
    assert torch.equal(as_tensor(np.ascontiguousarray(scratch[:, :7])), torch.from_numpy(source).to(torch.bfloat16))
    assert not bits(scratch)[:, 7:].any()


@pytest.mark.parametrize(("out_dtype", "shape"), [("float64", (2, 3)), ("float32", (3, 2))])
def test_other_dtypes_and_shapes_are_refused(out_dtype: str, shape: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="cannot convert float32"):
        convert(np.zeros((2, 3), np.float32), np.zeros(shape, out_dtype))


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_what_f16_cannot_hold_is_infinite(dtype: str) -> None:
    source = np.array([65504.0, 65536.0, -1e5, 3e38], np.float32).astype(DTYPES[dtype])
    out = np.empty(4, DTYPES["f16"])
    convert(source, out)
    largest = 65504.0 if dtype == "f32" else np.inf  # the nearest bf16 is 65536
    assert np.array_equal(out.astype(np.float32), np.array([largest, np.inf, -np.inf, np.inf], np.float32))


def test_rows_across_parts() -> None:
    parts = tuple(
        np.random.default_rng(i).normal(size=(rows, 4)).astype(np.float16) for i, rows in enumerate((3, 1, 5))
    )
    parameter = Parameter.of("w", "bf16", *parts)
    whole = torch.from_numpy(np.concatenate(parts)).to(torch.bfloat16)
    assert parameter.shape == (9, 4)
    assert torch.equal(as_tensor(parameter.value()), whole)
    for first in range(9):
        out = np.empty((min(3, 9 - first), 4), DTYPES["bf16"])
        parameter.read(first, out)
        assert torch.equal(as_tensor(out), whole[first : first + 3])
