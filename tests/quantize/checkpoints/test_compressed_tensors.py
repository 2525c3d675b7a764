"""Checkpoints that compressed-tensors itself compresses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmc.quantize import QuantizeError
from llmc.quantize.checkpoints import Activation, StoredTensor
from llmc.quantize.checkpoints.floats import TABLES
from llmc.quantize.formats.codes import E8M0, Codes
from llmc.quantize.rtn import quantize

from support.stored_checkpoints import PREFIX, Tensors, check_rows, find, find_one, named, tensor, whole

torch = pytest.importorskip("torch")
pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")

from compressed_tensors.compressors import BaseCompressor  # noqa: E402
from compressed_tensors.compressors.format import infer_module_format  # noqa: E402
from compressed_tensors.quantization import (  # noqa: E402
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    QuantizationStatus,
    preset_name_to_scheme,
)
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam  # noqa: E402

N, K = 48, 256
_BITS = {torch.bfloat16: ("BF16", np.uint16), torch.float8_e4m3fn: ("F8_E4M3", np.uint8)}


def stored(values: Any) -> StoredTensor:
    """A torch tensor as a checkpoint has it."""
    if values.dtype in _BITS:
        name, bits = _BITS[values.dtype]
        return tensor(values.view(torch.int16 if bits is np.uint16 else torch.uint8).numpy().view(bits), name)
    return tensor(values.numpy())


def settings(
    format: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None, **changes: Any
) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {"quant_method": "compressed-tensors", "format": format, "quantization_status": "compressed",
            "ignore": ["lm_head"], "config_groups": {"group_0": group}, **changes}  # fmt: skip


def ranges(weight: Any, args: Any) -> tuple[Any, Any]:
    """Least and largest numbers of what shares a scale."""
    n, k = weight.shape
    if args.strategy == "tensor":
        return weight.min().reshape(1), weight.max().reshape(1)
    if args.strategy == "channel":
        return weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    if args.strategy == "block":
        rows, columns = args.block_structure
        blocks = weight.reshape(n // rows, rows, k // columns, columns)
        return blocks.amin((1, 3)), blocks.amax((1, 3))
    groups = weight.reshape(n, k // args.group_size, args.group_size)
    return groups.amin(2), groups.amax(2)


def compress(
    format: str, weights: dict[str, Any], dtype: Any = None, n: int = N, k: int = K
) -> tuple[Tensors, np.ndarray[Any, np.dtype[np.float32]], Any]:
    """The tensors of a random weight, its values by the library's own decompression, and their dtype.

    dtype: of the scales; float32, so that the library does not round what it decompresses, unless told otherwise.
    """
    args = QuantizationArgs(**weights)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(7)) * 0.05
    low, high = ranges(weight, args)
    state: dict[str, Any] = {}
    if args.strategy == "tensor_group":
        state["weight_global_scale"] = generate_gparam(low.amin(), high.amax())
    scale, zero = calculate_qparams(low, high, args, state.get("weight_global_scale"))
    scale = scale.to(dtype or torch.float32)
    compressor = BaseCompressor.get_value_from_registry(format)
    state |= {"weight": weight.to(scale.dtype), "weight_scale": scale, "weight_zero_point": zero}
    compressed = compressor.compress(state, scheme)
    values = compressor.decompress(dict(compressed), scheme)["weight"]
    return named(PREFIX, **{leaf: stored(value) for leaf, value in compressed.items()}), values.float().numpy(), values


def group(bits: int, size: int, **changes: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "group", "group_size": size, **changes}


def channel(bits: int, **changes: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "channel", **changes}


FP8 = {"num_bits": 8, "type": "float", "symmetric": True}
NVFP4 = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16}
MX = {"type": "float", "symmetric": True, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
EXACT: list[tuple[str, dict[str, Any]]] = [
    ("pack-quantized", group(4, 32)),
    ("pack-quantized", group(4, 128, symmetric=False)),
    ("pack-quantized", group(8, 64)),
    ("pack-quantized", group(8, 64, symmetric=False)),
    ("pack-quantized", group(2, 32)),
    ("pack-quantized", group(2, 64, symmetric=False)),
    ("pack-quantized", channel(4)),
    ("pack-quantized", channel(8, symmetric=False)),
    ("int-quantized", channel(8)),
    ("int-quantized", channel(8, symmetric=False)),
    ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "tensor"}),
    ("int-quantized", group(4, 128)),
    ("naive-quantized", channel(8)),
    ("float-quantized", {**FP8, "strategy": "tensor"}),
    ("float-quantized", {**FP8, "strategy": "channel"}),
    ("float-quantized", {**FP8, "strategy": "group", "group_size": 128}),
    ("float-quantized", {**FP8, "strategy": "block", "block_structure": [16, 128]}),
    ("nvfp4-pack-quantized", NVFP4),
    ("mxfp4-pack-quantized", {**MX, "num_bits": 4}),
    ("mxfp8-quantized", {**MX, "num_bits": 8}),
]


def name_of(case: Any) -> str | None:
    if isinstance(case, dict):
        return (
            f"{case['type']}{case['num_bits']}-{case['strategy']}{'' if case.get('symmetric', True) else '-asymmetric'}"
        )
    return None


@pytest.mark.parametrize(("format", "weights"), EXACT, ids=name_of)
def test_values(format: str, weights: dict[str, Any]) -> None:
    tensors, expected, values = compress(format, weights)
    matrix = find_one(settings(format, weights), tensors)
    assert matrix.shape == (N, K)
    ours = whole(matrix)
    # The library rounds NVFP4 to bfloat16 in the end.
    np.testing.assert_array_equal(torch.from_numpy(ours).to(values.dtype).float().numpy(), expected)
    check_rows(matrix, ours)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("format", "weights"), [EXACT[1], EXACT[8], EXACT[14]], ids=name_of)
def test_narrow_scales(format: str, weights: dict[str, Any], dtype: str) -> None:
    """The library computes in the scales' dtype: its values are ours, rounded to it."""
    tensors, expected, values = compress(format, weights, getattr(torch, dtype))
    ours = torch.from_numpy(whole(find_one(settings(format, weights), tensors))).to(values.dtype).float().numpy()
    np.testing.assert_array_equal(ours, expected)


