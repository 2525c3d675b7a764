"""Checkpoints whose groups of columns lie apart (GPTQ's desc_act): numbers are kept as they are stored."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from llmc.buckets import Bucket
from llmc.cli.main import main
from llmc.compiler.bundle_apply import apply_bundle
from llmc.compiler.config import CompileConfig, CompileError
from llmc.compiler.extend import add_buckets
from llmc.compiler.pipeline import compile_model
from llmc.compiler.resolve import resolve
from llmc.compiler.store.bundle import create_bundle
from llmc.models.sources.registry import open_source
from llmc.quantize import QuantConfig
from llmc.runtime.binding import Artifact
from llmc.runtime.graph_view import op_of
from llmc.runtime.graphs_file import read_graphs

from support.compiled import assert_same_bytes, compile_tiny
from support.new_family import targets_here
from support.quantized_checkpoints import INNER, make_act_order_model, order_by_input
from support.quantized_model import LADDER, assert_company_changes_no_bit, stored_logits_error

pytestmark = pytest.mark.native
DOWN = "layers.1.mlp.down.weight"
QKV = "layers.1.attention.qkv.weight"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_act_order_model(tmp_path_factory.mktemp("act-order") / "model")


@pytest.fixture(scope="module")
def compiled(model: Path, kernel_cache: Path) -> Path:
    compile_tiny(model, model.parent / "out", kernel_cache, buckets=LADDER, dtype="f32").close()
    return model.parent / "out"


def ops_of(artifact: Path) -> list[str]:
    """Of its first graph."""
    tables = read_graphs(artifact)
    return [op_of(tables.kernels[c.kernel].symbol) for c in tables.commands_of(tables.graphs[0])]


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_logits_are_those_of_the_numbers(dtype: str, model: Path, tmp_path: Path, kernel_cache: Path) -> None:
    for target in targets_here():
        out = tmp_path / target
        artifact = compile_tiny(model, out, kernel_cache, buckets=LADDER, dtype=dtype, target=target)
        assert stored_logits_error(model, artifact) <= {"f32": 2e-5, "bf16": 4e-2}[dtype], target
        assert_company_changes_no_bit(artifact)
        artifact.close()
        # Before qkv, out and gate_up; the rows of gate and up are in the order of down.
        assert ops_of(out).count("permute_columns") == 6
        assert ops_of(out).count("linear_quant") == 8
