"""graphs.bin of layers whose KV blocks differ: sizes come back, anything else is a FormatError."""

from __future__ import annotations

import dataclasses
import struct

import pytest

from llmc import graphs_format as f
from llmc.compiler.store import graphs_writer as w
from llmc.compiler.store.graphs_patch import GraphsPatch
from llmc.graphs_records import (
    CodeRecord,
    CollectiveRecord,
    KernelRecord,
    KvLayerRecord,
    ModelRecord,
    OperandRecord,
    StageRecord,
    Tables,
    TargetRecord,
    WeightRecord,
    kv_block_bytes,
)
from llmc.runtime import graphs_file as r
from llmc.runtime.graph_view import commands_of
from llmc.runtime.graphs_checks import FormatError
from llmc.runtime.profile.costs import command_cost
from llmc.runtime.profile.steps import Step

from support.graphs_bin import check_random_changes, poked

TARGET = TargetRecord("cpu", "znver4", 4, "tiles")
MODEL = ModelRecord(3, 1, 8, 16, 1, 100, 64, 4, 1, 0, (2, 3), 1, 512, 768)
LAYERS = (KvLayerRecord(256, 768), KvLayerRecord(512, 512), KvLayerRecord(384, 0))
KERNELS = (KernelRecord("paged_attention_0", 2, 4), KernelRecord("latent_attention_0", 1, 4))
WEIGHTS = (WeightRecord("scale", 0, (8,), 64, 32, 1, "rows"),)
FILES = w.FileSums((CodeRecord("kernels.so", 4096, 0xC0DE),), 128, 0xABC)
PASSED = (CollectiveRecord(f.PASS_ON, 0, 1, stage=0), CollectiveRecord(f.PASS_ON, 0, 1, stage=1))


def pools(layer: int) -> tuple[OperandRecord, ...]:
    of = LAYERS[layer]
    found = OperandRecord(3, layer, 0, of.key_block_bytes), OperandRecord(4, layer, 0, of.value_block_bytes)
    return found if of.value_block_bytes else found[:1]


ATTENTION = tuple(w.CommandRecord(int(layer == 2), pools(layer), True, layer, 4) for layer in range(3))


def passed(stage: int) -> w.CommandRecord:
    return w.CommandRecord(f.COLLECTIVE + stage, (OperandRecord(0, 0, 0, 64),), True, -1, 7)


def graph(*commands: w.CommandRecord) -> w.GraphRecord:
    return w.GraphRecord(0, 1, 16, 16, 1, 1, 4, 4, 64, commands)


def written(
    layers: tuple[KvLayerRecord, ...] = LAYERS,
    model: ModelRecord = MODEL,
    commands: tuple[w.CommandRecord, ...] = ATTENTION,
) -> bytes:
    return w.write_graphs(TARGET, model, KERNELS, WEIGHTS, (graph(*commands),), FILES, kv_layers=layers)


def staged() -> Tables:
    commands = (*ATTENTION[:2], passed(0), ATTENTION[2], passed(1))
    stages = (StageRecord(0, 2), StageRecord(2, 1))
    data = w.write_graphs(
        TARGET, MODEL, KERNELS, WEIGHTS, (graph(*commands),), FILES, (), PASSED, stages, LAYERS
    )  # fmt: skip
    return r.parse_graphs(data)


def test_round_trip() -> None:
    tables = r.parse_graphs(written())
    assert (tables.header.version, tables.kv_layers) == (f.VERSION_OF_KV_LAYERS, LAYERS)
    assert tuple(map(tables.kv_layer, range(3))) == LAYERS
    assert (tables.adapters, tables.collectives, tables.stages) == ((), (), ())
    assert tables.kv_block_bytes == kv_block_bytes(MODEL, LAYERS) == 256 + 768 + 512 + 512 + 384


def test_a_stage_has_the_blocks_of_its_layers() -> None:
    tables = staged()
    assert tables.header.version == f.VERSION_OF_KV_LAYERS
    assert [kv_block_bytes(MODEL, LAYERS, (stage,)) for stage in tables.stages] == [2048, 384]
    assert tables.kv_block_bytes == 2048


