"""Writer of graphs.bin, the tables the runtime reads (runtime/FORMAT.md)."""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

MAGIC = b"LLMCGRPH"
VERSION = 3
MAX_EOS = 8
MAX_RANK = 4

# Word for word the records of FORMAT.md, where compiler and runtime meet; the reader has its own copy, because neither
# side imports the other. tests/test_graphs_file.py compares the three.
RECORDS = {
    "header": "u8 magic[8], u32 version, u32 header_bytes, u64 file_bytes, u32 num_sections, u32 crc32, "
    "u32 isa_level, u32 code_crc32, u64 code_bytes, u64 weights_bytes, u32 weights_header_crc32, u32 reserved",
    "section": "u32 kind, u32 record_bytes, u64 offset, u64 count",
    "model": "i32 num_layers, i32 num_kv_heads, i32 head_dim, i32 head_dim_padded, i32 block_size, i32 kv_dtype, "
    "i32 vocab_size, i32 max_model_len, i32 max_num_seqs, i32 panel_columns, i32 act_dtype, i32 sliding_window, "
    "i32 num_eos, i32 eos[8], i32 bos, i32 reserved[10]",
    "kernel": "u32 symbol_offset, u32 symbol_length, u32 num_buffers, u32 family, u32 max_tasks, u32 weight_parts",
    "weight": "u32 name_offset, u32 name_length, u32 dtype, u32 rank, u64 file_offset, u64 bytes, i64 shape[4], "
    "u32 crc32, u32 reserved",
    "graph": "u32 phase, u32 batch, u32 seq, u32 max_tokens, u32 max_seqs, u32 max_samples, u32 max_blocks_per_seq, "
    "u32 row_tile, u32 first_command, u32 num_commands, u64 arena_bytes, u64 reserved[2]",
    "command": "u32 kernel, u32 first_operand, u32 num_operands, u32 barrier, i32 layer, u32 family",
    "operand": "u32 kind, u32 index, u64 offset, u64 bytes",
}
_CODES = {"u8": "s", "u32": "I", "i32": "i", "u64": "Q", "i64": "q"}
_BYTES = {"u8": 1, "u32": 4, "i32": 4, "u64": 8, "i64": 8}


def _layout(record: str) -> struct.Struct:
    """The struct of a record; reserved fields become zero bytes that take no value."""
    codes = []
    for kind, name, count in re.findall(r"(\w+) (\w+)(?:\[(\d+)\])?", RECORDS[record]):
        number = int(count or 1)
        codes.append(f"{number * _BYTES[kind]}x" if name == "reserved" else f"{number}{_CODES[kind]}")
    return struct.Struct("<" + "".join(codes))


HEADER_LAYOUT, SECTION_LAYOUT, MODEL_LAYOUT, _KERNEL, WEIGHT_LAYOUT, _GRAPH, _COMMAND, _OPERAND = map(_layout, RECORDS)
_CRC_OFFSET = 28  # the header's crc32 covers every byte but its own four


class GraphsWriteError(ValueError):
    """A record that graphs.bin cannot hold."""


@dataclass(frozen=True)
class KernelRecord:
    """A symbol of kernels.so; family is an index into `spec.FAMILIES`; max_tasks 0: one a thread; weight_parts 0: it
    streams no weight."""

    symbol: str
    num_buffers: int
    family: int
    max_tasks: int = 0
    weight_parts: int = 0


@dataclass(frozen=True)
class WeightRecord:
    """A packed tensor: dtype code, packed shape (rank at most 4), byte range in weights.safetensors, its CRC-32."""

    name: str
    dtype: int
    shape: tuple[int, ...]
    file_offset: int
    bytes: int
    crc32: int


class OperandRecord(NamedTuple):
    """A buffer of a command. kind: 0 arena, 1 weight, 2 input, 3 K pool, 4 V pool, 5 output; offset in the arena.

    bytes: what the kernel may touch, never 0; of a pool, one block.
    """

    kind: int
    index: int  # type: ignore[assignment]  # it hides a method of tuples
    offset: int
    bytes: int


