"""Nodes of traced programs: the op each one calls, and its arguments. Imports no tvm."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

OWN = "llmc"
"""The namespace of llmc's own ops, which have kernel templates."""


def schema_of(node: fx.Node) -> Any | None:
    """The schema of the op that a node calls; None for other nodes."""
    return getattr(node.target, "_schema", None)


def llmc_op(node: fx.Node) -> str | None:
    """The op's name in the llmc namespace; None for any other node."""
    schema = schema_of(node)
    namespace, _, name = schema.name.partition("::") if schema is not None else ("", "", "")
    return name if namespace == OWN else None


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """The arguments of an op by name, with defaults filled in."""
    values: dict[str, Any] = {}
    schema = schema_of(node)
    for i, argument in enumerate(schema.arguments if schema is not None else ()):
        given = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name, argument.default_value)
        values[argument.name] = given
    return values


def ops_of(program: ExportedProgram) -> set[tuple[str, str, str]]:
    """(namespace, name, overload) of every op in a program, arithmetic on sizes excluded."""
    found = {
        (namespace, name, n.target._overloadname)
        for n in program.graph.nodes
        if n.op == "call_function" and isinstance(n.target, torch._ops.OpOverload)
        for namespace, name in (n.target._schema.name.split("::"),)
    }
    return {op for op in found if op[1] != "sym_size"}
