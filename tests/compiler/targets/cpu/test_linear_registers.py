"""Assembly of linear layers: in loops of products, sums stay in registers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import pytest

from llmc.compiler.targets.cpu.kernels.codegen import llvm_text
from llmc.compiler.targets.cpu.kernels.linear.spec import linear_quant_spec, linear_spec
from llmc.compiler.targets.cpu.kernels.registry import build_kernel
from llmc.compiler.targets.cpu.target import TARGETS
from llmc.quantize import SCHEMES

from support.marks import rare

N, K = 896, 4864  # more panels than any kernel reads side by side
_INSTRUCTION = re.compile(r"\s+(\w+)\s+(.*)")
_SPILLED = re.compile(r"%[xyz]mm(\d+), (?:-?\d+)?\(%rsp\)$")
_RESULT = re.compile(r"(?:.*, )?%[xyz]mm(\d+)$")
_PRODUCT = re.compile(r"vfn?madd\w+ps|vpmaddwd|vdpbf16ps|vpdpbusd")
_SUM = re.compile(r"vfn?madd\w+ps|vpaddd|vdpbf16ps|vpdpbusd")


def innermost_loops(code: str) -> Iterator[list[tuple[str, str]]]:
    """(instruction, operands) of each loop without another loop inside."""
    start: dict[str, int] = {}
    found: list[tuple[str, str]] = []
    last_label = 0
    for line in code.splitlines():
        line = line.partition("#")[0].rstrip()
        if line.startswith(".LBB"):
            start[line.removesuffix(":")] = last_label = len(found)
        elif line.startswith("\t") and (instruction := _INSTRUCTION.match(line)):
            found.append((instruction[1], instruction[2]))
            if instruction[1].startswith("j") and (begin := start.get(instruction[2])) is not None:
                yield found[begin:]
                start = {label: at for label, at in start.items() if at > begin}
    assert last_label


def stored_sums(loop: Sequence[tuple[str, str]]) -> int:
    """Sums that a loop writes to the stack at a fixed place, where the next product finds them."""
    made: dict[str, str] = {}
    count = 0
    for name, operands in loop:
        if spilled := _SPILLED.match(operands):
            count += bool(_SUM.match(made.get(spilled[1], "")))
        elif result := _RESULT.match(operands):
            made[result[1]] = name
    return count


@pytest.mark.parametrize(
    ("level", "scheme", "tile"),
    [
        ("x86-64-v4", "w8a16", 8),
        ("x86-64-v4", "w4a16", 8),
        ("x86-64-v4", "w4a16", 1),
        ("x86-64-v3", "w8a16", 4),
        ("x86-64-v3", "bf16", 1),
        *(rare("x86-64-v4", scheme, tile) for scheme in ("w8a16", "w4a16", "bf16") for tile in (2, 4)),
        *(rare("x86-64-v4", *case) for case in (("w8a16", 1), ("bf16", 1), ("bf16", 8))),
        *(rare("x86-64-v3", scheme, tile) for scheme in ("w4a16", "bf16") for tile in (2, 4)),
        *(rare("x86-64-v3", scheme, 1) for scheme in ("w8a16", "w4a16")),
    ],
)
def test_sums_stay_in_registers(level: str, scheme: str, tile: int) -> None:
    """Through the stack, a sum is a chain of stores and loads, as slow as all other products of a loop together."""
    spec = linear_spec(N, K, tile, "bf16")
    if scheme != "bf16":
        spec = linear_quant_spec(N, K, tile, "bf16", SCHEMES[scheme].weight)
    code = llvm_text(build_kernel(spec, TARGETS[level]), TARGETS[level], "asm")
    products = [loop for loop in innermost_loops(code) if sum(bool(_PRODUCT.match(name)) for name, _ in loop) >= 8]
    assert products
    assert [stored_sums(loop) for loop in products] == [0] * len(products)
