"""FORMAT.md's requirements on the tables of graphs.bin, checked as by the native reader: codes, indices, sizes,
reach."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from llmc.graphs_format import (
    ADAPTER_TILES,
    ADDS_BIAS,
    ADDS_RESIDUAL,
    ALIGNMENT,
    COLLECTIVE_ROWS,
    COLLECTIVES,
    DTYPE_BYTES,
    DTYPES,
    FAMILIES,
    GRAPH_INPUTS,
    INPUTS,
    MAX_BUFFERS,
    MAX_CODE_FILES,
    MAX_RANKS,
    OPERAND_KINDS,
    PHASES,
    ROPE_POSITIONS,
    STATE_SLOTS,
    STATES_USES,
    VERSION_OF_TOTALS,
)
from llmc.graphs_records import CodeRecord, CollectiveRecord, Command, Graph, ModelRecord, OperandRecord, Tables
from llmc.kv_dtypes import BY_CODE as KV_BY_CODE

_MAX_BLOCK_BYTES = 1 << 51
_MAX_ADAPTER_SLOTS, _MAX_ADAPTER_RANK = 256, 512
_MAX_WIDTH = 1 << 28
_MAX_STATES_WIDTH = 1 << 20
_ALL_REDUCE, _ALL_GATHER, _ = range(len(COLLECTIVES))
_ARENA, _WEIGHT, _INPUT, _K_POOL, _V_POOL, _OUTPUT, _ADAPTERS, _STATES = range(len(OPERAND_KINDS))
_CODE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")
"""A plain file name: an artifact must not refer outside itself."""


class FormatError(ValueError):
    """A file that is not a valid graphs.bin of this version; the message is one sentence."""


def need(condition: bool, message: str) -> None:
    if not condition:
        raise FormatError(message)


def check_tables(tables: Tables) -> None:
    """Raises FormatError with one sentence for the first violation of FORMAT.md."""
    _check_code(tables.code)
    _check_model(tables.model)
    _check_kernels(tables)
    _check_weights(tables)
    _check_adapters(tables)
    _check_stages(tables)
    _check_kv_layers(tables)
    _check_state_layers(tables)
    _check_ranks(tables)
    _check_operands(tables)
    _check_commands(tables)
    _check_graphs(tables)


def _check_code(files: Sequence[CodeRecord]) -> None:
    for i, file in enumerate(files):
        is_name = _CODE_NAME.fullmatch(file.name) is not None
        need(is_name, f"code file {i} is called {file.name!r}, which is not a file name")
    within = 1 <= len(files) <= MAX_CODE_FILES
    need(within, f"graphs.bin names {len(files)} code files, outside 1 to {MAX_CODE_FILES}")


def _check_model(model: ModelRecord) -> None:
    what = "the model record has"
    for name in ("num_layers", "num_kv_heads", "head_dim", "block_size", "vocab_size", "max_model_len", "max_num_seqs"):
        value = getattr(model, name)
        need(value >= 1, f"{what} {name} {value}, at least 1 is needed")
    need(model.block_size % 16 == 0, f"{what} block_size {model.block_size}, not a multiple of 16")
    need(0 <= model.act_dtype < len(DTYPES), f"{what} the unknown act_dtype code {model.act_dtype}")
    need(model.kv_dtype in KV_BY_CODE, f"{what} the unknown kv_dtype code {model.kv_dtype}")
    for name, least in (("key_block_bytes", 1), ("value_block_bytes", 0)):
        value = getattr(model, name)
        need(least <= value <= _MAX_BLOCK_BYTES, f"{what} {name} {value}, outside {least} to {_MAX_BLOCK_BYTES}")
    need(model.sliding_window >= 0, f"{what} sliding_window {model.sliding_window}")
    need(model.vector_width >= 0, f"{what} vector_width {model.vector_width}")
    within = 0 <= model.states_width <= _MAX_STATES_WIDTH
    need(within, f"{what} states_width {model.states_width}, outside 0 to {_MAX_STATES_WIDTH}")
    taken = model.takes_states in range(len(STATES_USES) if model.states_width > 0 else 1)
    need(taken, f"{what} takes_states {model.takes_states} for states of {model.states_width}")
    need(model.whole_prompts in (0, 1), f"{what} whole_prompts {model.whole_prompts}, which is neither 0 nor 1")
    for token in model.eos:
        need(0 <= token < model.vocab_size, f"end-of-sequence id {token} is outside of the vocabulary")
    need(-1 <= model.bos < model.vocab_size, f"beginning-of-sequence id {model.bos} is outside of the vocabulary")


def _check_kernels(tables: Tables) -> None:
    num_codes = len(tables.code)
    for kernel in tables.kernels:
        what, count = f"kernel {kernel.symbol}", kernel.num_buffers
        need(count <= MAX_BUFFERS, f"{what} has {count} buffers, at most {MAX_BUFFERS} fit")
        need(kernel.family < len(FAMILIES), f"{what} has the unknown family {kernel.family}")
        need(kernel.code < num_codes, f"{what} is in code file {kernel.code} of {num_codes}")


def _check_weights(tables: Tables) -> None:
    end, limit = 8, tables.header.weights_bytes  # the length of the safetensors header comes first
    for weight in tables.weights:
        what, shape, start = f"weight {weight.name!r}", list(weight.shape), weight.file_offset
        need(weight.dtype < len(DTYPES), f"{what} has the unknown dtype code {weight.dtype}")
        need(all(d >= 1 for d in shape), f"{what} has the invalid shape {shape}")
        wanted = math.prod(shape) * DTYPE_BYTES[weight.dtype]
        need(weight.bytes == wanted, f"{what} has {weight.bytes} bytes, its shape {shape} takes {wanted}")
        need(start % ALIGNMENT == 0, f"{what} is at byte {start}, not a multiple of {ALIGNMENT}")
        need(start >= end, f"{what} is at byte {start}, before byte {end} where the one before ends")
        end = start + weight.bytes
        need(end <= limit, f"{what} ends at byte {end} of weights.safetensors, which has {limit}")


def _check_adapters(tables: Tables) -> None:
    model, count = tables.model, len(tables.adapters)
    sizes = model.adapter_slots, model.adapter_rank
    within = 0 <= sizes[0] <= _MAX_ADAPTER_SLOTS and 0 <= sizes[1] <= _MAX_ADAPTER_RANK
    need(within, f"the model record has {sizes[0]} slots of adapters of rank {sizes[1]}")
    same = all((size == 0) == (count == 0) for size in sizes)
    need(same, f"graphs.bin has {count} pools of adapters for {sizes[0]} of rank {sizes[1]}")
    for i, adapter in enumerate(tables.adapters):
        known = adapter.weight < len(tables.weights)
        need(known, f"pool {i} of adapters is of weight {adapter.weight} of {len(tables.weights)}")


def _check_stages(tables: Tables) -> None:
    """Each stage has some of the KV cache's layers, one stage after the other."""
    if not tables.stages:
        return
    most, ranks = MAX_RANKS, tables.num_ranks
    sound = len(tables.stages) >= 2 and ranks <= most
    need(sound, f"graphs.bin has {len(tables.stages)} stages of {ranks} ranks, which are 2 or more, of at most {most}")
    end = 0
    for i, stage in enumerate(tables.stages):
        what = f"stage {i} has {stage.num_layers} layers from {stage.first_layer} on"
        need(stage.first_layer == end and stage.num_layers >= 1, f"{what}, and the ones before end at {end}")
        end += stage.num_layers
    need(end == tables.model.num_layers, f"the stages have {end} layers of {tables.model.num_layers}")


