"""graphs.bin: what the compiler writes, the reader reads; anything else is a FormatError."""

from __future__ import annotations

import dataclasses
import random
import re
import struct
import zlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmc import graphs_format as f
from llmc.compiler.store import graphs_writer as w
from llmc.graphs_records import (
    CodeRecord,
    KernelRecord,
    ModelRecord,
    OperandRecord,
    Tables,
    TargetRecord,
    WeightRecord,
)
from llmc.runtime import graphs_file as r
from llmc.runtime.graphs_checks import FormatError

from support.paths import ROOT

TARGET = TargetRecord("cpu", "znver4", 4, "tiles")
MODEL = ModelRecord(2, 1, 8, 16, 1, 100, 64, 4, 1, 0, (2, 3), 1, 256, 512)
KERNELS = (
    KernelRecord("embedding_0", 3, 0),
    KernelRecord("linear_0", 3, 2, 0, (50, 2)),
    KernelRecord("linear_ü", 3, 2),
)
WEIGHTS = (
    WeightRecord("embed", 1, (7, 4, 16, 2), 64, 1792, 7, "panels16"),
    WeightRecord("scale", 0, (8,), 1856, 32, 2**32 - 1, "rows"),
)
FILES = w.FileSums((CodeRecord("kernels.so", 4096, 0xC0DE),), 1888, 0xABC)


def op(kind: int, index: int = 0, offset: int = 0, size: int = 64) -> OperandRecord:
    return OperandRecord(kind, index, offset, size)


COMMANDS = (
    w.CommandRecord(0, (op(2, 0, 0, 4), op(1, 0, 0, 1792), op(0, 0, 64, 128)), True, -1, 0),
    w.CommandRecord(1, (op(0, 0, 64, 128), op(1, 1, 0, 32), op(3, 1, 0, 256)), False, 1, 2),
    w.CommandRecord(2, (op(0, 0, 64, 128), op(1, 1, 0, 32), op(5, 0, 0, 400)), True, -1, 2),
)
GRAPHS = (
    w.GraphRecord(0, 1, 16, 16, 1, 1, 4, 4, 192, COMMANDS),
    w.GraphRecord(1, 1, 16, 1, 1, 1, 4, 1, 192, COMMANDS),
    w.GraphRecord(1, 2, 16, 2, 2, 2, 4, 2, 256, COMMANDS[:1]),
)
DATA = w.write_graphs(TARGET, MODEL, KERNELS, WEIGHTS, GRAPHS, FILES)
KINDS = ("strings", "model", "kernels", "weights", "graphs", "commands", "operands", "target", "code")


def fix_crc(data: bytes) -> bytes:
    crc = zlib.crc32(data[32:], zlib.crc32(data[:28]))
    return data[:28] + struct.pack("<I", crc) + data[32:] if len(data) >= 64 else data


def section_of(data: bytes, name: str) -> int:
    """Offset of the first record of a section."""
    return int(struct.unpack_from("<Q", data, 64 + 24 * KINDS.index(name) + 8)[0])


def poke(offset: int, layout: str, *values: int) -> bytes:
    data = bytearray(DATA)
    struct.pack_into("<" + layout, data, offset, *values)
    return fix_crc(bytes(data))


def poke_record(section: str, offset: int, layout: str, *values: int) -> bytes:
    return poke(section_of(DATA, section) + offset, layout, *values)


def assert_same(tables: Tables) -> None:
    assert (tables.model, tables.target, tables.code) == (MODEL, TARGET, FILES.code)
    facts = [(*k.launch, *(0,) * (f.MAX_LAUNCH_FACTS - len(k.launch))) for k in KERNELS]
    assert tables.kernels == tuple(
        dataclasses.replace(k, launch=launch) for k, launch in zip(KERNELS, facts, strict=True)
    )
    assert tables.weights == WEIGHTS
    assert len(tables.graphs) == len(GRAPHS)
    for got, want in zip(tables.graphs, GRAPHS, strict=True):
        for field in dataclasses.fields(want):
            if field.name != "commands":
                assert getattr(got, field.name) == getattr(want, field.name)
        for command, wanted in zip(tables.commands_of(got), want.commands, strict=True):
            assert (command.kernel, command.barrier, command.layer, command.family) == (
                wanted.kernel, wanted.barrier, wanted.layer, wanted.family,
            )  # fmt: skip
            assert tables.operands_of(command) == wanted.operands


