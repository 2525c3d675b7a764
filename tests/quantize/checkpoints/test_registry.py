"""Where settings are, and methods that nothing reads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from llmc.quantize import QuantizeError
from llmc.quantize.checkpoints import READERS, find_stored, quantization_settings

from support.stored_checkpoints import PREFIX, Integers, find, gptq_config, gptq_tensors, named, tensor

GPTQ = gptq_config(sym=True)
TENSORS = gptq_tensors(Integers.random(40, 128, 4, 32, symmetric=True), 4, 1)


def test_a_model_that_is_not_quantized() -> None:
    assert find_stored({"model_type": "llama"}, named(PREFIX, weight=tensor(np.zeros((4, 4), np.float16)))) is None
    assert quantization_settings({"quantization_config": None, "text_config": None}) is None


@pytest.mark.parametrize(
    "config",
    [{"quantization_config": GPTQ}, {"compression_config": GPTQ}, {"text_config": {"quantization_config": GPTQ}},
     {"quantization_config": None, "llm_config": {"quantization_config": GPTQ}}],
)  # fmt: skip
def test_places_of_settings(config: dict[str, Any]) -> None:
    found = find_stored(config, TENSORS)
    assert found is not None
    assert found.method == "gptq"
    assert set(found.matrices) == {PREFIX}


def test_settings_of_config_json_come_first() -> None:
    assert quantization_settings({"quantization_config": GPTQ}, {"quantization": {"quant_algo": "FP8"}}) == GPTQ
    assert quantization_settings({}, {"quantization": {"quant_algo": "FP8"}}) == {
        "quant_algo": "FP8", "quant_method": "modelopt",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"quant_method": "eetq"},
            "eetq is not read: its weights are tiled for the GPU that wrote them; compile the model",
        ),
        ({"quant_method": "hqq"}, "hqq is not read: its zero points are not whole numbers"),
        ({"quant_method": "w8a8"}, "w8a8 is not read: inputs have a scale for each of their channels"),
        (
            {"quant_method": "GPTQ"},
            "quant_method is 'GPTQ', which is not one of auto-round, awq, bitsandbytes, compressed-tensors",
        ),
        ({"quant_method": ["gptq"]}, r"quant_method is \['gptq'\], not a string"),
        ({"bits": 4}, "quantization_config lacks quant_method"),
        ([], r"config.json: quantization_config is \[\], which is not an object"),
    ],
)
def test_refused(settings: Any, message: str) -> None:
    with pytest.raises(QuantizeError, match=message):
        find_stored({"quantization_config": settings}, TENSORS)


def test_a_scale_for_each_channel_of_inputs_is_refused_whatever_the_method_is_called() -> None:
    scales = named(PREFIX, in_scales=tensor(np.ones(128, np.float16)), out_scales=tensor(np.ones(40, np.float32)))
    with pytest.raises(QuantizeError, match=r"w8a8 is not read: inputs have a scale for each of their channels"):
        find_stored({"quantization_config": {"quant_method": "gptq", "group_size": -1}}, TENSORS | scales)


def test_a_file_without_settings() -> None:
    with pytest.raises(QuantizeError, match=r"hf_quant_config\.json lacks quantization"):
        find_stored({}, TENSORS, hf_quant_config={})


def test_names_that_a_terminal_would_obey() -> None:
    with pytest.raises(QuantizeError, match=r"a tensor named '\\x1b\[2J'"):
        find_stored({"quantization_config": GPTQ}, TENSORS | {"\x1b[2J": tensor(np.zeros(1, np.float16))})


def test_biases_that_the_model_does_not_have() -> None:
    found = find(GPTQ, TENSORS)
    zeros = TENSORS | named(PREFIX, bias=tensor(np.zeros(40, np.float16)))
    assert found.empty_biases(TENSORS, ()) == frozenset()
    assert found.empty_biases(zeros, ()) == {f"{PREFIX}.bias"}
    assert found.empty_biases(zeros, {f"{PREFIX}.bias"}) == frozenset()
    with pytest.raises(QuantizeError, match=f"{PREFIX}.bias is a bias that is not zero"):
        found.empty_biases(zeros | named(PREFIX, bias=tensor(np.ones(40, np.float16))), ())


def test_what_a_matrix_is_made_of_looks_like_a_weight() -> None:
    more = {
        "model.norm.weight": tensor(np.zeros(128, np.float16)),
        "model.layers.0.self_attn.k_scale": TENSORS[f"{PREFIX}.scales"],
    }
    shapes = find(GPTQ, TENSORS | more).shapes(TENSORS | more)
    assert shapes == {f"{PREFIX}.weight": (40, 128), "model.norm.weight": (128,)}


def test_methods() -> None:
    assert list(READERS) == sorted(READERS)
