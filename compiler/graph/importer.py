"""Wraps TVM's importer of exported programs; records which node made each variable and which values are packed.

A value that feeds a linear is packed (FORMAT.md); all others are plain. Where an op needs the other layout, an identity
op converts it, and is fused into a neighbour like any elementwise op.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx
from tvm import relax, te, tirx
from tvm.relax.frontend.torch.exported_program_translator import ExportedProgramImporter

from llmc.compiler.config import CompileError
from llmc.compiler.dtypes import F32, FLOATS_BY_LONG_NAME
from llmc.compiler.graph.commands import round_up
from llmc.compiler.graph.nodes import arguments_of, llmc_op
from llmc.compiler.ops.registry import OPS

Converter = Callable[[fx.Node, Any], relax.Var]


def _describe(node: fx.Node) -> str:
    """An op for error texts, as in `op aten.softmax.int (node softmax, [s0, 60] to [s0, 60])`."""

    def shape(value: Any) -> str:
        if isinstance(value, (list, tuple)):
            return ", ".join(map(shape, value))
        return f"[{', '.join(map(str, value.shape))}]" if hasattr(value, "shape") else str(value)

    inputs = ", ".join(shape(n.meta["val"]) for n in node.all_input_nodes if "val" in n.meta)
    result = shape(node.meta["val"]) if "val" in node.meta else "?"
    return f"op {node.target} (node {node.name}, {inputs or 'nothing'} to {result})"


class Importer(ExportedProgramImporter):  # type: ignore[misc]
    """One import. Afterwards, `describe` names the source of each variable of the module."""

    def __init__(self) -> None:
        super().__init__()
        self._packed: dict[fx.Node, relax.Var] = {}
        self._reads_packed: dict[str, fx.Node | None] = {}
        self._only_packed: set[fx.Node] = set()
        self._made: list[tuple[int, fx.Node]] = []
        self._llmc: dict[str, Converter] = {}

    def run(self, program: Any, converters: dict[str, Converter]) -> Any:
        """The Relax module. Raises CompileError naming an op that TVM cannot import."""
        self._llmc = converters
        return self.from_exported_program(program, True, True, False, dict(converters))

    def value_of(self, name: str, node: fx.Node) -> relax.Expr:
        """The value of an argument of the op that is being converted, in the layout that the op reads."""
        return self._packed[node] if self._reads_packed.get(name) is node else self.env[node]

    def describe(self, variable: str) -> str:
        """The op that made a variable of the imported module, for error texts."""
        number = _number(variable)
        for made, node in self._made:
            if number is not None and made >= number:
                return _describe(node)
        return f"the op of {variable}"

    def _check_unsupported_func_type(self, nodes: Sequence[fx.Node]) -> None:
        """Overrides TVM's hook, called before the first node is translated. Completes the converters and wraps them."""
        for name, reduce in (("amax.default", relax.op.max), ("amin.default", relax.op.min)):
            self.convert_map.setdefault(name, self._extreme(reduce))
        for node in nodes:
            if node.op == "call_function" and getattr(node.target, "__name__", "") not in self.convert_map:
                known = f"llmc::{llmc_op(node)} has no kernel template" if llmc_op(node) else "cannot be compiled"
                raise CompileError(f"{_describe(node)}: it {known}; write it with other ops")
        for name, convert in list(self.convert_map.items()):
            if isinstance(name, str):
                self.convert_map[name] = self._watched(convert, name in self._llmc)

    def _watched(self, convert: Callable[..., Any], own: bool) -> Callable[..., Any]:
        def watched(node: fx.Node, *_: Any) -> Any:
            op = llmc_op(node)
            definition = OPS.get(op or "")
            names = definition.packed_arguments if definition else ()
            arguments = arguments_of(node) if names else {}
            wants = arguments[names[0]] if names else None
            # A block may be added to its own input: that is read in both layouts.
            plain = any(value is wants for name, value in arguments.items() if name not in names)
            for source in node.all_input_nodes:
                if source in self._only_packed and (source is not wants or plain):
                    self.env[source] = self._unpack(source)
                    self._only_packed.remove(source)
            if wants is not None and wants not in self._packed:
                self._packed[wants] = self._pack(wants)
            self._reads_packed = {name: wants for name in names}
            try:
                made = convert(node, self) if own else convert(node)
            except (AssertionError, KeyError, NotImplementedError, TypeError, ValueError) as error:
                if isinstance(error, CompileError):
                    raise
                raise CompileError(f"{_describe(node)} cannot be imported: {error}") from error
            for var in made if isinstance(made, (list, tuple)) else (made,):
                number = _number(var.name) if isinstance(var, relax.Var) else None
                if number is not None:
                    self._made.append((number, node))
            if definition is not None and definition.packed_result:
                self._packed[node] = made
                self._only_packed.add(node)
            return made

        return watched

    def _extreme(self, reduce: Callable[..., relax.Expr]) -> Callable[[fx.Node], relax.Var]:
        """Converter for amax and amin, which TVM's importer lacks."""

        def convert(node: fx.Node) -> relax.Var:
            arguments = arguments_of(node)
            reduced = reduce(self.env[arguments["self"]], list(arguments["dim"]) or None, arguments["keepdim"])
            return self.block_builder.emit(reduced)

        return convert

    def _pack(self, node: fx.Node) -> relax.Var:
        """The value packed for a linear: columns padded with zeros to whole words."""
        plain = self.env[node]
        width = int(plain.ty.shape[1])
        dtype = FLOATS_BY_LONG_NAME.get(str(plain.ty.dtype), F32)
        wide = round_up(width, dtype.per_word)

        def pack(x: te.Tensor) -> te.Tensor:
            def element(i: Any, j: Any) -> Any:
                return x[i, j] if wide == width else tirx.if_then_else(j < width, x[i, j], _zero(x.dtype))

            return te.compute((x.shape[0], wide), element, name="pack")

        return self.block_builder.emit_te(pack, plain, primfunc_name_hint="pack")

    def _unpack(self, node: fx.Node) -> relax.Var:
        """The value in the plain layout that other ops read."""
        width = int(node.meta["val"].shape[-1])
        return self.block_builder.emit_te(
            lambda x: te.compute((x.shape[0], width), lambda i, j: x[i, j], name="unpack"),
            self.env[node],
            primfunc_name_hint="unpack",
        )


def _zero(dtype: str) -> Any:
    return tirx.const(0.0, dtype)


def _number(variable: str) -> int | None:
    """The number in a variable's name (lv, lv1, lv2, …, in order of creation); None for another name."""
    found = re.fullmatch(r"lv(\d*)", variable)
    return int(found[1] or 0) if found else None