def _check_kv_layers(tables: Tables) -> None:
    """Layers of the KV cache that differ are all described, and the model record has the largest sizes."""
    model, layers = tables.model, tables.kv_layers
    if not layers:
        return
    count = len(layers)
    need(count == model.num_layers, f"graphs.bin says the KV blocks of {count} layers of {model.num_layers}")
    for i, layer in enumerate(layers):
        need(layer.key_block_bytes >= 1, f"layer {i} has key_block_bytes {layer.key_block_bytes}, at least 1 is needed")
    for name in ("key_block_bytes", "value_block_bytes"):
        most, said = max(getattr(layer, name) for layer in layers), getattr(model, name)
        need(most == said, f"the model record has {name} {said}, its layers up to {most}")


def _check_state_layers(tables: Tables) -> None:
    """Layers with a state are some of the KV cache's, in their order."""
    least, count = 0, tables.model.num_layers
    for layer in tables.state_layers:
        need(layer < count, f"graphs.bin says that layer {layer} of {count} has a state")
        need(layer >= least, f"layers with a state do not ascend at layer {layer}")
        least = layer + 1


def _check_order_of_stages(tables: Tables, graph: Graph) -> None:
    """A graph visits the stages in their order and hands its results to the first one."""
    what, left, passing = f"graph {graph.name}", 0, False
    for command, (at, *_) in zip(tables.commands_of(graph), tables.stages_of(graph), strict=True):
        record = None if command.collective is None else tables.collectives[command.collective]
        passes = record is not None and record.passes_on
        if passes:
            again = passing and at + 1 == left
            need(again or at == left, f"{what} passes on results of stage {at} in stage {left}")
            left = at + 1
        else:
            need(left < len(tables.stages), f"{what} goes on behind its last stage")
            layers = range(tables.stages[at].first_layer, tables.stages[at].first_layer + tables.stages[at].num_layers)
            for operand in tables.operands_of(command):
                own = operand.kind not in (_K_POOL, _V_POOL) or operand.index in layers
                need(own, f"{what} reads layer {operand.index} in stage {at}, which has others")
        passing = passes
    need(left == len(tables.stages), f"{what} ends in stage {left}")


