"""AutoRound's own checkpoints: its three layouts, and layers with settings of their own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from llmc.quantize import QuantizeError

from support.stored_checkpoints import (
    PREFIX,
    Integers,
    Tensors,
    find,
    find_one,
    gemm_tensors,
    gptq_tensors,
    named,
    tensor,
    whole,
)

N, K = 40, 128
GPTQ, AWQ = "auto_round:auto_gptq", "auto_round:auto_awq"
OTHER = "model.layers.1.self_attn.q_proj"


def config(layout: str | None = GPTQ, **changes: Any) -> dict[str, Any]:
    given = {"quant_method": "auto-round", "packing_format": layout, "bits": 4, "group_size": 32, "sym": False}
    return {**given, "data_type": "int", "block_name_to_quantize": "model.layers", **changes}


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("layout", [GPTQ, None, "auto_round", "auto_round:gptqmodel", AWQ])
def test_values(layout: str | None, symmetric: bool) -> None:
    data = Integers.random(N, K, 4, 32, symmetric=symmetric, least_zero=1)
    tensors = gemm_tensors(data) if layout == AWQ else gptq_tensors(data, 4, int(layout in (GPTQ, None)))
    tensors.pop(f"{PREFIX}.g_idx", None)
    matrix = find_one(config(layout, sym=symmetric), tensors)
    assert matrix.format.asymmetric == (not symmetric)
    np.testing.assert_array_equal(whole(matrix), data.values)


def two_layers() -> Tensors:
    first, second = (Integers.random(N, K, bits, 32, symmetric=True) for bits in (4, 8))
    plain = tensor(np.zeros((N, K), np.float16))
    return gptq_tensors(first, 4, 1) | gptq_tensors(second, 8, 1, OTHER) | named("lm_head", weight=plain)


@pytest.mark.parametrize("name", [OTHER, r".*layers\.1\..*", "layers.1"])
def test_layers_with_settings_of_their_own(name: str) -> None:
    extra = {name: {"bits": 8}, ".*q_proj": {"bits": 4}, ".*k_proj": {"bits": 16}}
    plain = named("model.layers.0.self_attn.k_proj", weight=tensor(np.zeros((N, K), np.float16)))
    linears = [PREFIX, OTHER, "model.layers.0.self_attn.k_proj", "lm_head"]
    found = find(config(sym=True, extra_config=extra), two_layers() | plain, linears=linears)
    assert {prefix: matrix.format.bits for prefix, matrix in found.matrices.items()} == {PREFIX: 4, OTHER: 8}
    expected = Integers.random(N, K, 8, 32, symmetric=True).values
    np.testing.assert_array_equal(whole(found.matrices[OTHER]), expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"packing_format": "auto_round:llm_compressor"},
            "packing_format is 'auto_round:llm_compressor', not one of auto_",
        ),
        ({"data_type": "mx_fp"}, "data_type is 'mx_fp', not one of int"),
        ({"act_bits": 8}, "act_bits is 8, not 16"),
        ({"bits": 5}, "has numbers of 5 bits, which llmc does not read in layout auto_round:auto_gptq"),
        (
            {"extra_config": {PREFIX: {"bits": 16}}},
            f"leaves '{PREFIX}' as it is, but the checkpoint has {PREFIX}.qweight",
        ),
        (
            {"extra_config": {"lm_head": {"bits": 4}}},
            "says that 'lm_head' is quantized, but the checkpoint has lm_head",
        ),
        ({"extra_config": {"(": {"bits": 4}}}, "not a regular expression"),
        ({"extra_config": {PREFIX: 4}}, "is 4, which is not an object"),
        ({}, r"q_proj.scales has shape|not whole rows|shape"),
    ],
)
def test_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(QuantizeError, match=message):
        find(config(sym=True, **changes), two_layers(), linears=[PREFIX, OTHER, "lm_head"])
