"""Where a line of calls is cut into stages, and what passes from one stage to the next."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from llmc.compiler.config import CompileError
from llmc.compiler.graph.line import SAMPLES, TOKENS, Line
from llmc.quantize import layer_of


@dataclass(frozen=True)
class Cut:
    """The beginning of a stage: its first step, and the numbers of the values that it takes from the stage before."""

    step: int
    passed: tuple[int, ...]


def cuts_of(line: Line, params: Sequence[str], first_layers: Sequence[int]) -> list[Cut]:
    """A cut for each stage but the first.

    params: names of the line's parameters. first_layers: the first layer of each of these stages. Raises CompileError
    if a layer begins before the one ahead of it ends, or if something other than rows of float32 passes between them.
    """
    layers = [
        max((layer_of(params[number]) for number in step.reads if number < line.num_params), default=-1)
        for step in line.steps
    ]
    last_use = {number: index for index, step in enumerate(line.steps) for number in step.reads}
    last_use[line.output] = len(line.steps)
    found = []
    for first in first_layers:
        begin = 1 + max(index for index, layer in enumerate(layers) if 0 <= layer < first)
        end = min(index for index, layer in enumerate(layers) if layer >= first)
        cuts = [
            Cut(at, tuple(step.out for step in line.steps[:at] if last_use.get(step.out, -1) >= at))
            for at in range(begin, end + 1)
        ]
        plain = [cut for cut in cuts if all(_is_plain(line, number) for number in cut.passed)]
        if not plain:
            # Also if a step of this layer stands before the last one of the layer ahead of it.
            raise CompileError(
                f"what layer {first} reads of layer {first - 1} is not rows of float32, so no stage can begin there: "
                "choose another number of stages, or leave out --pipeline-parallel"
            )
        found.append(min(plain, key=lambda cut: sum(width_of(line, number) for number in cut.passed)))
    return found


def _is_plain(line: Line, number: int) -> bool:
    """Whether a value is rows of float32, one behind the other."""
    value = line.values[number]
    by_row = bool(value.dims) and value.dims[0] in (TOKENS, SAMPLES) and all(isinstance(d, int) for d in value.dims[1:])
    return by_row and value.dtype == "float32" and number not in line.packed


def width_of(line: Line, number: int) -> int:
    """Elements in a row of a value."""
    return math.prod(dim for dim in line.values[number].dims if isinstance(dim, int))
