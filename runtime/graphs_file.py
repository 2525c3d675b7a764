"""Reader of graphs.bin (FORMAT.md) in plain Python, with the checks of the native reader; for tools and tests."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from llmc.graphs_format import (
    ALIGNMENT,
    DTYPE_BYTES,
    DTYPES,
    FAMILIES,
    INPUTS,
    MAGIC,
    MAX_BUFFERS,
    MAX_CODE_FILES,
    MAX_EOS,
    MAX_RANK,
    OPERAND_KINDS,
    PHASES,
    SECTIONS,
    VERSION,
    layout,
    tables_crc32,
)
from llmc.graphs_format import input_shape as shape_of_input
from llmc.regular_file import read_regular

_MAX_BYTES = 1 << 30
_MAX_BLOCK_BYTES = 1 << 51
_HEADER, _SECTION = layout("header"), layout("section")
_LAYOUTS = {kind: layout(name) for name, kind in SECTIONS.items() if name != "strings"}
_SECTION_NAMES = {kind: name if name.endswith("s") else f"{name}s" for name, kind in SECTIONS.items()}
_MODEL_FIELDS = (
    "num_layers",
    "num_kv_heads",
    "head_dim",
    "block_size",
    "kv_dtype",
    "vocab_size",
    "max_model_len",
    "max_num_seqs",
    "act_dtype",
    "sliding_window",
)
_ARENA, _WEIGHT_KIND, _INPUT, _K_POOL, _V_POOL, _OUTPUT = range(len(OPERAND_KINDS))
_CODE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")
"""A plain file name: no artifact makes anybody look outside of itself."""


class FormatError(ValueError):
    """A file that is not a valid graphs.bin of this version; the message is one sentence."""


@dataclass(frozen=True)
class Header:
    """version, size of graphs.bin in bytes, its CRC-32; of weights.safetensors the size and the CRC-32 of its
    header."""

    version: int
    file_bytes: int
    crc32: int
    weights_bytes: int
    weights_header_crc32: int


@dataclass(frozen=True)
class TargetRecord:
    """What the code is for: the kind of device that loads it, the level that this must have, the target's name, and the
    tag of how activations and KV cache lie."""

    kind: str
    name: str
    level: int
    layout: str


@dataclass(frozen=True)
class Code:
    """A file of machine code beside graphs.bin: its name, size in bytes and CRC-32."""

    name: str
    bytes: int
    crc32: int


@dataclass(frozen=True)
class ModelRecord:
    """What the engine must know of the model. sliding_window 0: none; bos -1: none; dtypes are codes of DTYPES.

    key_block_bytes, value_block_bytes: of one KV block of one layer.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    kv_dtype: int
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    act_dtype: int
    sliding_window: int
    eos: tuple[int, ...]
    bos: int
    key_block_bytes: int
    value_block_bytes: int

    @property
    def kv_block_bytes(self) -> int:
        """Of a KV block, keys and values of all layers."""
        return self.num_layers * (self.key_block_bytes + self.value_block_bytes)

    def kv_widths(self) -> tuple[int, int]:
        """Elements that a token takes of a head's keys and values, padding included."""
        rows = self.num_kv_heads * self.block_size * DTYPE_BYTES[self.kv_dtype]
        return self.key_block_bytes // rows, self.value_block_bytes // rows


@dataclass(frozen=True)
class Kernel:
    """A symbol of a code file, its number of buffers and its family, an index into FAMILIES.

    code: index of the file. launch: what the device is told of it, numbers that the target defines.
    """

    symbol: str
    num_buffers: int
    family: int
    code: int
    launch: tuple[int, ...]


