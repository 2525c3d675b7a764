"""What a linear kernel is put together from, by problem and target, and that more can be listed."""

from __future__ import annotations

from typing import ClassVar

import pytest

from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.targets.cpu.kernels import builder as b
from llmc.compiler.targets.cpu.kernels.linear import plan as plans
from llmc.compiler.targets.cpu.kernels.linear.micro import MICRO_KERNELS
from llmc.compiler.targets.cpu.kernels.linear.micro.base import F32
from llmc.compiler.targets.cpu.kernels.linear.micro.fma import Fma
from llmc.compiler.targets.cpu.kernels.linear.plan import Loops
from llmc.compiler.targets.cpu.kernels.linear.readers import FLOATS
from llmc.compiler.targets.cpu.kernels.linear.readers.base import OfGroup, Reader
from llmc.compiler.targets.cpu.kernels.linear.spec import linear_quant_spec, linear_spec, problem_of
from llmc.compiler.targets.cpu.kernels.registry import build_kernel
from llmc.compiler.targets.cpu.target import TARGETS
from llmc.quantize import QuantizeError, WeightFormat
from llmc.quantize.formats.codes import Codes
from llmc.quantize.formats.integers import Integers
from llmc.quantize.formats.steps import Steps

W8, W4, W4_128 = Integers(8), Integers(4), Integers(4, 128)
STEPS, NF4 = Steps(64), Codes("nf4", 64)
SIDE, STREAMED = Loops.SIDE_BY_SIDE, Loops.STREAMED_BLOCKS
FEW, PANELS, GROUPS = Loops.PANELS_OF_FEW, Loops.PANELS, Loops.GROUPS_OF_PANELS


def floats(tile: int, act: str) -> KernelSpec:
    return linear_spec(96, 1024, tile, act)


def quantized(tile: int, act: str, format: WeightFormat) -> KernelSpec:
    return linear_quant_spec(96, 1024, tile, act, format)


@pytest.mark.parametrize(
    ("target", "spec", "parts", "loops"),
    [
        ("x86-64-v3", floats(1, "f32"), ("Float32", "Fma", None), [SIDE]),
        ("x86-64-v3", floats(4, "bf16"), ("Bfloat16", "Fma", None), [GROUPS]),
        ("znver4", floats(4, "bf16"), ("Bfloat16", "DotBf16", None), [SIDE]),
        ("znver4", floats(8, "bf16"), ("Bfloat16", "DotBf16", None), [SIDE, GROUPS]),
        ("x86-64-v3", floats(1, "f16"), ("Halves", "Fma", None), [SIDE]),
        ("znver4", floats(8, "f16"), ("Halves", "Fma", None), [GROUPS]),
        ("sapphirerapids", floats(8, "f16"), ("Halves", "Fma", None), [GROUPS]),
        ("sapphirerapids", floats(1, "bf16"), ("Bfloat16", "Fma", "AmxBf16"), [PANELS]),
        ("sapphirerapids", floats(8, "f32"), ("Float32", "Fma", None), [SIDE, GROUPS]),
        ("x86-64-v3", quantized(2, "i8", W8), ("EightBits", "DotU8S8", None), [SIDE]),
        ("x86-64-v3", quantized(4, "i8", W8), ("EightBits", "DotU8S8", None), [STREAMED, PANELS]),
        ("x86-64-v3", quantized(4, "bf16", W4), ("FourBits", "DotS16", None), [SIDE, FEW, PANELS]),
        ("x86-64-v3", quantized(4, "f32", W4), ("FourBits", "Fma", None), [SIDE, FEW, PANELS]),
        ("x86-64-v3", quantized(4, "bf16", NF4), ("Looked", "Fma", None), [SIDE, FEW, GROUPS]),
        ("znver4", quantized(8, "i8", W4_128), ("FourBits", "DotU8S8", None), [SIDE, FEW, PANELS]),
        ("znver4", quantized(8, "bf16", W4), ("FourBits", "DotNumbers", None), [SIDE, FEW, GROUPS]),
        ("x86-64-v3", quantized(4, "f16", W8), ("EightBits", "Fma", None), [SIDE, GROUPS]),
        ("icelake-server", quantized(8, "f32", W8), ("EightBits", "Fma", None), [SIDE, PANELS]),
        ("sapphirerapids", quantized(8, "i8", STEPS), ("Stepped", "DotU8S8", "AmxInt8"), [STREAMED, PANELS]),
        ("sapphirerapids", quantized(4, "i8", STEPS), ("Stepped", "DotU8S8", None), [STREAMED]),
    ],
)
def test_choices(target: str, spec: KernelSpec, parts: tuple[str | None, ...], loops: list[Loops]) -> None:
    plan = plans.plan(problem_of(spec, TARGETS[target]), None)
    registers = plan.registers.__name__ if plan.registers else None
    assert (type(plan.reader).__name__, type(plan.micro).__name__, registers) == parts
    assert [loop for _, loop in plan.loops] == loops
    assert plan.loops[-1][0] is None  # any number of rows


