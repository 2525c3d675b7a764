"""FP8 and NVFP4 checkpoints of fp8, fbgemm_fp8 and Model Optimizer, against numbers decoded by their definition."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from llmc.quantize import QuantizeError
from llmc.quantize.checkpoints import Activation, StoredTensor, find_stored
from llmc.quantize.checkpoints.floats import TABLES, e8m0

from support.stored_checkpoints import PREFIX, Tensors, bf16, check_rows, find, find_one, named, tensor, whole

N, K = 136, 288  # the last blocks of 128 are cut
DEEPSEEK = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
ONE = tensor(np.array(0.5, np.float32))


def decoded(code: int, exponent_bits: int, mantissa_bits: int, bias: int) -> float:
    """Sign, exponent, mantissa; an exponent of 0 is that of 1 without the leading one."""
    mantissa = code & ((1 << mantissa_bits) - 1)
    exponent = code >> mantissa_bits & ((1 << exponent_bits) - 1)
    sign = -1.0 if code >> (exponent_bits + mantissa_bits) & 1 else 1.0
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return float(sign * (1 + mantissa * 2.0**-mantissa_bits) * 2.0 ** (exponent - bias))


def test_tables() -> None:
    for code in range(256):
        if code & 127 == 127:
            assert np.isnan(TABLES["e4m3"][code])
        else:
            assert TABLES["e4m3"][code] == decoded(code, 4, 3, 7)
    assert [float(value) for value in TABLES["e2m1"]] == [decoded(code, 2, 1, 1) for code in range(16)]
    powers = e8m0(np.arange(256, dtype=np.uint8))
    assert [float(value) for value in powers[:255]] == [2.0 ** (code - 127) for code in range(255)]
    assert np.isnan(powers[255])


def codes(n: int = N, k: int = K) -> NDArray[np.uint8]:
    """FP8 numbers without NaN."""
    found = np.random.default_rng(n + k).integers(0, 256, (n, k)).astype(np.uint8)
    found[(found & 127) == 127] = 0
    return found


def floats(*shape: int) -> NDArray[np.float32]:
    return np.random.default_rng(len(shape)).uniform(0.001, 0.01, shape).astype(np.float32)


def weight(array: NDArray[np.uint8]) -> StoredTensor:
    return tensor(array, "F8_E4M3")


def by_blocks(array: NDArray[np.uint8], scale: NDArray[Any], rows: int, columns: int) -> NDArray[np.float32]:
    """float32 products, element by element."""
    out = np.empty(array.shape, np.float32)
    for i in range(len(array)):
        for j in range(array.shape[1]):
            number = np.float32(decoded(int(array[i, j]), 4, 3, 7))
            out[i, j] = number * np.float32(scale[i // rows, j // columns])
    return out


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F8_E8M0"])
def test_blocks(dtype: str) -> None:
    array, scale = codes(), floats(2, 3)
    stored: NDArray[Any] = scale
    if dtype == "BF16":
        stored, scale = bf16(scale), (bf16(scale).astype(np.uint32) << 16).view(np.float32)
    if dtype == "F8_E8M0":
        stored = np.array([[120, 121, 122], [123, 124, 119]], np.uint8)
        scale = np.exp2(stored.astype(np.float32) - 127)
    matrix = find_one(DEEPSEEK, named(PREFIX, weight=weight(array), weight_scale_inv=tensor(stored, dtype)))
    assert matrix.format.group_size == 128
    assert matrix.activation == Activation("e4m3", "group", True)
    expected = by_blocks(array, scale, 128, 128)
    np.testing.assert_array_equal(whole(matrix), expected)
    check_rows(matrix, expected)
    rows = matrix.rows(100, 36)
    np.testing.assert_array_equal(rows.scale, scale[[0] * 28 + [1] * 8])
    assert (rows.scale_codes is None) == (dtype != "F8_E8M0")


@pytest.mark.parametrize("leaf", ["weight_scale", "weight_scale_inv"])
@pytest.mark.parametrize("static", [True, False])
def test_one_scale(static: bool, leaf: str) -> None:
    array = codes()
    config = {"quant_method": "fp8", "activation_scheme": "static" if static else "dynamic"}
    tensors = named(PREFIX, **{"weight": weight(array), leaf: ONE} | ({"input_scale": ONE} if static else {}))
    matrix = find_one(config, tensors)
    np.testing.assert_array_equal(whole(matrix), by_blocks(array, np.full((1, 1), 0.5), N, K))
    expected = Activation("e4m3", "tensor", False, 0.5) if static else Activation("e4m3", "token", True)
    assert matrix.activation == expected


def test_fbgemm() -> None:
    array, scale = codes(), floats(N, 1)
    config = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]}
    matrix = find_one(config, named(PREFIX, weight=weight(array), weight_scale=tensor(scale)))
    np.testing.assert_array_equal(whole(matrix), by_blocks(array, scale, 1, K))
    assert matrix.activation == Activation("e4m3", "token", True)


def test_modules_that_are_left() -> None:
    plain = tensor(np.zeros((8, K), np.uint16), "BF16")
    tensors = named(PREFIX, weight=weight(codes()), weight_scale_inv=tensor(floats(2, 3)))
    gate = "model.layers.0.mlp.gate"
    tensors |= {f"{gate}.weight": plain, "lm_head.weight": plain, "model.layers.0.input_layernorm.weight": plain}
    linears = [PREFIX, gate, "lm_head"]
    found = find(DEEPSEEK | {"modules_to_not_convert": ["lm_head", gate]}, tensors, linears=linears)
    assert list(found.matrices) == [PREFIX]
    assert found.shapes(tensors)[f"{PREFIX}.weight"] == (N, K)
    # DeepSeek's settings have no list: its output projection is a plain one all the same.
    assert list(find(DEEPSEEK, tensors, linears=[PREFIX, "lm_head"]).matrices) == [PREFIX]
    with pytest.raises(
        QuantizeError, match=rf"says that '{gate}' is quantized, but the checkpoint has {gate}.weight of"
    ):
        find(DEEPSEEK, tensors, linears=linears)


REFUSED: list[tuple[dict[str, Any], Mapping[str, StoredTensor | None], str]] = [
    ({"fmt": "e5m2"}, {}, "fmt is 'e5m2', not one of e4m3"),
    ({"activation_scheme": "none"}, {}, "activation_scheme is 'none', not one of dynamic, static"),
    ({"weight_block_size": [128]}, {}, r"weight_block_size is \[128\], not two positive integers"),
    ({"weight_block_size": [128, 100]}, {}, "scales of 128 x 100 numbers"),
    ({"weight_block_size": [128, 10**300 * 16]}, {}, "scales of 128 x a number of 1001 bits"),
    ({"weight_block_size": [64, 128]}, {}, r"weight_scale_inv has shape \[2, 3\], not \[3, 3\]"),
    ({"weight_block_size": None}, {}, r"weight_scale_inv has shape \[2, 3\], not that of one number"),
    ({"quant_algo": "MIXED_PRECISION"}, {}, "quant_method fp8 and quant_algo too"),
    ({"modules_to_not_convert": ["model.layers.*.self_attn"]}, {}, "leaves"),
    ({}, {"weight_scale_inv": None}, f"{PREFIX}.weight_scale_inv is missing beside {PREFIX}.weight"),
    ({}, {"weight": tensor(np.zeros((N, K), np.uint8))}, "the checkpoint has no tensor PREFIX.weight of dtype F8_E4M3"),
    ({}, {"weight": weight(np.full((N, K), 0xFF, np.uint8))}, f"{PREFIX}.weight holds a NaN"),
    ({}, {"weight_scale_inv": tensor(-floats(2, 3))}, f"{PREFIX}.weight_scale_inv holds the scale -0.0"),
    ({}, {"weight_scale_inv": tensor(np.full((2, 3), 255, np.uint8), "F8_E8M0")}, "holds the scale nan"),
]


@pytest.mark.parametrize(("config", "changes", "message"), REFUSED, ids=[row[2] for row in REFUSED])
def test_refused(config: dict[str, Any], changes: Mapping[str, StoredTensor | None], message: str) -> None:
    tensors = named(PREFIX, weight=weight(codes()), weight_scale_inv=tensor(floats(2, 3)))
    for leaf, other in changes.items():
        del tensors[f"{PREFIX}.{leaf}"]
        if other is not None:
            tensors[f"{PREFIX}.{leaf}"] = other
    with pytest.raises(QuantizeError, match=message):
        find(DEEPSEEK | config, tensors).matrices[PREFIX].rows(0, N)


def nvfp4(static: bool = True) -> tuple[Tensors, NDArray[np.float32]]:
    """An NVFP4 matrix and its values: number * (scale * overall), in float32."""
    packed = np.random.default_rng(1).integers(0, 256, (40, 32)).astype(np.uint8)
    scale = np.random.default_rng(2).integers(1, 0x7F, (40, 4)).astype(np.uint8)
    overall = np.float32(0.000123)
    expected = np.empty((40, 64), np.float32)
    for i in range(40):
        for j in range(64):
            code = packed[i, j // 2] >> (4 * (j % 2)) & 15
            local = np.float32(decoded(int(scale[i, j // 16]), 4, 3, 7)) * overall
            expected[i, j] = np.float32(decoded(int(code), 2, 1, 1)) * local
    tensors = named(PREFIX, weight=tensor(packed), weight_scale=weight(scale), weight_scale_2=tensor(np.array(overall)))
    return tensors | (named(PREFIX, input_scale=ONE) if static else {}), expected


def modelopt(algorithm: str, **changes: Any) -> dict[str, Any]:
    quantization = {"quant_algo": algorithm, "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"], **changes}
    return {"producer": {"name": "modelopt", "version": "0.33.0"}, "quantization": quantization}


def test_nvfp4() -> None:
    tensors, expected = nvfp4()
    scales = {"model.layers.0.self_attn.k_proj.k_scale": ONE}
    found = find_stored({}, tensors | scales, hf_quant_config=modelopt("NVFP4", group_size=16))
    assert found is not None
    assert found.unused == set(scales)
    matrix = found.matrices[PREFIX]
    assert matrix.shape == (40, 64)
    assert (matrix.format.kind, matrix.format.group_size, matrix.format.scale_kind) == ("e2m1", 16, "e4m3")
    assert matrix.activation == Activation("e2m1", "group", True, 0.5)
    np.testing.assert_array_equal(whole(matrix), expected)


def test_the_settings_in_config_json_are_the_same() -> None:
    tensors, expected = nvfp4()
    group = {"weights": {"num_bits": 4, "type": "float", "group_size": 16}, "targets": ["Linear"]}
    config = {"quant_algo": "NVFP4", "ignore": ["lm_head", "mtp*"], "config_groups": {"group_0": group}}
    for method in ({}, {"quant_method": "modelopt"}):
        np.testing.assert_array_equal(whole(find_one(config | method, tensors)), expected)


def test_fp8_of_model_optimizer() -> None:
    array = codes()
    tensors = named(PREFIX, weight=weight(array), weight_scale=ONE, input_scale=ONE)
    found = find_stored({}, tensors, hf_quant_config=modelopt("FP8"))
    assert found is not None
    matrix = found.matrices[PREFIX]
    np.testing.assert_array_equal(whole(matrix), by_blocks(array, np.full((1, 1), 0.5), N, K))
    assert matrix.activation == Activation("e4m3", "tensor", False, 0.5)


def test_layers_of_several_algorithms() -> None:
    names = [f"model.layers.0.mlp.{part}_proj" for part in ("up", "down")] + ["model.layers.1.mlp.experts.3.up_proj"]
    plain, four = "model.layers.0.mlp.gate_proj", nvfp4(static=False)
    eight = np.full((N, 9), 120, np.uint8)
    tensors = {name.replace(PREFIX, names[0]): value for name, value in four[0].items()}
    tensors |= named(names[1], weight=weight(codes()), weight_scale=tensor(eight))
    tensors |= named(names[2], weight=weight(codes()), weight_scale=ONE, input_scale=ONE)
    tensors |= named(plain, weight=tensor(np.zeros((8, 64), np.float16)))
    layers = {names[0]: {"quant_algo": "W4A16_NVFP4", "group_size": 16}, names[1]: {"quant_algo": "MXFP8"},
              "model.layers.1.mlp.experts": {"quant_algo": "FP8"}}  # fmt: skip
    given = modelopt("MIXED_PRECISION", quantized_layers=layers)
    found = find_stored({}, tensors, linears=[*names, plain], hf_quant_config=given)
    assert found is not None
    np.testing.assert_array_equal(whole(found.matrices[names[0]]), four[1])
    np.testing.assert_array_equal(whole(found.matrices[names[1]]), by_blocks(codes(), np.full((N, 9), 2.0**-7), 1, 32))
    assert {prefix: matrix.activation for prefix, matrix in found.matrices.items()} == {
        names[0]: None, names[1]: Activation("e4m3", "group", True), names[2]: Activation("e4m3", "tensor", False, 0.5),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("algorithm", "changes", "more", "message"),
    [
        ("W4A8_AWQ", {}, {}, "quant_algo is 'W4A8_AWQ', not one of FP8, NVFP4"),
        ("NVFP4", {"group_size": 32}, {}, "group_size is 32, not the 16 of NVFP4"),
        ("NVFP4", {}, {"pre_quant_scale": ONE}, "has a pre_quant_scale"),
        ("NVFP4", {"exclude_modules": ["model.layers.0*"]}, {}, "leaves"),
        ("NVFP4", {"exclude_modules": ["*.self_attn.*"]}, {}, "leaves"),
        (
            "NVFP4",
            {},
            {"weight_scale_2": tensor(np.array(np.inf, np.float32))},
            "weight_scale_2 holds inf, not a positive",
        ),
        (
            "NVFP4",
            {},
            {"weight_scale": tensor(np.zeros((40, 2), np.uint8), "F8_E4M3")},
            r"shape \[40, 2\], not \[40, 4\]",
        ),
        ("FP8", {}, {}, "weight has dtype 'U8', not F8_E4M3"),
        (
            "MIXED_PRECISION",
            {"quantized_layers": {PREFIX: {"quant_algo": "FP4"}}},
            {},
            "quant_algo is 'FP4', not one of",
        ),
        ("MIXED_PRECISION", {}, {}, "leaves"),
    ],
)
def test_refused_of_model_optimizer(
    algorithm: str, changes: dict[str, Any], more: dict[str, StoredTensor], message: str
) -> None:
    tensors, _ = nvfp4()
    config = modelopt(algorithm, **changes)["quantization"] | {"quant_method": "modelopt"}
    with pytest.raises(QuantizeError, match=message):
        find(config, tensors | named(PREFIX, **more)).matrices[PREFIX].rows(0, 1)
