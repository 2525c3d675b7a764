"""Static KV cache scales in a separate file, in the format of vLLM's former `--quantization-param-path`.

    {"model_type": "llama", "kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": {"0": {"0": 0.02, "1": 0.03}}}}

`scaling_factor` maps tensor-parallel rank → layer → scale. A key or a value is number · scale.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmc.quantize.formats.base import QuantizeError
from llmc.regular_file import JsonError, parse_json, read_regular
from llmc.shown import shown

DTYPE = "float8_e4m3fn"
"""The only dtype that such a file can state."""
FILE_KV_DTYPE = "fp8_e4m3"
"""llmc's name for it."""
_MOST_BYTES = 1 << 22
_MOST_LAYERS = 1 << 16
_LEAST, _LARGEST = 2.0**-126, 2.0**127


def read_kv_scales(path: Path, num_layers: int, model_type: str | None = None) -> tuple[float, ...]:
    """Reads the scales of keys and values, by layer. model_type: required if not None. Raises QuantizeError."""
    try:
        content = parse_json(read_regular(path, _MOST_BYTES))
    except FileNotFoundError:
        raise QuantizeError(f"{path} does not exist; name the JSON file with the scales of the KV cache") from None
    except OSError as error:
        raise QuantizeError(f"{path} cannot be read: {error.strerror}") from None
    except JsonError as error:
        raise QuantizeError(f"{path} is not valid JSON ({error}); write it again") from None
    return kv_scales_of(content, str(path), num_layers, model_type)


def kv_scales_of(content: Any, origin: str, num_layers: int, model_type: str | None = None) -> tuple[float, ...]:
    """As `read_kv_scales`, from parsed content. origin: its name in errors. Raises QuantizeError."""
    of_model = _table(content, origin).get("model_type")
    if of_model is not None and not isinstance(of_model, str):
        raise QuantizeError(f"{origin}: model_type is {shown(of_model)}, not a string; write the file again")
    if None not in (model_type, of_model) and of_model != model_type:
        raise QuantizeError(
            f"{origin} has scales of a model of type {shown(of_model)}, but this one is a {model_type}; name its own "
            "file"
        )
    cache = _table(content.get("kv_cache"), f"{origin}: kv_cache")
    dtype = cache.get("dtype")
    if dtype != DTYPE:
        raise QuantizeError(
            f"{origin}: kv_cache has scales for the dtype {shown(dtype)}, but only those for {DTYPE} are read; leave "
            "the file out"
        )
    ranks = _table(cache.get("scaling_factor"), f"{origin}: scaling_factor")
    if set(ranks) != {"0"}:
        raise QuantizeError(
            f"{origin}: scaling_factor has the ranks {shown(sorted(ranks))}, not 0 alone; write the scales for a "
            "tensor-parallel size of 1"
        )
    by_layer = _table(ranks["0"], f"{origin}: scaling_factor 0")
    layers = {str(layer) for layer in range(min(num_layers, _MOST_LAYERS))}
    if by_layer.keys() != layers:
        missing = sorted(layers - by_layer.keys(), key=int)
        what = f"lacks layer {missing[0]}" if missing else f"has a layer {shown(min(by_layer.keys() - layers))}"
        raise QuantizeError(
            f"{origin}: scaling_factor 0 {what}, but the model has {num_layers} layers; name its own file"
        )
    return tuple(_scale(by_layer[str(layer)], f"{origin}: layer {layer}") for layer in range(num_layers))


def _table(value: Any, origin: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise QuantizeError(f"{origin} is {shown(value)}, which is not an object; write the file again")
    return value


def _scale(value: Any, origin: str) -> float:
    number = float(value) if type(value) in (int, float) and abs(value) <= _LARGEST else math.nan
    if not number >= _LEAST:
        raise QuantizeError(f"{origin} has the scale {shown(value)}, not a positive number; calibrate the model again")
    return number
