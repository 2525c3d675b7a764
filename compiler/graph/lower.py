"""ExportedProgram → Relax; every llmc op becomes a call of a kernel template at a numbered site.

A call names its site (`llmc_site_7`); the site holds static attributes, which Relax need not understand.
Every other op is legalised and fused into functions of rows (`passes/fuse.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx
from tvm import relax

from llmc.compiler.config import CompileError
from llmc.compiler.dtypes import F32, FLOATS
from llmc.compiler.graph.commands import Site
from llmc.compiler.graph.export import Exported
from llmc.compiler.graph.importer import Importer
from llmc.compiler.graph.ir_spec import verify_lowered, verify_site
from llmc.compiler.graph.lowered import SITE_PREFIX, Lowered
from llmc.compiler.graph.nodes import OWN, arguments_of, llmc_op, ops_of
from llmc.compiler.graph.passes import row_symbol
from llmc.compiler.graph.passes.fuse import calls_of_tir, fuse_rows
from llmc.compiler.ops.definition import Call, OpDef
from llmc.compiler.ops.registry import get_op
from llmc.graphs_format import INPUTS


def _result_type(op: OpDef, values: dict[str, Any], tensors: dict[str, Any]) -> relax.TensorType:
    """Shape and dtype of the op's result."""
    act = FLOATS.get(values.get("act_dtype", F32.name))
    if act is None:
        raise CompileError(
            f"activation dtype {values['act_dtype']!r} of op {op.name} is not one of {', '.join(FLOATS)}"
        )
    shape, dtype = op.result(Call({name: tensor.ty.shape for name, tensor in tensors.items()}, values, act))
    return relax.TensorType(shape, dtype)


def _converter(op: str, sites: list[Site], samples: str) -> Callable[[fx.Node, Any], relax.Var]:
    def convert(node: fx.Node, importer: Any) -> relax.Var:
        values = arguments_of(node)
        tensors = {name: importer.value_of(name, value) for name, value in values.items() if isinstance(value, fx.Node)}
        attributes = {
            name: value for name, value in values.items() if value is not None and not isinstance(value, fx.Node)
        }
        shapes = {name: node_value.meta["val"].shape for name, node_value in values.items() if name in tensors}
        attributes["weight_shapes"] = {
            name: tuple(shape) for name, shape in shapes.items() if all(isinstance(d, int) for d in shape)
        }
        attributes["widths"] = {name: shape[-1] for name, shape in shapes.items() if isinstance(shape[-1], int)}
        out_type = _result_type(get_op(op), values, tensors)
        # Tensor names that ops of other kinds also use.
        attributes["shared"] = [
            name
            for name, value in values.items()
            if isinstance(value, fx.Node) and any(llmc_op(user) not in (None, op) for user in value.users)
        ]
        attributes["on_samples"] = str(node.meta["val"].shape[0]) == samples
        verify_site(op, node.name, tensors)
        sites.append(Site(op, attributes, tuple(tensors)))
        call = relax.call_dps_packed(f"{SITE_PREFIX}{len(sites) - 1}", list(tensors.values()), out_type)
        return importer.block_builder.emit(call)

    return convert


def lower(exported: Exported) -> Lowered:
    """Imports the traced program. Raises CompileError naming an op that cannot be compiled."""
    sites: list[Site] = []
    program = exported.program
    ops = ops_of(program)
    placeholders = [n for n in program.graph.nodes if n.op == "placeholder"]
    samples = str(placeholders[INPUTS.index("sample_index")].meta["val"].shape[0])
    importer = Importer()
    module = importer.run(
        program,
        {
            f"{name}.{overload}": _converter(name, sites, samples)
            for namespace, name, overload in ops
            if namespace == OWN
        },
    )
    names = [*exported.inputs, *exported.weights]
    num_params = len(module["main"].params)
    if num_params != len(names):
        raise CompileError(f"the traced graph has {num_params} parameters where {len(names)} were expected")
    # The importer packs an input of a linear by a function of rows unless a norm has already packed it.
    if any(namespace != OWN for namespace, _, _ in ops) or any(calls_of_tir(module["main"])):
        symbols = {row_symbol(module, "input_ids"): "tokens", row_symbol(module, "sample_index"): "samples"}
        module = fuse_rows(module, symbols, importer.describe)
    lowered = Lowered(module, tuple(sites), tuple(names))
    verify_lowered(lowered)
    return lowered
