"""Scales that checkpoints state for a quantized KV cache: where they are found, and what is wrong with them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from llmc.quantize.checkpoints.base import StoredTensor
from llmc.quantize.checkpoints.kv_cache import find_kv_scales
from llmc.quantize.checkpoints.section import Section
from llmc.quantize.formats.base import QuantizeError

from support.stored_checkpoints import tensor

ATTENTION = "model.layers.{}.self_attn."


def stored(value: Any, dtype: Any = np.float32) -> StoredTensor:
    return tensor(np.asarray(value, dtype))


def section(**values: Any) -> Section:
    return Section({"quant_method": "fp8", **values}, "quantization_config")


def scales_of(key: str, value: str, layers: int = 2) -> dict[str, StoredTensor]:
    found = {ATTENTION.format(i) + key: stored(0.25 * (i + 1)) for i in range(layers)}
    return found | {ATTENTION.format(i) + value: stored([0.5]) for i in range(layers)}


@pytest.mark.parametrize(
    ("key", "value"), [("k_scale", "v_scale"), ("k_proj.k_scale", "v_proj.v_scale"), ("attn.k_scale", "attn.v_scale")]
)
def test_names_that_vllm_reads(key: str, value: str) -> None:
    found = find_kv_scales(section(), scales_of(key, value))
    assert found is not None
    assert found.dtype == "fp8_e4m3"
    expected = np.array([[[0.25] * 3, [0.5] * 3], [[0.5] * 3, [0.5] * 3]], np.float32)
    np.testing.assert_array_equal(list(found.read({0: 3, 1: 3})), expected)


def test_one_scale_of_both_and_one_a_head() -> None:
    found = find_kv_scales(section(), {ATTENTION.format(0) + "kv_scale": stored([[1.0], [2.0]], np.float16)})
    assert found is not None
    np.testing.assert_array_equal(list(found.read({0: 2})), np.array([[[1, 2], [1, 2]]], np.float32))


@pytest.mark.parametrize(
    ("settings", "dtype"),
    [
        ({"kv_cache_scheme": {"type": "float", "num_bits": 8, "dynamic": False}}, "fp8_e4m3"),
        ({"kv_cache_scheme": {"type": "int", "num_bits": 8}}, "int8"),
        ({"kv_cache_scheme": {"type": "float", "dynamic": True}}, None),
        ({"kv_cache_scheme": "static"}, "fp8_e4m3"),
        ({"kv_cache_quant_algo": "FP8"}, "fp8_e4m3"),
        ({"kv_cache_quant_algo": "INT8"}, "int8"),
        ({"kv_cache_quant_algo": "NVFP4"}, None),
    ],
)
def test_what_the_settings_say(settings: dict[str, Any], dtype: str | None) -> None:
    found = find_kv_scales(section(**settings), scales_of("k_scale", "v_scale"))
    assert (None if found is None else found.dtype) == dtype


def test_settings_alone_are_no_scales() -> None:
    assert find_kv_scales(section(kv_cache_quant_algo="FP8"), {}) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k_scale": stored(float("nan"))}, r"self_attn\.k_scale has the scale nan, which is not positive and finite"),
        ({"v_scale": stored(-1.0)}, r"self_attn\.v_scale has the scale -1\.0, which is not positive"),
        ({"k_scale": stored([1.0, 2.0])}, r"self_attn\.k_scale has shape \[2\], not that of one number or of 3"),
        ({"v_scale": stored(1, np.int32)}, r"self_attn\.v_scale has dtype 'I32', not F32 or F16 or BF16"),
    ],
)
def test_bad_scales_are_one_sentence(change: dict[str, StoredTensor], message: str) -> None:
    tensors = scales_of("k_scale", "v_scale") | {ATTENTION.format(1) + name: value for name, value in change.items()}
    found = find_kv_scales(section(), tensors)
    assert found is not None
    with pytest.raises(QuantizeError, match=message):
        list(found.read({0: 3, 1: 3}))


def test_a_layer_without_scales() -> None:
    found = find_kv_scales(section(), scales_of("k_scale", "v_scale"))
    assert found is not None
    with pytest.raises(QuantizeError, match=r"no k_scale of layer 2"):
        list(found.read({0: 1, 1: 1, 2: 1}))


def test_a_scheme_of_four_bits_is_refused() -> None:
    with pytest.raises(QuantizeError, match=r"num_bits"):
        find_kv_scales(section(kv_cache_scheme={"type": "int", "num_bits": 4}), scales_of("k_scale", "v_scale"))
