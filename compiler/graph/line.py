"""The lowered model as plain data: its calls in order, read from Relax once for all buckets."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import relax, tirx

from llmc.compiler.config import CompileError
from llmc.compiler.graph.commands import Site
from llmc.compiler.graph.lowered import SITE_PREFIX, Lowered
from llmc.compiler.graph.passes import row_symbol
from llmc.compiler.graph.passes.fuse import NAME, PROGRAM
from llmc.compiler.ops.registry import get_op

TOKENS, SAMPLES = "tokens", "samples"


@dataclass(frozen=True)
class Value:
    """A tensor. bits: per element. dims: integers, TOKENS or SAMPLES; empty for a parameter."""

    dtype: str
    bits: int
    dims: tuple[int | str, ...] = ()

    def elements(self, rows: dict[str, int]) -> int:
        """The number of elements, given the values of TOKENS and SAMPLES in `rows`."""
        total = 1
        for dim in self.dims:
            total *= rows[dim] if isinstance(dim, str) else dim
        return total


@dataclass(frozen=True)
class Step:
    """A call. reads, out: value numbers. site: number of the llmc op; None for a function of rows, named by `name` and
    defined by `program`."""

    reads: tuple[int, ...]
    out: int
    site: int | None
    name: str = ""
    program: str = ""


@dataclass(frozen=True)
class Line:
    """The calls of a lowered model.

    values: all tensors, parameters first.
    uses: how often each value is read.
    packed: values in the layout that linears read.
    kinds: per site, the first site that equals it except for the layer.
    """

    values: tuple[Value, ...]
    num_params: int
    steps: tuple[Step, ...]
    output: int
    uses: tuple[int, ...]
    packed: frozenset[int]
    kinds: tuple[int, ...]


def read_line(lowered: Lowered) -> Line:
    """Reads a lowered model. Raises CompileError on a binding that is not a call with one result."""
    module, main = lowered.module, lowered.module["main"]
    symbols = {row_symbol(module, "input_ids"): TOKENS, row_symbol(module, "sample_index"): SAMPLES}
    numbers: dict[relax.Var, int] = {param: i for i, param in enumerate(main.params)}
    values = [Value(str(param.ty.dtype), _bits(param)) for param in main.params]
    functions: dict[str, tuple[str, str]] = {}
    steps: list[Step] = []
    for block in main.body.blocks:
        for binding in block.bindings:
            var, call = binding.var, binding.value
            if isinstance(call, relax.Var):
                numbers[var] = numbers[call]
                continue
            if not isinstance(call, relax.Call) or not isinstance(var.ty, relax.TensorType):
                raise CompileError(f"cannot emit {var.name}, which is no call that makes one tensor")
            callee, fields = call.args[0], call.args[1].fields
            # Scalar constants belong to the function's program.
            reads = tuple(numbers[field] for field in fields if isinstance(field, relax.Var))
            numbers[var] = len(values)
            values.append(Value(str(var.ty.dtype), _bits(var), tuple(_dim(d, var, symbols) for d in var.ty.shape)))
            if isinstance(callee, relax.ExternFunc):
                site = int(str(callee.global_symbol).removeprefix(SITE_PREFIX))
                steps.append(Step(reads, numbers[var], site))
                continue
            if callee.name_hint not in functions:
                attributes = module[callee].attrs
                functions[callee.name_hint] = str(attributes[NAME]), str(attributes[PROGRAM])
            steps.append(Step(reads, numbers[var], None, *functions[callee.name_hint]))
    output = numbers[main.body.body]
    kept = _live(steps, output)
    uses = Counter(number for step in kept for number in step.reads)
    return Line(
        tuple(values),
        len(main.params),
        tuple(kept),
        output,
        tuple(uses[number] for number in range(len(values))),
        frozenset(_packed(kept, lowered.sites)),
        _kinds(lowered.sites),
    )


def _bits(var: relax.Var) -> int:
    return int(tvm.DataType(str(var.ty.dtype)).bits)


def _dim(dim: Any, var: relax.Var, symbols: dict[str, str]) -> int | str:
    if isinstance(dim, tirx.IntImm):
        return int(dim)
    if not isinstance(dim, tirx.Var) or str(dim.name) not in symbols:
        raise CompileError(f"{var.name} has a dimension {dim}, which is neither a number nor tokens nor samples")
    return symbols[str(dim.name)]


def _live(steps: list[Step], output: int) -> list[Step]:
    """The steps whose results are used, directly or not, by the output."""
    used, kept = {output}, list[Step]()
    for step in reversed(steps):
        if step.out in used:
            used.update(step.reads)
            kept.append(step)
    return kept[::-1]


def _packed(steps: list[Step], sites: tuple[Site, ...]) -> set[int]:
    """Values in the packed layout: what linears read and some llmc ops write."""
    packed = set()
    for step in steps:
        if step.site is not None:
            site = sites[step.site]
            op, tensors = get_op(site.op), dict(zip(site.tensors, step.reads, strict=True))
            packed |= {tensors[name] for name in op.packed_arguments if name in tensors}
            if op.packed_result:
                packed.add(step.out)
    return packed


def _kinds(sites: tuple[Site, ...]) -> tuple[int, ...]:
    first: dict[str, int] = {}
    kinds = []
    for number, site in enumerate(sites):
        attributes = {name: value for name, value in site.attributes.items() if name != "layer"}
        kinds.append(first.setdefault(json.dumps([site.op, attributes, site.tensors], sort_keys=True), number))
    return tuple(kinds)