def _check_ranks(tables: Tables) -> None:
    model, count = tables.model, len(tables.weights)
    ranks, shared = model.num_ranks, model.num_shared_weights
    need(ranks == 0 or 2 <= ranks <= MAX_RANKS, f"the model record has {ranks} ranks, which are 2 to {MAX_RANKS}")
    alone = ranks == 0 and not tables.stages
    need(not alone or not tables.collectives, "graphs.bin has collectives of one rank")
    need(ranks > 0 or shared == 0, f"the model record has {shared} shared weights of one rank")
    need(0 <= shared <= count, f"the model record has {shared} shared weights of {count}")
    own = tables.num_rank_weights
    need(ranks == 0 or shared + own * ranks == count, f"{count - shared} weights are not as many for each of {ranks}")
    first = tables.weights_of(0)
    for rank in range(1, ranks):
        for weight, other in zip(first[shared:], tables.weights_of(rank)[shared:], strict=True):
            same = (weight.dtype, weight.shape, weight.layout) == (other.dtype, other.shape, other.layout)
            need(same, f"weight {other.name!r} of rank {rank} is not like {weight.name!r} of rank 0")
    for i, collective in enumerate(tables.collectives):
        what = f"collective {i}"
        known = collective.op < len(COLLECTIVES) and (tables.stages if collective.passes_on else ranks)
        need(bool(known), f"{what} has the unknown op {collective.op}")
        within = not collective.passes_on or collective.stage < len(tables.stages)
        need(within, f"{what} is of stage {collective.stage} of {len(tables.stages)}")
        need(collective.rows < len(COLLECTIVE_ROWS), f"{what} has the unknown rows {collective.rows}")
        need(1 <= collective.width <= _MAX_WIDTH, f"{what} has rows of {collective.width}, outside 1 to {_MAX_WIDTH}")
        whole = collective.op != _ALL_GATHER or collective.width % ranks == 0
        need(whole, f"{what} gathers rows of {collective.width} from {ranks} ranks")
        most = ADDS_BIAS | ADDS_RESIDUAL if collective.op == _ALL_REDUCE else 0
        need(collective.adds & ~most == 0, f"{what} adds {collective.adds}, which {COLLECTIVES[collective.op]} cannot")


