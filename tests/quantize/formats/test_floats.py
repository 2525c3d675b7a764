"""FP8 and 4-bit codes as weight formats: rounding, kernels called directly, and models that are rounded to them."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from llmc.quantize import SCHEMES, QuantConfig, QuantizeError
from llmc.quantize.formats.affine import Affine
from llmc.quantize.formats.codes import E8M0, Codes
from llmc.quantize.formats.fp8 import VALUES, Fp8, nearest
from llmc.quantize.formats.integers import Integers
from llmc.quantize.formats.tables import TABLES
from llmc.quantize.rtn import quantize
from llmc.quantize.scheme import recorded_scheme, stored_scheme

from support.compiled import compile_tiny
from support.new_format import check_kernels, check_rounding
from support.quantized_model import LADDER, logits_error, make_model
from support.verified import Claim, verifies

MXFP4, IQ4 = Codes("e2m1", 32, E8M0), Codes("iq4_nl", 32)


@pytest.mark.parametrize(
    "format", [Fp8(), Fp8(32), Codes("nf4", 64), Codes("fp4", 32), Codes("e2m1", -1), IQ4], ids=str
)
def test_the_nearest_number(format: Fp8 | Codes) -> None:
    check_rounding(format)


def test_rounding_to_fp8_is_ieee() -> None:
    """All 16-bit halves of float32 in its range, and both neighbours of each."""
    every = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)
    some = every[np.abs(every) <= 448]
    values = np.concatenate([some, np.nextafter(some, np.float32(0)), np.nextafter(some, some * 2)])
    values = np.concatenate([values[np.abs(values) <= 448], (VALUES[:126] + VALUES[1:127]) / 2])
    expected = values.astype(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(nearest(values), expected.view(np.uint8))
    assert list(nearest(np.array([1e9, -1e9, np.inf], np.float32))) == [0x7E, 0xFE, 0x7E]
    np.testing.assert_array_equal(
        VALUES, np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    )


def test_rounding_to_mxfp4() -> None:
    """By hand: the power of two, the numbers; ties go to even ones, what is beyond 6 becomes 6."""
    weight = np.zeros((3, 32), np.float32)
    weight[0, :9] = 4, 5, -5, 3.5, 0.25, -0.75, 6.5, 2.5, -1.25
    weight[1, :3] = 7, -0.5, 0.75  # 7 is nearer to 8 than to 6
    found = quantize(weight, MXFP4)
    assert [int(power) for power in found.planes["scale"][:2, 0]] == [127, 128]
    assert list(found.value()[0, :9]) == [4, 4, -4, 4, 0, -1, 6, 2, -1]
    assert list(found.value()[1, :3]) == [8, 0, 1]
    assert not found.value()[2].any()
    extremes = np.repeat(np.array([[3e38], [1e-44]], np.float32), 32, 1)
    found = quantize(extremes, MXFP4)
    assert np.abs(found.value()[0] / 3e38 - 1).max() < 0.2
    assert np.abs(found.value()[1]).max() < 1e-37
    with pytest.raises(QuantizeError, match="infinite or not a number"):
        quantize(np.full((1, 32), np.inf, np.float32), MXFP4)
    assert MXFP4.bits_per_weight(64) == 4.25


def test_the_furthest_value_is_the_end_of_a_table_that_is_longer_on_one_side() -> None:
    weight = np.zeros((2, 32), np.float32)
    weight[0, :3], weight[1, :3] = (127, -100, 0), (-254, 226, 2)
    found = quantize(weight, IQ4)
    assert list(found.scale[:, 0]) == [-1, 2]
    assert list(found.value()[0, :3]) == [127, -89, -1]
    assert list(found.value()[1, :3]) == [-254, 226, 2]


@pytest.mark.slow
@pytest.mark.native
@pytest.mark.parametrize("format", [Fp8(64), IQ4, MXFP4, Codes("e2m1", 16)], ids=str)
def test_kernels(format: Fp8 | Codes) -> None:
    check_kernels(format)


@verifies(lambda scheme: [Claim("qwen2", scheme=scheme, target="reference")])
@pytest.mark.parametrize(
    ("scheme", "model"),
    [("fp8", "tied"), ("mxfp4", "plain"), ("nvfp4", "plain"), ("nf4", "plain"), ("fp4", "plain"), ("iq4_nl", "plain")],
)
def test_models_are_rounded_to_them(scheme: str, model: str, tmp_path: Path, kernel_cache: Path) -> None:
    """Of the plain kernels; those of this machine read the same in tests/compiler/test_quantized_checkpoints.py."""
    config, path = QuantConfig(scheme), make_model(tmp_path / "model", model)
    artifact = compile_tiny(
        path, tmp_path / "out", kernel_cache, buckets=LADDER, dtype="f32", quant=config, target="reference"
    )
    assert logits_error(path, config, artifact) <= 1e-5
    artifact.close()


def test_a_stored_format_has_the_scheme_that_is_closest() -> None:
    names = {
        "fp8": Fp8(128),
        "mxfp4": Codes("e2m1", 64, E8M0),
        "nvfp4": Codes("e2m1", 32),
        "nf4": Codes("nf4", 32),
        "fp4": Codes("fp4", 64),
        "iq4_nl": Affine(4, 32, offsets=False, table="iq4_nl"),
        "w5a16": Affine(5, scale_kind="f16"),
        "w8a16": Integers(8, 32, scale_kind="f16"),
    }
    for name, format in names.items():
        scheme = stored_scheme(format, int8_inputs=False)
        assert (scheme.name, scheme.weight, scheme.act_bits) == (name, format, 16)
        assert recorded_scheme(name, format) == scheme
    with pytest.raises(QuantizeError, match="scheme 'w5a16' is unknown"):
        recorded_scheme("w5a16", Affine(4))
    assert {
        table for scheme in SCHEMES.values() if isinstance(scheme.weight, Codes) for table in [scheme.weight.table]
    } == set(TABLES)
