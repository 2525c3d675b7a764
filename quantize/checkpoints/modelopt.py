"""Checkpoints of NVIDIA's Model Optimizer: FP8, NVFP4 and MXFP8, by hf_quant_config.json or config.json.

FP8: weight e4m3, `weight_scale` and `input_scale` one number each. NVFP4: weight [N, K / 2] bytes, `weight_scale` e4m3
[N, K / 16], `weight_scale_2` one number, and `input_scale` unless only weights are rounded. MXFP8: weight e4m3,
`weight_scale` powers of two [N, K / 32]. value = number * scale, of NVFP4 number * (weight_scale * weight_scale_2).
"""

from __future__ import annotations

from llmc.quantize.checkpoints.base import Activation, Inputs, StoredMatrix
from llmc.quantize.checkpoints.fp8 import FP8, OF_GROUPS, static_inputs
from llmc.quantize.checkpoints.modules import HEAD, PLAIN, Tensors, check_agreement, last
from llmc.quantize.checkpoints.planes import E8M0, FloatMatrix, find_scales, number_of
from llmc.quantize.checkpoints.result import Settings, StoredCheckpoint
from llmc.quantize.checkpoints.section import Section
from llmc.quantize.formats.base import QuantizeError
from llmc.shown import shown

_NVFP4_GROUP, _MX_GROUP = 16, 32
_MIXED = "MIXED_PRECISION"


def _fp8(tensors: Tensors, prefix: str) -> StoredMatrix:
    weight = tensors.matrix(prefix, "weight", FP8)
    n, k = weight.shape
    scales = find_scales(tensors, prefix, "weight_scale", (n, k), "tensor")
    return FloatMatrix(prefix, "weight", weight, "e4m3", scales, static_inputs(tensors, prefix))


def _mxfp8(tensors: Tensors, prefix: str) -> StoredMatrix:
    weight = tensors.matrix(prefix, "weight", FP8)
    n, k = weight.shape
    scales = find_scales(tensors, prefix, "weight_scale", (n, k), "group", (1, _MX_GROUP), E8M0)
    return FloatMatrix(prefix, "weight", weight, "e4m3", scales, OF_GROUPS)


def _nvfp4_weights(tensors: Tensors, prefix: str) -> StoredMatrix:
    return _nvfp4_matrix(tensors, prefix, Inputs())


def _nvfp4(tensors: Tensors, prefix: str) -> StoredMatrix:
    tensor, name = tensors.scalar(prefix, "input_scale", PLAIN), f"{prefix}.input_scale"
    activation = Inputs(lambda: Activation("e2m1", "group", True, number_of(tensor, name)), {"input_scale": name})
    return _nvfp4_matrix(tensors, prefix, activation)


def _nvfp4_matrix(tensors: Tensors, prefix: str, inputs: Inputs) -> StoredMatrix:
    weight = tensors.matrix(prefix, "weight", ("U8",))
    n, k = weight.shape[0], 2 * weight.shape[1]
    scales = find_scales(tensors, prefix, "weight_scale", (n, k), "group", (1, _NVFP4_GROUP), FP8)
    overall = f"{prefix}.weight_scale_2", tensors.scalar(prefix, "weight_scale_2", PLAIN)
    return FloatMatrix(prefix, "weight", weight, "e2m1", scales, inputs, overall)


_ALGORITHMS = {"FP8": _fp8, "NVFP4": _nvfp4, "W4A16_NVFP4": _nvfp4_weights, "MXFP8": _mxfp8}


class _Algorithms:
    """The algorithm of each module. mixed: the settings list modules; otherwise all modules share one algorithm."""

    def __init__(self, settings: Settings) -> None:
        section = settings.section
        self._left = settings.left("exclude_modules", "ignore")
        algorithm = section.text("quant_algo")
        self._of_all = None if algorithm == _MIXED else self._checked(section, "quant_algo")
        self.mixed = self._of_all is None
        self._listed: dict[str, str] = {}
        for prefix in section.table("quantized_layers").values if self.mixed else ():
            own = section.table("quantized_layers").table(prefix)
            self._listed[prefix] = self._checked(own, "quant_algo")

    @staticmethod
    def _checked(section: Section, name: str) -> str:
        algorithm = section.text(name)
        if algorithm not in _ALGORITHMS:
            raise section.wrong(name, f"one of {', '.join(_ALGORITHMS)}, {_MIXED}: export the model with one of these")
        wanted = {"NVFP4": _NVFP4_GROUP, "W4A16_NVFP4": _NVFP4_GROUP, "MXFP8": _MX_GROUP}.get(algorithm)
        if wanted and section.integer("group_size", wanted) != wanted:
            raise section.wrong("group_size", f"the {wanted} of {algorithm}")
        return algorithm

    def find(self, prefix: str) -> str | None:
        """The algorithm of module `prefix`; None if it is not quantized."""
        if self._left.find(prefix):
            return None
        if self._of_all is not None:
            return self._of_all
        # Experts are listed as one module.
        while prefix and prefix not in self._listed:
            prefix = prefix.rpartition(".")[0]
        return self._listed.get(prefix)


def read_modelopt(settings: Settings) -> StoredCheckpoint:
    section, tensors = settings.section, settings.tensors
    algorithms = _Algorithms(settings)

    def wanted(prefix: str) -> bool | None:
        if algorithms.find(prefix) is None:
            return False
        return None if last(prefix) == HEAD and not algorithms.mixed else True

    found = tensors.prefixes("weight", (*FP8, "U8"))
    check_agreement(tensors, found, "weight of dtype F8_E4M3 or U8", wanted, settings.linears, section.origin)
    matrices: dict[str, StoredMatrix] = {}
    for prefix in found:
        if f"{prefix}.pre_quant_scale" in tensors:
            raise QuantizeError(
                f"{shown(prefix)} has a pre_quant_scale, by which inputs are divided first, which llmc does not read; "
                f"export the model without AWQ"
            )
        algorithm = algorithms.find(prefix)
        assert algorithm is not None
        matrices[prefix] = _ALGORITHMS[algorithm](tensors, prefix)
    return StoredCheckpoint("modelopt", matrices, unused=tensors.of_kv_cache())