def test_layers_that_do_not_differ_change_no_byte() -> None:
    model = dataclasses.replace(MODEL, key_block_bytes=256)
    commands = (w.CommandRecord(0, pools(0), True, 0, 4),)
    data = written((), model, commands)
    assert written((LAYERS[0],) * 3, model, commands) == data
    tables = r.parse_graphs(data)
    assert (tables.header.version, tables.kv_layers) == (f.VERSION_WITHOUT_ADAPTERS, ())
    assert tables.kv_layer(2) == LAYERS[0]
    assert tables.kv_block_bytes == 3 * 1024
    assert kv_block_bytes(model, (), (StageRecord(0, 2), StageRecord(2, 1))) == 2 * 1024


def test_views_and_costs_are_those_of_the_layer() -> None:
    tables = r.parse_graphs(written())
    views = commands_of(tables, tables.graphs[0])
    assert [b.type for view in views for b in view.buffers] == [
        "u8[num_blocks, 256]", "u8[num_blocks, 768]", "u8[num_blocks, 512]", "u8[num_blocks, 512]",
        "u8[num_blocks, 384]",
    ]  # fmt: skip
    step = Step(((0, 16),))
    params = [{"kv_dtype": "bf16", "num_heads": 1, "head_dim": dim} for dim in (8, 16, 4)]
    commands = tables.commands_of(tables.graphs[0])
    costs = [
        command_cost(tables, tables.graphs[0], command, of, step) for command, of in zip(commands, params, strict=True)
    ]
    assert [cost.memory_bytes for cost in costs] == [layer.block_bytes for layer in LAYERS]
    assert costs[1].flops == 2 * costs[0].flops == 4 * costs[2].flops > 0


def test_patched_tables_tell_their_layers() -> None:
    patch = GraphsPatch(written())
    assert (
        patch.kv_layers
        == w.pack_kv_layers(LAYERS)
        == b"".join(struct.pack("<QQ", *dataclasses.astuple(layer)) for layer in LAYERS)
    )
    assert r.parse_graphs(patch.with_weights(MODEL, {"scale": 7})).kv_layers == LAYERS
    model = dataclasses.replace(MODEL, key_block_bytes=256)
    even = written((), model, (w.CommandRecord(0, pools(0), True, 0, 4),))
    assert GraphsPatch(even).kv_layers == w.pack_kv_layers(()) == w.pack_kv_layers((LAYERS[0],) * 3) == b""


def changed(layer: int, **fields: int) -> tuple[KvLayerRecord, ...]:
    return (*LAYERS[:layer], dataclasses.replace(LAYERS[layer], **fields), *LAYERS[layer + 1 :])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (written(LAYERS[:2]), "the KV blocks of 2 layers of 3"),
        (written((*LAYERS, LAYERS[0])), "the KV blocks of 4 layers of 3"),
        (written(changed(0, key_block_bytes=0)), "layer 0 has key_block_bytes 0"),
        (written(changed(1, key_block_bytes=511)), "key_block_bytes 512, its layers up to 511"),
        (written(changed(2, key_block_bytes=2**64 - 1)), "key_block_bytes 512, its layers up to 18446744073709551615"),
        (written(changed(2, value_block_bytes=769)), "value_block_bytes 768, its layers up to 769"),
        (written(changed(0, key_block_bytes=320)), "blocks of 256 bytes, those of layer 0 have 320"),
        (
            written(commands=(w.CommandRecord(1, (OperandRecord(4, 2, 0, 512),), True, 2, 4),)),
            "blocks of 512 bytes, those of layer 2 have 0",
        ),
        (
            written(commands=(w.CommandRecord(1, (OperandRecord(3, 3, 0, 512),), True, 2, 4),)),
            "names k_pool 3 of 3",
        ),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(data: bytes, message: str) -> None:
    with pytest.raises(FormatError, match=message) as caught:
        r.parse_graphs(data)
    assert "\n" not in str(caught.value)


def poke(at: int, layout: str, value: int) -> bytes:
    return poked(written(), at, layout, value)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (poke(8, "I", 9), "version 9 has the section kv_layers"),
        (poke(64 + 12 * 24, "I", 99), "version 10 has no section kv_layers"),
        (poke(64 + 12 * 24 + 4, "I", 8), "section kv_layers has records of 8 bytes instead of 16"),
        (poke(64 + 12 * 24 + 16, "Q", 99), "section kv_layers of 99 records"),
    ],
)
def test_a_damaged_section_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        r.parse_graphs(data)


def test_random_changes_raise_nothing_else() -> None:
    check_random_changes(written())
