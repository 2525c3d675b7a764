"""Exported layouts are read back as the numbers that were written."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from llmc.quantize import QuantizeError
from llmc.quantize.checkpoints import find_stored
from llmc.quantize.export.base import Wanted
from llmc.quantize.export.registry import get_layout
from llmc.quantize.formats.codes import E8M0, Codes
from llmc.quantize.formats.fp8 import Fp8
from llmc.quantize.formats.integers import ZERO, Integers
from llmc.quantize.methods.grids import find_grid, round_to_nearest

N, K = 64, 128
MXFP4 = Codes("e2m1", 32, E8M0)
PREFIXES = ("model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj")
CASES: list[tuple[str, Wanted]] = [
    *(
        ("compressed-tensors", Wanted(Integers(bits, size, asymmetric), act_bits, dtype))
        for bits, size in ((4, 32), (4, -1), (8, -1))
        for asymmetric in (False, True)
        for act_bits, dtype in ((16, "bf16"), (8, "f32"))
    ),
    *(("gptq", Wanted(Integers(bits, 64, asymmetric), 16, "f16")) for bits in (4, 8) for asymmetric in (False, True)),
    *(("awq", Wanted(Integers(4, 64, asymmetric), 16, "f16")) for asymmetric in (False, True)),
    ("compressed-tensors", Wanted(Fp8(), 16, "bf16")),
    ("compressed-tensors", Wanted(MXFP4, 16, "bf16")),
]


@pytest.mark.parametrize(("name", "wanted"), CASES)
def test_a_layout_is_read_back(name: str, wanted: Wanted) -> None:
    layout = get_layout(name, wanted)
    rng = np.random.default_rng(0)
    tensors: dict[str, Any] = {}
    values, formats = {}, {}
    for prefix, k in zip(PREFIXES, (K, K + 16), strict=True):
        format = layout.format_of(N, k, wanted.format)
        weight = rng.standard_normal((N, k)).astype(np.float32)
        if format is None:
            assert name != "compressed-tensors" or wanted.format == MXFP4
            tensors[f"{prefix}.weight"] = get_layout("compressed-tensors", Wanted(Integers(8), 16, "f32")).tensors(
                prefix, round_to_nearest(weight, Integers(8), find_grid(weight, Integers(8)))
            )[f"{prefix}.weight_scale"]
            continue
        found = round_to_nearest(weight, format, find_grid(weight, format, dtype=layout.scale_dtype))
        tensors |= layout.tensors(prefix, found)
        values[prefix], formats[prefix] = found, format
    left = [prefix for prefix in PREFIXES if prefix not in formats]
    stored = find_stored({"quantization_config": layout.settings(formats, left)}, tensors, formats)
    assert stored is not None
    assert set(stored.matrices) == set(formats)
    assert stored.parts == {tensor for tensor in tensors if tensor.rpartition(".")[0] in formats}
    for prefix, matrix in stored.matrices.items():
        rows, expected = matrix.rows(0, N), values[prefix]
        assert np.array_equal(rows.numbers, expected.numbers)
        codes = rows.scale if rows.scale_codes is None else rows.scale_codes
        assert np.array_equal(codes, expected.scale)
        if matrix.format.asymmetric:
            zero = expected.planes.get(ZERO)
            assert rows.zero is not None
            assert np.array_equal(rows.zero, np.full_like(rows.zero, 8) if zero is None else zero)
        np.testing.assert_array_equal(matrix.values(0, N), expected.value().astype(np.float32))
        activation = matrix.activation
        kind = "e4m3" if isinstance(wanted.format, Fp8) else "int8" if wanted.act_bits == 8 else None
        assert (activation is not None) == (kind is not None)
        if activation is not None:
            assert (activation.kind, activation.per, activation.dynamic) == (kind, "token", True)


def test_layers_may_have_formats_of_their_own() -> None:
    """Each in a group of config.json that names its layers; most layers have that of the class."""
    formats: dict[str, Any] = {
        f"model.layers.{i}.mlp.{part}": format
        for i, (part, format) in enumerate(
            [("up", Integers(4, 64)), ("up", Integers(4, 64)), ("up", Integers(4, 32)), ("up", Integers(8)),
             ("gate", Integers(8)), ("down", Integers(4, 64)), ("down", MXFP4)]
        )
    }  # fmt: skip
    layout = get_layout("compressed-tensors", Wanted(Integers(4, 64), 16, "f32"))
    rng = np.random.default_rng(0)
    tensors: dict[str, Any] = {}
    values = {}
    for prefix, format in formats.items():
        weight = rng.standard_normal((N, K)).astype(np.float32)
        values[prefix] = round_to_nearest(weight, format, find_grid(weight, format))
        tensors |= layout.tensors(prefix, values[prefix])
    settings = layout.settings(formats, ["lm_head"])
    assert settings["config_groups"]["group_0"]["targets"] == ["Linear"]
    assert len(settings["config_groups"]) == 4
    stored = find_stored({"quantization_config": settings}, tensors, formats)
    assert stored is not None
    assert set(stored.matrices) == set(formats)
    for prefix, matrix in stored.matrices.items():
        np.testing.assert_array_equal(matrix.values(0, N), values[prefix].value().astype(np.float32))


@pytest.mark.parametrize(
    ("name", "wanted", "sentence"),
    [
        ("ggml", Wanted(Integers(4, 64), 16, "f32"), "--format 'ggml' is unknown: use compressed-tensors, gptq, awq"),
        ("gptq", Wanted(Integers(4, 64), 8, "f32"), "--format gptq holds no rounded activations"),
        ("awq", Wanted(Integers(8), 16, "f32"), "--format awq holds numbers of 4 bits alone"),
    ],
)
def test_what_a_layout_does_not_hold(name: str, wanted: Wanted, sentence: str) -> None:
    with pytest.raises(QuantizeError, match=sentence):
        get_layout(name, wanted)
