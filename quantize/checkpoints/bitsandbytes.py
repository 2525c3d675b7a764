"""bitsandbytes checkpoints: nf4 and fp4 in blocks of a row, or int8 rows.

4 bits: `weight` has bytes [N * K / 2, 1], the first number in the high half, and `weight.quant_map` is the table of
values. `weight.absmax` has one scale a block, as float32. Quantized once more, it has codes of
`weight.nested_quant_map` with scales `weight.nested_absmax` and an offset. Settings are JSON, in
`weight.quant_state.bitsandbytes__nf4`.
8 bits: int8 `weight` and `SCB` [N], value = number * SCB / 127.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from llmc.quantize.checkpoints.base import AGAIN, Floats, Kind, Rows, StoredFormat, StoredMatrix
from llmc.quantize.checkpoints.bits import nibbles
from llmc.quantize.checkpoints.floats import TABLES
from llmc.quantize.checkpoints.modules import HEAD, Tensors, check_agreement, last
from llmc.quantize.checkpoints.planes import Int8Matrix, Scales
from llmc.quantize.checkpoints.result import Settings, StoredCheckpoint
from llmc.quantize.checkpoints.section import Section
from llmc.quantize.formats.base import WHOLE_ROW, QuantizeError
from llmc.regular_file import JsonError, parse_json
from llmc.shown import shown

_STATE = "weight.quant_state.bitsandbytes__"
_KINDS: tuple[Kind, ...] = ("nf4", "fp4")
_BLOCK_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
_MOST_STATE_BYTES = 4096
_ROW_FORMAT = 0
_MOST_OFFSET = 1e30
_INT8_FACTOR = 7.874015748031496e-3  # 1 / 127


class Bnb4Matrix(StoredMatrix):
    def __init__(self, prefix: str, tensors: Tensors, kind: Kind) -> None:
        leaf = f"{_STATE}{kind}"
        state = _state(tensors, prefix, leaf)
        shape = state.values.get("shape")
        if not isinstance(shape, list) or len(shape) != 2 or not all(type(n) is int and 0 < n < 1 << 31 for n in shape):
            raise state.wrong("shape", "that of a matrix")
        if state.text("quant_type") != kind:
            raise state.wrong("quant_type", kind)
        n, k = shape
        size = state.one_of("blocksize", _BLOCK_SIZES)
        if k % size:
            raise QuantizeError(
                f"{prefix}.weight has rows of {k} numbers, which are not whole blocks of {size}; "
                f"quantize the model with a smaller block size"
            )
        self._packed = tensors.get(prefix, "weight", ("U8",), (n * k // 2, 1), leaf)
        self._groups, self._state = k // size, state
        self._tensors, self._nested = tensors, state.has("nested_blocksize")
        names = {"weight": f"{prefix}.weight", "scale": f"{prefix}.weight.absmax", "state": f"{prefix}.{leaf}"}
        names["table"] = f"{prefix}.weight.quant_map"
        table = tensors.get(prefix, "weight.quant_map", ("F32",), (16,), leaf)
        self._table = table
        scales = "U8" if self._nested else "F32"
        self._absmax = tensors.get(prefix, "weight.absmax", (scales,), (n * self._groups,), leaf)
        if self._nested:
            self._nested_size = state.one_of("nested_blocksize", _BLOCK_SIZES)
            blocks = -(-n * self._groups // self._nested_size)
            names |= {role: f"{prefix}.weight.{role}" for role in ("nested_absmax", "nested_quant_map")}
            self._nested_absmax = tensors.get(prefix, "weight.nested_absmax", ("F32",), (blocks,), leaf)
            self._nested_map = tensors.get(prefix, "weight.nested_quant_map", ("F32",), (256,), leaf)
            offset = state.values.get("nested_offset")
            if not isinstance(offset, float) or not abs(offset) < _MOST_OFFSET:
                raise state.wrong("nested_offset", "a number")
            self._offset = np.float32(offset)
        super().__init__(prefix, (n, k), StoredFormat(kind, 4, size), names)

    def _read(self, first: int, count: int) -> Rows:
        kind, half = self.format.kind, self.shape[1] // 2
        if not np.array_equal(self._table.load(), TABLES[kind]):
            raise QuantizeError(f"{self.tensors['table']} is not the table of {kind}; {AGAIN}")
        packed = self._packed.load().reshape(-1)[first * half : (first + count) * half].reshape(count, half)
        numbers = nibbles(packed, low_first=False)
        return Rows(numbers, self._scale(first * self._groups, count * self._groups).reshape(count, self._groups))

    def _scale(self, first: int, count: int) -> Floats:
        stored = self._absmax.load()[first : first + count]
        if not self._nested:
            return stored.astype(np.float32)
        of_block = self._nested_absmax.load()[(first + np.arange(count)) // self._nested_size]
        scale: Floats = self._nested_map.load()[stored] * of_block + self._offset
        return scale


def _state(tensors: Tensors, prefix: str, leaf: str) -> Section:
    tensor, name = tensors.get(prefix, leaf, ("U8",)), f"{prefix}.{leaf}"
    if len(tensor.shape) != 1 or tensor.shape[0] > _MOST_STATE_BYTES:
        raise QuantizeError(f"{name} has shape {shown(list(tensor.shape))}, not that of a short text; {AGAIN}")
    try:
        value: Any = parse_json(tensor.load().tobytes())
    except JsonError as error:
        raise QuantizeError(f"{name} is not JSON ({error}); {AGAIN}") from None
    return Section(value, name)


class Bnb8Matrix(Int8Matrix):
    def __init__(self, prefix: str, tensors: Tensors) -> None:
        weight = tensors.matrix(prefix, "weight", ("I8",))
        tensor = tensors.get(prefix, "SCB", ("F32",), weight.shape[:1])
        scales = Scales(f"{prefix}.SCB", tensor, "f32", 1, WHOLE_ROW)
        super().__init__(prefix, weight, 8, scales, None, factor=_INT8_FACTOR)
        self._format = None
        if f"{prefix}.weight_format" in tensors:
            self._format = tensors.scalar(prefix, "weight_format", ("U8",))
            self.tensors["format"] = f"{prefix}.weight_format"

    def _read(self, first: int, count: int) -> Rows:
        if self._format is not None and self._format.load().reshape(-1)[0] != _ROW_FORMAT:
            raise QuantizeError(
                f"{self.tensors['format']} says that {self.tensors['weight']} is tiled for a kernel; save the model "
                f"again with a newer bitsandbytes"
            )
        return super()._read(first, count)


def read_bitsandbytes(settings: Settings) -> StoredCheckpoint:
    section, tensors = settings.section, settings.tensors
    eight, four = section.flag("load_in_8bit", False), section.flag("load_in_4bit", False)
    if eight == four:
        raise section.wrong("load_in_4bit", "true, or load_in_8bit, and not both")
    left = settings.left("llm_int8_skip_modules")

    def wanted(prefix: str) -> bool | None:
        return False if left.find(prefix) else None if last(prefix) == HEAD else True

    matrices: dict[str, StoredMatrix] = {}
    if eight:
        found, leaf = tensors.prefixes("SCB"), "SCB"
        matrices = {prefix: Bnb8Matrix(prefix, tensors) for prefix in found}
    else:
        leaf = f"{_STATE}nf4"
        for kind in _KINDS:
            for prefix in tensors.prefixes(f"{_STATE}{kind}"):
                matrices[prefix] = Bnb4Matrix(prefix, tensors, kind)
    check_agreement(tensors, matrices, leaf, wanted, settings.linears, section.origin)
    return StoredCheckpoint("bitsandbytes", matrices, unused=tensors.of_kv_cache())