def _check_operands(tables: Tables) -> None:
    model, weights, adapters = tables.model, tables.weights, tables.adapters
    optional = {
        ADAPTER_TILES: bool(adapters),
        STATE_SLOTS: bool(tables.state_layers),
        ROPE_POSITIONS: STATES_USES[model.takes_states] == "placed_on_axes",
    }
    inputs = [*INPUTS, *(name for name, given in optional.items() if given)]
    num_inputs = GRAPH_INPUTS.index(inputs[-1]) + 1
    # Operands name a rank's own weights by rank 0's name.
    named = model.num_shared_weights + tables.num_rank_weights
    limits = (1, named, num_inputs, model.num_layers, model.num_layers, 1, len(adapters), int(model.states_width > 0))
    for i, (kind, index, offset, size) in enumerate(tables.operands):
        need(kind < len(OPERAND_KINDS), f"operand {i} has the unknown kind {kind}")
        name = OPERAND_KINDS[kind]
        # The index is unused for the arena.
        need(kind == _ARENA or index < limits[kind], f"operand {i} names {name} {index} of {limits[kind]}")
        what = f"operand {i}, {name}"
        need(offset % ALIGNMENT == 0, f"{what}, is at byte {offset}, not a multiple of {ALIGNMENT}")
        need(size > 0, f"{what}, has no bytes")
        if kind == _INPUT:
            need(GRAPH_INPUTS[index] in inputs, f"{what}, is {GRAPH_INPUTS[index]}, which this model has not")
        elif kind == _WEIGHT:
            weight, end = weights[index], offset + size
            need(end <= weight.bytes, f"{what}, reaches byte {end} of {weight.name!r}, which has {weight.bytes}")
        elif kind == _ADAPTERS:
            wanted = adapters[index].slot.bytes
            need(size == wanted, f"{what}, has slots of {size} bytes, those of its pool have {wanted}")
        elif kind in (_K_POOL, _V_POOL):
            layer = tables.kv_layer(index)
            wanted = layer.key_block_bytes if kind == _K_POOL else layer.value_block_bytes
            need(offset == 0, f"{what}, starts at byte {offset} of the pool instead of 0")
            need(size == wanted, f"{what}, has blocks of {size} bytes, those of layer {index} have {wanted}")


def _check_commands(tables: Tables) -> None:
    kernels, num_operands, num_layers = tables.kernels, len(tables.operands), tables.model.num_layers
    for i, command in enumerate(tables.commands):
        first, count = command.first_operand, command.num_operands
        if command.collective is None:
            need(command.kernel < len(kernels), f"command {i} names kernel {command.kernel} of {len(kernels)}")
            needed = kernels[command.kernel].num_buffers
        else:
            named, known = command.collective, len(tables.collectives)
            need(named < known, f"command {i} names collective {named} of {known}")
            needed = tables.collectives[named].num_operands
        need(count == needed, f"command {i} has {count} operands, {tables.name_of(command)} takes {needed}")
        need(first + count <= num_operands, f"command {i} has operands from {first}, {count} of {num_operands}")
        need(-1 <= command.layer < num_layers, f"command {i} names layer {command.layer} of {num_layers}")
        need(command.family < len(FAMILIES), f"command {i} has the unknown family {command.family}")


def _check_collective(tables: Tables, graph: Graph, command: Command, collective: CollectiveRecord) -> None:
    """Checks that a collective's rows are in the arena or the output and cover all of the graph's rows, and that a bias
    is a weight."""
    what = f"graph {graph.name} has an {COLLECTIVES[collective.op]} that"
    rows = (graph.max_tokens, graph.max_samples)[collective.rows]
    whole = rows * collective.width * 4
    part = whole // tables.model.num_ranks if collective.op == _ALL_GATHER else whole
    parts: list[tuple[int, tuple[int, ...]]] = [] if collective.passes_on else [(part, (_ARENA,))]
    if collective.adds & ADDS_BIAS:
        parts.append((collective.width * 4, (_WEIGHT,)))
    if collective.adds & ADDS_RESIDUAL:
        parts.append((whole, (_ARENA,)))
    parts.append((whole, (_ARENA, _OUTPUT)))
    for operand, (size, kinds) in zip(tables.operands_of(command), parts, strict=True):
        need(operand.kind in kinds, f"{what} touches {OPERAND_KINDS[operand.kind]} where it must not")
        need(operand.bytes >= size, f"{what} has an operand of {operand.bytes} bytes, {size} are needed")
    need(command.barrier, f"{what} has no barrier behind it")


