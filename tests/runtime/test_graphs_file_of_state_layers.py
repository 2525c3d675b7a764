"""graphs.bin of layers with a state: they come back, and anything else is a FormatError."""

from __future__ import annotations

import dataclasses
import struct

import pytest

from llmc import graphs_format as f
from llmc.compiler.store import graphs_writer as w
from llmc.compiler.store.graphs_patch import GraphsPatch
from llmc.graphs_records import (
    CodeRecord,
    KernelRecord,
    KvLayerRecord,
    ModelRecord,
    OperandRecord,
    StageRecord,
    Tables,
    TargetRecord,
    kv_block_bytes,
    state_bytes,
)
from llmc.runtime import graphs_file as r
from llmc.runtime.graph_view import commands_of
from llmc.runtime.graphs_checks import FormatError
from llmc.runtime.profile.costs import command_cost
from llmc.runtime.profile.steps import Step

from support.graphs_bin import check_random_changes, poked

TARGET = TargetRecord("cpu", "znver4", 4, "tiles")
MODEL = ModelRecord(3, 1, 8, 16, 1, 100, 64, 4, 1, 0, (2, 3), 1, 4096, 768)
LAYERS = (KvLayerRecord(4096, 96), KvLayerRecord(4096, 96), KvLayerRecord(256, 768))
STATES = (0, 1)
KERNELS = (KernelRecord("delta_rule_0", 1, 4), KernelRecord("short_conv_0", 1, 7))
FILES = w.FileSums((CodeRecord("kernels.so", 4096, 0xC0DE),), 128, 0xABC)
COMMANDS = tuple(
    w.CommandRecord(kind - 3, (OperandRecord(kind, layer, 0, size),), True, layer, 7)
    for layer in STATES
    for kind, size in ((4, LAYERS[layer].value_block_bytes), (3, LAYERS[layer].key_block_bytes))
)
GRAPH = w.GraphRecord(0, 1, 16, 16, 1, 1, 4, 4, 64, COMMANDS)
SECTION = 64 + 13 * 24


def written(states: tuple[int, ...] = STATES, layers: tuple[KvLayerRecord, ...] = LAYERS) -> bytes:
    return w.write_graphs(TARGET, MODEL, KERNELS, (), (GRAPH,), FILES, kv_layers=layers, state_layers=states)


def test_round_trip() -> None:
    tables = r.parse_graphs(written())
    assert (tables.header.version, tables.state_layers) == (f.VERSION_OF_STATE_LAYERS, STATES)
    assert (tables.kv_layers, tables.stages, tables.collectives) == (LAYERS, (), ())
    assert (tables.kv_block_bytes, tables.state_bytes) == (256 + 768, 2 * (4096 + 96))


def test_without_states_no_byte_changes() -> None:
    data = written(())
    assert data == w.write_graphs(TARGET, MODEL, KERNELS, (), (GRAPH,), FILES, kv_layers=LAYERS)
    tables = r.parse_graphs(data)
    assert (tables.header.version, tables.state_layers) == (f.VERSION_OF_KV_LAYERS, ())


def test_layers_with_a_state_may_be_of_one_size() -> None:
    model = dataclasses.replace(MODEL, value_block_bytes=96)
    data = w.write_graphs(TARGET, model, KERNELS, (), (GRAPH,), FILES, kv_layers=LAYERS[:1] * 3, state_layers=(0, 1, 2))
    tables = r.parse_graphs(data)
    assert (tables.header.version, tables.kv_layers, tables.state_layers) == (12, (), (0, 1, 2))
    assert (tables.kv_block_bytes, tables.state_bytes) == (0, 3 * (4096 + 96))


def test_the_stage_with_the_most_of_either_counts() -> None:
    stages = StageRecord(0, 1), StageRecord(1, 2)
    sizes = MODEL, LAYERS, stages
    assert (kv_block_bytes(*sizes, STATES), state_bytes(*sizes, STATES)) == (256 + 768, 4096 + 96)
    assert (kv_block_bytes(*sizes, (2,)), state_bytes(*sizes, (2,))) == (4096 + 96, 256 + 768)
    assert (kv_block_bytes(*sizes), state_bytes(*sizes, ())) == (4096 + 96 + 256 + 768, 0)