class _Negated(Reader):
    """A format of its own: every number is the negative of a float32."""

    units_of: ClassVar = {F32: 1}

    def operand_of(self, word: b.Expr, unit: int, of_group: OfGroup | None, v: int) -> b.Expr:
        return b.call("sub", b.splat(0.0), word)


class _Unfused(Fma):
    """An instruction set of its own: one without fma."""

    def multiply(self, acc: b.Expr, weight: b.Expr, value: b.Expr) -> b.Expr:
        return b.call("add", acc, b.call("mul", value, weight))


@pytest.mark.parametrize("tile", [1, 4])
def test_a_format_and_an_instruction_set_are_one_entry_each(tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, target = floats(tile, "f32"), TARGETS["x86-64-v3"]
    fused = str(build_kernel(spec, target).script())
    monkeypatch.setattr(plans, "MICRO_KERNELS", (_Unfused, *MICRO_KERNELS))
    monkeypatch.setitem(FLOATS, "f32", _Negated)
    other = str(build_kernel(spec, target).script())
    assert "llmc_fma" in fused
    assert "llmc_sub" not in fused
    assert "llmc_fma" not in other
    assert other.count("llmc_mul") == fused.count("llmc_fma")
    assert other.count("llmc_sub") > 0


def test_a_format_that_is_not_listed_is_refused() -> None:
    spec = quantized(1, "i8", W8)
    unknown = KernelSpec.of(spec.family, spec.op, **{**spec.as_dict(), "format": "ternary"})
    with pytest.raises(QuantizeError, match="weight format 'ternary' is unknown; known: integers, steps"):
        build_kernel(unknown, TARGETS["x86-64-v3"])


def test_a_part_of_the_last_row_tile_is_computed_where_that_is_faster() -> None:
    """Of rows that seldom fill tiles, such as those of an expert, in the largest tile of wide registers."""

    def fewer(target: str, spec: KernelSpec, *, uneven: bool = True) -> tuple[int, ...]:
        return plans.plan(problem_of(spec, TARGETS[target]), None, uneven=uneven).fewer_rows

    assert fewer("znver4", floats(8, "bf16")) == fewer("icelake-server", floats(8, "f16")) == (4, 6)
    assert fewer("znver4", floats(8, "bf16"), uneven=False) == fewer("znver4", floats(4, "bf16")) == ()
    assert fewer("znver4", quantized(8, "i8", W8)) == fewer("znver4", quantized(8, "bf16", W4)) == (4, 6)
    assert fewer("znver4", quantized(8, "i8", W8), uneven=False) == fewer("znver4", quantized(2, "i8", W8)) == ()
    assert fewer("x86-64-v3", floats(4, "f32")) == fewer("x86-64-v3", quantized(4, "i8", W8)) == ()
    assert fewer("sapphirerapids", quantized(8, "i8", W8)) == ()  # tile registers have rows of their own
