"""Reader of graphs.bin (FORMAT.md) in plain Python, with the checks of the native reader; for tools and tests."""

from __future__ import annotations

import math
import re
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from llmc.regular_file import read_regular

PHASES = ("prefill", "decode", "mixed")
FAMILIES = ("embedding", "norm", "linear", "rope", "attention", "activation", "gather", "other")
DTYPES = ("f32", "bf16", "f16", "i8", "u8", "i32")
DTYPE_BYTES = (4, 2, 2, 1, 1, 4)
OPERAND_KINDS = ("arena", "weight", "input", "k_pool", "v_pool", "output")
INPUTS = (
    "input_ids",
    "positions",
    "slot_mapping",
    "block_tables",
    "context_lens",
    "query_start",
    "sample_index",
    "token_seq",
)
ISA_LEVELS = ("any", "x86-64-v3", "x86-64-v4", "x86-64-v4 + VNNI", "x86-64-v4 + AVX512-BF16", "x86-64-v4 + AMX")
MAGIC = b"LLMCGRPH"
VERSION = 3
ALIGNMENT = 64
MAX_BUFFERS = 12
MAX_WEIGHT_PARTS = 2
_MAX_BYTES = 1 << 30

# Word for word the records of FORMAT.md, where compiler and runtime meet; the writer has its own copy, because neither
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
    """The struct of a record; reserved fields are skipped."""
    codes = []
    for kind, name, count in re.findall(r"(\w+) (\w+)(?:\[(\d+)\])?", RECORDS[record]):
        number = int(count or 1)
        codes.append(f"{number * _BYTES[kind]}x" if name == "reserved" else f"{number}{_CODES[kind]}")
    return struct.Struct("<" + "".join(codes))


_HEADER, _SECTION, _MODEL, _KERNEL, _WEIGHT, _GRAPH, _COMMAND, _OPERAND = map(_layout, RECORDS)
_CRC_OFFSET = 28  # the header's crc32 covers every byte but its own four
_MODEL_FIELDS = (
    "num_layers",
    "num_kv_heads",
    "head_dim",
    "head_dim_padded",
    "block_size",
    "kv_dtype",
    "vocab_size",
    "max_model_len",
    "max_num_seqs",
    "panel_columns",
    "act_dtype",
    "sliding_window",
)
_STRINGS_KIND = 1
_LAYOUTS = {2: _MODEL, 3: _KERNEL, 4: _WEIGHT, 5: _GRAPH, 6: _COMMAND, 7: _OPERAND}
_SECTION_NAMES = {1: "strings", 2: "model", 3: "kernels", 4: "weights", 5: "graphs", 6: "commands", 7: "operands"}
_ARENA, _WEIGHT_KIND, _INPUT, _K_POOL, _V_POOL, _OUTPUT = range(len(OPERAND_KINDS))


class FormatError(ValueError):
    """A file that is not a valid graphs.bin of this version; the message is one sentence."""


@dataclass(frozen=True)
class Header:
    """version, size of graphs.bin in bytes, its CRC-32, needed ISA level (0 ... 5); sizes in bytes and CRC-32 of the
    files beside it, of weights.safetensors that of its header."""

    version: int
    file_bytes: int
    crc32: int
    isa_level: int
    code_crc32: int
    code_bytes: int
    weights_bytes: int
    weights_header_crc32: int


@dataclass(frozen=True)
class ModelRecord:
    """What the engine must know of the model. sliding_window 0: none; bos -1: none; dtypes are codes of DTYPES."""

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
class Kernel:
    """A symbol of kernels.so, its number of buffers and its family, an index into FAMILIES.

    max_tasks: into how many tasks its work is worth cutting; 0: one a thread. weight_parts: into how many equal parts
    the weight is stored that its tasks stream, each a share of every part; 0: none.
    """

    symbol: str
    num_buffers: int
    family: int
    max_tasks: int
    weight_parts: int


@dataclass(frozen=True)
class Weight:
    """A packed tensor: dtype code, packed shape, byte range in weights.safetensors and CRC-32 of those bytes."""

    name: str
    dtype: int
    shape: tuple[int, ...]
    file_offset: int
    bytes: int
    crc32: int


