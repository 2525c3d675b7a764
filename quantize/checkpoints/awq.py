"""AWQ checkpoints, as AutoAWQ writes them: 4-bit numbers with zero points, value = (number - zero) * scale.

| version | qweight | qzeros | scales |
|---|---|---|---|
| gemm | int32 [K, N / 8], eight columns of N in the order 0 2 4 6 1 3 5 7 | int32 [G, N / 8], the same | [G, N] |
| gemv | int32 [N, K / 8], in order | int32 [N, W], in order | [N, 8 W] |
| gemv_fast | int16 [N / 4, K], interleaved | f16 [8 W, N]: -zero * scale | [8 W, N] |

W: words of G zero points, padded for the kernels.
"""

from __future__ import annotations

import numpy as np

from llmc.quantize.checkpoints.base import AGAIN, Bytes, Floats, Rows, StoredFormat, StoredMatrix
from llmc.quantize.checkpoints.bits import nibbles, unpack
from llmc.quantize.checkpoints.floats import widened
from llmc.quantize.checkpoints.grouped import check_group_size
from llmc.quantize.checkpoints.modules import HEAD, PLAIN, Tensors, check_agreement, check_no_plain, last
from llmc.quantize.checkpoints.result import Settings, StoredCheckpoint
from llmc.quantize.formats.base import WHOLE_ROW, QuantizeError

_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_PLACES = np.argsort(_ORDER)
_INTERLEAVED, _STEP = 4, 64
"""gemv_fast: rows of N, and columns of K, whose numbers share a run of words."""
_WHOLE = 1 / 16
"""Largest distance from an integer allowed for a zero point stored in float16 as its product with a scale."""


