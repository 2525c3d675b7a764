"""Writer of graphs.bin, the tables the runtime reads (runtime/FORMAT.md)."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

MAGIC = b"LLMCGRPH"
VERSION = 1
MAX_EOS = 8
MAX_RANK = 4

_HEADER = struct.Struct("<8sIIQIII28x")
_SECTION = struct.Struct("<IIQQ")
_MODEL = struct.Struct("<13i8ii40x")
_KERNEL = struct.Struct("<4I")
_WEIGHT = struct.Struct("<4I2Q4q8x")
_GRAPH = struct.Struct("<10IQ16x")
_COMMAND = struct.Struct("<4IiI")
_OPERAND = struct.Struct("<IIQQ")


class GraphsWriteError(ValueError):
    """A record that graphs.bin cannot hold."""


@dataclass(frozen=True)
class KernelRecord:
    """A symbol of kernels.so; family is an index into `spec.FAMILIES`."""

    symbol: str
    num_buffers: int
    family: int


@dataclass(frozen=True)
class WeightRecord:
    """A packed tensor: dtype code, packed shape (rank at most 4), byte range in weights.safetensors."""

    name: str
    dtype: int
    shape: tuple[int, ...]
    file_offset: int
    bytes: int


@dataclass(frozen=True)
class OperandRecord:
    """A buffer of a command. kind: 0 arena, 1 weight, 2 input, 3 K pool, 4 V pool, 5 output; offset in the arena."""

    kind: int
    index: int
    offset: int
    bytes: int


@dataclass(frozen=True)
class CommandRecord:
    """One kernel call. barrier: all threads meet after it; layer: -1 for none."""

    kernel: int
    operands: tuple[OperandRecord, ...]
    barrier: bool
    layer: int
    family: int


@dataclass(frozen=True)
class GraphRecord:
    """One bucket. phase: 0 prefill, 1 decode, 2 mixed."""

    phase: int
    batch: int
    seq: int
    max_tokens: int
    max_seqs: int
    max_samples: int
    max_blocks_per_seq: int
    row_tile: int
    arena_bytes: int
    commands: tuple[CommandRecord, ...]


@dataclass(frozen=True)
class ModelRecord:
    """What the engine must know of the model. sliding_window 0: none; eos: at most 8 ids; bos -1: none."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    head_dim_padded: int
    block_size: int
    kv_dtype: int
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    panel_columns: int
    act_dtype: int
    sliding_window: int
    eos: tuple[int, ...]
    bos: int


class _Strings:
    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, int]] = {}
        self.data = bytearray()

    def add(self, text: str) -> tuple[int, int]:
        if text not in self._seen:
            raw = text.encode()
            self._seen[text] = (len(self.data), len(raw))
            # The runtime passes symbols to dlsym straight from the mapping.
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


def _model(model: ModelRecord) -> bytes:
    if len(model.eos) > MAX_EOS:
        raise GraphsWriteError(f"the model has {len(model.eos)} end-of-sequence ids, at most {MAX_EOS} fit")
    eos = (*model.eos, *(0,) * (MAX_EOS - len(model.eos)))
    return _pack(
        _MODEL, "the model record", model.num_layers, model.num_kv_heads, model.head_dim, model.head_dim_padded,
        model.block_size, model.kv_dtype, model.vocab_size, model.max_model_len, model.max_num_seqs,
        model.panel_columns, model.act_dtype, model.sliding_window, len(model.eos), *eos, model.bos,
    )  # fmt: skip


def _weight(weight: WeightRecord, strings: _Strings) -> bytes:
    rank = len(weight.shape)
    if rank > MAX_RANK:
        raise GraphsWriteError(f"weight {weight.name!r} has rank {rank}, at most {MAX_RANK} fits")
    if weight.file_offset % 64:
        raise GraphsWriteError(f"weight {weight.name!r} is at byte {weight.file_offset}, not a multiple of 64")
    shape = (*weight.shape, *(0,) * (MAX_RANK - rank))
    name = strings.add(weight.name)
    return _pack(
        _WEIGHT, f"weight {weight.name!r}", *name, weight.dtype, rank, weight.file_offset, weight.bytes, *shape
    )


def _command(command: CommandRecord, num_kernels: int, operands: _Runs) -> bytes:
    if not 0 <= command.kernel < num_kernels:
        raise GraphsWriteError(f"a command names kernel {command.kernel}, there are {num_kernels}")
    first = operands.find(command.operands)
    if first is None:
        packed = [_pack(_OPERAND, "an operand", o.kind, o.index, o.offset, o.bytes) for o in command.operands]
        first = operands.add(command.operands, packed)
    count = len(command.operands)
    return _pack(
        _COMMAND, "a command", command.kernel, first, count, int(command.barrier), command.layer, command.family
    )


def write_graphs(
    model: ModelRecord,
    kernels: Sequence[KernelRecord],
    weights: Sequence[WeightRecord],
    graphs: Sequence[GraphRecord],
    isa_level: int,
) -> bytes:
    """The bytes of graphs.bin; equal command lists, operand lists and strings are stored once.

    isa_level: 1 ... 5, see FORMAT.md. Raises GraphsWriteError for a value out of the range of its field.
    """
    strings, operands, commands = _Strings(), _Runs(), _Runs()
    kernel_data = b"".join(
        _pack(_KERNEL, f"kernel {k.symbol!r}", *strings.add(k.symbol), k.num_buffers, k.family) for k in kernels
    )
    weight_data = b"".join(_weight(w, strings) for w in weights)
    graph_data = bytearray()
    for g in graphs:
        first = commands.find(g.commands)
        if first is None:
            first = commands.add(g.commands, [_command(c, len(kernels), operands) for c in g.commands])
        graph_data += _pack(
            _GRAPH, f"graph {g.phase}:{g.batch}x{g.seq}", g.phase, g.batch, g.seq, g.max_tokens, g.max_seqs,
            g.max_samples, g.max_blocks_per_seq, g.row_tile, first, len(g.commands), g.arena_bytes,
        )  # fmt: skip
    sections = (
        (1, 1, len(strings.data), bytes(strings.data)),
        (2, _MODEL.size, 1, _model(model)),
        (3, _KERNEL.size, len(kernels), kernel_data),
        (4, _WEIGHT.size, len(weights), weight_data),
        (5, _GRAPH.size, len(graphs), bytes(graph_data)),
        (6, _COMMAND.size, commands.count, bytes(commands.data)),
        (7, _OPERAND.size, operands.count, bytes(operands.data)),
    )
    table, body = bytearray(), bytearray()
    start = _HEADER.size + _SECTION.size * len(sections)
    for kind, record_bytes, count, data in sections:
        table += _SECTION.pack(kind, record_bytes, start + len(body), count)
        body += data + b"\0" * (-len(data) % 8)
    tail = bytes(table + body)
    total = _HEADER.size + len(tail)
    header = _HEADER.pack(MAGIC, VERSION, _HEADER.size, total, len(sections), zlib.crc32(tail), isa_level)
    return header + tail