def _check_graphs(tables: Tables) -> None:
    reach = [_reach(tables.operands_of(command)) for command in tables.commands]
    needs: dict[tuple[int, int], dict[_Buffer, int]] = {}
    for i, graph in enumerate(tables.graphs):
        need(graph.phase < len(PHASES), f"graph {i} has the unknown phase {graph.phase}")
        for name in ("batch", "seq", "max_tokens", "max_seqs", "max_samples", "max_blocks_per_seq", "row_unit"):
            value = getattr(graph, name)
            need(1 <= value <= 0x7FFFFFFF, f"graph {graph.name} has {name} {value}")
        _check_total(tables.header.version, graph)
        first, last = graph.first_command, graph.first_command + graph.num_commands
        need(last <= len(reach), f"graph {graph.name} has commands {first} to {last} of {len(reach)}")
        if tables.stages:
            _check_order_of_stages(tables, graph)
        for command in tables.commands_of(graph):
            if command.collective is not None:
                _check_collective(tables, graph, command, tables.collectives[command.collective])
        if (first, last) not in needs:
            needs[first, last] = _merged(reach[first:last])
        for (kind, index), end in needs[first, last].items():
            what = GRAPH_INPUTS[index] if kind == _INPUT else OPERAND_KINDS[kind]
            capacity = _capacity(graph, tables.model, kind, index)
            need(end <= capacity, f"graph {graph.name} touches byte {end} of its {what}, which has {capacity}")
    need(bool(tables.graphs), "graphs.bin has no graph")


def _check_total(version: int, graph: Graph) -> None:
    """Checks a graph for a total of contexts; earlier versions have none."""
    blocks = graph.max_blocks
    need(
        not blocks or version >= VERSION_OF_TOTALS,
        f"graphs.bin of version {version} has no graph for a total, as {graph.name}",
    )
    sound = PHASES[graph.phase] == "decode" and graph.max_seqs <= blocks and graph.max_blocks_per_seq <= blocks
    need(not blocks or (sound and blocks <= 0x7FFFFFFF), f"graph {graph.name} has a table of {blocks} blocks")


_Buffer = tuple[int, int]
"""(kind, index) of a buffer sized by the graph: arena, input, output or states."""


def _reach(operands: tuple[OperandRecord, ...]) -> dict[_Buffer, int]:
    """The end, in bytes, of a command's accesses to each of the graph's buffers."""
    ends: dict[_Buffer, int] = {}
    for o in operands:
        if o.kind in (_ARENA, _INPUT, _OUTPUT, _STATES):
            key = (o.kind, 0 if o.kind == _ARENA else o.index)
            ends[key] = max(ends.get(key, 0), o.offset + o.bytes)
    return ends


def _merged(reaches: list[dict[_Buffer, int]]) -> dict[_Buffer, int]:
    ends: dict[_Buffer, int] = {}
    for reach in reaches:
        for key, end in reach.items():
            ends[key] = max(ends.get(key, 0), end)
    return ends


def _capacity(graph: Graph, model: ModelRecord, kind: int, index: int) -> int:
    """Size in bytes of a buffer of the graph."""
    if kind == _ARENA:
        return graph.arena_bytes
    if kind == _OUTPUT:
        return graph.max_samples * model.output_width * 4
    if kind == _STATES:
        return graph.max_tokens * model.states_width * 4
    return math.prod(graph.input_shape(index)) * 4