def test_round_trip() -> None:
    tables = r.parse_graphs(DATA)
    assert (tables.header.version, tables.header.file_bytes) == (5, len(DATA))
    for name in ("weights_bytes", "weights_header_crc32"):
        assert getattr(tables.header, name) == getattr(FILES, name)
    assert_same(tables)
    assert [g.name for g in tables.graphs] == ["prefill:1x16", "decode:1x16", "decode:2x16"]


def test_equal_lists_are_stored_once() -> None:
    tables = r.parse_graphs(DATA)
    assert tables.graphs[0].first_command == tables.graphs[1].first_command
    assert len(tables.commands) == 4
    assert len(tables.operands) == 9


def test_the_layout_is_the_documented_one() -> None:
    assert DATA[:16] == b"LLMCGRPH" + struct.pack("<II", 5, 64)
    assert len(DATA) % 8 == 0
    entries = [struct.unpack_from("<IIQQ", DATA, 64 + 24 * i) for i in range(9)]
    assert [(kind, size) for kind, size, _, _ in entries] == [
        (1, 1), (2, 128), (3, 48), (4, 80), (5, 64), (6, 24), (7, 24), (8, 32), (9, 24),
    ]  # fmt: skip
    assert all(offset % 8 == 0 for _, _, offset, _ in entries)
    strings = section_of(DATA, "strings")
    offset, length = struct.unpack_from("<II", DATA, section_of(DATA, "kernels"))
    assert DATA[strings + offset : strings + offset + length + 1] == b"embedding_0\0"


def test_the_records_are_those_of_the_document() -> None:
    document = (Path(r.__file__).parent / "FORMAT.md").read_text()
    written = dict(re.findall(r"^    (\w+): (\w+ \w+(?:\[\d+\])?(?:, .+)?)$", document, flags=re.MULTILINE))
    assert written == f.RECORDS
    assert f"# The artifact format, version {f.VERSIONS[-1]}" in document
    assert {name: f.layout(name).size for name in f.RECORDS} == {
        "header": 64, "section": 24, "model": 128, "kernel": 48, "weight": 80, "graph": 64, "command": 24,
        "operand": 24, "target": 32, "code": 24, "adapter": 64, "collective": 32, "stage": 8, "kv_layer": 16,
        "state_layer": 8,
    }  # fmt: skip
    assert len(f.DTYPES) == len(f.DTYPE_BYTES)
    for name, kind in f.SECTIONS.items():
        assert f"| {kind} | {name} |" in document or f"| {kind} | {name}s |" in document


