"""Linear layers of tensor cores for tests: their kernels, numbers, and what they should give."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
import torch

from llmc.compiler.kernel_spec import KernelSpec, Param
from llmc.compiler.ops.experts import index_ints
from llmc.compiler.targets.gpu import linear_forms
from llmc.compiler.targets.gpu.cuda import cuda_text
from llmc.compiler.targets.gpu.launch import launch_of
from llmc.compiler.targets.gpu.tensor_cores import tensor_layer
from llmc.compiler.targets.reference.kernels.rows_int8 import Int8Rows
from llmc.quantize.formats.base import Quantized, WeightFormat
from llmc.quantize.formats.integers import Integers
from llmc.quantize.formats.registry import format_of_kernel

TORCH = {"bf16": torch.bfloat16, "f16": torch.float16}
EXPERTS, TOP_K = 7, 3
_OF_EXPERTS: dict[str, Param] = {"experts": EXPERTS, "top_k": TOP_K}
ORDER = KernelSpec.of("other", "expert_order", row_unit=16, rows=0, some=True, **_OF_EXPERTS)
"""Lists the rows of experts."""


def float_spec(dtype: str, k: int, n: int, gated: str = "", **more: bool) -> KernelSpec:
    """A layer of k inputs and n weight rows, of floats of x's type."""
    given: dict[str, Param] = {"k": k, "n": n, "act_dtype": dtype, "weight_dtype": dtype, "gated": gated, "rows": 0}
    return KernelSpec.of("linear", "linear", **{"bias": False, "residual": False, **given, **more})


def quantized_spec(dtype: str, k: int, n: int, format: WeightFormat, gated: str = "", **more: bool) -> KernelSpec:
    """A layer of k inputs and n weight rows in a format."""
    given: dict[str, Param] = {"k": k, "n": n, "act_dtype": dtype, "gated": gated, "rows": 0, **format.kernel_params()}
    return KernelSpec.of("linear", "linear_quant", **{"bias": False, "residual": False, **given, **more})


def expert_spec(spec: KernelSpec) -> KernelSpec:
    """A layer with `EXPERTS` such weights, of which a token has `TOP_K`."""
    given = {name: value for name, value in spec.as_dict().items() if name not in ("residual", "rows")}
    return KernelSpec.of("linear", f"expert_{spec.op}", **given, experts=EXPERTS, top_k=TOP_K)


def layer_texts(specs: Mapping[str, KernelSpec], places: Mapping[str, int]) -> list[str]:
    """Kernels by name. places: groups that a GPU runs at a time, of those for which it is not the usual number."""
    found = []
    for name, spec in specs.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(linear_forms, "PLACES", places.get(name, linear_forms.PLACES))
            found.append(cuda_text(spec))
    return found


def check_rows(library: ctypes.CDLL, spec: KernelSpec, rows: Sequence[int]) -> None:
    """A layer of tensor cores has torch's numbers, and a row the same bits with any number of rows, in any groups."""
    assert tensor_layer(spec) is not None
    layer, most = Layer(spec, max(rows)), max(rows)
    whole = run_layer(library, spec, layer, most, groups=3)
    check_numbers(spec, whole, layer.expected)
    for fewer in sorted({*rows} - {most}):
        for groups in (1, 5):
            found = run_layer(library, spec, layer, fewer, groups)
            assert np.array_equal(found.view(np.uint8), whole[:fewer].view(np.uint8)), fewer


