"""GPTQ checkpoints against numbers packed bit by bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from llmc.quantize import QuantizeError
from llmc.quantize.checkpoints import StoredTensor

from support.stored_checkpoints import (
    PREFIX,
    Integers,
    Tensors,
    check_rows,
    find,
    find_one,
    gptq_config,
    gptq_tensors,
    named,
    tensor,
    whole,
)

N, K = 40, 128
HEAD = "lm_head"
OTHER = "model.layers.1.self_attn.q_proj"


@pytest.mark.parametrize("layout", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("group_size", "ordered"), [(32, False), (64, True), (128, False), (-1, False), (32, True)])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_values(bits: int, group_size: int, ordered: bool, symmetric: bool, layout: str) -> None:
    minus_one = int(layout == "gptq")
    data = Integers.random(N, K, bits, group_size, symmetric=symmetric, ordered=ordered, least_zero=minus_one)
    config = gptq_config(bits=bits, group_size=group_size, sym=symmetric, desc_act=ordered, checkpoint_format=layout)
    matrix = find_one(config, gptq_tensors(data, bits, minus_one))
    assert matrix.shape == (N, K)
    assert matrix.format.bits == max(bits, 4)
    assert matrix.format.asymmetric == (not symmetric)
    assert (matrix.columns is not None) == (ordered and group_size < K)
    np.testing.assert_array_equal(whole(matrix), data.values)
    check_rows(matrix, data.values)


def test_columns_keep_their_order_in_a_group() -> None:
    data = Integers.random(N, K, 4, 32, symmetric=True, ordered=True)
    matrix = find_one(gptq_config(sym=True), gptq_tensors(data, 4, 1))
    columns = matrix.columns
    assert columns is not None
    assert columns.dtype == np.int32
    for group in range(K // 32):
        own = list(columns[32 * group : 32 * group + 32])
        assert own == sorted(np.flatnonzero(data.group == group))


def test_without_g_idx_groups_are_neighbours() -> None:
    data = Integers.random(N, K, 4, 64, symmetric=False)
    tensors = gptq_tensors(data, 4, 0)
    del tensors[f"{PREFIX}.g_idx"]
    matrix = find_one(gptq_config(group_size=64, checkpoint_format="gptq_v2"), tensors)
    np.testing.assert_array_equal(whole(matrix), data.values)


def test_scales_in_bfloat16() -> None:
    data = Integers.random(N, K, 4, 32, symmetric=True)
    tensors = gptq_tensors(data, 4, 1)
    upper = (data.scale.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    tensors[f"{PREFIX}.scales"] = tensor(upper.T, "BF16")
    scale = (upper.astype(np.uint32) << 16).view(np.float32)
    expected = (data.numbers - 8) * scale[:, data.group].astype(np.float64)
    np.testing.assert_array_equal(whole(find_one(gptq_config(sym=True), tensors)), expected.astype(np.float32))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_a_zero_point_that_the_first_layout_lost(bits: int) -> None:
    data = Integers.random(N, K, bits, 32, symmetric=False, least_zero=1)
    data.zero[5, 1] = 1 << bits
    matrix = find_one(gptq_config(bits=bits), gptq_tensors(data, bits, 1))
    top = (1 << bits) - 1
    with pytest.raises(QuantizeError, match=rf"{PREFIX}.qzeros holds {top} for a zero point of {top + 1}.*gptq_v2"):
        matrix.rows(0, N)
    assert matrix.rows(6, 10).zero is not None


def test_symmetric_settings_and_other_zero_points() -> None:
    data = Integers.random(N, K, 4, 32, symmetric=True)
    matrix = find_one(gptq_config(sym=True, checkpoint_format="gptq_v2"), gptq_tensors(data, 4, 1))
    with pytest.raises(QuantizeError, match="holds the zero point 7, not the 8 of symmetric numbers"):
        matrix.values(0, 1)


def two_layers(bits: int = 4, group_size: int = 32) -> Tensors:
    first = Integers.random(N, K, 4, 32, symmetric=True)
    second = Integers.random(N, K, bits, group_size, symmetric=True)
    return gptq_tensors(first, 4, 1) | gptq_tensors(second, bits, 1, OTHER)


def plain(*shape: int) -> StoredTensor:
    return tensor(np.zeros(shape, np.float16))


def test_rules_of_single_modules() -> None:
    dynamic = {r"+:model\.layers\.1\..*": {"bits": 8, "group_size": 64}, r"-:.*\.mlp\..*": {}}
    tensors = two_layers(8, 64) | named("model.layers.0.mlp.gate", weight=plain(N, K))
    found = find(gptq_config(sym=True, dynamic=dynamic), tensors, linears=[PREFIX, OTHER, "model.layers.0.mlp.gate"])
    assert {prefix: (matrix.format.bits, matrix.format.group_size) for prefix, matrix in found.matrices.items()} == {
        PREFIX: (4, 32), OTHER: (8, 64),
    }  # fmt: skip
    expected = Integers.random(N, K, 8, 64, symmetric=True).values
    np.testing.assert_array_equal(whole(found.matrices[OTHER]), expected)


def test_the_first_rule_that_fits_counts() -> None:
    dynamic: dict[str, Any] = {r".*\.1\..*": {"bits": 8}, r"-:.*": {}}
    with pytest.raises(QuantizeError, match=rf"leaves '{PREFIX}' as it is, but the checkpoint has {PREFIX}.qweight"):
        find(gptq_config(sym=True, dynamic=dynamic), two_layers(8))
    found = find(gptq_config(sym=True, dynamic={r".*\.1\..*": {"bits": 8}, r".*": {"bits": 4}}), two_layers(8))
    assert found.matrices[OTHER].format.bits == 8


@pytest.mark.parametrize("quantized", [True, False])
@pytest.mark.parametrize("said", [True, False])
def test_output_projection(quantized: bool, said: bool) -> None:
    tensors = two_layers()
    head = gptq_tensors(Integers.random(64, K, 4, 32, symmetric=True), 4, 1, HEAD)
    tensors |= head if quantized else named(HEAD, weight=plain(64, K))
    config, linears = gptq_config(sym=True, lm_head=said), [PREFIX, OTHER, HEAD]
    if quantized == said:
        assert (HEAD in find(config, tensors, linears=linears).matrices) == quantized
    else:
        with pytest.raises(QuantizeError, match="lm_head"):
            find(config, tensors, linears=linears)


def test_modules_of_a_block() -> None:
    listed = [["self_attn.q_proj"], ["mlp.up_proj", "mlp.gate_proj"]]
    tensors = two_layers() | named("model.layers.0.mlp.down_proj", weight=plain(N, K))
    config = gptq_config(sym=True, modules_in_block_to_quantize=listed)
    assert set(find(config, tensors, linears=[PREFIX, OTHER, "model.layers.0.mlp.down_proj"]).matrices) == {
        PREFIX,
        OTHER,
    }
    with pytest.raises(QuantizeError, match=r"says that 'model.layers.0.mlp.up_proj' is quantized, but"):
        find(config, tensors | named("model.layers.0.mlp.up_proj", weight=plain(N, K)),
             linears=["model.layers.0.mlp.up_proj"])  # fmt: skip


def test_a_plain_weight_among_quantized_ones() -> None:
    tensors = two_layers() | named("model.layers.2.self_attn.q_proj", weight=plain(N, K))
    with pytest.raises(QuantizeError, match=r"says that 'model.layers.2.self_attn.q_proj' is quantized, but the check"):
        find(gptq_config(sym=True), tensors)


REFUSED: list[tuple[dict[str, Any], dict[str, StoredTensor | None], str]] = [
    ({"bits": 5}, {}, "bits is 5, not one of 2, 3, 4, 8"),
    ({"bits": "4"}, {}, "bits is '4', not an integer"),
    ({"bits": None}, {}, "lacks bits"),
    ({"bits": 8}, {}, r"scales has shape \[4, 40\], not \[2, 40\]"),
    ({"bits": 3}, {}, "qweight has 16 rows of words, which are not whole rows of 3-bit numbers"),
    ({"group_size": 48}, {}, "rows of 128 numbers in groups of 48"),
    ({"group_size": 0}, {}, "groups of 0"),
    ({"group_size": 256}, {}, "groups of 256"),
    ({"group_size": 64}, {}, r"q_proj.scales has shape \[4, 40\], not \[2, 40\]"),
    ({"checkpoint_format": "marlin"}, {}, "checkpoint_format is 'marlin', not one of gptq, gptq_v2"),
    ({"is_marlin_format": True}, {}, "is_marlin_format is True"),
    ({"sym": "yes"}, {}, "sym is 'yes', not true or false"),
    ({"dynamic": {"+:(": {}}}, {}, "not a regular expression"),
    ({"dynamic": {"+:(a+)+$": {}}}, {}, "a repeated group holds a repetition or a choice"),
    ({"dynamic": {".*": {"bits": 7}}}, {}, "bits is 7, not one of"),
    ({"dynamic": {".*": 3}}, {}, "which is not an object"),
    ({"dynamic": []}, {}, "which is not an object"),
    ({"modules_in_block_to_quantize": [[1]]}, {}, "not a list of lists of names"),
    ({}, {"qzeros": None}, rf"{PREFIX}.qzeros is missing beside {PREFIX}.qweight"),
    ({}, {"scales": None}, rf"{PREFIX}.scales is missing beside {PREFIX}.qweight"),
    ({}, {"qweight": None}, "the checkpoint has no tensor PREFIX.qweight"),
    ({}, {"weight": plain(N, K)}, rf"both {PREFIX}.weight and {PREFIX}.qweight"),
    ({}, {"qweight": tensor(np.zeros((16, N), np.int64))}, "qweight has dtype 'I64', not I32"),
    ({}, {"qweight": tensor(np.zeros((16, 2, N), np.int32))}, "not that of a matrix"),
    ({}, {"qweight": tensor(np.zeros((0, N), np.int32))}, "not that of a matrix"),
    ({}, {"qzeros": tensor(np.zeros((4, 4), np.int32))}, r"qzeros has shape \[4, 4\], not \[4, 5\]"),
    ({}, {"scales": tensor(np.zeros((4, N), np.int32))}, "scales has dtype 'I32', not F32 or F16 or BF16"),
    ({}, {"g_idx": tensor(np.zeros(K - 1, np.int32))}, r"g_idx has shape \[127\], not \[128\]"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "changes", "message"), REFUSED, ids=[row[2] for row in REFUSED])
def test_refused(config: dict[str, Any], changes: dict[str, StoredTensor | None], message: str) -> None:
    tensors = gptq_tensors(Integers.random(N, K, 4, 32, symmetric=True), 4, 1)
    for leaf, changed in changes.items():
        tensors.pop(f"{PREFIX}.{leaf}", None)
        if changed is not None:
            tensors[f"{PREFIX}.{leaf}"] = changed
    with pytest.raises(QuantizeError, match=message):
        find(gptq_config(**{"sym": True, **config}), tensors)


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [(3, 4, "g_idx holds the group 4 of 4"), (3, -1, "the group -1 of 4"), (3, 1, "31 columns in group 0, not 32")],
)  # fmt: skip
def test_groups_that_no_column_can_have(at: int, value: int, message: str) -> None:
    tensors = gptq_tensors(Integers.random(N, K, 4, 32, symmetric=True), 4, 1)
    group = tensors[f"{PREFIX}.g_idx"].load().copy()
    group[at] = value
    matrix = find_one(gptq_config(sym=True), tensors | {f"{PREFIX}.g_idx": tensor(group)})
    with pytest.raises(QuantizeError, match=message):
        matrix.values(0, 1)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_scales_that_are_not_finite(value: float) -> None:
    data = Integers.random(N, K, 4, 32, symmetric=True)
    data.scale[7, 2] = value
    matrix = find_one(gptq_config(sym=True), gptq_tensors(data, 4, 1))
    with pytest.raises(QuantizeError, match=rf"{PREFIX}.scales holds the scale -?(nan|inf)"):
        matrix.rows(0, N)
    assert matrix.rows(8, N - 8).scale.shape == (N - 8, 4)


def test_negative_scales_are_numbers_like_others() -> None:
    data = Integers.random(N, K, 4, 32, symmetric=True)
    np.negative(data.scale, out=data.scale)
    np.testing.assert_array_equal(whole(find_one(gptq_config(sym=True), gptq_tensors(data, 4, 1))), data.values)


def test_rows_out_of_range() -> None:
    matrix = find_one(gptq_config(sym=True), gptq_tensors(Integers.random(N, K, 4, 32, symmetric=True), 4, 1))
    with pytest.raises(IndexError, match="rows 39 to 41 of 40"):
        matrix.rows(39, 2)
