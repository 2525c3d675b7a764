"""Relax main → command list: kernels, operands and arena offsets of one bucket."""

from __future__ import annotations

from dataclasses import replace

import tvm
from tvm import relax

from llmc.compiler.config import CompileError
from llmc.compiler.graph.commands import Command, CommandList, Operand, Site, round_up
from llmc.compiler.graph.ir_spec import verify_operand
from llmc.compiler.graph.lowered import SITE_PREFIX, Lowered
from llmc.compiler.graph.passes.fuse import NAME, PROGRAM
from llmc.compiler.ops.definition import BufferSource, GraphParams
from llmc.compiler.ops.fused import fused_spec
from llmc.compiler.ops.registry import get_op
from llmc.compiler.weight_request import kv_scales_name
from llmc.graphs_format import ALIGNMENT, INPUTS, MAX_BUFFERS


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
    packed = _packed(bindings, lowered)
    for binding in bindings:
        call = binding.value
        if isinstance(call, relax.Var):
            if call in values:
                values[binding.var] = values[call]
            continue
        if not isinstance(call, relax.Call):
            raise CompileError(f"cannot emit {type(call).__name__} {call}")
        if isinstance(call.op, relax.ExternFunc):
            commands.extend(_commands(call, values, lowered, graph))
            continue
        if isinstance(call.op, tvm.ir.GlobalVar):
            commands.append(_fused(module[call.op], call, values, packed, graph))
            continue
        op = call.op.name if isinstance(call.op, tvm.ir.Op) else str(call.op)
        if op == "relax.memory.alloc_storage":
            storages[binding.var] = arena
            arena += round_up(int(call.args[0].values[0]), ALIGNMENT)
        elif op == "relax.memory.alloc_tensor":
            offset = storages[call.args[0]] + int(call.args[1].value)
            shape, dtype = call.args[2], str(call.args[3].value)
            values[binding.var] = Operand("arena", offset=offset, nbytes=_nbytes(shape, dtype))
        elif op == "relax.builtin.alloc_tensor":
            if binding.var != output:
                raise CompileError(f"tensor {binding.var.name} was left out of the memory plan")
            shape, dtype = call.args[0], str(call.args[1].value)
            values[binding.var] = Operand("output", nbytes=_nbytes(shape, dtype))
        elif op not in ("relax.memory.kill_tensor", "relax.memory.kill_storage"):
            raise CompileError(f"operation {op} is neither an llmc op nor a function of rows")
    if not commands or commands[-1].operands[-1].kind != "output":
        raise CompileError("the graph's last command does not write its output")
    _check_weights(commands)
    # Behind the planned values: what the commands of one site pass to each other, the same place for all sites.
    scratch = max(get_op(site.op).scratch(site, graph)[1] for site in lowered.sites)
    commands = [replace(c, operands=tuple(_placed(o, arena) for o in c.operands)) for c in commands]
    return CommandList(tuple(commands), arena + round_up(scratch, ALIGNMENT))


def _site(call: relax.Call, lowered: Lowered) -> tuple[Site, dict[str, relax.Var]]:
    """The llmc op that is called, and its tensors by name."""
    name = str(call.op.global_symbol)
    if not name.startswith(SITE_PREFIX):
        raise CompileError(f"call of unknown function {name}")
    site = lowered.sites[int(name.removeprefix(SITE_PREFIX))]
    arguments = list(call.args)
    if len(arguments) == 1 and isinstance(arguments[0], relax.Tuple):
        arguments = list(arguments[0].fields)
    return site, dict(zip((*site.tensors, "out"), arguments, strict=True))


def _packed(bindings: list[relax.Binding], lowered: Lowered) -> set[relax.Var]:
    """The tensors in the packed layout: whatever a linear reads, and what some llmc ops write."""
    packed = set()
    for binding in bindings:
        call = binding.value
        if isinstance(call, relax.Call) and isinstance(call.op, relax.ExternFunc):
            site, tensors = _site(call, lowered)
            op = get_op(site.op)
            names = (*op.packed_arguments, *(("out",) if op.packed_result else ()))
            packed |= {tensors[name] for name in names}
    # A call writes an allocation, which later calls read by another name.
    for binding in reversed(bindings):
        if isinstance(binding.value, relax.Var):
            same = {binding.var, binding.value}
            packed |= same if packed & same else set()
    return packed


def _fused(
    func: tvm.tirx.PrimFunc,
    call: relax.Call,
    values: dict[relax.Var, Operand],
    packed: set[relax.Var],
    graph: GraphParams,
) -> Command:
    """The kernel of a function of rows; scalar constants are part of its program."""
    arguments = [a for a in call.args if isinstance(a, relax.Var)]
    if len(arguments) > MAX_BUFFERS:
        raise CompileError(f"{func.attrs[NAME]} has {len(arguments)} tensors, at most {MAX_BUFFERS} fit a kernel")
    operands = tuple(values[a] for a in arguments)
    layouts = tuple("packed" if a in packed else operand.kind for a, operand in zip(arguments, operands, strict=True))
    return Command(fused_spec(str(func.attrs[NAME]), str(func.attrs[PROGRAM]), layouts, graph), operands, -1)


def _check_weights(commands: list[Command]) -> None:
    """A packed weight has no rows that a generic op could read."""
    readers: dict[str, set[bool]] = {}
    for command in commands:
        for operand in command.operands:
            if operand.kind == "weight":
                readers.setdefault(operand.name, set()).add(command.spec.op == "fused")
    for name, kinds in readers.items():
        if len(kinds) > 1:
            raise CompileError(f"weight {name} is read by generic ops and by llmc ops; give each a weight of its own")


def _placed(operand: Operand, scratch: int) -> Operand:
    """An operand in scratch memory, which begins at `scratch`, as one in the arena."""
    return replace(operand, kind="arena", offset=scratch + operand.offset) if operand.kind == "scratch" else operand


def _commands(
    call: relax.Call, values: dict[relax.Var, Operand], lowered: Lowered, graph: GraphParams
) -> list[Command]:
    site, variables = _site(call, lowered)
    op, tensors = get_op(site.op), {name: values[variable] for name, variable in variables.items()}
    for name, variable in variables.items():
        verify_operand(site, name, str(variable.ty.dtype), graph.act_dtype)
    scratch, _ = op.scratch(site, graph)

    def operand(source: str) -> Operand:
        match source:
            case BufferSource.K_POOL:
                return Operand("k_pool", layer=site.layer)
            case BufferSource.V_POOL:
                return Operand("v_pool", layer=site.layer)
            case BufferSource.KV_SCALES:
                return Operand("weight", kv_scales_name(site.layer))
            case BufferSource.SCRATCH:
                return Operand("scratch", nbytes=op.scratch_bytes(site, graph))
        if source in scratch:
            offset, nbytes = scratch[source]
            return Operand("scratch", offset=offset, nbytes=nbytes)
        tensor, _, plane = source.partition(".")
        return Operand("weight", f"{tensors[tensor].name}.{plane}") if plane else tensors[tensor]

    return [
        Command(call.spec, tuple(operand(source) for source in call.buffers), site.layer)
        for call in op.kernels(site, graph)
    ]
