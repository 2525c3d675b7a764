"""Finds the quantized matrices of a checkpoint, by the exact method name in its settings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from llmc.quantize.checkpoints.auto_round import read_auto_round
from llmc.quantize.checkpoints.awq import read_awq
from llmc.quantize.checkpoints.base import StoredTensor
from llmc.quantize.checkpoints.bitsandbytes import read_bitsandbytes
from llmc.quantize.checkpoints.compressed_tensors import read_compressed_tensors
from llmc.quantize.checkpoints.fp8 import read_fbgemm_fp8, read_fp8
from llmc.quantize.checkpoints.gptq import read_gptq
from llmc.quantize.checkpoints.kv_cache import find_kv_scales
from llmc.quantize.checkpoints.modelopt import read_modelopt
from llmc.quantize.checkpoints.modules import Tensors
from llmc.quantize.checkpoints.mxfp4 import read_mxfp4
from llmc.quantize.checkpoints.result import Settings, StoredCheckpoint
from llmc.quantize.checkpoints.section import Section
from llmc.quantize.formats.base import QuantizeError
from llmc.shown import shown

READERS: dict[str, Callable[[Settings], StoredCheckpoint]] = {
    "auto-round": read_auto_round,
    "awq": read_awq,
    "bitsandbytes": read_bitsandbytes,
    "compressed-tensors": read_compressed_tensors,
    "fbgemm_fp8": read_fbgemm_fp8,
    "fp8": read_fp8,
    "gptq": read_gptq,
    "modelopt": read_modelopt,
    "mxfp4": read_mxfp4,
}
"""The reader of each quant_method."""

_REFUSED = {
    "eetq": "its weights are tiled for the GPU that wrote them",
    "hqq": "its zero points are not whole numbers",
    **dict.fromkeys(("w8a8", "w4a8"), "inputs have a scale for each of their channels (in_scales)"),
}
"""Methods that are not supported, and why."""
_OF_INPUTS = ".in_scales"
_INSTEAD = "compile the model that is not quantized with --quant, or take one quantized by another method"
# Places of the settings in config.json; nested ones belong to the language model of a larger model.
_FIELDS = ("quantization_config", "compression_config")
_NESTED = ("text_config", "llm_config", "language_config")


def quantization_settings(
    config: Mapping[str, Any], hf_quant_config: Mapping[str, Any] | None = None
) -> Mapping[str, Any] | None:
    """The quantization settings in config.json, or in the hf_quant_config.json beside it; None if there are none.

    Raises QuantizeError.
    """
    places = [(config, "config.json")]
    places += [(config[name], f"config.json: {name}") for name in _NESTED if isinstance(config.get(name), Mapping)]
    for values, origin in places:
        for field in _FIELDS:
            if values.get(field) is not None:
                settings: Mapping[str, Any] = Section(values, origin).table(field).values
                return settings
    if hf_quant_config is None:
        return None
    section = Section(hf_quant_config, "hf_quant_config.json")
    if not section.has("quantization"):
        raise QuantizeError("hf_quant_config.json lacks quantization; download the checkpoint again")
    return {**section.table("quantization").values, "quant_method": "modelopt"}


def quantization_method(settings: Mapping[str, Any], tensors: Iterable[str] = ()) -> str:
    """The method in READERS that the settings, and if need be the tensor names, indicate. Raises QuantizeError if
    unsupported."""
    section = Section(settings, "quantization_config")
    # Early releases of Model Optimizer omit the method.
    method = section.text("quant_method", "modelopt" if section.has("quant_algo") else None)
    if any(name.endswith(_OF_INPUTS) for name in tensors):
        # Exports for Enflame cards do not always name a method.
        method = "w8a8"
    if method in _REFUSED:
        raise QuantizeError(f"quant_method {method} is not read: {_REFUSED[method]}; {_INSTEAD}")
    if method not in READERS:
        raise QuantizeError(f"quant_method is {shown(method)}, which is not one of {', '.join(READERS)}; {_INSTEAD}")
    return method


def find_stored(
    config: Mapping[str, Any],
    tensors: Mapping[str, StoredTensor],
    linears: Iterable[str] | None = None,
    hf_quant_config: Mapping[str, Any] | None = None,
) -> StoredCheckpoint | None:
    """Finds what is quantized in a checkpoint; None if its settings mention no quantization.

    config: the parsed config.json.
    tensors: all tensors by name; for most, only the header is read.
    linears: prefixes of the model's linear layers, as in `model.layers.0.self_attn.q_proj`; if given, each is checked
    against the settings.
    hf_quant_config: the parsed file beside config.json, if there is one.
    Raises QuantizeError.
    """
    settings = quantization_settings(config, hf_quant_config)
    if settings is None:
        return None
    section = Section(settings, "quantization_config")
    method = quantization_method(settings, tensors)
    found = READERS[method](Settings(section, Tensors(tensors), None if linears is None else tuple(linears)))
    return replace(found, kv_scales=find_kv_scales(section, tensors))