def test_unknown_sections_are_ignored() -> None:
    count = 9
    table, body = bytearray(DATA[64 : 64 + 24 * count]), DATA[64 + 24 * count :]
    for i in range(count):
        struct.pack_into("<Q", table, 24 * i + 8, struct.unpack_from("<Q", table, 24 * i + 8)[0] + 24)
    table += struct.pack("<IIQQ", 4242, 1, 0, 0)
    header = bytearray(DATA[:64])
    struct.pack_into("<QI", header, 16, len(DATA) + 24, count + 1)
    assert_same(r.parse_graphs(fix_crc(bytes(header + table + body))))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "shorter than its header"),
        (b"X" + DATA[1:], "does not start with LLMCGRPH"),
        (poke(8, "I", 1), "format version 1"),
        (
            poke(8, "I", 4),
            "format version 4, this llmc reads versions 5, 6, 7, 8, 9, 10, 12 and 13: compile",
        ),
        (poke(8, "I", 14), "format version 14"),
        (poke(8, "I", 6), "graphs.bin of version 6 has no section adapters"),
        (DATA[:-8], "truncated"),
        (DATA[:-1] + b"\x01", "checksum"),
        (poke(24, "I", 2**32 - 1), "sections"),
        (poke(64 + 24 * 5, "I", 7), "more than one section operands"),
        (poke(64, "I", 99), "no section strings"),
        (poke(64 + 24 + 4, "I", 64), "records of 64 bytes"),
        (poke(64 + 72 + 16, "Q", 2**64 // 72 + 1), "does not fit"),
        (poke(64 + 72 + 8, "Q", 2**64 - 8), "does not fit"),
        (poke(64 + 72 + 8, "Q", 7), "invalid byte 7"),
        (poke_record("model", 80, "Q", 0), "key_block_bytes 0"),
        (poke_record("model", 88, "Q", 2**63), "value_block_bytes 9223372036854775808"),
        (poke_record("model", 12, "i", 8), "block_size 8"),
        (poke_record("model", 40, "i", 9), "9 end-of-sequence"),
        (poke_record("kernels", 8, "I", 13), "13 buffers"),
        (poke_record("kernels", 16, "I", 1), "code file 1 of 1"),
        (poke_record("target", 4, "I", 0), "target's kind has an invalid name"),
        (poke_record("target", 16, "I", 2**32 - 1), "of strings"),
        (poke_record("code", 4, "I", 999), "of strings"),
        (poke_record("code", 0, "II", 0, 12), "code file 0 has an invalid name"),
        (poke_record("weights", 68, "I", 999), "of strings"),
        (poke_record("kernels", 0, "I", 2**32 - 1), "of strings"),
        (poke_record("weights", 12, "I", 5), "rank 5"),
        (poke_record("weights", 24, "Q", 8), "8 bytes, its shape"),
        (poke_record("weights", 16, "Q", 65), "multiple of 64"),
        (poke_record("weights", 16, "Q", 2**64 - 64), "of weights.safetensors"),
        (poke_record("weights", 80 + 16, "Q", 64), "before byte 1856"),
        (poke_record("weights", 16, "Q", 0), "before byte 8"),
        (poke(32, "Q", 1887), "which has 1887"),
        (poke_record("graphs", 0, "I", 3), "unknown phase 3"),
        (poke_record("graphs", 36, "I", 99), "commands 0 to 99"),
        (poke_record("graphs", 40, "Q", 191), "byte 192 of its arena, which has 191"),
        (poke_record("graphs", 28, "I", 0), "row_unit 0"),
        (poke_record("commands", 0, "I", 3), "kernel 3 of 3"),
        (poke_record("commands", 4, "I", 2**32 - 1), "operands from 4294967295"),
        (poke_record("commands", 8, "I", 2), "2 operands"),
        (poke_record("commands", 12, "I", 2), "barrier flag 2"),
        (poke_record("commands", 16, "i", 2), "layer 2 of 2"),
        (poke_record("operands", 0, "I", 6), "names adapters 0 of 0"),
        (poke_record("operands", 0, "I", 7), "names states 0 of 0"),
        (poke_record("operands", 0, "I", 8), "unknown kind 8"),
        (poke_record("operands", 4, "I", 8), "input 8 of 8"),
        (poke_record("operands", 28, "I", 2), "weight 2 of 2"),
        (poke_record("operands", 16, "Q", 0), "operand 0, input, has no bytes"),
        (poke_record("operands", 16, "Q", 65), "decode:1x16 touches byte 65 of its input_ids|byte 65 of its input_ids"),
        (poke_record("operands", 40, "Q", 1793), "byte 1793 of 'embed'"),
        (poke_record("operands", 56, "Q", 65), "multiple of 64"),
        (poke_record("operands", 56, "Q", 2**64 - 64), "of its arena"),
        (poke_record("operands", 24 * 5 + 16, "Q", 255), "blocks of 255 bytes, those of layer 1 have 256"),
        (poke_record("operands", 24 * 5 + 16, "Q", 512), "blocks of 512 bytes, those of layer 1 have 256"),
        (poke_record("operands", 24 * 5 + 8, "Q", 64), "byte 64 of the pool"),
        (poke_record("operands", 24 * 8 + 16, "Q", 401), "byte 401 of its output, which has 400"),
    ],
)
def test_what_is_wrong_is_named(data: bytes, message: str) -> None:
    with pytest.raises(FormatError, match=message) as caught:
        r.parse_graphs(data)
    assert "\n" not in str(caught.value)


