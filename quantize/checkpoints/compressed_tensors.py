"""Checkpoints of compressed-tensors, as LLM Compressor writes them. A module's format determines its tensors.

| format | tensors beside `weight_scale` | value |
|---|---|---|
| pack-quantized | `weight_packed` int32 [N, words], `weight_shape`, `weight_zero_point` packed along N | (n - z) * s |
| int-quantized | `weight` int8 [N, K], `weight_zero_point` int8 | (n - z) * s |
| float-quantized | `weight` e4m3 [N, K] | n * s |
| nvfp4-pack-quantized | `weight_packed` bytes [N, K / 2], `weight_global_scale` | n * (s / global) |
| mxfp4-pack-quantized, mxfp8-quantized | `weight_packed` bytes, `weight` e4m3; scales are powers of two | n * s |
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from llmc.quantize.checkpoints.base import AGAIN, Activation, Bytes, Inputs, Rows, StoredFormat, StoredMatrix
from llmc.quantize.checkpoints.bits import unpack, unpack_slice, words_of
from llmc.quantize.checkpoints.grouped import check_group_size, grouped_columns
from llmc.quantize.checkpoints.modules import PLAIN, Tensors, check_agreement
from llmc.quantize.checkpoints.planes import E8M0, FloatMatrix, Int8Matrix, Scales, find_scales, number_of
from llmc.quantize.checkpoints.recipes import Args, Recipe, Scheme
from llmc.quantize.checkpoints.result import Settings, StoredCheckpoint
from llmc.quantize.checkpoints.section import Section
from llmc.quantize.formats.base import WHOLE_ROW, QuantizeError
from llmc.shown import shown

_FP8 = ("F8_E4M3",)
_NVFP4_GROUP, _MX_GROUP = 16, 32
_NONE = -1
"""Marks a column of `weight_g_idx` that was never written."""


def _scales(
    tensors: Tensors, prefix: str, shape: tuple[int, int], args: Args, leaf: str = "weight_scale",
    dtypes: tuple[str, ...] = PLAIN,
) -> Scales:  # fmt: skip
    per: Literal["tensor", "channel", "group", "block"]
    block = (1, WHOLE_ROW)
    if args.strategy in ("group", "tensor_group"):
        assert args.group_size is not None
        per, block = "group", (1, args.group_size)
    elif args.strategy == "block":
        assert args.block is not None
        per, block = "block", args.block
    else:
        per = "tensor" if args.strategy == "tensor" else "channel"
    return find_scales(tensors, prefix, leaf, shape, per, block, dtypes)


class PackedMatrix(StoredMatrix):
    """A matrix of the format pack-quantized; 2-bit numbers are widened to 4 bits."""

    def __init__(self, tensors: Tensors, prefix: str, args: Args, inputs: Inputs) -> None:
        self._packed = tensors.matrix(prefix, "weight_packed", ("I32",))
        shape = tensors.get(prefix, "weight_shape", ("I64", "I32"), (2,), "weight_packed")
        n, k = (int(size) for size in shape.load())
        if n != self._packed.shape[0] or not 0 < k < 1 << 31 or words_of(k, args.bits) != self._packed.shape[1]:
            raise QuantizeError(
                f"{prefix}.weight_packed has shape {list(self._packed.shape)}, which does not hold the {shown([n, k])} "
                f"numbers of {args.bits} bits that {prefix}.weight_shape tells; {AGAIN}"
            )
        self._bits = args.bits
        self._scales = _scales(tensors, prefix, (n, k), args)
        if self._scales.rows_each > 1:
            raise QuantizeError(
                f"{prefix} has packed numbers in blocks of rows, which is not a format of compressed-tensors; {AGAIN}"
            )
        size = self._scales.group_size
        check_group_size(prefix, size, k)
        names = {"weight": f"{prefix}.weight_packed", "scale": self._scales.name, "shape": f"{prefix}.weight_shape"}
        groups = 1 if size == WHOLE_ROW else k // size
        if not args.symmetric:
            names["zero"] = f"{prefix}.weight_zero_point"
            self._zeros = tensors.get(prefix, "weight_zero_point", ("I32", "I8"), of="weight_packed")
            wanted = (words_of(n, args.bits) if self._zeros.dtype == "I32" else n, groups)
            tensors.get(prefix, "weight_zero_point", ("I32", "I8"), wanted)
        self._groups_of = None
        if args.ordered or f"{prefix}.weight_g_idx" in tensors:
            self._groups_of = tensors.get(prefix, "weight_g_idx", ("I32",), (k,), "weight_packed")
            names["columns"] = f"{prefix}.weight_g_idx"
        format = StoredFormat("int", max(args.bits, 4), size, asymmetric=not args.symmetric)
        super().__init__(prefix, (n, k), format, names, inputs)

    @cached_property
    def columns(self) -> NDArray[np.int32] | None:
        if self._groups_of is None:
            return None
        groups_of = self._groups_of.load()
        if (groups_of == _NONE).all():
            return None
        return grouped_columns(self.tensors["columns"], groups_of, self.format.group_size)

    def _read(self, first: int, count: int) -> Rows:
        numbers = unpack(self._packed.load()[first : first + count], self._bits, self.shape[1])
        scale, _ = self._scales.read(first, count)
        if self.format.asymmetric:
            return Rows(numbers, scale, self._zero_points(first, count))
        numbers += np.uint8((1 << (self.format.bits - 1)) - (1 << (self._bits - 1)))
        return Rows(numbers, scale)

    def _zero_points(self, first: int, count: int) -> Bytes:
        stored, middle = self._zeros.load(), 1 << (self._bits - 1)
        if self._zeros.dtype == "I32":
            return np.ascontiguousarray(unpack_slice(stored.T, self._bits, first, count).T)
        signed = stored[first : first + count].astype(np.int16)
        if ((signed < -middle) | (signed >= middle)).any():
            raise QuantizeError(f"{self.tensors['zero']} holds what is no zero point of {self._bits} bits; {AGAIN}")
        unsigned: Bytes = (signed + middle).astype(np.uint8)
        return unsigned


def _inputs(tensors: Tensors, prefix: str, args: Args | None) -> Inputs:
    if args is None:
        return Inputs()
    if args.kind == "int":
        kind: Literal["int8", "int4", "e4m3", "e2m1"] = "int8" if args.bits == 8 else "int4"
    else:
        kind = "e4m3" if args.bits == 8 else "e2m1"
    names: dict[str, str] = {}
    per: Literal["tensor", "token", "group"] = "group" if args.strategy in ("group", "tensor_group") else "token"
    per = "tensor" if args.strategy == "tensor" else per
    if args.dynamic is True:
        return Inputs(lambda: Activation(kind, per, True, symmetric=args.symmetric))
    local = args.dynamic == "local" or args.strategy == "tensor_group"
    leaf = "input_global_scale" if local else "input_scale"
    scale = tensors.scalar(prefix, leaf, PLAIN, "weight_scale")
    names["input_scale"] = f"{prefix}.{leaf}"
    zero = None
    if f"{prefix}.input_zero_point" in tensors:
        zero = tensors.scalar(prefix, "input_zero_point", ("I8", *_FP8))
        names["input_zero"] = f"{prefix}.input_zero_point"

    def activation() -> Activation:
        number = number_of(scale, names["input_scale"])
        point = None if zero is None or zero.dtype != "I8" else int(zero.load().reshape(-1)[0])
        if local:
            return Activation(kind, per, True, float(np.float32(1) / np.float32(number)))
        if point is None and args.kind == "int":
            point = 0
        return Activation(kind, per, False, number, point, args.symmetric)

    return Inputs(activation, names)


def _int8(tensors: Tensors, prefix: str, args: Args, inputs: Inputs) -> StoredMatrix:
    weight = tensors.matrix(prefix, "weight", ("I8",))
    n, k = weight.shape
    scales, zeros = _scales(tensors, prefix, (n, k), args), None
    if scales.rows_each > 1:
        raise QuantizeError(
            f"{prefix} has integers in blocks of rows, which llmc does not read; use groups or channels"
        )
    check_group_size(prefix, scales.group_size, k)
    if not args.symmetric:
        zeros = _scales(tensors, prefix, (n, k), args, "weight_zero_point", ("I8",))
    return Int8Matrix(prefix, weight, args.bits, scales, zeros, inputs)


def _fp8(tensors: Tensors, prefix: str, args: Args, inputs: Inputs) -> StoredMatrix:
    weight = tensors.matrix(prefix, "weight", _FP8)
    n, k = weight.shape
    return FloatMatrix(prefix, "weight", weight, "e4m3", _scales(tensors, prefix, (n, k), args), inputs)


def _mxfp8(tensors: Tensors, prefix: str, args: Args, inputs: Inputs) -> StoredMatrix:
    weight = tensors.matrix(prefix, "weight", _FP8)
    n, k = weight.shape
    scales = _scales(tensors, prefix, (n, k), args, dtypes=E8M0)
    return FloatMatrix(prefix, "weight", weight, "e4m3", scales, inputs)


def _mxfp4(tensors: Tensors, prefix: str, args: Args, inputs: Inputs) -> StoredMatrix:
    weight = tensors.matrix(prefix, "weight_packed", ("U8",))
    n, k = weight.shape[0], 2 * weight.shape[1]
    scales = _scales(tensors, prefix, (n, k), args, dtypes=E8M0)
    return FloatMatrix(prefix, "weight_packed", weight, "e2m1", scales, inputs)


def _nvfp4(tensors: Tensors, prefix: str, args: Args, inputs: Inputs) -> StoredMatrix:
    weight = tensors.matrix(prefix, "weight_packed", ("U8",))
    n, k = weight.shape[0], 2 * weight.shape[1]
    scales = _scales(tensors, prefix, (n, k), args, dtypes=_FP8)
    overall = f"{prefix}.weight_global_scale", tensors.scalar(prefix, "weight_global_scale", ("F32",), "weight_packed")
    return FloatMatrix(prefix, "weight_packed", weight, "e2m1", scales, inputs, overall, divides=True)


_Maker = Callable[[Tensors, str, Args, Inputs], StoredMatrix]
# Weights of each format: kind, bits, group size (None: any), and their reader.
_MAKERS: dict[str, tuple[str, tuple[int, ...], int | None, _Maker]] = {
    "pack-quantized": ("int", (2, 4, 8), None, PackedMatrix),
    "int-quantized": ("int", (4, 8), None, _int8),
    "float-quantized": ("float", (8,), None, _fp8),
    "nvfp4-pack-quantized": ("float", (4,), _NVFP4_GROUP, _nvfp4),
    "mxfp4-pack-quantized": ("float", (4,), _MX_GROUP, _mxfp4),
    "mxfp8-quantized": ("float", (8,), _MX_GROUP, _mxfp8),
}


def _check(scheme: Scheme) -> _Maker:
    """The reader for weights of the scheme. Raises QuantizeError if the scheme contradicts its format."""
    kind, bits, group_size, maker = _MAKERS[scheme.format]
    args = scheme.weights
    grouped = group_size is None or args.group_size == group_size
    if args.kind != kind or args.bits not in bits or not grouped or (args.kind == "float" and not args.symmetric):
        raise QuantizeError(
            f"{scheme.origin}: weights of {args.bits} bits, type {args.kind}, group_size {shown(args.group_size)}, "
            f"symmetric {args.symmetric} are none of the format {scheme.format}; correct config.json or {AGAIN}"
        )
    if args.dynamic or args.strategy == "token":
        raise QuantizeError(
            f"{scheme.origin}: weights are dynamic or by token, which no stored weight is; correct config.json"
        )
    return maker


def _check_plainly_stored(section: Section) -> None:
    """Raises QuantizeError if weights or inputs were also transformed or made sparse."""
    # Early releases named the status of compressed weights "frozen".
    if section.text("quantization_status", "compressed") not in ("compressed", "frozen"):
        raise section.wrong("quantization_status", "compressed; save the model with its weights compressed")
    if section.has("sparsity_config") and section.table("sparsity_config").text("format", "dense") != "dense":
        raise section.table("sparsity_config").wrong("format", "dense: llmc reads no sparse weights")
    if section.has("transform_config") and section.table("transform_config").values.get("config_groups"):
        raise section.wrong(
            "transform_config", "empty: llmc rotates no activations; quantize the model without transforms"
        )


def read_compressed_tensors(settings: Settings) -> StoredCheckpoint:
    section, tensors = settings.section, settings.tensors
    _check_plainly_stored(section)
    recipe = Recipe(section)

    def wanted(prefix: str) -> bool | None:
        return recipe.find(prefix) is not None

    plain = set(tensors.prefixes("weight", PLAIN))
    found = {*tensors.prefixes("weight_packed"), *tensors.prefixes("weight", ("I8", *_FP8))}
    # A scale beside a plain weight comes from a module that was calibrated but not quantized.
    found |= set(tensors.prefixes("weight_scale")) - plain
    check_agreement(tensors, found, "weight_scale", wanted, settings.linears, section.origin)
    matrices: dict[str, StoredMatrix] = {}
    for prefix in sorted(found):
        scheme = recipe.find(prefix)
        assert scheme is not None
        maker = _check(scheme)
        matrix = maker(tensors, prefix, scheme.weights, _inputs(tensors, prefix, scheme.inputs))
        _claim_zeros(tensors, prefix, matrix)
        matrices[prefix] = matrix
    return StoredCheckpoint("compressed-tensors", matrices, unused=tensors.of_kv_cache())


def _claim_zeros(tensors: Tensors, prefix: str, matrix: StoredMatrix) -> None:
    """Assigns to the matrix the zero points of symmetric numbers, which early releases stored; checks that all are
    zero."""
    name = f"{prefix}.weight_zero_point"
    if name not in tensors or "zero" in matrix.tensors:
        return
    if tensors.get(prefix, "weight_zero_point", ("I8", *_FP8, *PLAIN)).load().any():
        raise QuantizeError(
            f"{name} holds zero points other than 0, though config.json says symmetric; set symmetric to false there"
        )
    matrix.tensors["zeros_of_symmetric"] = name
