"""A readable view of a graph: commands with named, shaped buffers, and the flow of data between them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from llmc.graphs_format import DTYPE_BYTES, DTYPES, FAMILIES, GRAPH_INPUTS, OPERAND_KINDS, RANK_0
from llmc.graphs_records import Command, Graph, OperandRecord, Tables

Dim = int | str

_LINEAR = FAMILIES.index("linear")
_GATHER = FAMILIES.index("gather")
_ATTENTION = FAMILIES.index("attention")
_SLOTS = GRAPH_INPUTS.index("slot_mapping")
_IN_LAYER = re.compile(r"layers\.(\d+)(?:\.|$)")
_KV_SCALES = ".kv_scales"
_PACKS_OUTPUT = tuple(FAMILIES.index(f) for f in ("norm", "attention"))
# Kernels with float32 rows where others of their family have packed activations.
_PLAIN_ROWS = ("head_linear", "latent_attention", "normed_linear", "normed_linear_quant")
# Kernels of other families that write packed activations.
_PACKING = ("packed_head_linear", "activate")


@dataclass(frozen=True)
class BufferView:
    """One argument of a kernel. offset: in the arena or the weight. bytes: its size; for a pool, of one block.

    name: unique per value; an arena buffer that is rewritten gets a new name.
    """

    kind: str
    name: str
    dtype: str
    shape: tuple[Dim, ...]
    offset: int
    bytes: int
    written: bool

    @property
    def type(self) -> str:
        """As in `f32[4, 896]`."""
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"

    def at(self, use: BufferView) -> BufferView:
        """The same value as used by another command."""
        return replace(use, dtype=self.dtype, shape=self.shape)


@dataclass(frozen=True)
class CommandView:
    """One kernel call. op: the kernel template's name. layer: of the model; -1 for none.

    name: unique in the graph: the module whose weight it reads, as in `layers.0.mlp.down`, or layer and op.
    """

    index: int
    name: str
    symbol: str
    op: str
    family: str
    layer: int
    barrier: bool
    buffers: tuple[BufferView, ...]


@dataclass(frozen=True)
class ArenaValue:
    """A value in the arena, from the command that writes it to its last reader (indices)."""

    name: str
    dtype: str
    shape: tuple[Dim, ...]
    offset: int
    bytes: int
    first: int
    last: int


def op_of(symbol: str) -> str:
    """The kernel template of a symbol, `op_` and a hash."""
    return symbol.rsplit("_", 1)[0] or symbol


def group_of(layer: int, index: int, first: int) -> str:
    """The label of a layer, "layer 3"; for commands outside layers, another one. first: first command of a layer."""
    return f"layer {layer}" if layer >= 0 else "before layers" if index < first else "after layers"


def writes_cache(operands: Iterable[OperandRecord]) -> bool:
    """Whether a command writes keys and values of its tokens: it knows their slots."""
    return any(OPERAND_KINDS[o.kind] == "input" and o.index == _SLOTS for o in operands)


def is_written(family: int, kind: str, position: int, count: int, *, cache: bool) -> bool:
    """Whether a command of `family` writes its operand of `kind`, at `position` of `count`. cache: as `writes_cache`
    says."""
    if kind in ("k_pool", "v_pool"):
        return cache
    # Attention also writes results of context segments.
    partial = kind == "arena" and family == _ATTENTION and position == count - 2 > 1
    return position == count - 1 or partial


def row_unit(graph: Graph, rows: int) -> int:
    """Rows of a unit in a tensor of `rows` rows (FORMAT.md, layout `tiles`): sampled rows may be fewer than the graph's
    unit."""
    unit = 1
    while unit < rows and unit < graph.row_unit:
        unit *= 2
    return unit


def _arena_type(tables: Tables, graph: Graph, size: int, packed: bool, rows: int) -> tuple[str, tuple[Dim, ...]]:
    """(dtype, logical shape): graphs.bin only has sizes, but FORMAT.md fixes the layout of intermediate values."""
    code = tables.model.act_dtype if packed else 0
    unit = row_unit(graph, rows) if packed else 1
    row_bytes, rest = divmod(size, -(-rows // unit) * unit)
    if rest or row_bytes % DTYPE_BYTES[code] or not row_bytes:
        return "u8", (size,)
    return DTYPES[code], (rows, row_bytes // DTYPE_BYTES[code])


def _buffers(
    tables: Tables, graph: Graph, command: Command, sampled: bool, versions: dict[str, int]
) -> tuple[BufferView, ...]:
    model, op = tables.model, op_of(tables.name_of(command))
    operands = tables.operands_of(command)
    cache, views = writes_cache(operands), []
    for position, operand in enumerate(operands):
        kind, index, size = OPERAND_KINDS[operand.kind], operand.index, operand.bytes
        written = is_written(command.family, kind, position, len(operands), cache=cache)
        # A gather reads all tokens; it and its successors write sampled rows.
        rows = graph.max_samples if sampled and (written or command.family != _GATHER) else graph.max_tokens
        dtype, shape = "f32", tuple[Dim, ...]()
        if kind == "arena":
            name = f"arena_{operand.offset}"
            packs = (command.family in _PACKS_OUTPUT and op not in _PLAIN_ROWS) or op in _PACKING
            reads = (command.family == _LINEAR and op not in _PLAIN_ROWS) or op == "adapter_shrink"
            packed = written if packs else reads and position == 0
            dtype, shape = _arena_type(tables, graph, size, packed, rows)
        elif kind == "weight":
            weight = tables.weights[index]
            name, dtype, shape = weight.name.removeprefix(RANK_0), DTYPES[weight.dtype], weight.shape
        elif kind == "input":
            name, dtype, shape = GRAPH_INPUTS[index], "i32", graph.input_shape(index)
        elif kind == "output":
            name, shape = "logits", (graph.max_samples, model.output_width)
        elif kind == "states":
            name, shape = "states", (graph.max_tokens, model.states_width)
        elif kind == "adapters":
            name, dtype = f"{tables.weights[tables.adapters[index].weight].name}.adapters", "u8"
            shape = (model.adapter_slots, size)
        elif index in tables.state_layers:
            name, shape = f"{kind}_{index}", ("num_states", size // 4)
        elif tables.kv_layers:
            # The tables do not say how many heads share a block of this layer.
            name, dtype, shape = f"{kind}_{index}", "u8", ("num_blocks", size)
        else:
            name, dtype, per_word = f"{kind}_{index}", model.kv.name, model.kv.per_word
            keys, values = model.kv_widths()
            width = (keys, model.block_size) if kind == "k_pool" else (model.block_size, values)
            shape = ("num_blocks", model.num_kv_heads, width[0] // per_word, width[1], per_word)
        views.append(BufferView(kind, name, dtype, shape, operand.offset, size, written))
    # Reads first: a kernel may write in place.
    named = [
        v if v.kind in ("weight", "input", "adapters") else replace(v, name=_version(v.name, versions)) for v in views
    ]
    for i, view in enumerate(views):
        if view.written and view.kind not in ("weight", "input", "adapters"):
            versions[view.name] = versions.get(view.name, -1 if view.kind == "output" else 0) + 1
            named[i] = replace(view, name=_version(view.name, versions))
    return tuple(named)


def _version(name: str, versions: dict[str, int]) -> str:
    number = versions.get(name, 0)
    return f"{name}.{number}" if number else name


def commands_of(tables: Tables, graph: Graph) -> list[CommandView]:
    """The command list of `graph` with names, dtypes, shapes and sizes of every buffer."""
    versions: dict[str, int] = {}
    sampled = False
    views = []
    for index, command in enumerate(tables.commands_of(graph)):
        symbol = tables.name_of(command)
        sampled = sampled or command.family == _GATHER
        buffers = _buffers(tables, graph, command, sampled, versions)
        family = FAMILIES[command.family]
        views.append(CommandView(index, "", symbol, op_of(symbol), family, command.layer, command.barrier, buffers))
    views = _named(views)
    # Only the layer that reads an activation shows that it is packed, and only its weight that it is int8.
    read = {x.name: x for command in views if (x := _linear_input(command)) is not None}
    return [
        replace(command, buffers=tuple(read.get(buffer.name, buffer).at(buffer) for buffer in command.buffers))
        for command in views
    ]


def layer_of(weight: str) -> int:
    """The model's layer of a weight, by its name; -1 for none, and for scales of the KV cache, which are named by its
    own layer numbers."""
    found = _IN_LAYER.match(weight.removeprefix(RANK_0))
    return int(found[1]) if found and not weight.endswith(_KV_SCALES) else -1


def _module(command: CommandView) -> str:
    """The module whose weight a command reads; empty if none. Where it accesses the KV cache, only weights of a layer
    count: tables such as rope's serve every layer."""
    names = (b.name for b in command.buffers if b.kind == "weight")
    name = next((name for name in names if command.layer < 0 or layer_of(name) >= 0), "")
    return name.rpartition(".")[0]