@dataclass(frozen=True)
class Operand:
    """A buffer of a command: kind is an index into OPERAND_KINDS; offset in the arena.

    bytes: what the kernel may touch, never 0; of a pool, one block.
    """

    kind: int
    index: int
    offset: int
    bytes: int


@dataclass(frozen=True)
class Command:
    """One kernel call on operands[first_operand : first_operand + num_operands]; layer -1: none."""

    kernel: int
    first_operand: int
    num_operands: int
    barrier: bool
    layer: int
    family: int


@dataclass(frozen=True)
class Graph:
    """One bucket; its commands are commands[first_command : first_command + num_commands]."""

    phase: int
    batch: int
    seq: int
    max_tokens: int
    max_seqs: int
    max_samples: int
    max_blocks_per_seq: int
    row_tile: int
    first_command: int
    num_commands: int
    arena_bytes: int

    @property
    def name(self) -> str:
        """`phase:batchxseq`, as in `decode:4x512`."""
        return f"{PHASES[self.phase]}:{self.batch}x{self.seq}"


@dataclass(frozen=True)
class Tables:
    """Everything in graphs.bin."""

    header: Header
    model: ModelRecord
    kernels: tuple[Kernel, ...]
    weights: tuple[Weight, ...]
    graphs: tuple[Graph, ...]
    commands: tuple[Command, ...]
    operands: tuple[Operand, ...]

    def commands_of(self, graph: Graph) -> tuple[Command, ...]:
        """The command list of `graph`, in the order of execution."""
        return self.commands[graph.first_command : graph.first_command + graph.num_commands]

    def operands_of(self, command: Command) -> tuple[Operand, ...]:
        """The buffers of `command`, in the order of the kernel's arguments."""
        return self.operands[command.first_operand : command.first_operand + command.num_operands]


@dataclass(frozen=True)
class _Section:
    record_bytes: int
    offset: int
    count: int


def _need(condition: bool, message: str) -> None:
    if not condition:
        raise FormatError(message)


def _read_header(data: memoryview) -> tuple[Header, int]:
    _need(len(data) >= _HEADER.size, f"graphs.bin has {len(data)} bytes, shorter than its header of {_HEADER.size}")
    magic, version, header_bytes, file_bytes, num_sections, crc, isa, *files = _HEADER.unpack_from(data)
    _need(magic == MAGIC, "graphs.bin does not start with LLMCGRPH: this is not an llmc artifact")
    _need(
        version == VERSION,
        f"graphs.bin has format version {version}, this llmc reads version {VERSION}: compile the model again",
    )
    _need(header_bytes == _HEADER.size, f"graphs.bin has a header of {header_bytes} bytes instead of {_HEADER.size}")
    _need(file_bytes == len(data), f"graphs.bin has {len(data)} bytes, its header says {file_bytes}: it is truncated")
    found = zlib.crc32(data[_CRC_OFFSET + 4 :], zlib.crc32(data[:_CRC_OFFSET]))
    _need(found == crc, f"graphs.bin is damaged: its checksum is {found:08x} instead of {crc:08x}")
    _need(0 <= isa < len(ISA_LEVELS), f"graphs.bin names ISA level {isa}, known are 0 to {len(ISA_LEVELS) - 1}")
    return Header(version, file_bytes, crc, isa, *files), num_sections