class CommandRecord(NamedTuple):
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


@dataclass(frozen=True)
class FileSums:
    """What graphs.bin says of the files beside it: sizes, and CRC-32 of the code and of the safetensors header."""

    code_bytes: int
    code_crc32: int
    weights_bytes: int
    weights_header_crc32: int

    @classmethod
    def of(cls, code: bytes, weights_header: bytes, weights_bytes: int) -> FileSums:
        """weights_header: with its length prefix; weights_bytes: of the whole file."""
        return cls(len(code), zlib.crc32(code), weights_bytes, zlib.crc32(weights_header))


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


def pack_model(model: ModelRecord) -> bytes:
    """The bytes of the model record. Raises GraphsWriteError."""
    if len(model.eos) > MAX_EOS:
        raise GraphsWriteError(f"the model has {len(model.eos)} end-of-sequence ids, at most {MAX_EOS} fit")
    eos = (*model.eos, *(0,) * (MAX_EOS - len(model.eos)))
    return _pack(
        MODEL_LAYOUT, "the model record", model.num_layers, model.num_kv_heads, model.head_dim, model.head_dim_padded,
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
        WEIGHT_LAYOUT, f"weight {weight.name!r}", *name, weight.dtype, rank, weight.file_offset, weight.bytes, *shape,
        weight.crc32,
    )  # fmt: skip


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
    files: FileSums,
) -> bytes:
    """The bytes of graphs.bin; equal command lists, operand lists and strings are stored once.

    weights: in the order of the file; isa_level: 1 ... 5, see FORMAT.md. Raises GraphsWriteError for a value out of
    the range of its field.
    """
    strings, operands, commands = _Strings(), _Runs(), _Runs()
    kernel_data = b"".join(
        _pack(
            _KERNEL,
            f"kernel {k.symbol!r}",
            *strings.add(k.symbol),
            k.num_buffers,
            k.family,
            k.max_tasks,
            k.weight_parts,
        )
        for k in kernels
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
    sections: tuple[tuple[int, int, int, bytes], ...] = (
        (1, 1, len(strings.data), bytes(strings.data)),
        (2, MODEL_LAYOUT.size, 1, pack_model(model)),
        (3, _KERNEL.size, len(kernels), kernel_data),
        (4, WEIGHT_LAYOUT.size, len(weights), weight_data),
        (5, _GRAPH.size, len(graphs), bytes(graph_data)),
        (6, _COMMAND.size, commands.count, bytes(commands.data)),
        (7, _OPERAND.size, operands.count, bytes(operands.data)),
    )
    table, body = bytearray(), bytearray()
    start = HEADER_LAYOUT.size + SECTION_LAYOUT.size * len(sections)
    for kind, record_bytes, count, records in sections:
        table += SECTION_LAYOUT.pack(kind, record_bytes, start + len(body), count)
        body += records + b"\0" * (-len(records) % 8)
    total = HEADER_LAYOUT.size + len(table) + len(body)

    def header(crc: int) -> bytes:
        return HEADER_LAYOUT.pack(
            MAGIC, VERSION, HEADER_LAYOUT.size, total, len(sections), crc, isa_level,
            files.code_crc32, files.code_bytes, files.weights_bytes, files.weights_header_crc32,
        )  # fmt: skip

    data = bytearray(header(0) + table + body)
    data[: HEADER_LAYOUT.size] = header(checksum(data))
    return bytes(data)


def checksum(data: bytes | bytearray) -> int:
    """The header's crc32 of the bytes of a graphs.bin, whatever it says now."""
    view = memoryview(data)
    return zlib.crc32(view[_CRC_OFFSET + 4 :], zlib.crc32(view[:_CRC_OFFSET]))