@dataclass(frozen=True)
class Weight:
    """A packed tensor: dtype code, packed shape, byte range in weights.safetensors, CRC-32 of those bytes, and the tag
    of its layout."""

    name: str
    dtype: int
    shape: tuple[int, ...]
    file_offset: int
    bytes: int
    crc32: int
    layout: str


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
    """One bucket; its commands are commands[first_command : first_command + num_commands].

    row_unit: rows of tokens are held, and computed, in multiples of it.
    """

    phase: int
    batch: int
    seq: int
    max_tokens: int
    max_seqs: int
    max_samples: int
    max_blocks_per_seq: int
    row_unit: int
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
    target: TargetRecord
    code: tuple[Code, ...]
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
    magic, version, header_bytes, file_bytes, num_sections, crc, *weights = _HEADER.unpack_from(data)
    _need(magic == MAGIC, "graphs.bin does not start with LLMCGRPH: this is not an llmc artifact")
    _need(
        version == VERSION,
        f"graphs.bin has format version {version}, this llmc reads version {VERSION}: compile the model again",
    )
    _need(header_bytes == _HEADER.size, f"graphs.bin has a header of {header_bytes} bytes instead of {_HEADER.size}")
    _need(file_bytes == len(data), f"graphs.bin has {len(data)} bytes, its header says {file_bytes}: it is truncated")
    found = tables_crc32(data)
    _need(found == crc, f"graphs.bin is damaged: its checksum is {found:08x} instead of {crc:08x}")
    return Header(version, file_bytes, crc, *weights), num_sections