class Layer:
    """Numbers of a layer, and what it should give, as float64 sums. experts: of each row, of those of the layer."""

    def __init__(self, spec: KernelSpec, rows: int, experts: np.ndarray | None = None) -> None:
        p, random = spec.as_dict(), np.random.default_rng(7)
        self.n, self.k, act = int(p["n"]), int(p["k"]), str(p["act_dtype"])
        weights = int(p.get("experts", 1))
        x = random.standard_normal((rows, self.k), dtype=np.float32)
        weight = random.standard_normal((weights * self.n, self.k), dtype=np.float32) / np.float32(self.k**0.5)
        self.bias = random.standard_normal(weights * self.n, dtype=np.float32)
        self.residual = random.standard_normal((rows, self.n), dtype=np.float32)
        if not spec.op.endswith("_quant"):
            self.weights, wide = [_stored(weight, act)], _widened(weight, act)
        else:
            format = format_of_kernel(p)
            quantized = Quantized.empty(format, len(weight), self.k)
            format.quantize_rows(weight, quantized)
            wide, numbers = format.value(quantized), quantized.numbers
            if format.bits == 4:
                numbers = numbers[:, 0::2] | numbers[:, 1::2] << np.uint8(4)
            self.weights = [np.ascontiguousarray(part) for part in (numbers, *quantized.planes.values())]
        if act == "i8":
            assert isinstance(format, Integers)
            self.x, x_wide = _int8_rows(x, format)
        else:
            self.x, x_wide = _stored(x, act), _widened(x, act)
        total = x_wide @ wide.T
        if p["bias"]:
            total = total + self.bias
        if experts is not None:
            total = total.reshape(rows, weights, self.n)[np.arange(rows), experts]
        if p.get("residual"):
            total = total + self.residual
        if p["gated"]:
            gate, up = total[:, : self.n // 2], total[:, self.n // 2 :]
            total = gate / (1 + np.exp(-gate)) * up
        self.expected = total


def _stored(values: np.ndarray, dtype: str) -> np.ndarray:
    return torch.from_numpy(values).to(TORCH[dtype]).view(torch.int16).numpy().copy()


def _widened(values: np.ndarray, dtype: str) -> np.ndarray:
    return torch.from_numpy(values).to(TORCH[dtype]).double().numpy()


def _int8_rows(x: np.ndarray, format: Integers) -> tuple[np.ndarray, np.ndarray]:
    groups = format.scales(x.shape[1])
    rows = Int8Rows(x.shape[1], groups)
    scale = np.abs(x).max(1, keepdims=True) / np.float32(127)
    numbers = np.rint(x / scale).astype(np.int8)
    words = np.zeros((len(x), rows.words), np.int32)
    words[:, : rows.number_words] = numbers.view(np.int32)
    words[:, rows.number_words] = scale[:, 0].view(np.int32)
    sums = np.add.reduceat(numbers.astype(np.int32), np.arange(groups) * format.group_size, 1)
    assert format.sums is not None
    words[:, rows.number_words + 1 :][:, :groups] = sums * format.sums.factor
    return words, numbers.astype(np.float64) * scale.astype(np.float64)


def run_layer(
    library: ctypes.CDLL, spec: KernelSpec, layer: Layer, rows: int, groups: int, *index: np.ndarray
) -> np.ndarray:
    """The result of the first `rows` rows, as it is stored. index: of experts."""
    p = spec.as_dict()
    width = layer.n // (2 if p["gated"] else 1)
    out = np.full((rows + 1, width), 77, np.int16 if p["gated"] in TORCH else np.float32)
    optional = [array for name, array in (("bias", layer.bias), ("residual", layer.residual)) if p.get(name)]
    call_kernel(library, spec, [layer.x[:rows].copy(), *layer.weights, *optional, *index, out], rows, groups)
    assert (out[rows] == 77).all()  # nothing is written behind the last row
    return out[:rows]


def call_kernel(library: ctypes.CDLL, spec: KernelSpec, buffers: list[np.ndarray], rows: int, groups: int) -> None:
    """Runs a kernel of a library of `host_library` with these operands."""
    call_at(library, spec, [one.ctypes.data for one in buffers], rows, groups)


def call_at(library: ctypes.CDLL, spec: KernelSpec, addresses: Sequence[int], rows: int, groups: int) -> None:
    """Runs a kernel of a library of `host_library` with operands at these addresses."""
    scalars = np.array([rows, 1, 1, 1, 1, 0, 0, 0], np.int32)
    arguments = [*map(ctypes.c_void_p, addresses), *(ctypes.c_int32(0) for _ in addresses)]
    arguments.append(ctypes.c_void_p(scalars.ctypes.data))
    pointers = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
    getattr(library, f"run_{spec.symbol()}")(pointers, groups, launch_of(spec, tensor_cores=True).items)


def check_numbers(spec: KernelSpec, found: np.ndarray, expected: np.ndarray) -> None:
    """Fails if a result of `run_layer` is not what a `Layer` expects."""
    gated = spec.as_dict()["gated"]
    as_float = torch.from_numpy(found).view(TORCH[str(gated)]).float().numpy() if gated in TORCH else found
    error = np.abs(as_float - expected).max() / np.abs(expected).max()
    assert error < {"bf16": 4e-3, "f16": 1e-3}.get(str(gated), 2e-6)


def index_of(library: ctypes.CDLL, ids: np.ndarray, groups: int) -> np.ndarray:
    """The index of tokens with these experts; `EXPERTS` stands for those of another rank."""
    tokens, pairs = len(ids), ids.size
    index = np.full(index_ints(EXPERTS, pairs) + 1, -77, np.int32)
    call_kernel(library, ORDER, [np.concatenate([ids, np.zeros_like(ids)], 1).copy(), index], tokens, groups)
    assert index[-1] == -77
    return index