class AwqMatrix(StoredMatrix):
    """A matrix in the layout gemm."""

    packed_dtype = "I32"

    def __init__(self, prefix: str, tensors: Tensors, group_size: int, symmetric: bool) -> None:
        self._packed = tensors.matrix(prefix, "qweight", (self.packed_dtype,))
        n, k = self._layout(prefix)
        check_group_size(prefix, group_size, k)
        self._groups = 1 if group_size == WHOLE_ROW else k // group_size
        names = {"weight": f"{prefix}.qweight", "scale": f"{prefix}.scales", "zero": f"{prefix}.qzeros"}
        self._take_scales(prefix, tensors, n, group_size)
        self._symmetric = symmetric
        super().__init__(prefix, (n, k), StoredFormat("int", 4, group_size, asymmetric=not symmetric), names)

    def _layout(self, prefix: str) -> tuple[int, int]:
        """N and K, from the shape of the packed numbers."""
        rows, words = self._packed.shape
        return words * 8, rows

    def _take_scales(self, prefix: str, tensors: Tensors, n: int, group_size: int) -> None:
        self._zeros = tensors.get(prefix, "qzeros", ("I32",), (self._groups, n // 8), "qweight")
        self._scales = tensors.get(prefix, "scales", PLAIN, (self._groups, n), "qweight")

    def _read(self, first: int, count: int) -> Rows:
        # A word holds eight rows of the weight.
        start, end = first // 8, -(-(first + count) // 8)
        numbers = self._in_order(self._packed.load()[:, start:end])[:, first - 8 * start :][:, :count].T
        zero = self._in_order(self._zeros.load()[:, start:end])[:, first - 8 * start :][:, :count].T
        scale = widened(self._scales.dtype, self._scales.load()[:, first : first + count].T)
        return self._rows(np.ascontiguousarray(numbers), scale, np.ascontiguousarray(zero))

    def _in_order(self, words: np.ndarray[tuple[int, ...], np.dtype[np.int32]]) -> Bytes:
        packed = unpack(words, 4, 8 * words.shape[-1])
        ordered: Bytes = packed.reshape(*words.shape, 8)[..., _PLACES].reshape(packed.shape)
        return ordered

    def _rows(self, numbers: Bytes, scale: Floats, zero: Bytes) -> Rows:
        if not self._symmetric:
            return Rows(numbers, scale, zero)
        other = zero[zero != 8]
        if len(other):
            raise QuantizeError(
                f"{self.tensors['zero']} holds the zero point {other[0]}, not the 8 of symmetric numbers, though "
                f"config.json says that zero_point is false; set it to true there"
            )
        return Rows(numbers, scale)


class AwqGemvMatrix(AwqMatrix):
    """A matrix in the layout gemv."""

    def _layout(self, prefix: str) -> tuple[int, int]:
        rows, words = self._packed.shape
        return rows, words * 8

    def _take_scales(self, prefix: str, tensors: Tensors, n: int, group_size: int) -> None:
        words = _padded_words(prefix, self._groups, group_size)
        self._zeros = tensors.get(prefix, "qzeros", ("I32",), (n, words), "qweight")
        self._scales = tensors.get(prefix, "scales", PLAIN, (n, words * 8), "qweight")

    def _read(self, first: int, count: int) -> Rows:
        wanted = slice(first, first + count)
        numbers = unpack(self._packed.load()[wanted], 4, self.shape[1])
        zero = unpack(self._zeros.load()[wanted], 4, self._groups)
        return self._rows(numbers, widened(self._scales.dtype, self._scales.load()[wanted, : self._groups]), zero)


class AwqGemvFastMatrix(AwqMatrix):
    """A matrix in the layout gemv_fast. Zero points are integers here; AutoAWQ's kernels use their float16 products
    with the scale."""

    packed_dtype = "I16"

    def _layout(self, prefix: str) -> tuple[int, int]:
        blocks, k = self._packed.shape
        if k % _STEP:
            raise QuantizeError(f"{prefix}.qweight has {k} columns, which is not a multiple of {_STEP}; {AGAIN}")
        return blocks * _INTERLEAVED, k

    def _take_scales(self, prefix: str, tensors: Tensors, n: int, group_size: int) -> None:
        rows = _padded_words(prefix, self._groups, group_size) * 8
        self._zeros = tensors.get(prefix, "qzeros", ("F16",), (rows, n), "qweight")
        self._scales = tensors.get(prefix, "scales", ("F16",), (rows, n), "qweight")

    def _read(self, first: int, count: int) -> Rows:
        start, end = first // _INTERLEAVED, -(-(first + count) // _INTERLEAVED)
        numbers = _deinterleaved(self._packed.load()[start:end].view(np.uint16))[first - _INTERLEAVED * start :][:count]
        wanted = (slice(self._groups), slice(first, first + count))
        scale = widened("F16", self._scales.load()[wanted].T)
        self._check_scale(scale)
        return self._rows(np.ascontiguousarray(numbers), scale, self._whole(scale, self._zeros.load()[wanted].T))

    def _whole(self, scale: Floats, scaled: np.ndarray[tuple[int, ...], np.dtype[np.float16]]) -> Bytes:
        """Zero points, recovered from their float16 products with the scales."""
        zero = np.zeros(scale.shape, np.float32)
        np.divide(-scaled.astype(np.float32), scale, out=zero, where=scale != 0)
        whole = np.rint(zero)
        wrong = ~((np.abs(zero - whole) <= _WHOLE) & (whole >= 0) & (whole <= 15))
        if wrong.any():
            raise QuantizeError(
                f"{self.tensors['zero']} holds {scaled[wrong][0]} beside the scale {scale[wrong][0]}, which makes no "
                f"zero point from 0 to 15; {AGAIN}"
            )
        return whole.astype(np.uint8)


def _padded_words(prefix: str, groups: int, group_size: int) -> int:
    """Words per row of zero points in the gemv layouts, padded because AutoAWQ's kernels read several at a time."""
    if group_size not in (32, 64) and WHOLE_ROW < group_size < 128:
        raise QuantizeError(f"{prefix} has groups of {group_size}, which AutoAWQ's gemv layouts do not have; {AGAIN}")
    multiple = {32: 4, 64: 2}.get(group_size, 1)
    words = -(-groups // 8)
    return -(-words // multiple) * multiple


def _deinterleaved(packed: np.ndarray[tuple[int, ...], np.dtype[np.uint16]]) -> Bytes:
    """Unpacks words [B, K] into numbers [4 B, K]. Four rows of 64 columns are 64 words; each run of 32 is in the
    kernel's order."""
    blocks, k = packed.shape
    runs = nibbles(np.ascontiguousarray(packed).view(np.uint8)).reshape(blocks, k // _STEP, _INTERLEAVED, _STEP)
    rows = runs.transpose(0, 2, 1, 3).reshape(blocks * _INTERLEAVED, k // 32, 4, 2, 4)
    # In every eight, the even ones came first; in every 32, pairs were taken from each quarter.
    pairs = rows.transpose(0, 1, 2, 4, 3).reshape(blocks * _INTERLEAVED, k // 32, 4, 4, 2)
    return np.ascontiguousarray(pairs.transpose(0, 1, 3, 2, 4)).reshape(blocks * _INTERLEAVED, k)


_LAYOUTS = {"gemm": AwqMatrix, "gemv": AwqGemvMatrix, "gemv_fast": AwqGemvFastMatrix}


def read_awq(settings: Settings) -> StoredCheckpoint:
    section, tensors = settings.section, settings.tensors
    field = next((name for name in ("version", "checkpoint_format", "format") if section.has(name)), "version")
    layout = section.choice(field, tuple(_LAYOUTS), "gemm")
    if section.has("backend") and section.text("backend") == "llm-awq":
        raise section.wrong("backend", "that of AutoAWQ; convert the model with AutoAWQ")
    section.one_of("bits" if section.has("bits") else "w_bit", (4,), 4)
    group_size = section.integer("group_size" if section.has("group_size") else "q_group_size", 128)
    symmetric = not section.flag("zero_point", True)
    left = settings.left("modules_to_not_convert")

    def wanted(prefix: str) -> bool | None:
        return False if left.find(prefix) else None if last(prefix) == HEAD else True

    found = tensors.prefixes("qweight")
    check_agreement(tensors, found, "qweight", wanted, settings.linears, section.origin)
    check_no_plain(tensors, found, "qweight")
    matrices = {prefix: _LAYOUTS[layout](prefix, tensors, group_size, symmetric) for prefix in found}
    return StoredCheckpoint("awq", matrices, unused=tensors.of_kv_cache())