def test_only_their_kernels_read_slots() -> None:
    index = f.GRAPH_INPUTS.index(f.STATE_SLOTS)
    slots = OperandRecord(f.OPERAND_KINDS.index("input"), index, 0, 4 * f.STATE_FIELDS)
    command = w.CommandRecord(0, (slots,), True, -1, 7)
    graph = dataclasses.replace(GRAPH, commands=(command,))

    def tables(states: tuple[int, ...], **of_input: int) -> Tables:
        commands = (command._replace(operands=(slots._replace(**of_input),)),)
        graphs = (dataclasses.replace(graph, commands=commands),)
        return r.parse_graphs(
            w.write_graphs(TARGET, MODEL, KERNELS, (), graphs, FILES, kv_layers=LAYERS, state_layers=states)
        )

    assert tables(STATES).graphs[0].input_shape(index) == (1, f.STATE_FIELDS)
    with pytest.raises(FormatError, match="operand 0 names input 9 of 8"):
        tables(())
    with pytest.raises(FormatError, match="operand 0, input, is adapter_tiles, which this model has not"):
        tables(STATES, index=f.GRAPH_INPUTS.index(f.ADAPTER_TILES))
    with pytest.raises(FormatError, match="touches byte 16 of its state_slots, which has 12"):
        tables(STATES, bytes=16)


def test_a_step_reads_and_writes_each_state_once() -> None:
    tables = r.parse_graphs(written())
    graph = tables.graphs[0]
    window, heads = LAYERS[0].value_block_bytes, LAYERS[0].key_block_bytes
    views = commands_of(tables, graph)
    assert [b.type for b in (views[0].buffers[0], views[1].buffers[0])] == [
        f"f32[num_states, {window // 4}]", f"f32[num_states, {heads // 4}]",
    ]  # fmt: skip
    params = {"heads": 4, "key_dim": 16, "value_dim": 16}
    cost = command_cost(tables, graph, tables.commands_of(graph)[1], params, Step(((0, 5), (40, 3), (7, 1))))
    assert (cost.memory_bytes, cost.written_bytes) == (5 * heads, 3 * heads)
    assert cost.flops == 9 * 7 * 4 * 16 * 16


def test_patched_tables_tell_their_layers() -> None:
    patch = GraphsPatch(written())
    assert patch.state_layers == w.pack_state_layers(STATES) == struct.pack("<4I", 0, 0, 1, 0)
    assert patch.kv_layers == w.pack_kv_layers(LAYERS)
    assert r.parse_graphs(patch.with_weights(MODEL, {})).state_layers == STATES
    assert GraphsPatch(written(())).state_layers == w.pack_state_layers(()) == b""


def poke(at: int, layout: str, value: int) -> bytes:
    return poked(written(), at, layout, value)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (written((0, 3)), "layer 3 of 3 has a state"),
        (written((1, 1)), "layers with a state do not ascend at layer 1"),
        (written((2, 1)), "layers with a state do not ascend at layer 1"),
        (poke(8, "I", 10), "version 10 has the section state_layers"),
        (poke(8, "I", 11), "version 11, of an older llmc with states elsewhere: compile the model again$"),
        (poke(SECTION, "I", 99), "version 12 has no section state_layers"),
        (poke(SECTION + 4, "I", 4), "section state_layers has records of 4 bytes instead of 8"),
        (poke(SECTION + 16, "Q", 99), "section state_layers of 99 records"),
    ],
)
def test_what_is_wrong_is_named(data: bytes, message: str) -> None:
    with pytest.raises(FormatError, match=message) as caught:
        r.parse_graphs(data)
    assert "\n" not in str(caught.value)


def test_a_number_beyond_its_field_is_refused() -> None:
    with pytest.raises(w.GraphsWriteError, match="a layer with a state does not fit the format"):
        w.pack_state_layers((1 << 32,))


def test_random_changes_raise_nothing_else() -> None:
    check_random_changes(written())