def _read_sections(data: memoryview, num_sections: int) -> dict[int, _Section]:
    end = _HEADER.size + num_sections * _SECTION.size
    _need(end <= len(data), f"graphs.bin names {num_sections} sections, more than its {len(data)} bytes can hold")
    sections: dict[int, _Section] = {}
    for kind, record_bytes, offset, count in _SECTION.iter_unpack(data[_HEADER.size : end]):
        name = _SECTION_NAMES.get(kind)
        if name is None:
            continue
        _need(kind not in sections, f"graphs.bin has more than one section {name}")
        wanted = 1 if kind == _STRINGS_KIND else _LAYOUTS[kind].size
        _need(record_bytes == wanted, f"section {name} has records of {record_bytes} bytes instead of {wanted}")
        _need(offset % 8 == 0 and offset >= end, f"section {name} starts at the invalid byte {offset}")
        fits = offset <= len(data) and count * record_bytes <= len(data) - offset
        _need(fits, f"section {name} of {count} records at byte {offset} does not fit in {len(data)} bytes")
        # The native reader counts in 32 bits.
        _need(count <= 0xFFFFFFFF, f"section {name} has {count} records, too many")
        sections[kind] = _Section(record_bytes, offset, count)
    for kind, name in _SECTION_NAMES.items():
        _need(kind in sections, f"graphs.bin has no section {name}")
    return sections


