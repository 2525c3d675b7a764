"""Helpers of AMX's tile registers: the instruction of each, and what rows are copied for them."""

from __future__ import annotations

import re

import numpy as np
import pytest

from llmc.compiler.targets.cpu.kernels.ir import tiles, vector
from llmc.compiler.targets.cpu.target import TARGETS, native_target

from support.ir_probe import assembly, call, signatures

pytestmark = pytest.mark.native

AMX = TARGETS["sapphirerapids"]
DOTS = [(0, 6, 7), (5, 6, 7)]


def instruction(kind: str, name: str) -> list[str]:
    text = vector.helpers(AMX.mcpu) + tiles.instructions(kind, DOTS)
    found: list[str] = re.findall(r"^\s+((?:tile|ldtile|tdp)[^\n#]*)", assembly(text, name, AMX), re.MULTILINE)
    return [re.sub(r"\s+", " ", line).strip().replace("%", "") for line in found]


@pytest.mark.parametrize(("kind", "product"), [("s8u8", "tdpbsud"), ("bf16", "tdpbf16ps")])
def test_each_helper_is_one_instruction(kind: str, product: str) -> None:
    for c, a, b in DOTS:
        assert instruction(kind, f"tile_dot_{kind}_{c}_{a}_{b}") == [f"{product} tmm{b}, tmm{a}, tmm{c}"]
    for n in range(8):
        assert instruction(kind, f"tile_zero_{n}") == [f"tilezero tmm{n}"]
        assert re.fullmatch(rf"tileloadd \(.*\), tmm{n}", instruction(kind, f"tile_load_{n}")[0])
        assert re.fullmatch(rf"tilestored tmm{n}, \(.*\)", instruction(kind, f"tile_store_{n}")[0])
    assert instruction(kind, "tile_configure")[0].startswith("ldtilecfg")
    assert instruction(kind, "tile_release") == ["tilerelease"]
    names = {"tile_configure", "tile_release", *(f"tile_dot_{kind}_{c}_{a}_{b}" for c, a, b in DOTS)}
    names |= {f"tile_{name}_{n}" for name in ("zero", "load", "store") for n in range(8)}
    assert signatures(tiles.instructions(kind, DOTS)).keys() == names


@pytest.mark.parametrize("row_tile", [1, 2, 4, 8])
@pytest.mark.parametrize("words", [1, 3, 8, 16])
def test_rows_of_a_row_tile(row_tile: int, words: int) -> None:
    target = native_target()
    text = vector.helpers(target.mcpu) + tiles.rows_helpers(row_tile, [words])
    given = np.arange(1, words * row_tile + 1, dtype=np.int32)
    out = np.full(16 * row_tile, -1, np.int32)
    call(text, f"tile_rows_{words}", target, given, out)
    expected = np.zeros((row_tile, 16), np.int32)
    expected[:, :words] = given.reshape(words, row_tile).T
    np.testing.assert_array_equal(out.reshape(row_tile, 16), expected)