def parse_or_refuse(data: bytes) -> None:
    try:
        tables = r.parse_graphs(data)
    except FormatError:
        return
    for graph in tables.graphs:
        for command in tables.commands_of(graph):
            if command.collective is None:
                assert len(tables.operands_of(command)) == tables.kernels[command.kernel].num_buffers
            else:
                assert len(tables.operands_of(command)) == tables.collectives[command.collective].num_operands


@given(st.integers(0, len(DATA) - 1), st.integers(1, 255))
def test_a_flipped_byte_is_always_noticed(position: int, flip: int) -> None:
    data = bytearray(DATA)
    data[position] ^= flip
    with pytest.raises(FormatError):
        r.parse_graphs(bytes(data))


@given(st.integers(0, len(DATA) - 1))
def test_a_truncated_file_is_always_noticed(length: int) -> None:
    with pytest.raises(FormatError):
        r.parse_graphs(DATA[:length])


@settings(max_examples=500)
@given(st.lists(st.tuples(st.integers(24, len(DATA) - 1), st.integers(0, 255)), min_size=1, max_size=8))
def test_changes_with_a_right_checksum_raise_nothing_else(changes: list[tuple[int, int]]) -> None:
    data = bytearray(DATA)
    for position, value in changes:
        data[position] = value
    parse_or_refuse(fix_crc(bytes(data)))


@given(st.integers(64, len(DATA)), st.binary(max_size=64))
def test_a_cut_file_with_a_right_header_raises_nothing_else(length: int, tail: bytes) -> None:
    data = bytearray(DATA[:length] + tail)
    struct.pack_into("<Q", data, 16, len(data))
    parse_or_refuse(fix_crc(bytes(data)))


@given(st.binary(max_size=300))
def test_junk_raises_nothing_else(data: bytes) -> None:
    with pytest.raises(FormatError):
        r.parse_graphs(data)
    with pytest.raises(FormatError):
        r.parse_graphs(b"LLMCGRPH" + data)


def test_random_tables_round_trip() -> None:
    rng = random.Random(1)
    for _ in range(20):
        commands = tuple(
            w.CommandRecord(
                rng.randrange(3),
                tuple(op(0, 0, 64 * rng.randrange(9), rng.randrange(1, 999)) for _ in range(3)),
                rng.random() < 0.5, rng.randrange(-1, 2), rng.randrange(8),
            )
            for _ in range(rng.randrange(1, 9))
        )  # fmt: skip
        graph = w.GraphRecord(1, 1, 16, 1, 1, 1, 4, 1, 9999, commands)
        tables = r.parse_graphs(w.write_graphs(TARGET, MODEL, KERNELS, WEIGHTS, (graph,), FILES))
        assert [c.kernel for c in tables.commands_of(tables.graphs[0])] == [c.kernel for c in commands]


def test_the_writer_refuses_what_does_not_fit() -> None:
    with pytest.raises(w.GraphsWriteError, match="9 end-of-sequence"):
        w.write_graphs(TARGET, dataclasses.replace(MODEL, eos=tuple(range(9))), KERNELS, WEIGHTS, GRAPHS, FILES)
    with pytest.raises(w.GraphsWriteError, match="rank 5"):
        w.write_graphs(TARGET, MODEL, KERNELS, [WeightRecord("x", 0, (1,) * 5, 0, 4, 0, "rows")], GRAPHS, FILES)
    with pytest.raises(w.GraphsWriteError, match="kernel 1, there are 1"):
        w.write_graphs(TARGET, MODEL, KERNELS[:1], WEIGHTS, GRAPHS, FILES)
    with pytest.raises(w.GraphsWriteError, match="does not fit"):
        w.write_graphs(TARGET, dataclasses.replace(MODEL, vocab_size=2**31), KERNELS, WEIGHTS, GRAPHS, FILES)
    with pytest.raises(w.GraphsWriteError, match="8 launch facts"):
        w.write_graphs(TARGET, MODEL, [KernelRecord("x", 1, 0, 0, (1,) * 8)], WEIGHTS, (), FILES)
    with pytest.raises(w.GraphsWriteError, match="code file 1, there are 1"):
        w.write_graphs(TARGET, MODEL, [KernelRecord("x", 1, 0, 1)], WEIGHTS, (), FILES)