def test_scales_that_are_powers_of_two_keep_their_codes() -> None:
    format, weights = "mxfp4-pack-quantized", {**MX, "num_bits": 4}
    tensors, _, _ = compress(format, weights)
    matrix = find_one(settings(format, weights), tensors)
    rows = matrix.rows(2, 5)
    assert matrix.format.scale_kind == "e8m0"
    assert rows.scale_codes is not None
    np.testing.assert_array_equal(rows.scale, np.exp2(rows.scale_codes.astype(np.float64) - 127))


def test_rounding_to_mxfp4_is_that_of_the_library() -> None:
    format, weights = "mxfp4-pack-quantized", {**MX, "num_bits": 4}
    tensors, _, _ = compress(format, weights)
    rows = find_one(settings(format, weights), tensors).rows(0, N)
    weight = torch.randn(N, K, generator=torch.Generator().manual_seed(7)) * 0.05
    found = quantize(weight.numpy(), Codes("e2m1", 32, E8M0))
    assert rows.scale_codes is not None
    np.testing.assert_array_equal(found.planes["scale"], rows.scale_codes)
    np.testing.assert_array_equal(TABLES["e2m1"][found.numbers], TABLES["e2m1"][rows.numbers])  # one of the zeros


def test_nvfp4_keeps_the_codes_of_its_scales() -> None:
    tensors, _, _ = compress("nvfp4-pack-quantized", NVFP4)
    rows = find_one(settings("nvfp4-pack-quantized", NVFP4), tensors).rows(0, N)
    np.testing.assert_array_equal(rows.scale_codes, tensors[f"{PREFIX}.weight_scale"].load())