def _layers(views: list[CommandView]) -> list[int]:
    """The model's layer of each command; -1 for none.

    It is that of the weights. graphs.bin has numbers of the KV cache's layers, which other layers may share, or of
    which a layer may have two. So a command that accesses the cache is of the layer of the weights before it; the
    number serves where none of them names a layer.
    """
    layers, last = [], -1
    for command in views:
        layer = layer_of(_module(command))
        last = layer if layer >= 0 else last
        if layer < 0 <= command.layer:
            layer = last if last >= 0 else command.layer
        layers.append(layer)
    # A command without weights, between two of a layer, belongs to that layer.
    for i, layer in enumerate(layers[1:-1], 1):
        if layer < 0 and not _module(views[i]) and layers[i - 1] == layers[i + 1]:
            layers[i] = layers[i - 1]
    return layers


def _named(views: list[CommandView]) -> list[CommandView]:
    """Adds each command's layer and name."""
    seen: dict[str, int] = {}
    named = []
    for command, layer in zip(views, _layers(views), strict=True):
        name = _module(command) or (f"layers.{layer}.{command.op}" if layer >= 0 else command.op)
        seen[name] = seen.get(name, 0) + 1
        unique = name if seen[name] == 1 else f"{name}.{seen[name] - 1}"
        named.append(replace(command, name=unique, layer=layer))
    return named


