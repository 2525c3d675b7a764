"""GPTQ checkpoints, as AutoGPTQ and GPTQModel write them: numbers packed along K, zero points along N.

qweight: int32 [K * bits / 32, N]. qzeros: int32 [G, N * bits / 32]. scales: [G, N]. g_idx: int32 [K], the group of each
column, or nothing where groups are neighbours. value = (number - zero) * scale.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from llmc.quantize.checkpoints.base import AGAIN, Bytes, Rows, StoredFormat, StoredMatrix
from llmc.quantize.checkpoints.bits import unpack, unpack_slice, words_of
from llmc.quantize.checkpoints.floats import widened
from llmc.quantize.checkpoints.grouped import check_group_size, grouped_columns
from llmc.quantize.checkpoints.modules import HEAD, PLAIN, Tensors, check_agreement, check_no_plain, last
from llmc.quantize.checkpoints.patterns import Parts, expression
from llmc.quantize.checkpoints.result import Settings, StoredCheckpoint
from llmc.quantize.checkpoints.section import Section
from llmc.quantize.formats.base import WHOLE_ROW, QuantizeError
from llmc.shown import shown

BITS = (2, 3, 4, 8)
"""Supported widths of packed numbers."""
_LAYOUTS = ("gptq", "gptq_v2")


class GptqMatrix(StoredMatrix):
    """A matrix in the layout of GPTQ.

    bits: width of the packed numbers; 2 and 3 are widened to 4.
    symmetric: every zero point is the middle of the range.
    minus_one: zero points are stored minus one (format `gptq`; `gptq_v2` stores them unchanged).
    """

    def __init__(
        self,
        prefix: str,
        tensors: Tensors,
        bits: int,
        group_size: int,
        symmetric: bool,
        minus_one: bool,
    ) -> None:
        packed = tensors.matrix(prefix, "qweight", ("I32",))
        n = packed.shape[1]
        k = packed.shape[0] * 32 // bits
        if k % 32 or words_of(k, bits) != packed.shape[0]:
            raise QuantizeError(
                f"{prefix}.qweight has {packed.shape[0]} rows of words, which are not whole rows of {bits}-bit "
                f"numbers; correct bits in config.json or {AGAIN}"
            )
        check_group_size(prefix, group_size, k)
        groups = 1 if group_size == WHOLE_ROW else k // group_size
        self._bits, self._minus_one = bits, minus_one
        self._packed = packed
        self._scales = tensors.get(prefix, "scales", PLAIN, (groups, n), "qweight")
        self._zeros = tensors.get(prefix, "qzeros", ("I32",), (groups, words_of(n, bits)), "qweight")
        names = {"weight": f"{prefix}.qweight", "scale": f"{prefix}.scales", "zero": f"{prefix}.qzeros"}
        self._groups_of = None
        if f"{prefix}.g_idx" in tensors:
            self._groups_of = tensors.get(prefix, "g_idx", ("I32",), (k,), "qweight")
            names["columns"] = f"{prefix}.g_idx"
        format = StoredFormat("int", max(bits, 4), group_size, asymmetric=not symmetric)
        super().__init__(prefix, (n, k), format, names)

    @cached_property
    def columns(self) -> NDArray[np.int32] | None:
        if self._groups_of is None:
            return None
        return grouped_columns(self.tensors["columns"], self._groups_of.load(), self.format.group_size)

    def _read(self, first: int, count: int) -> Rows:
        numbers = unpack(self._packed.load()[:, first : first + count].T, self._bits, self.shape[1])
        scale = widened(self._scales.dtype, self._scales.load()[:, first : first + count].T)
        zero = self._zero_points(first, count)
        if self.format.asymmetric:
            return Rows(numbers, scale, zero)
        middle = 1 << (self._bits - 1)
        self._check_symmetric(zero, middle)
        numbers += np.uint8((1 << (self.format.bits - 1)) - middle)
        return Rows(numbers, scale)

    def _zero_points(self, first: int, count: int) -> Bytes:
        zero = np.ascontiguousarray(unpack_slice(self._zeros.load(), self._bits, first, count).T)
        if not self._minus_one:
            return zero
        largest = (1 << self._bits) - 1
        if (zero == largest).any():
            raise QuantizeError(
                f"{self.tensors['zero']} holds {largest} for a zero point of {largest + 1}, which is what became "
                f"of 0 in this layout; quantize the model again with checkpoint_format gptq_v2"
            )
        return zero + np.uint8(1)

    def _check_symmetric(self, zero: Bytes, middle: int) -> None:
        other = zero[zero != middle]
        if len(other):
            raise QuantizeError(
                f"{self.tensors['zero']} holds the zero point {other[0]}, not the {middle} of symmetric numbers, "
                f"though config.json says sym; set sym to false there, or correct checkpoint_format"
            )


class _Rules:
    """bits, group_size and sym of a module: from the first matching pattern of `dynamic`, else from the settings."""

    def __init__(self, section: Section) -> None:
        self._section = section
        self._dynamic: list[tuple[str, Section]] = []
        for pattern, override in section.table("dynamic").values.items():
            if pattern.startswith("-:"):
                override = {}
            self._dynamic.append((pattern, Section(override, f"{section.origin}: dynamic {shown(pattern)}")))

    def find(self, prefix: str) -> Section | None:
        """The module's own rules; empty if it has none. None for a module that is not quantized."""
        for pattern, override in self._dynamic:
            bare = pattern[2:] if pattern.startswith(("+:", "-:")) else pattern
            if expression(bare, self._section.origin).match(prefix):
                return None if pattern.startswith("-:") else override
        return Section({}, self._section.origin)

    def names(self, prefix: str) -> bool:
        """Whether a pattern has rules for the module."""
        found = self.find(prefix)
        return found is not None and bool(found.values)


