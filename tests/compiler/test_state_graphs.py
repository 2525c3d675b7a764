"""Graphs of models with a state: which inputs their kernels read, and what a KV block has to do with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmc.compiler.config import CompileConfig
from llmc.compiler.dry_run import dry_run
from llmc.compiler.pipeline import compile_model
from llmc.graphs_format import GRAPH_INPUTS, INPUTS, OPERAND_KINDS, STATE_SLOTS, VERSION_OF_STATE_LAYERS
from llmc.graphs_records import Command, Tables
from llmc.runtime.graph_view import op_of
from llmc.runtime.graphs_file import read_graphs

from support.families import CASES
from support.tiny_models import make_tiny_model

OF_STATES = ("short_conv", "delta_rule", "selective_state")
OF_SEQUENCES = {STATE_SLOTS, "query_start", "positions"}
LADDER = "prefill=[1,2]x16,decode=[1,3]x64"
with_states = pytest.mark.parametrize("name", ["qwen3_next", "lfm2", "nemotron_h", "falcon_h1"])


def model_of(name: str, folder: Path) -> Path:
    family, fields = CASES[name]
    return make_tiny_model(folder / "model", family, **fields)


def compiled(model: Path, output: Path, kernel_cache: Path, block_size: int) -> Tables:
    config = CompileConfig(
        model=model, output=output, target="reference", cache_dir=kernel_cache, jobs=1, buckets=LADDER, dtype="f32",
        block_size=block_size,
    )  # fmt: skip
    compile_model(config)
    return read_graphs(output)


def inputs_of(tables: Tables, command: Command) -> set[str]:
    return {GRAPH_INPUTS[o.index] for o in tables.operands_of(command) if OPERAND_KINDS[o.kind] == "input"}


@with_states
def test_kernels_find_states_by_slots_alone(name: str, tmp_path: Path, kernel_cache: Path) -> None:
    model = model_of(name, tmp_path)
    of_size = {size: compiled(model, tmp_path / str(size), kernel_cache, size) for size in (16, 64)}
    symbols = []
    for tables in of_size.values():
        assert tables.header.version == VERSION_OF_STATE_LAYERS
        ops = [(op_of(tables.name_of(command)), command) for command in tables.commands]
        assert {command.layer for op, command in ops if op in OF_STATES} == set(tables.state_layers)
        for op, command in ops:
            read = inputs_of(tables, command)
            assert read == OF_SEQUENCES if op in OF_STATES else STATE_SLOTS not in read, op
        symbols.append({tables.name_of(command) for op, command in ops if op in OF_STATES})
    assert symbols[0] == symbols[1]
    assert of_size[16].state_bytes == of_size[64].state_bytes > 0
    assert 4 * of_size[16].kv_block_bytes == of_size[64].kv_block_bytes > 0


def test_a_dry_run_tells_states_from_keys_and_values(tmp_path: Path, kernel_cache: Path) -> None:
    model = model_of("falcon_h1", tmp_path)
    tables = compiled(model, tmp_path / "artifact", kernel_cache, 16)
    config = CompileConfig(model=model, output=model, target="reference", dtype="f32", cache_dir=kernel_cache)
    found = dry_run(config)
    assert found.state_bytes == tables.state_bytes
    assert found.kv_bytes_per_token == tables.kv_block_bytes // 16


def test_other_models_have_no_slots(tmp_path: Path, kernel_cache: Path) -> None:
    tables = compiled(make_tiny_model(tmp_path / "model", "llama"), tmp_path / "artifact", kernel_cache, 16)
    assert tables.header.version < VERSION_OF_STATE_LAYERS
    assert set.union(*(inputs_of(tables, command) for command in tables.commands)) <= set(INPUTS)
    assert tables.state_bytes == 0
