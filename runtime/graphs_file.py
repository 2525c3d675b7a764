"""Reads graphs.bin (FORMAT.md) in plain Python, for tools and tests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmc.adapter_slot import ITEM_BYTES, AdapterSlot
from llmc.graphs_format import (
    DTYPES,
    FIRST_VERSIONS,
    MAGIC,
    MAX_ADAPTER_PARTS,
    MAX_EOS,
    MAX_RANK,
    SECTIONS,
    VERSION_OF_STATES_IN_BLOCKS,
    VERSIONS,
    layout,
    tables_crc32,
)
from llmc.graphs_records import (
    AdapterRecord,
    CodeRecord,
    CollectiveRecord,
    Command,
    Graph,
    Header,
    KernelRecord,
    KvLayerRecord,
    ModelRecord,
    OperandRecord,
    StageRecord,
    Tables,
    TargetRecord,
    WeightRecord,
)
from llmc.regular_file import read_regular
from llmc.runtime.graphs_checks import FormatError, check_tables, need

_MAX_BYTES = 1 << 30
_HEADER, _SECTION = layout("header"), layout("section")
_LAYOUTS = {kind: layout(name) for name, kind in SECTIONS.items() if name != "strings"}
_SECTION_NAMES = {kind: name if name.endswith("s") else f"{name}s" for name, kind in SECTIONS.items()}

_FIRST_VERSIONS = {SECTIONS[name]: version for name, version in FIRST_VERSIONS.items()}


@dataclass(frozen=True)
class _Section:
    record_bytes: int
    offset: int
    count: int


def _read_header(data: memoryview) -> tuple[Header, int]:
    need(len(data) >= _HEADER.size, f"graphs.bin has {len(data)} bytes, shorter than its header of {_HEADER.size}")
    magic, version, header_bytes, file_bytes, num_sections, crc, *weights = _HEADER.unpack_from(data)
    need(magic == MAGIC, "graphs.bin does not start with LLMCGRPH: this is not an llmc artifact")
    need(
        version != VERSION_OF_STATES_IN_BLOCKS,
        f"graphs.bin has format version {version}, of an older llmc with states elsewhere: compile the model again",
    )
    need(
        version in VERSIONS,
        f"graphs.bin has format version {version}, this llmc reads versions {', '.join(map(str, VERSIONS[:-1]))} and "
        f"{VERSIONS[-1]}: compile the model again",
    )
    need(header_bytes == _HEADER.size, f"graphs.bin has a header of {header_bytes} bytes instead of {_HEADER.size}")
    need(file_bytes == len(data), f"graphs.bin has {len(data)} bytes, its header says {file_bytes}: it is truncated")
    found = tables_crc32(data)
    need(found == crc, f"graphs.bin is damaged: its checksum is {found:08x} instead of {crc:08x}")
    return Header(version, file_bytes, crc, *weights), num_sections


def _read_sections(data: memoryview, num_sections: int, version: int) -> dict[int, _Section]:
    end = _HEADER.size + num_sections * _SECTION.size
    need(end <= len(data), f"graphs.bin names {num_sections} sections, more than its {len(data)} bytes can hold")
    sections: dict[int, _Section] = {}
    for kind, record_bytes, offset, count in _SECTION.iter_unpack(data[_HEADER.size : end]):
        name = _SECTION_NAMES.get(kind)
        if name is None:
            continue
        need(kind not in sections, f"graphs.bin has more than one section {name}")
        wanted = 1 if kind == SECTIONS["strings"] else _LAYOUTS[kind].size
        need(record_bytes == wanted, f"section {name} has records of {record_bytes} bytes instead of {wanted}")
        need(offset % 8 == 0 and offset >= end, f"section {name} starts at the invalid byte {offset}")
        fits = offset <= len(data) and count * record_bytes <= len(data) - offset
        need(fits, f"section {name} of {count} records at byte {offset} does not fit in {len(data)} bytes")
        # The native reader counts in 32 bits.
        need(count <= 0xFFFFFFFF, f"section {name} has {count} records, too many")
        sections[kind] = _Section(record_bytes, offset, count)
    for kind, name in _SECTION_NAMES.items():
        wanted = version >= _FIRST_VERSIONS.get(kind, 0)
        which = "no" if wanted else "the"
        need((kind in sections) == wanted, f"graphs.bin of version {version} has {which} section {name}")
    return sections


class _Reader:
    """Parses everything parseable; `check_tables` decides on validity."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self.header, num_sections = _read_header(data)
        self._sections = _read_sections(data, num_sections, self.header.version)
        strings = self._sections[SECTIONS["strings"]]
        self._strings = data[strings.offset : strings.offset + strings.count]

    def tables(self) -> Tables:
        model = self._model()
        return Tables(
            header=self.header,
            target=self._target(),
            code=tuple(self._code(i, *record) for i, record in enumerate(self._records("code"))),
            model=model,
            kernels=tuple(self._kernel(i, record) for i, record in enumerate(self._records("kernel"))),
            weights=tuple(self._weight(i, record) for i, record in enumerate(self._records("weight"))),
            graphs=tuple(Graph(*record, max_blocks=blocks) for *record, blocks in self._records("graph")),
            commands=tuple(self._command(i, *record) for i, record in enumerate(self._records("command"))),
            operands=tuple(OperandRecord(*record) for record in self._records("operand")),
            adapters=tuple(self._adapter(i, model, record) for i, record in enumerate(self._records("adapter"))),
            collectives=tuple(CollectiveRecord(*record) for record in self._records("collective")),
            stages=tuple(StageRecord(*record) for record in self._records("stage")),
            kv_layers=tuple(KvLayerRecord(*record) for record in self._records("kv_layer")),
            state_layers=tuple(layer for (layer,) in self._records("state_layer")),
        )

    def _records(self, name: str) -> Iterator[tuple[int, ...]]:
        kind = SECTIONS[name]
        if kind not in self._sections:
            return iter(())
        section = self._sections[kind]
        return _LAYOUTS[kind].iter_unpack(
            self._data[section.offset : section.offset + section.count * section.record_bytes]
        )

    def _one(self, name: str) -> tuple[int, ...]:
        """The record of a section with exactly one."""
        count = self._sections[SECTIONS[name]].count
        need(count == 1, f"graphs.bin has {count} {name} records instead of 1")
        return next(self._records(name))

    def _string(self, offset: int, length: int, what: str, terminated: bool = False) -> str:
        end = offset + length
        size = len(self._strings)
        need(end + terminated <= size, f"{what} has its name at bytes {offset} to {end} of {size} bytes of strings")
        raw = bytes(self._strings[offset:end])
        need(length > 0 and b"\0" not in raw, f"{what} has an invalid name")
        need(not terminated or self._strings[end] == 0, f"{what} has a name without a terminating NUL")
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise FormatError(f"{what} has a name that is not UTF-8") from None

    def _target(self) -> TargetRecord:
        *places, level = self._one("target")
        kind, name, tag = (
            self._string(places[i], places[i + 1], f"the target's {what}")
            for i, what in ((0, "kind"), (2, "name"), (4, "layout"))
        )
        return TargetRecord(kind, name, level, tag)

    def _code(self, index: int, offset: int, length: int, crc: int, size: int) -> CodeRecord:
        return CodeRecord(self._string(offset, length, f"code file {index}"), size, crc)

    def _model(self) -> ModelRecord:
        record = self._one("model")
        num_eos, eos, rest = record[10], record[11 : 11 + MAX_EOS], record[11 + MAX_EOS :]
        need(0 <= num_eos <= MAX_EOS, f"the model record has {num_eos} end-of-sequence ids, at most {MAX_EOS} fit")
        values: list[Any] = [*record[:10], eos[:num_eos], *rest]
        return ModelRecord(*values)

    def _kernel(self, index: int, record: tuple[int, ...]) -> KernelRecord:
        offset, length, num_buffers, family, code, *launch = record
        symbol = self._string(offset, length, f"kernel {index}", terminated=True)
        return KernelRecord(symbol, num_buffers, family, code, tuple(launch))

    def _weight(self, index: int, record: tuple[int, ...]) -> WeightRecord:
        name_offset, name_length, dtype, rank, file_offset, size = record[:6]
        name = self._string(name_offset, name_length, f"weight {index}")
        need(rank <= MAX_RANK, f"weight {name!r} has rank {rank}, at most {MAX_RANK} is allowed")
        crc, tag_offset, tag_length = record[6 + MAX_RANK :]
        tag = self._string(tag_offset, tag_length, f"the layout of weight {name!r}")
        return WeightRecord(name, dtype, record[6 : 6 + rank], file_offset, size, crc, tag)

    def _adapter(self, index: int, model: ModelRecord, record: tuple[int, ...]) -> AdapterRecord:
        weight, columns, tile_rows, tile_columns, num_parts = record[:5]
        rows, slot_bytes = record[5 : 5 + MAX_ADAPTER_PARTS], record[5 + MAX_ADAPTER_PARTS]
        what = f"pool {index} of adapters"
        within = 1 <= num_parts <= MAX_ADAPTER_PARTS and min(columns, tile_rows, tile_columns, *rows[:num_parts]) >= 1
        need(
            within,
            f"{what} has {columns} columns, tiles of {tile_rows} by {tile_columns} and parts of {list(rows)} rows",
        )
        dtype = DTYPES[model.act_dtype] if 0 <= model.act_dtype < len(DTYPES) else ""
        need(dtype in ITEM_BYTES, f"{what} is in a model of act_dtype code {model.act_dtype}")
        slot = AdapterSlot(columns, rows[:num_parts], model.adapter_rank, tile_rows, tile_columns, ITEM_BYTES[dtype])
        need(slot.bytes == slot_bytes, f"{what} has slots of {slot_bytes} bytes, its sizes take {slot.bytes}")
        return AdapterRecord(weight, slot)

    def _command(
        self, index: int, kernel: int, first: int, count: int, barrier: int, layer: int, family: int
    ) -> Command:
        need(barrier <= 1, f"command {index} has the invalid barrier flag {barrier}")
        return Command(kernel, first, count, bool(barrier), layer, family)


def parse_graphs(data: bytes) -> Tables:
    """The tables in `data`, fully checked. Raises FormatError with one sentence for a violation of FORMAT.md."""
    tables = _Reader(memoryview(data)).tables()
    check_tables(tables)
    return tables


def read_graphs(artifact: Path) -> Tables:
    """The tables of the artifact directory `artifact` (or of a graphs.bin); also checks the sizes of its files.

    Raises FormatError, naming the path, if it is not an artifact or is damaged; `verify_artifact` checks all bytes.
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
        need(found == wanted, f"{file_path} has {found} bytes, graphs.bin says {wanted}: compile the model again")
    return tables
