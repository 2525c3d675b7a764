"""Writes graphs.bin, the tables that the runtime reads (runtime/FORMAT.md)."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from llmc.graphs_format import (
    ALIGNMENT,
    COLLECTIVE,
    MAGIC,
    MAX_ADAPTER_PARTS,
    MAX_EOS,
    MAX_LAUNCH_FACTS,
    MAX_RANK,
    SECTIONS,
    STATES_USES,
    VERSION_OF_ADAPTERS,
    VERSION_OF_KV_LAYERS,
    VERSION_OF_PLACED_ROWS,
    VERSION_OF_RANKS,
    VERSION_OF_STAGES,
    VERSION_OF_STATE_LAYERS,
    VERSION_OF_TOTALS,
    VERSION_WITHOUT_ADAPTERS,
    layout,
    tables_crc32,
)
from llmc.graphs_records import (
    AdapterRecord,
    CodeRecord,
    CollectiveRecord,
    GraphSizes,
    KernelRecord,
    KvLayerRecord,
    ModelRecord,
    OperandRecord,
    StageRecord,
    TargetRecord,
    WeightRecord,
    layers_differ,
)

_HEADER, _SECTION, _MODEL, _KERNEL, _WEIGHT = map(layout, ("header", "section", "model", "kernel", "weight"))
_GRAPH, _COMMAND, _OPERAND, _TARGET, _CODE = map(layout, ("graph", "command", "operand", "target", "code"))
_ADAPTER, _COLLECTIVE, _STAGE = map(layout, ("adapter", "collective", "stage"))
_KV_LAYER, _STATE_LAYER = map(layout, ("kv_layer", "state_layer"))


class GraphsWriteError(ValueError):
    """A record that graphs.bin cannot represent."""


class CommandRecord(NamedTuple):
    """One kernel call.

    barrier: all threads wait for each other after it.
    layer: of the KV cache; −1 for none.
    kernel: index of a kernel, or COLLECTIVE + index of a collective.
    """

    kernel: int
    operands: tuple[OperandRecord, ...]
    barrier: bool
    layer: int
    family: int


@dataclass(frozen=True)
class GraphRecord(GraphSizes):
    """A graph to write, with its commands."""

    arena_bytes: int
    commands: tuple[CommandRecord, ...]


@dataclass(frozen=True)
class FileSums:
    """Sizes and checksums of other files in graphs.bin: the code files, and weights.safetensors with its header's
    CRC-32."""

    code: tuple[CodeRecord, ...]
    weights_bytes: int
    weights_header_crc32: int

    @classmethod
    def of(cls, code: Mapping[str, bytes], weights_header: bytes, weights_bytes: int) -> FileSums:
        """code: files by name. weights_header: with its length prefix. weights_bytes: of the whole file."""
        files = tuple(CodeRecord(name, len(content), zlib.crc32(content)) for name, content in code.items())
        return cls(files, weights_bytes, zlib.crc32(weights_header))


class _Strings:
    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, int]] = {}
        self.data = bytearray()

    def add(self, text: str) -> tuple[int, int]:
        if text not in self._seen:
            raw = text.encode()
            self._seen[text] = (len(self.data), len(raw))
            # The runtime passes symbols to dlsym directly from the mapping.
            self.data += raw + b"\0"
        return self._seen[text]


class _Runs:
    """Records of one section; equal runs are stored once."""

    def __init__(self) -> None:
        self._seen: dict[Hashable, int] = {}
        self.data = bytearray()
        self.count = 0

    def find(self, key: Hashable) -> int | None:
        return self._seen.get(key)

    def add(self, key: Hashable, records: Sequence[bytes]) -> int:
        first = self.count
        self._seen[key] = first
        self.data += b"".join(records)
        self.count += len(records)
        return first


def _pack(layout: struct.Struct, what: str, *values: int) -> bytes:
    try:
        return layout.pack(*values)
    except struct.error as error:
        raise GraphsWriteError(f"{what} does not fit the format: {error} (values {values})") from None


def pack_model(model: ModelRecord) -> bytes:
    """The bytes of the model record. Raises GraphsWriteError."""
    if len(model.eos) > MAX_EOS:
        raise GraphsWriteError(f"the model has {len(model.eos)} end-of-sequence ids, at most {MAX_EOS} fit")
    eos = (*model.eos, *(0,) * (MAX_EOS - len(model.eos)))
    return _pack(
        _MODEL, "the model record", model.num_layers, model.num_kv_heads, model.head_dim, model.block_size,
        model.kv_dtype, model.vocab_size, model.max_model_len, model.max_num_seqs, model.act_dtype,
        model.sliding_window, len(model.eos), *eos, model.bos, model.key_block_bytes, model.value_block_bytes,
        model.vector_width, model.whole_prompts, model.adapter_slots, model.adapter_rank, model.num_ranks,
        model.num_shared_weights, model.states_width, model.takes_states,
    )  # fmt: skip


def pack_kv_layers(layers: Sequence[KvLayerRecord]) -> bytes:
    """The bytes of the layers of the KV cache; none if they do not differ. Raises GraphsWriteError."""
    packed = (_pack(_KV_LAYER, "a layer", layer.key_block_bytes, layer.value_block_bytes) for layer in layers)
    return b"".join(packed) if layers_differ(layers) else b""


def pack_state_layers(layers: Sequence[int]) -> bytes:
    """The bytes of the layers with a state. Raises GraphsWriteError."""
    return b"".join(_pack(_STATE_LAYER, "a layer with a state", layer) for layer in layers)


def _target(target: TargetRecord, strings: _Strings) -> bytes:
    texts = [n for text in (target.kind, target.name, target.layout) for n in strings.add(text)]
    return _pack(_TARGET, f"target {target.name!r}", *texts, target.level)


def _kernel(kernel: KernelRecord, num_codes: int, strings: _Strings) -> bytes:
    what = f"kernel {kernel.symbol!r}"
    if not 0 <= kernel.code < num_codes:
        raise GraphsWriteError(f"{what} is in code file {kernel.code}, there are {num_codes}")
    if len(kernel.launch) > MAX_LAUNCH_FACTS:
        raise GraphsWriteError(f"{what} has {len(kernel.launch)} launch facts, at most {MAX_LAUNCH_FACTS} fit")
    launch = (*kernel.launch, *(0,) * (MAX_LAUNCH_FACTS - len(kernel.launch)))
    return _pack(_KERNEL, what, *strings.add(kernel.symbol), kernel.num_buffers, kernel.family, kernel.code, *launch)


def _weight(weight: WeightRecord, strings: _Strings) -> bytes:
    rank = len(weight.shape)
    if rank > MAX_RANK:
        raise GraphsWriteError(f"weight {weight.name!r} has rank {rank}, at most {MAX_RANK} fits")
    if weight.file_offset % ALIGNMENT:
        raise GraphsWriteError(f"weight {weight.name!r} is at byte {weight.file_offset}, not a multiple of {ALIGNMENT}")
    shape = (*weight.shape, *(0,) * (MAX_RANK - rank))
    name = strings.add(weight.name)
    return _pack(
        _WEIGHT, f"weight {weight.name!r}", *name, weight.dtype, rank, weight.file_offset, weight.bytes, *shape,
        weight.crc32, *strings.add(weight.layout),
    )  # fmt: skip


def _adapter(adapter: AdapterRecord) -> bytes:
    slot = adapter.slot
    if len(slot.rows) > MAX_ADAPTER_PARTS:
        raise GraphsWriteError(f"a pool of adapters has {len(slot.rows)} parts, at most {MAX_ADAPTER_PARTS} fit")
    rows = (*slot.rows, *(0,) * (MAX_ADAPTER_PARTS - len(slot.rows)))
    return _pack(_ADAPTER, "a pool of adapters", adapter.weight, *slot.layout, *rows, slot.bytes)


def _collective(record: CollectiveRecord) -> bytes:
    return _pack(_COLLECTIVE, "a collective", record.op, record.rows, record.width, record.adds, record.stage)


def _command(command: CommandRecord, num_kernels: int, num_collectives: int, operands: _Runs) -> bytes:
    index, count, what = command.kernel, num_kernels, "kernel"
    if index >= COLLECTIVE:
        index, count, what = index - COLLECTIVE, num_collectives, "collective"
    if not 0 <= index < count:
        raise GraphsWriteError(f"a command names {what} {index}, there are {count}")
    first = operands.find(command.operands)
    if first is None:
        packed = [_pack(_OPERAND, "an operand", o.kind, o.index, o.offset, o.bytes) for o in command.operands]
        first = operands.add(command.operands, packed)
    count = len(command.operands)
    return _pack(
        _COMMAND, "a command", command.kernel, first, count, int(command.barrier), command.layer, command.family
    )


def write_graphs(
    target: TargetRecord,
    model: ModelRecord,
    kernels: Sequence[KernelRecord],
    weights: Sequence[WeightRecord],
    graphs: Sequence[GraphRecord],
    files: FileSums,
    adapters: Sequence[AdapterRecord] = (),
    collectives: Sequence[CollectiveRecord] = (),
    stages: Sequence[StageRecord] = (),
    kv_layers: Sequence[KvLayerRecord] = (),
    state_layers: Sequence[int] = (),
) -> bytes:
    """The bytes of graphs.bin; equal command lists, operand lists and strings are stored once.

    weights: in file order. kv_layers: all, or none if they do not differ. state_layers: those that hold a state, in
    order. Raises GraphsWriteError for a value outside its field's range.
    """
    strings, operands, commands = _Strings(), _Runs(), _Runs()
    kernel_data = b"".join(_kernel(k, len(files.code), strings) for k in kernels)
    weight_data = b"".join(_weight(w, strings) for w in weights)
    graph_data = bytearray()
    for g in graphs:
        first = commands.find(g.commands)
        if first is None:
            first = commands.add(
                g.commands, [_command(c, len(kernels), len(collectives), operands) for c in g.commands]
            )
        graph_data += _pack(
            _GRAPH, f"graph {g.name}", g.phase, g.batch, g.seq, g.max_tokens, g.max_seqs,
            g.max_samples, g.max_blocks_per_seq, g.row_unit, first, len(g.commands), g.arena_bytes, g.max_blocks,
        )  # fmt: skip
    target_data = _target(target, strings)
    code_data = b"".join(
        _pack(_CODE, f"code file {c.name!r}", *strings.add(c.name), c.crc32, c.bytes) for c in files.code
    )
    sections: tuple[tuple[str, int, int, bytes], ...] = (
        ("strings", 1, len(strings.data), bytes(strings.data)),
        ("model", _MODEL.size, 1, pack_model(model)),
        ("kernel", _KERNEL.size, len(kernels), kernel_data),
        ("weight", _WEIGHT.size, len(weights), weight_data),
        ("graph", _GRAPH.size, len(graphs), bytes(graph_data)),
        ("command", _COMMAND.size, commands.count, bytes(commands.data)),
        ("operand", _OPERAND.size, operands.count, bytes(operands.data)),
        ("target", _TARGET.size, 1, target_data),
        ("code", _CODE.size, len(files.code), code_data),
    )
    version = VERSION_OF_ADAPTERS if adapters else VERSION_WITHOUT_ADAPTERS
    version = VERSION_OF_RANKS if model.num_ranks else version
    version = VERSION_OF_TOTALS if model.states_width or any(g.max_blocks for g in graphs) else version
    version = VERSION_OF_STAGES if stages else version
    version = VERSION_OF_KV_LAYERS if layers_differ(kv_layers) else version
    version = VERSION_OF_STATE_LAYERS if state_layers else version
    version = VERSION_OF_PLACED_ROWS if STATES_USES[model.takes_states].startswith("placed") else version
    if version >= VERSION_OF_ADAPTERS:
        sections += (("adapter", _ADAPTER.size, len(adapters), b"".join(map(_adapter, adapters))),)
    if version >= VERSION_OF_RANKS:
        sections += (("collective", _COLLECTIVE.size, len(collectives), b"".join(map(_collective, collectives))),)
    if version >= VERSION_OF_STAGES:
        packed = [_pack(_STAGE, "a stage", stage.first_layer, stage.num_layers) for stage in stages]
        sections += (("stage", _STAGE.size, len(stages), b"".join(packed)),)
    if version >= VERSION_OF_KV_LAYERS:
        packed_layers = pack_kv_layers(kv_layers)
        sections += (("kv_layer", _KV_LAYER.size, len(packed_layers) // _KV_LAYER.size, packed_layers),)
    if version >= VERSION_OF_STATE_LAYERS:
        sections += (("state_layer", _STATE_LAYER.size, len(state_layers), pack_state_layers(state_layers)),)
    table, body = bytearray(), bytearray()
    start = _HEADER.size + _SECTION.size * len(sections)
    for name, record_bytes, count, records in sections:
        table += _SECTION.pack(SECTIONS[name], record_bytes, start + len(body), count)
        body += records + b"\0" * (-len(records) % 8)
    total = _HEADER.size + len(table) + len(body)

    def header(crc: int) -> bytes:
        return _HEADER.pack(
            MAGIC, version, _HEADER.size, total, len(sections), crc, files.weights_bytes, files.weights_header_crc32,
        )  # fmt: skip

    data = bytearray(header(0) + table + body)
    data[: _HEADER.size] = header(tables_crc32(data))
    return bytes(data)