@pytest.mark.parametrize("bits", [4, 8])
def test_order_of_columns(bits: int) -> None:
    """Early releases kept columns in place and their groups in weight_g_idx; the order here is any."""
    tensors, expected, _ = compress("pack-quantized", group(bits, 64))
    place = np.random.default_rng(3).permutation(K)  # column j of the compressed weight is column place[j] of ours
    packed = tensors[f"{PREFIX}.weight_packed"].load().view(np.uint32)
    each = 32 // bits
    numbers = np.stack([packed[:, j // each] >> np.uint32(bits * (j % each)) & ((1 << bits) - 1) for j in range(K)], 1)
    moved = np.empty_like(numbers)
    moved[:, place] = numbers
    words = np.zeros_like(packed)
    for j in range(K):
        words[:, j // each] |= moved[:, j] << np.uint32(bits * (j % each))
    groups = np.empty(K, np.int32)
    groups[place] = np.arange(K) // 64
    tensors |= named(PREFIX, weight_packed=tensor(words.view(np.int32)), weight_g_idx=tensor(groups))
    wanted = np.empty_like(expected)
    wanted[:, place] = expected
    matrix = find_one(settings("pack-quantized", group(bits, 64, actorder="group")), tensors)
    assert matrix.columns is not None
    np.testing.assert_array_equal(whole(matrix), wanted)
    check_rows(matrix, wanted)


def test_columns_that_were_never_ordered() -> None:
    tensors, expected, _ = compress("pack-quantized", group(4, 64))
    tensors |= named(PREFIX, weight_g_idx=tensor(np.full(K, -1, np.int32)))
    matrix = find_one(settings("pack-quantized", group(4, 64, actorder="weight")), tensors)
    assert matrix.columns is None
    np.testing.assert_array_equal(whole(matrix), expected)


def test_zero_points_of_symmetric_numbers() -> None:
    """Early releases stored them all the same."""
    tensors, expected, _ = compress("int-quantized", channel(8))
    zeros = named(PREFIX, weight_zero_point=tensor(np.zeros((N, 1), np.int8)))
    np.testing.assert_array_equal(whole(find_one(settings("int-quantized", channel(8)), tensors | zeros)), expected)
    ones = named(PREFIX, weight_zero_point=tensor(np.ones((N, 1), np.int8)))
    with pytest.raises(QuantizeError, match="weight_zero_point holds zero points other than 0, though"):
        find(settings("int-quantized", channel(8)), tensors | ones)


def test_zero_points_that_were_not_packed() -> None:
    """Early releases stored zero points of packed numbers as int8."""
    weights = group(4, 64, symmetric=False)
    tensors, expected, _ = compress("pack-quantized", weights)
    rows = find_one(settings("pack-quantized", weights), tensors).rows(0, N)
    assert rows.zero is not None
    tensors |= named(PREFIX, weight_zero_point=tensor((rows.zero.astype(np.int16) - 8).astype(np.int8)))
    np.testing.assert_array_equal(whole(find_one(settings("pack-quantized", weights), tensors)), expected)


TOKEN = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
STATIC = {"num_bits": 8, "type": "int", "strategy": "tensor", "dynamic": False}
SCALE = tensor(np.array([0.25], np.float32))
ZERO = tensor(np.array([-3], np.int8))


@pytest.mark.parametrize(
    ("inputs", "more", "expected"),
    [
        (None, {}, None),
        (TOKEN, {}, Activation("int8", "token", True)),
        (STATIC, {"input_scale": SCALE}, Activation("int8", "tensor", False, 0.25, 0)),
        ({**STATIC, "symmetric": False}, {"input_scale": SCALE, "input_zero_point": ZERO},
         Activation("int8", "tensor", False, 0.25, -3, symmetric=False)),
        ({**TOKEN, "symmetric": False}, {}, Activation("int8", "token", True, symmetric=False)),
        ({**TOKEN, "type": "float"}, {}, Activation("e4m3", "token", True)),
        ({**STATIC, "type": "float"}, {"input_scale": SCALE}, Activation("e4m3", "tensor", False, 0.25)),
        ({**NVFP4, "dynamic": "local"}, {"input_global_scale": SCALE}, Activation("e2m1", "group", True, 4.0)),
    ],
)  # fmt: skip
def test_activations(inputs: dict[str, Any] | None, more: dict[str, StoredTensor], expected: Activation | None) -> None:
    tensors, _, _ = compress("int-quantized", channel(8))
    matrix = find_one(settings("int-quantized", channel(8), inputs), tensors | named(PREFIX, **more))
    assert matrix.activation == expected


# A static input has a scale; the width of what compressed weights hold, from the library's table.
PRESETS = {
    "W8A8": 8, "W8A16": 8, "W4A16": 4, "W4A16_ASYM": 4, "W4A8": 4, "W4AFP8": 4, "W2A16": 4, "FP8": 8, "FP8_DYNAMIC": 8,
    "FP8_BLOCK": 8, "NVFP4": 4, "NVFP4A16": 4, "MXFP4": 4, "MXFP4A16": 4, "MXFP8": 8, "MXFP8A16": 8,
}  # fmt: skip


@pytest.mark.parametrize("name", PRESETS)
def test_settings_that_the_library_writes(name: str) -> None:
    scheme = preset_name_to_scheme(name, ["Linear"])
    format = infer_module_format(torch.nn.Linear, scheme).value
    tensors, _, values = compress(format, scheme.weights.model_dump(), n=128)
    config = QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"], format=format)
    config.quantization_status = QuantizationStatus.COMPRESSED
    inputs = scheme.input_activations
    if inputs is not None and inputs.dynamic is not True:
        leaf = "input_global_scale" if inputs.strategy == "tensor_group" else "input_scale"
        tensors |= named(PREFIX, **{leaf: SCALE})
    matrix = find_one(json.loads(config.model_dump_json()), tensors)
    assert matrix.format.bits == PRESETS[name]
    assert (matrix.activation is None) == (inputs is None)
    ours = torch.from_numpy(whole(matrix)).to(values.dtype)
    assert torch.equal(ours, values)


def test_a_file(tmp_path: Path) -> None:
    """A safetensors file, of which only headers are looked at before rows are asked for."""
    safetensors = pytest.importorskip("safetensors.torch")
    tensors, expected, _ = compress("pack-quantized", group(4, 64, symmetric=False), torch.bfloat16)
    bits = {"BF16": torch.bfloat16}
    arrays = {name: torch.from_numpy(value.load().copy()) for name, value in tensors.items()}
    arrays = {name: array.view(bits.get(tensors[name].dtype, array.dtype)) for name, array in arrays.items()}
    safetensors.save_file(arrays, tmp_path / "model.safetensors")
    data = (tmp_path / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    entries = json.loads(data[8:start])
    stored = {}
    for name, entry in entries.items():
        begin = start + entry["data_offsets"][0]
        stored[name] = StoredTensor.in_buffer(entry["dtype"], tuple(entry["shape"]), data, begin)
    matrix = find_one(settings("pack-quantized", group(4, 64, symmetric=False)), stored)
    np.testing.assert_array_equal(torch.from_numpy(whole(matrix)).bfloat16().float().numpy(), expected)


def mixed(*groups: dict[str, Any], **changes: Any) -> dict[str, Any]:
    config = settings("mixed-precision", {}, **changes)
    return config | {"config_groups": {f"group_{i}": group for i, group in enumerate(groups)}}


def moved(tensors: Tensors, prefix: str) -> Tensors:
    return {name.replace(PREFIX, prefix): value for name, value in tensors.items()}


def test_groups_of_a_mixed_recipe() -> None:
    """By exact name first, then by pattern, then by class."""
    names = [f"model.layers.{i}.mlp.{part}_proj" for i in range(2) for part in ("up", "down")]
    int4, int8 = compress("pack-quantized", group(4, 32)), compress("int-quantized", channel(8))
    fp8 = compress("float-quantized", {**FP8, "strategy": "channel"})
    tensors = moved(int8[0], names[0]) | moved(fp8[0], names[1]) | moved(int4[0], names[2]) | moved(fp8[0], names[3])
    recipe = mixed(
        {"targets": ["Linear"], "weights": group(4, 32), "format": "pack-quantized"},
        {"targets": [r"re:.*\.down_proj$", r"re:.*layers\.0.*up"], "weights": {**FP8, "strategy": "channel"}},
        {"targets": [names[0]], "weights": channel(8), "input_activations": TOKEN, "format": "int-quantized"},
        {"targets": ["LlamaAttention"], "output_activations": STATIC},
    )
    tensors["model.layers.0.self_attn.k_scale"] = SCALE
    found = find(recipe, tensors, linears=names)
    kinds = {prefix: (matrix.format.kind, matrix.format.bits) for prefix, matrix in found.matrices.items()}
    assert kinds == {names[0]: ("int", 8), names[1]: ("e4m3", 8), names[2]: ("int", 4), names[3]: ("e4m3", 8)}
    np.testing.assert_array_equal(whole(found.matrices[names[2]]), int4[1])
    np.testing.assert_array_equal(whole(found.matrices[names[3]]), fp8[1])
    assert found.unused == {"model.layers.0.self_attn.k_scale"}
    shapes = found.shapes(tensors)
    assert shapes == {f"{name}.weight": (N, K) for name in names}


@pytest.mark.parametrize("ignore", [["lm_head"], ["re:.*lm_head.*"], []])
def test_modules_that_are_ignored(ignore: list[str]) -> None:
    tensors = compress("pack-quantized", group(4, 32))[0] | {"lm_head.weight": tensor(np.zeros((64, K), np.float16))}
    config = settings("pack-quantized", group(4, 32), ignore=ignore)
    if ignore:
        assert list(find(config, tensors, linears=[PREFIX, "lm_head"]).matrices) == [PREFIX]
    else:
        with pytest.raises(QuantizeError, match="says that 'lm_head' is quantized, but the checkpoint has lm_head"):
            find(config, tensors, linears=[PREFIX, "lm_head"])


def weights_of(**changes: Any) -> dict[str, Any]:
    return {"config_groups": {"group_0": {"targets": ["Linear"], "weights": group(4, 32) | changes}}}


REFUSED: list[tuple[dict[str, Any], dict[str, StoredTensor | None], str]] = [
    ({"format": "marlin-24"}, {}, "format is 'marlin-24', not one of pack-quantized"),
    ({"quantization_status": "initialized"}, {}, "quantization_status is 'initialized', not compressed"),
    ({"sparsity_config": {"format": "sparse-24-bitmask"}}, {}, "llmc reads no sparse weights"),
    ({"transform_config": {"config_groups": {"R1": {}}}}, {}, "llmc rotates no activations"),
    ({"ignore": [PREFIX]}, {}, f"leaves '{PREFIX}' as it is, but the checkpoint has {PREFIX}.weight_scale"),
    ({"ignore": ["re:*"]}, {}, "not a regular expression"),
    ({"ignore": "lm_head"}, {}, "ignore is 'lm_head', not a list of strings"),
    ({"config_groups": {}}, {}, "leaves"),
    (weights_of(num_bits=3), {}, "num_bits is 3, not one of 2, 4, 8"),
    (weights_of(num_bits=8), {}, r"does not hold the \[48, 256\] numbers of 8 bits"),
    (weights_of(type="float"), {}, "type float, group_size 32, symmetric True are none of the format pack-quantized"),
    (weights_of(strategy="tensor_group", group_size=None), {}, "group_size is None, not a positive integer"),
    (weights_of(group_size=64), {}, r"weight_scale has shape \[48, 8\], not \[48, 4\]"),
    (weights_of(group_size=48), {}, r"weight_scale has shape|whole groups of 48"),
    (weights_of(symmetric=False), {}, "weight_zero_point is missing beside"),
    (weights_of(actorder="group"), {}, "weight_g_idx is missing beside"),
    (weights_of(strategy="block", block_structure=[0, 1]), {}, "not two positive integers"),
    (weights_of(dynamic=True), {}, "weights are dynamic or by token"),
    ({}, {"weight_scale": None}, f"{PREFIX}.weight_scale is missing beside"),
    ({}, {"weight_packed": None}, f"{PREFIX}.weight_packed is missing beside"),
    ({}, {"weight_shape": None}, f"{PREFIX}.weight_shape is missing beside"),
    ({}, {"weight_shape": tensor(np.array([N, K + 8]))}, r"does not hold the \[48, 264\] numbers of 4 bits"),
    ({}, {"weight_shape": tensor(np.array([N, -K]))}, "does not hold"),
    ({}, {"weight_scale": tensor(np.full((N, 8), np.nan, np.float32))}, "weight_scale holds the scale nan"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "changes", "message"), REFUSED, ids=[row[2] for row in REFUSED])
def test_refused(config: dict[str, Any], changes: dict[str, StoredTensor | None], message: str) -> None:
    tensors, _, _ = compress("pack-quantized", group(4, 32))
    for leaf, other in changes.items():
        del tensors[f"{PREFIX}.{leaf}"]
        if other is not None:
            tensors[f"{PREFIX}.{leaf}"] = other
    with pytest.raises(QuantizeError, match=message):
        find(settings("pack-quantized", group(4, 32)) | config, tensors).matrices[PREFIX].rows(0, N)


@pytest.mark.parametrize(
    ("scale", "message"), [(0, "holds 0.0, not a positive number"), (np.nan, "holds nan"), (-1, "holds -1.0")]
)
def test_static_scales_that_none_has(scale: float, message: str) -> None:
    tensors, _, _ = compress("int-quantized", channel(8))
    tensors |= named(PREFIX, input_scale=tensor(np.array(scale, np.float32)))
    matrix = find_one(settings("int-quantized", channel(8), STATIC), tensors)
    with pytest.raises(QuantizeError, match=f"{PREFIX}.input_scale {message}"):
        _ = matrix.activation


def test_nvfp4_scales_that_none_has() -> None:
    tensors, _, _ = compress("nvfp4-pack-quantized", NVFP4)
    for code, message in ((0x7F, "scale nan"), (0xB8, "scale -")):
        codes = tensors[f"{PREFIX}.weight_scale"].load().copy()
        codes[5, 3] = code
        matrix = find_one(
            settings("nvfp4-pack-quantized", NVFP4), tensors | named(PREFIX, weight_scale=tensor(codes, "F8_E4M3"))
        )
        with pytest.raises(QuantizeError, match=f"weight_scale holds the {message}"):
            matrix.rows(0, N)
    matrix = find_one(
        settings("nvfp4-pack-quantized", NVFP4),
        tensors | named(PREFIX, weight_global_scale=tensor(np.zeros(1, np.float32))),
    )
    with pytest.raises(QuantizeError, match=r"weight_global_scale holds 0\.0, not a positive"):
        matrix.rows(0, N)
