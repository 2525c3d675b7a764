"""Linear layers without tensor cores: every sum is eight chains that meet in one tree, whatever the number of rows."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.ops.latent import head_linear_spec
from llmc.compiler.targets.gpu.cuda import cuda_text
from llmc.compiler.targets.gpu.plain_forms import CHAINS, FORMS, MOST_ROWS
from llmc.compiler.targets.gpu.tensor_cores import tensor_layer
from llmc.compiler.targets.reference.kernels.padding import number_bytes
from llmc.quantize.formats.affine import Affine
from llmc.quantize.formats.base import Quantized, WeightFormat
from llmc.quantize.formats.integers import Integers

from support.cuda import host_library
from support.tensor_layers import call_kernel, float_spec, quantized_spec

_N = 66
_ROWS = sorted({2, MOST_ROWS + 1, *(rows for form in FORMS for rows in (form.most, form.most + 1))})
"""With tiles of each form, whole and not."""
_FORMATS: dict[str, tuple[int, int, WeightFormat | None]] = {
    "floats": (96, 4, None),
    "floats, one by one": (97, 1, None),
    "fewer reads than chains": (20, 4, None),
    "many floats": (2308, 4, None),
    "8 bits": (96, 16, Integers(8)),
    "4 bits": (96, 16, Integers(4, 32)),
    "4 bits with zeros": (288, 16, Integers(4, 32, True)),
    "groups shorter than a read": (96, 8, Integers(8, 8)),
    "numbers one by one": (90, 1, Integers(4, 6)),
    "blocks with offsets": (512, 16, Affine(4, 32, block=256, offsets=True)),
}
"""Elements of K, those of a read, and the format of the weight."""


def _spec(name: str) -> KernelSpec:
    k, _, format = _FORMATS[name]
    return float_spec("f32", k, _N) if format is None else quantized_spec("f32", k, _N, format)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    assert all(tensor_layer(_spec(name)) is None for name in _FORMATS)
    return ctypes.CDLL(str(host_library([cuda_text(_spec(name)) for name in _FORMATS], tmp_path_factory.mktemp("k"))))


@pytest.fixture(scope="module")
def fma() -> Callable[[float, float, float], float]:
    of_c = ctypes.CDLL(None).fmaf
    of_c.restype, of_c.argtypes = ctypes.c_float, [ctypes.c_float] * 3
    found: Callable[[float, float, float], float] = of_c
    return found


@pytest.mark.parametrize("name", list(_FORMATS))
def test_sums_are_eight_chains(name: str, library: ctypes.CDLL, fma: Callable[[float, float, float], float]) -> None:
    """Numbers are near float64 sums. Bits of a row are those that it has alone, and of some columns those of fmaf."""
    (k, count, format), random = _FORMATS[name], np.random.default_rng(5)
    x = random.standard_normal((max(_ROWS), k), dtype=np.float32)
    weight = random.standard_normal((_N, k), dtype=np.float32)
    operands: list[np.ndarray] = [weight]
    wide = weight
    if format is not None:
        quantized = Quantized.empty(format, _N, k)
        format.quantize_rows(weight, quantized)
        wide = format.value(quantized).astype(np.float32)
        numbers = np.zeros((_N, number_bytes(k, format.bits)), np.uint8)
        stored = quantized.numbers
        packed = stored[:, 0::2] | stored[:, 1::2] << np.uint8(4) if format.bits == 4 else stored
        numbers[:, : packed.shape[1]] = packed
        operands = [numbers, *map(np.ascontiguousarray, quantized.planes.values())]

    def run(first: int, rows: int) -> np.ndarray:
        out = np.full((rows + 1, _N), 77, np.float32)
        call_kernel(library, _spec(name), [x[first : first + rows].copy(), *operands, out], rows, groups=3)
        assert (out[rows] == 77).all()  # nothing is written behind the last row
        return out[:rows]

    alone = np.concatenate([run(row, 1) for row in range(len(x))])
    expected = x.astype(np.float64) @ wide.astype(np.float64).T
    assert np.abs(alone - expected).max() < 1e-5 * np.abs(expected).max()
    for rows in _ROWS:
        np.testing.assert_array_equal(run(0, rows).view(np.int32), alone[:rows].view(np.int32))
    if isinstance(format, Affine):
        return  # its values are rounded in another order
    for column in (0, 31, 32, _N - 1):
        totals = [0.0] * CHAINS
        for i, (a, b) in enumerate(zip(x[0], wide[column], strict=True)):
            chain = i // count % CHAINS
            totals[chain] = fma(a, b, totals[chain])
        found = np.array(totals, np.float32)
        while len(found) > 1:
            found = found[::2] + found[1::2]
        assert found[0] == alone[0, column]


@pytest.mark.parametrize("gives", ["", "bf16"])
def test_heads_have_weights_of_their_own(gives: str, tmp_path: Path) -> None:
    """Numbers are near float64 sums, and bits of a row are those that it has alone. A head is wider than a tile."""
    heads, of_head, k, stride = 3, 35, 24, 40
    columns = heads * of_head
    spec = head_linear_spec("bf16", gives, heads=heads, k=k, n=columns, stride=stride, rows=0)
    library, random = ctypes.CDLL(str(host_library([cuda_text(spec)], tmp_path))), np.random.default_rng(6)
    x = random.standard_normal((max(_ROWS), heads, stride), dtype=np.float32)
    weight = torch.from_numpy(random.standard_normal((columns, k), dtype=np.float32)).to(torch.bfloat16)
    stored = weight.view(torch.int16).numpy().view(np.uint16)
    of_heads = weight.double().numpy().reshape(heads, of_head, k)
    expected = np.einsum("rhk,hck->rhc", x[..., :k].astype(np.float64), of_heads).reshape(len(x), columns)

    def run(first: int, rows: int) -> np.ndarray:
        out = np.full((rows, columns + 1 if gives else columns), 77, np.uint16 if gives else np.float32)
        call_kernel(library, spec, [x[first : first + rows].copy(), stored, out], rows, groups=3)
        assert not gives or (out[:, columns] == 0).all()  # padding
        return out[:, :columns]

    alone = np.concatenate([run(row, 1) for row in range(len(x))])
    wide = (alone.astype(np.uint32) << 16).view(np.float32) if gives else alone
    assert np.abs(wide - expected).max() < (8e-3 if gives else 1e-6) * np.abs(expected).max()
    for rows in _ROWS:
        assert run(0, rows).tobytes() == alone[:rows].tobytes()
