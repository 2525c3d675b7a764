"""AutoRound's own checkpoints: `packing_format` selects the layout of GPTQ or AWQ; layers may have their own settings.

The layout `auto_round:auto_gptq` stores each zero point minus one; `auto_round` and `auto_round:gptqmodel` do not.
"""

from __future__ import annotations

from llmc.quantize.checkpoints.awq import AwqMatrix
from llmc.quantize.checkpoints.base import StoredMatrix
from llmc.quantize.checkpoints.gptq import BITS, GptqMatrix
from llmc.quantize.checkpoints.modules import HEAD, check_agreement, check_no_plain, last
from llmc.quantize.checkpoints.patterns import expression
from llmc.quantize.checkpoints.result import Settings, StoredCheckpoint
from llmc.quantize.checkpoints.section import Section
from llmc.quantize.formats.base import QuantizeError
from llmc.shown import shown

_LESS_ONE = {"auto_round:auto_gptq": True, "auto_round:gptqmodel": False, "auto_round": False}
_AWQ = "auto_round:auto_awq"
_PLAIN_BITS = (16, 32)
"""Values of `bits` for a layer that is not quantized."""


class _Layers:
    """Settings of single layers, by exact name, or else by the first regular expression found in the name."""

    def __init__(self, section: Section) -> None:
        self._origin = section.origin
        extra = section.table("extra_config")
        self._extra = {name: extra.table(name) for name in extra.values if name}

    def find(self, prefix: str) -> Section:
        if prefix in self._extra:
            return self._extra[prefix]
        for name, own in self._extra.items():
            if expression(name, self._origin).search(prefix):
                return own
        return Section({}, self._origin)


def read_auto_round(settings: Settings) -> StoredCheckpoint:
    section, tensors = settings.section, settings.tensors
    layout = section.text("packing_format", "auto_round:auto_gptq")
    if layout != _AWQ and layout not in _LESS_ONE:
        raise section.wrong(
            "packing_format", f"one of {', '.join(_LESS_ONE)}, {_AWQ}: export the model in one of these"
        )
    section.choice("data_type", ("int",), "int")
    if section.integer("act_bits", 16) not in _PLAIN_BITS:
        raise section.wrong("act_bits", "16: llmc reads no rounded activations of AutoRound")
    layers = _Layers(section)
    bits, group_size, symmetric = section.integer("bits"), section.integer("group_size"), section.flag("sym", True)

    def wanted(prefix: str) -> bool | None:
        own = layers.find(prefix).integer("bits", _PLAIN_BITS[0] if last(prefix) == HEAD else bits)
        return own not in _PLAIN_BITS

    found = tensors.prefixes("qweight")
    check_agreement(tensors, found, "qweight", wanted, settings.linears, section.origin)
    check_no_plain(tensors, found, "qweight")
    matrices: dict[str, StoredMatrix] = {}
    for prefix in found:
        own = layers.find(prefix)
        of_own = own.integer("bits", bits), own.integer("group_size", group_size), own.flag("sym", symmetric)
        if of_own[0] not in BITS or (layout == _AWQ and of_own[0] != 4):
            raise QuantizeError(
                f"{shown(prefix)} has numbers of {shown(of_own[0])} bits, which llmc does not read in layout {layout}; "
                f"use another checkpoint"
            )
        if layout == _AWQ:
            matrices[prefix] = AwqMatrix(prefix, tensors, of_own[1], of_own[2])
        else:
            matrices[prefix] = GptqMatrix(prefix, tensors, *of_own, _LESS_ONE[layout])
    return StoredCheckpoint("auto-round", matrices, unused=tensors.of_kv_cache())
