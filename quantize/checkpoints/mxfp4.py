"""MXFP4 checkpoints like gpt-oss: one tensor holds all experts; groups of 32 e2m1 numbers share a power of two.

NAME_blocks: bytes [E, N, K / 32, 16], two numbers each, the first in the low half. NAME_scales: bytes [E, N, K / 32].
"""

from __future__ import annotations

from llmc.quantize.checkpoints.base import AGAIN, Rows, StoredFormat, StoredMatrix, StoredTensor
from llmc.quantize.checkpoints.bits import nibbles
from llmc.quantize.checkpoints.floats import e8m0
from llmc.quantize.checkpoints.result import Settings, StoredCheckpoint
from llmc.quantize.formats.base import QuantizeError
from llmc.shown import shown

_BLOCKS, _SCALES = "_blocks", "_scales"
_GROUP = 32
_MOST_EXPERTS = 4096


class Mxfp4Expert(StoredMatrix):
    """The matrix of one expert."""

    def __init__(self, name: str, blocks: StoredTensor, scales: StoredTensor, expert: int) -> None:
        self._blocks, self._scales, self._expert = blocks, scales, expert
        names = {"weight": name + _BLOCKS, "scale": name + _SCALES}
        _, n, groups, _ = blocks.shape
        super().__init__(name, (n, groups * _GROUP), StoredFormat("e2m1", 4, _GROUP, scale_kind="e8m0"), names)

    def _read(self, first: int, count: int) -> Rows:
        packed = self._blocks.load()[self._expert, first : first + count]
        codes = self._scales.load()[self._expert, first : first + count]
        return Rows(nibbles(packed.reshape(count, self.shape[1] // 2)), e8m0(codes), None, codes)


def read_mxfp4(settings: Settings) -> StoredCheckpoint:
    tensors = settings.tensors.all
    left = settings.left("modules_to_not_convert")
    experts: dict[str, tuple[StoredMatrix, ...]] = {}
    for blocks_name in sorted(name for name in tensors if name.endswith(_BLOCKS)):
        name = blocks_name.removesuffix(_BLOCKS)
        blocks, scales = tensors[blocks_name], tensors.get(name + _SCALES)
        if left.find(name):
            raise QuantizeError(
                f"{settings.section.origin} leaves {shown(name)} as it is, but the checkpoint has {blocks_name}; "
                f"correct config.json or {AGAIN}"
            )
        if blocks.dtype != "U8" or len(blocks.shape) != 4 or 0 in blocks.shape or blocks.shape[3] != _GROUP // 2:
            raise QuantizeError(
                f"{blocks_name} is {shown(blocks.dtype)} {shown(list(blocks.shape))}, not U8 [experts, N, K / 32, 16]; "
                f"{AGAIN}"
            )
        if blocks.shape[0] > _MOST_EXPERTS:
            raise QuantizeError(f"{blocks_name} has {blocks.shape[0]} experts, more than {_MOST_EXPERTS}; {AGAIN}")
        if scales is None or scales.dtype not in ("U8", "F8_E8M0") or scales.shape != blocks.shape[:3]:
            has = "missing" if scales is None else f"{shown(scales.dtype)} {shown(list(scales.shape))}"
            raise QuantizeError(f"{name}{_SCALES} is {has}, not U8 {list(blocks.shape[:3])}; {AGAIN}")
        experts[name] = tuple(Mxfp4Expert(name, blocks, scales, expert) for expert in range(blocks.shape[0]))
    if not experts:
        raise QuantizeError(
            f"{settings.section.origin} says that experts are quantized, but the checkpoint has no tensor NAME_blocks; "
            f"take the settings out of config.json if its weights are plain ones"
        )
    return StoredCheckpoint("mxfp4", {}, experts, settings.tensors.of_kv_cache())