def _inside_blocks(section: Section) -> Parts | None:
    """The modules that the settings list, in the order in which they were quantized; None for all."""
    field = "modules_in_block_to_quantize"
    if not section.has(field):
        return None
    steps = section.values[field]
    names = (
        [name for step in steps for name in (step if isinstance(step, list) else [step])]
        if isinstance(steps, list)
        else [None]
    )
    if not all(isinstance(name, str) for name in names):
        raise section.wrong(field, "a list of lists of names")
    return Parts(map(str, names))


def read_gptq(settings: Settings) -> StoredCheckpoint:
    section, tensors = settings.section, settings.tensors
    if section.flag("is_marlin_format", False):
        raise section.wrong("is_marlin_format", "false: that layout is of one kernel; quantize the model without it")
    layout = section.text("checkpoint_format", section.text("format", "gptq")).lower()
    if layout not in _LAYOUTS:
        raise section.wrong("checkpoint_format", f"one of {', '.join(_LAYOUTS)}")
    bits, group_size = section.one_of("bits", BITS), section.integer("group_size", WHOLE_ROW)
    symmetric, head = section.flag("sym", True), section.flag("lm_head", False)
    rules = _Rules(section)
    left, inside = settings.left("modules_to_not_convert"), _inside_blocks(section)

    def wanted(prefix: str) -> bool | None:
        if rules.find(prefix) is None or left.find(prefix):
            return False
        if inside is not None:
            return inside.find(prefix)
        return head or rules.names(prefix) if last(prefix) == HEAD else True

    found = tensors.prefixes("qweight")
    check_agreement(tensors, found, "qweight", wanted, settings.linears, section.origin)
    check_no_plain(tensors, found, "qweight")
    matrices: dict[str, StoredMatrix] = {}
    for prefix in found:
        own = rules.find(prefix)
        assert own is not None
        matrices[prefix] = GptqMatrix(
            prefix,
            tensors,
            own.one_of("bits", BITS, bits),
            own.integer("group_size", group_size),
            own.flag("sym", symmetric),
            layout == "gptq",
        )
    return StoredCheckpoint("gptq", matrices, unused=tensors.of_kv_cache())
