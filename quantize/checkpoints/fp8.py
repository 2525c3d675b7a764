"""FP8 checkpoints: float8_e4m3fn weights, as DeepSeek and Qwen publish them (`fp8`), or with FBGEMM's scales.

`fp8` with blocks has `weight_scale_inv` [N / rows, K / columns], whose blocks at the edges may be cut. Without blocks
it has one `weight_scale_inv` or `weight_scale` per matrix, and `input_scale` for static activations. `fbgemm_fp8` has
`weight_scale` [N, 1]. value = number * scale, even if the scale's name says that it is inverse.
"""

from __future__ import annotations

from collections.abc import Callable

from llmc.quantize.checkpoints.base import Activation, Inputs, StoredMatrix
from llmc.quantize.checkpoints.modules import HEAD, PLAIN, Tensors, check_agreement, last
from llmc.quantize.checkpoints.planes import FloatMatrix, find_scales, number_of
from llmc.quantize.checkpoints.result import Settings, StoredCheckpoint
from llmc.quantize.checkpoints.section import Section
from llmc.quantize.formats.base import QuantizeError

FP8 = ("F8_E4M3",)
_FORMATS = ("e4m3", "float8_e4m3fn", "float8_e4m3")


def static_inputs(tensors: Tensors, prefix: str) -> Inputs:
    """The inputs of a module whose `input_scale` applies to the whole tensor."""
    tensor, name = tensors.scalar(prefix, "input_scale", PLAIN), f"{prefix}.input_scale"
    return Inputs(lambda: Activation("e4m3", "tensor", False, number_of(tensor, name)), {"input_scale": name})


OF_TOKENS = Inputs(lambda: Activation("e4m3", "token", True))
OF_GROUPS = Inputs(lambda: Activation("e4m3", "group", True))


def _block(section: Section) -> tuple[int, int] | None:
    """(rows, columns) of the blocks that share a scale; None for one scale per matrix."""
    if not section.has("weight_block_size"):
        return None
    value = section.values["weight_block_size"]
    if not isinstance(value, list) or len(value) != 2 or not all(type(size) is int and size > 0 for size in value):
        raise section.wrong("weight_block_size", "two positive integers")
    return value[0], value[1]


def _wanted(settings: Settings) -> Callable[[str], bool | None]:
    left = settings.left("modules_to_not_convert", "ignored_layers")
    # Some checkpoints leave the output projection plain without listing it among the excluded modules.
    return lambda prefix: False if left.find(prefix) else None if last(prefix) == HEAD else True


def read_fp8(settings: Settings) -> StoredCheckpoint:
    section, tensors = settings.section, settings.tensors
    if section.has("quant_algo"):
        raise QuantizeError(
            f"{section.origin} has quant_method fp8 and quant_algo too, a mixture that llmc does not read; "
            f"use a checkpoint of one method"
        )
    section.choice("fmt", _FORMATS, "e4m3")
    static = section.choice("activation_scheme", ("dynamic", "static"), "dynamic") == "static"
    block = _block(section)
    found = tensors.prefixes("weight", FP8)
    check_agreement(tensors, found, "weight of dtype F8_E4M3", _wanted(settings), settings.linears, section.origin)
    matrices: dict[str, StoredMatrix] = {}
    for prefix in found:
        weight = tensors.matrix(prefix, "weight", FP8)
        n, k = weight.shape
        if block:
            dtypes = (*PLAIN, "F8_E8M0")
            scales = find_scales(tensors, prefix, "weight_scale_inv", (n, k), "block", block, dtypes)
            inputs = OF_GROUPS
        else:
            leaf = "weight_scale_inv" if f"{prefix}.weight_scale_inv" in tensors else "weight_scale"
            scales = find_scales(tensors, prefix, leaf, (n, k), "tensor")
            inputs = static_inputs(tensors, prefix) if static else OF_TOKENS
        matrices[prefix] = FloatMatrix(prefix, "weight", weight, "e4m3", scales, inputs)
    return StoredCheckpoint("fp8", matrices, unused=tensors.of_kv_cache())


def read_fbgemm_fp8(settings: Settings) -> StoredCheckpoint:
    tensors = settings.tensors
    found = tensors.prefixes("weight", FP8)
    origin = settings.section.origin
    check_agreement(tensors, found, "weight of dtype F8_E4M3", _wanted(settings), settings.linears, origin)
    matrices: dict[str, StoredMatrix] = {}
    for prefix in found:
        weight = tensors.matrix(prefix, "weight", FP8)
        n, k = weight.shape
        scales = find_scales(tensors, prefix, "weight_scale", (n, k), "channel")
        matrices[prefix] = FloatMatrix(prefix, "weight", weight, "e4m3", scales, OF_TOKENS)
    return StoredCheckpoint("fbgemm_fp8", matrices, unused=tensors.of_kv_cache())