def role_of(command: CommandView, buffer: BufferView) -> str:
    """The role of a buffer in its command: `x`, `residual`, `weight`, `scale`, `k_pool`, `positions`, …; `y` is
    written."""
    if buffer.kind == "weight":
        return buffer.name.rpartition(".")[2]
    if buffer.kind != "arena":
        return buffer.name if buffer.kind == "input" else "y" if buffer.kind == "output" else buffer.kind
    same = [b for b in command.buffers if b.kind == "arena" and b.written == buffer.written]
    first, others = ("y", "partial") if buffer.written else ("x", "residual")
    position = same[::-1].index(buffer) if buffer.written else same.index(buffer)
    return first if position == 0 else others if position == 1 else f"{others}_{position}"


def _linear_input(command: CommandView) -> BufferView | None:
    """The activation that a linear layer reads; an int8 one has numbers, and 4 bytes per scale and per group sum."""
    if command.family != FAMILIES[_LINEAR] or command.buffers[0].kind != "arena":
        return None
    x = command.buffers[0]
    if len(command.buffers) < 4 or command.buffers[1].dtype != "u8":
        return x
    weight, scale = command.buffers[1:3]
    if len(x.shape) != 2 or len(weight.shape) != 4 or len(scale.shape) != 3:
        return x
    rows, words, groups = x.shape[0], weight.shape[1], scale.shape[1]
    if not isinstance(rows, int) or not isinstance(words, int) or not isinstance(groups, int):
        return x
    row_bytes = DTYPE_BYTES[DTYPES.index(x.dtype)] * int(x.shape[1])
    if row_bytes not in (4 * (words + 1 + groups), 4 * (2 * words + 1 + groups)):
        return x
    return replace(x, dtype="i8", shape=(rows, row_bytes))


def memory_plan(commands: list[CommandView]) -> list[ArenaValue]:
    """The values in the arena, in order of first use."""
    values: dict[str, ArenaValue] = {}
    for command in commands:
        for buffer in command.buffers:
            if buffer.kind != "arena":
                continue
            known = values.get(buffer.name)
            if known is None:
                values[buffer.name] = ArenaValue(
                    buffer.name, buffer.dtype, buffer.shape, buffer.offset, buffer.bytes, command.index, command.index
                )
            else:
                values[buffer.name] = replace(known, last=command.index)
    return list(values.values())