def _read_sections(data: memoryview, num_sections: int) -> dict[int, _Section]:
    end = _HEADER.size + num_sections * _SECTION.size
    _need(end <= len(data), f"graphs.bin names {num_sections} sections, more than its {len(data)} bytes can hold")
    sections: dict[int, _Section] = {}
    for kind, record_bytes, offset, count in _SECTION.iter_unpack(data[_HEADER.size : end]):
        name = _SECTION_NAMES.get(kind)
        if name is None:
            continue
        _need(kind not in sections, f"graphs.bin has more than one section {name}")
        wanted = 1 if kind == SECTIONS["strings"] else _LAYOUTS[kind].size
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
        strings = self._sections[SECTIONS["strings"]]
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

    def _one(self, name: str) -> tuple[int, ...]:
        """The record of a section that has one."""
        count = self._sections[SECTIONS[name]].count
        _need(count == 1, f"graphs.bin has {count} {name} records instead of 1")
        return next(self._records(SECTIONS[name]))

    def target(self) -> TargetRecord:
        *places, level = self._one("target")
        kind, name, tag = (
            self._string(places[i], places[i + 1], f"the target's {what}", terminated=False)
            for i, what in ((0, "kind"), (2, "name"), (4, "layout"))
        )
        return TargetRecord(kind, name, level, tag)

    def code(self) -> tuple[Code, ...]:
        files = []
        for i, (offset, length, crc, size) in enumerate(self._records(SECTIONS["code"])):
            name = self._string(offset, length, f"code file {i}", terminated=False)
            _need(_CODE_NAME.fullmatch(name) is not None, f"code file {i} is called {name!r}, which is no file name")
            files.append(Code(name, size, crc))
        within = 1 <= len(files) <= MAX_CODE_FILES
        _need(within, f"graphs.bin names {len(files)} code files, outside 1 to {MAX_CODE_FILES}")
        return tuple(files)

    def model(self) -> ModelRecord:
        values = self._one("model")
        num_eos, eos, bos, *block_bytes = values[10], values[11:19], *values[19:]
        _need(0 <= num_eos <= MAX_EOS, f"the model record has {num_eos} end-of-sequence ids, at most {MAX_EOS} fit")
        fields = dict(zip(_MODEL_FIELDS, values, strict=False))
        model = ModelRecord(**fields, eos=eos[:num_eos], bos=bos, key_block_bytes=block_bytes[0],
                            value_block_bytes=block_bytes[1])  # fmt: skip
        for name in ("num_layers", "num_kv_heads", "head_dim", "block_size", "vocab_size", "max_model_len",
                     "max_num_seqs"):  # fmt: skip
            value = getattr(model, name)
            _need(value >= 1, f"the model record has {name} {value}, at least 1 is needed")
        _need(model.block_size % 16 == 0, f"the model record has block_size {model.block_size}, not a multiple of 16")
        for name in ("kv_dtype", "act_dtype"):
            code = getattr(model, name)
            _need(0 <= code < len(DTYPES), f"the model record has the unknown {name} code {code}")
        for name in ("key_block_bytes", "value_block_bytes"):
            value = getattr(model, name)
            within = 1 <= value <= _MAX_BLOCK_BYTES
            _need(within, f"the model record has {name} {value}, outside 1 to {_MAX_BLOCK_BYTES}")
        _need(model.sliding_window >= 0, f"the model record has sliding_window {model.sliding_window}")
        for token in model.eos:
            _need(0 <= token < model.vocab_size, f"end-of-sequence id {token} is outside of the vocabulary")
        _need(-1 <= bos < model.vocab_size, f"beginning-of-sequence id {bos} is outside of the vocabulary")
        return model

    def kernels(self, num_codes: int) -> tuple[Kernel, ...]:
        kernels = []
        for i, (offset, length, num_buffers, family, code, *launch) in enumerate(self._records(SECTIONS["kernel"])):
            symbol = self._string(offset, length, f"kernel {i}", terminated=True)
            _need(num_buffers <= MAX_BUFFERS, f"kernel {symbol} has {num_buffers} buffers, at most {MAX_BUFFERS} fit")
            _need(family < len(FAMILIES), f"kernel {symbol} has the unknown family {family}")
            _need(code < num_codes, f"kernel {symbol} is in code file {code} of {num_codes}")
            kernels.append(Kernel(symbol, num_buffers, family, code, tuple(launch)))
        return tuple(kernels)

    def weights(self) -> tuple[Weight, ...]:
        weights = []
        end, limit = 8, self.header.weights_bytes  # the length of the safetensors header comes first
        for i, record in enumerate(self._records(SECTIONS["weight"])):
            name_offset, name_length, dtype, rank, file_offset, size = record[:6]
            name = self._string(name_offset, name_length, f"weight {i}", terminated=False)
            what = f"weight {name!r}"
            _need(dtype < len(DTYPES), f"{what} has the unknown dtype code {dtype}")
            _need(rank <= MAX_RANK, f"{what} has rank {rank}, at most {MAX_RANK} is allowed")
            shape = record[6 : 6 + rank]
            _need(all(d >= 1 for d in shape), f"{what} has the invalid shape {list(shape)}")
            wanted = math.prod(shape) * DTYPE_BYTES[dtype]
            _need(size == wanted, f"{what} has {size} bytes, its shape {list(shape)} takes {wanted}")
            _need(file_offset % ALIGNMENT == 0, f"{what} is at byte {file_offset}, not a multiple of {ALIGNMENT}")
            _need(file_offset >= end, f"{what} is at byte {file_offset}, before byte {end} where the one before ends")
            end = file_offset + size
            _need(end <= limit, f"{what} ends at byte {end} of weights.safetensors, which has {limit}")
            tag = self._string(record[11], record[12], f"the layout of {what}", terminated=False)
            weights.append(Weight(name, dtype, shape, file_offset, size, record[10], tag))
        return tuple(weights)

    def operands(self, model: ModelRecord, weights: tuple[Weight, ...]) -> tuple[Operand, ...]:
        limits = (1, len(weights), len(INPUTS), model.num_layers, model.num_layers, 1)
        blocks = {_K_POOL: model.key_block_bytes, _V_POOL: model.value_block_bytes}
        operands = []
        for i, (kind, index, offset, size) in enumerate(self._records(SECTIONS["operand"])):
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
        for i, (kernel, first, count, barrier, layer, family) in enumerate(self._records(SECTIONS["command"])):
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
        for i, record in enumerate(self._records(SECTIONS["graph"])):
            _need(record[0] < len(PHASES), f"graph {i} has the unknown phase {record[0]}")
            graph = Graph(*record)
            for name in ("batch", "seq", "max_tokens", "max_seqs", "max_samples", "max_blocks_per_seq", "row_unit"):
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
    limits = (graph.max_tokens, graph.max_seqs, graph.max_samples, graph.max_blocks_per_seq)
    return shape_of_input(INPUTS[index], *limits)


def parse_graphs(data: bytes) -> Tables:
    """The tables in `data`, fully checked. Raises FormatError with one sentence for what FORMAT.md does not allow."""
    reader = _Reader(memoryview(data))
    target, code, model = reader.target(), reader.code(), reader.model()
    kernels, weights = reader.kernels(len(code)), reader.weights()
    operands = reader.operands(model, weights)
    commands = reader.commands(model, kernels, len(operands))
    graphs = reader.graphs(model, commands, operands)
    return Tables(reader.header, target, code, model, kernels, weights, graphs, commands, operands)


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
    files = {"weights.safetensors": header.weights_bytes, **{code.name: code.bytes for code in tables.code}}
    for name, wanted in files.items():
        file_path = path.with_name(name)
        found = file_path.stat().st_size if file_path.exists() else wanted
        _need(found == wanted, f"{file_path} has {found} bytes, graphs.bin says {wanted}: compile the model again")
    return tables
