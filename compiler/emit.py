"""Relax main → command list: kernels, operands and arena offsets of one bucket."""

from __future__ import annotations

import tvm
from tvm import relax

from llmc.compiler.config import CompileError
from llmc.compiler.export import INPUTS
from llmc.compiler.graph import Command, CommandList, Operand, Site
from llmc.compiler.lower import SITE_PREFIX, Lowered
from llmc.compiler.templates import BufferSource, GraphParams, command_of

ARENA_ALIGNMENT = 64


def _nbytes(shape: relax.Expr, dtype: str) -> int:
    total = int(tvm.DataType(dtype).bits) // 8
    for dim in shape.values:
        total *= int(dim)
    return total


def emit(module: tvm.IRModule, lowered: Lowered, graph: GraphParams) -> CommandList:
    """Reads off the planned straight line of `passes.bind_bucket`. Raises CompileError on anything else."""
    main = module["main"]
    values: dict[relax.Var, Operand] = {}
    for i, (param, name) in enumerate(zip(main.params, lowered.params, strict=True)):
        values[param] = Operand("input" if i < len(INPUTS) else "weight", name)
    storages: dict[relax.Var, int] = {}
    output = main.body.body
    bindings = [b for block in main.body.blocks for b in block.bindings]
    aliases = {b.var: b.value for b in bindings if isinstance(b.value, relax.Var)}
    while output in aliases:
        output = aliases[output]
    arena = 0
    commands: list[Command] = []
    for binding in bindings:
        call = binding.value
        if isinstance(call, relax.Var):
            if call in values:
                values[binding.var] = values[call]
            continue
        if not isinstance(call, relax.Call):
            raise CompileError(f"cannot emit {type(call).__name__} {call}")
        if isinstance(call.op, relax.ExternFunc):
            commands.append(_command(call, values, lowered, graph))
            continue
        op = call.op.name if isinstance(call.op, tvm.ir.Op) else str(call.op)
        if op == "relax.memory.alloc_storage":
            storages[binding.var] = arena
            arena += -(-int(call.args[0].values[0]) // ARENA_ALIGNMENT) * ARENA_ALIGNMENT
        elif op == "relax.memory.alloc_tensor":
            offset = storages[call.args[0]] + int(call.args[1].value)
            shape, dtype = call.args[2], str(call.args[3].value)
            values[binding.var] = Operand("arena", offset=offset, nbytes=_nbytes(shape, dtype))
        elif op == "relax.builtin.alloc_tensor":
            if binding.var != output:
                raise CompileError(f"tensor {binding.var.name_hint} was left out of the memory plan")
            shape, dtype = call.args[0], str(call.args[1].value)
            values[binding.var] = Operand("output", nbytes=_nbytes(shape, dtype))
        elif op not in ("relax.memory.kill_tensor", "relax.memory.kill_storage"):
            raise CompileError(f"operation {op} has no kernel template; write it with the llmc ops")
    if not commands or commands[-1].operands[-1].kind != "output":
        raise CompileError("the graph's last command does not write its output")
    return CommandList(tuple(commands), arena)


def _command(call: relax.Call, values: dict[relax.Var, Operand], lowered: Lowered, graph: GraphParams) -> Command:
    name = str(call.op.global_symbol)
    if not name.startswith(SITE_PREFIX):
        raise CompileError(f"call of unknown function {name}")
    site: Site = lowered.sites[int(name.removeprefix(SITE_PREFIX))]
    arguments = list(call.args)
    if len(arguments) == 1 and isinstance(arguments[0], relax.Tuple):
        arguments = list(arguments[0].fields)
    tensors = dict(zip((*site.tensors, "out"), (values[a] for a in arguments), strict=True))
    spec, sources = command_of(site, graph)
    operands = []
    for source in sources:
        if source == BufferSource.K_POOL:
            operands.append(Operand("k_pool", layer=site.layer))
        elif source == BufferSource.V_POOL:
            operands.append(Operand("v_pool", layer=site.layer))
        else:
            operands.append(tensors[source])
    return Command(spec, tuple(operands), site.layer)