class _Reader:
    def __init__(self, data: memoryview) -> None:
        self._data = data
        self.header, num_sections = _read_header(data)
        self._sections = _read_sections(data, num_sections)
        strings = self._sections[_STRINGS_KIND]
        self._strings = data[strings.offset : strings.offset + strings.count]

    def _records(self, kind: int) -> Iterator[tuple[int, ...]]:
        section = self._sections[kind]
        return _LAYOUTS[kind].iter_unpack(
            self._data[section.offset : section.offset + section.count * section.record_bytes]
        )

    def _string(self, offset: int, length: int, what: str, terminated: bool) -> str:
        end = offset + length
        size = len(self._strings)
        _need(end + terminated <= size, f"{what} has its name at bytes {offset} to {end} of {size} bytes of strings")
        raw = bytes(self._strings[offset:end])
        _need(length > 0 and b"\0" not in raw, f"{what} has an invalid name")
        _need(not terminated or self._strings[end] == 0, f"{what} has a name without a terminating NUL")
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise FormatError(f"{what} has a name that is not UTF-8") from None

    def model(self) -> ModelRecord:
        count = self._sections[2].count
        _need(count == 1, f"graphs.bin has {count} model records instead of 1")
        values = next(self._records(2))
        num_eos, eos, bos = values[12], values[13:21], values[21]
        _need(0 <= num_eos <= 8, f"the model record has {num_eos} end-of-sequence ids, at most 8 fit")
        model = ModelRecord(**dict(zip(_MODEL_FIELDS, values, strict=False)), eos=eos[:num_eos], bos=bos)
        for name in ("num_layers", "num_kv_heads", "head_dim", "block_size", "vocab_size", "max_model_len",
                     "max_num_seqs", "panel_columns"):  # fmt: skip
            value = getattr(model, name)
            _need(value >= 1, f"the model record has {name} {value}, at least 1 is needed")
        _need(
            model.head_dim_padded == -(-model.head_dim // 16) * 16,
            f"the model record has head_dim_padded {model.head_dim_padded} for head_dim {model.head_dim}",
        )
        _need(model.block_size % 16 == 0, f"the model record has block_size {model.block_size}, not a multiple of 16")
        for name in ("kv_dtype", "act_dtype"):
            code = getattr(model, name)
            _need(0 <= code < len(DTYPES), f"the model record has the unknown {name} code {code}")
        _need(model.sliding_window >= 0, f"the model record has sliding_window {model.sliding_window}")
        for token in model.eos:
            _need(0 <= token < model.vocab_size, f"end-of-sequence id {token} is outside of the vocabulary")
        _need(-1 <= bos < model.vocab_size, f"beginning-of-sequence id {bos} is outside of the vocabulary")
        return model

    def kernels(self) -> tuple[Kernel, ...]:
        kernels = []
        for i, (offset, length, num_buffers, family, max_tasks, parts) in enumerate(self._records(3)):
            symbol = self._string(offset, length, f"kernel {i}", terminated=True)
            _need(num_buffers <= MAX_BUFFERS, f"kernel {symbol} has {num_buffers} buffers, at most {MAX_BUFFERS} fit")
            _need(family < len(FAMILIES), f"kernel {symbol} has the unknown family {family}")
            _need(parts <= MAX_WEIGHT_PARTS, f"kernel {symbol} has {parts} weight parts, more than {MAX_WEIGHT_PARTS}")
            kernels.append(Kernel(symbol, num_buffers, family, max_tasks, parts))
        return tuple(kernels)

    def weights(self) -> tuple[Weight, ...]:
        weights = []
        end, limit = 8, self.header.weights_bytes  # the length of the safetensors header comes first
        for i, record in enumerate(self._records(4)):
            name_offset, name_length, dtype, rank, file_offset, size = record[:6]
            name = self._string(name_offset, name_length, f"weight {i}", terminated=False)
            what = f"weight {name!r}"
            _need(dtype < len(DTYPES), f"{what} has the unknown dtype code {dtype}")
            _need(rank <= 4, f"{what} has rank {rank}, at most 4 is allowed")
            shape = record[6 : 6 + rank]
            _need(all(d >= 1 for d in shape), f"{what} has the invalid shape {list(shape)}")
            wanted = math.prod(shape) * DTYPE_BYTES[dtype]
            _need(size == wanted, f"{what} has {size} bytes, its shape {list(shape)} takes {wanted}")
            _need(file_offset % ALIGNMENT == 0, f"{what} is at byte {file_offset}, not a multiple of {ALIGNMENT}")
            _need(file_offset >= end, f"{what} is at byte {file_offset}, before byte {end} where the one before ends")
            end = file_offset + size
            _need(end <= limit, f"{what} ends at byte {end} of weights.safetensors, which has {limit}")
            weights.append(Weight(name, dtype, shape, file_offset, size, record[10]))
        return tuple(weights)

    def operands(self, model: ModelRecord, weights: tuple[Weight, ...]) -> tuple[Operand, ...]:
        limits = (1, len(weights), len(INPUTS), model.num_layers, model.num_layers, 1)
        rows = model.num_kv_heads * model.block_size * DTYPE_BYTES[model.kv_dtype]
        blocks = {_K_POOL: rows * model.head_dim, _V_POOL: rows * model.head_dim_padded}
        operands = []
        for i, (kind, index, offset, size) in enumerate(self._records(7)):
            _need(kind < len(OPERAND_KINDS), f"operand {i} has the unknown kind {kind}")
            name = OPERAND_KINDS[kind]
            # The index means nothing for the arena.
            _need(kind == _ARENA or index < limits[kind], f"operand {i} names {name} {index} of {limits[kind]}")
            what = f"operand {i}, {name}"
            _need(offset % ALIGNMENT == 0, f"{what}, is at byte {offset}, not a multiple of {ALIGNMENT}")
            _need(size > 0, f"{what}, has no bytes")
            if kind == _WEIGHT_KIND:
                weight = weights[index]
                end = offset + size
                _need(end <= weight.bytes, f"{what}, reaches byte {end} of {weight.name!r}, which has {weight.bytes}")
            elif kind in blocks:
                wanted = blocks[kind]
                _need(offset == 0, f"{what}, starts at byte {offset} of the pool instead of 0")
                _need(size == wanted, f"{what}, has blocks of {size} bytes, the model's have {wanted}")
            operands.append(Operand(kind, index, offset, size))
        return tuple(operands)

    def commands(self, model: ModelRecord, kernels: tuple[Kernel, ...], num_operands: int) -> tuple[Command, ...]:
        commands = []
        for i, (kernel, first, count, barrier, layer, family) in enumerate(self._records(6)):
            _need(kernel < len(kernels), f"command {i} names kernel {kernel} of {len(kernels)}")
            needed = kernels[kernel].num_buffers
            _need(count == needed, f"command {i} has {count} operands, {kernels[kernel].symbol} takes {needed}")
            _need(first + count <= num_operands, f"command {i} has operands from {first}, {count} of {num_operands}")
            _need(barrier <= 1, f"command {i} has the invalid barrier flag {barrier}")
            _need(-1 <= layer < model.num_layers, f"command {i} names layer {layer} of {model.num_layers}")
            _need(family < len(FAMILIES), f"command {i} has the unknown family {family}")
            commands.append(Command(kernel, first, count, bool(barrier), layer, family))
        return tuple(commands)

    def graphs(
        self, model: ModelRecord, commands: tuple[Command, ...], operands: tuple[Operand, ...]
    ) -> tuple[Graph, ...]:
        reach = [_reach(operands[c.first_operand : c.first_operand + c.num_operands]) for c in commands]
        needs: dict[tuple[int, int], dict[_Buffer, int]] = {}
        graphs = []
        for i, record in enumerate(self._records(5)):
            _need(record[0] < len(PHASES), f"graph {i} has the unknown phase {record[0]}")
            graph = Graph(*record)
            for name in ("batch", "seq", "max_tokens", "max_seqs", "max_samples", "max_blocks_per_seq", "row_tile"):
                value = getattr(graph, name)
                _need(1 <= value <= 0x7FFFFFFF, f"graph {graph.name} has {name} {value}")
            first, last = graph.first_command, graph.first_command + graph.num_commands
            _need(last <= len(commands), f"graph {graph.name} has commands {first} to {last} of {len(commands)}")
            if (first, last) not in needs:
                needs[first, last] = _merged(reach[first:last])
            for (kind, index), end in needs[first, last].items():
                what = INPUTS[index] if kind == _INPUT else OPERAND_KINDS[kind]
                capacity = _capacity(graph, model, kind, index)
                _need(end <= capacity, f"graph {graph.name} touches byte {end} of its {what}, which has {capacity}")
            graphs.append(graph)
        _need(bool(graphs), "graphs.bin has no graph")
        return tuple(graphs)


_Buffer = tuple[int, int]
"""Kind and index of a buffer whose size is the graph's own: arena, input or output."""


def _reach(operands: tuple[Operand, ...]) -> dict[_Buffer, int]:
    """How far a command's operands reach into the graph's buffers, in bytes."""
    ends: dict[_Buffer, int] = {}
    for o in operands:
        if o.kind in (_ARENA, _INPUT, _OUTPUT):
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
    """Bytes of a buffer of the graph."""
    if kind == _ARENA:
        return graph.arena_bytes
    if kind == _OUTPUT:
        return graph.max_samples * model.vocab_size * 4
    return math.prod(input_shape(graph, index)) * 4


def input_shape(graph: Graph, index: int) -> tuple[int, ...]:
    """Shape of the int32 input INPUTS[index]."""
    tokens, seqs = (graph.max_tokens,), (graph.max_seqs,)
    tables, bounds = (graph.max_seqs, graph.max_blocks_per_seq), (graph.max_seqs + 1,)
    return (tokens, tokens, tokens, tables, seqs, bounds, (graph.max_samples,), tokens)[index]


def parse_graphs(data: bytes) -> Tables:
    """The tables in `data`, fully checked. Raises FormatError with one sentence for what FORMAT.md does not allow."""
    reader = _Reader(memoryview(data))
    model, kernels, weights = reader.model(), reader.kernels(), reader.weights()
    operands = reader.operands(model, weights)
    commands = reader.commands(model, kernels, len(operands))
    graphs = reader.graphs(model, commands, operands)
    return Tables(reader.header, model, kernels, weights, graphs, commands, operands)


def read_graphs(artifact: Path) -> Tables:
    """The tables of the artifact directory `artifact` (or of a graphs.bin), and a look at the sizes of its files.

    Raises FormatError, naming the path, if it is not an artifact or is damaged; `verify_artifact` reads the rest.
    """
    artifact = Path(artifact)
    path = artifact / "graphs.bin" if artifact.is_dir() else artifact
    try:
        data = read_regular(path, _MAX_BYTES)
    except OSError as error:
        raise FormatError(f"cannot read {path}: {error.strerror or error}; is {artifact} an llmc artifact?") from None
    try:
        tables = parse_graphs(data)
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from None
    header = tables.header
    for name, wanted in (("weights.safetensors", header.weights_bytes), ("kernels.so", header.code_bytes)):
        file_path = path.with_name(name)
        found = file_path.stat().st_size if file_path.exists() else wanted
        _need(found == wanted, f"{file_path} has {found} bytes, graphs.bin says {wanted}: compile the model again")
    return tables