def test_read_from_a_directory(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="cannot read"):
        r.read_graphs(tmp_path)
    (tmp_path / "graphs.bin").write_bytes(DATA)
    assert_same(r.read_graphs(tmp_path))
    (tmp_path / "weights.safetensors").write_bytes(bytes(100))
    with pytest.raises(FormatError, match=r"has 100 bytes, graphs\.bin says 1888"):
        r.read_graphs(tmp_path)


def test_the_native_reader_knows_the_same_codes_and_limits() -> None:
    artifact = ROOT / "runtime" / "native" / "artifact"
    text = (artifact / "artifact.h").read_text() + (artifact / "model_shape.h").read_text()

    def members(enum: str) -> list[tuple[str, int]]:
        body = re.search(rf"enum (?:class )?{enum} : uint32_t {{([^}}]*)}}", text)
        assert body is not None
        return [(name, int(code)) for name, code in re.findall(r"k(\w+) = (\d+)", body[1])]

    def spelt(name: str) -> str:
        return "".join(map(str.capitalize, name.split("_")))

    pools = {"k_pool": "KeyPool", "v_pool": "ValuePool"}
    assert members("Phase") == [(spelt(name), code) for code, name in enumerate(f.PHASES)]
    assert members("Input") == [(spelt(name), code) for code, name in enumerate(f.GRAPH_INPUTS)]
    assert members("OperandKind") == [(pools.get(name, spelt(name)), code) for code, name in enumerate(f.OPERAND_KINDS)]
    assert members("CollectiveOp") == [(spelt(name), code) for code, name in enumerate(f.COLLECTIVES)]
    assert members("CollectiveRows") == [(spelt(name), code) for code, name in enumerate(f.COLLECTIVE_ROWS)]
    assert f"kAddsBias = {f.ADDS_BIAS}, kAddsResidual = {f.ADDS_RESIDUAL};" in text
    assert f"kCollective = 1u << {f.COLLECTIVE.bit_length() - 1};" in text
    limits = {name: int(value) for name, value in re.findall(r"constexpr u?int\d+_t k(\w+) = (\d+);", text)}
    assert limits == {
        "MaxBuffers": f.MAX_BUFFERS, "NumFamilies": len(f.FAMILIES), "NumInputs": len(f.GRAPH_INPUTS),
        "Alignment": f.ALIGNMENT, "MaxLaunchFacts": f.MAX_LAUNCH_FACTS, "MaxRanks": f.MAX_RANKS,
        "TileRows": f.TILE_ROWS, "StateFields": f.STATE_FIELDS, "RopeAxes": f.ROPE_AXES,
    }  # fmt: skip


def test_documents_name_the_version_that_is_written_and_read() -> None:
    runtime = ROOT / "runtime"
    native = re.search(r"kVersion = (\d+);", (runtime / "native" / "artifact" / "artifact.cc").read_text())
    assert native is not None
    assert int(native[1]) == f.VERSIONS[-1]
    said = (runtime / "COMPATIBILITY.md").read_text()
    table = re.findall(r"^\| (\d+) \|", said[said.index("| format |") : said.index("**C ABI.**")], re.MULTILINE)
    assert [int(version) for version in table] == list(range(1, f.VERSIONS[-1] + 1))
    assert (
        f"[format](FORMAT.md), now {f.VERSION_OF_PLACED_ROWS}, and versions {f.VERSION_OF_STATE_LAYERS}, "
        f"{f.VERSION_OF_KV_LAYERS}, "
        f"{f.VERSION_OF_STAGES}, {f.VERSION_OF_TOTALS}, {f.VERSION_OF_RANKS}, {f.VERSION_OF_ADAPTERS} and "
        f"{f.VERSION_WITHOUT_ADAPTERS}" in said
    )
    abi = re.search(r"LLMC_ABI_VERSION (\d+)", (runtime / "native" / "include" / "llmc" / "llmc.h").read_text())
    assert abi is not None
    assert f"`llmc_abi_version()` is {abi[1]}." in said
    assert (runtime / "FORMAT.md").read_text().startswith(f"# The artifact format, version {f.VERSIONS[-1]}\n")
