"""The memory that a plan counts on before anything is compiled, beside that of compiled graphs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmc.buckets.cost import ModelShape
from llmc.runtime.graphs_file import read_graphs

from support.artifacts import TinyArtifact
from support.paths import ROOT

EXAMPLE = ROOT / "examples" / "tiny-english"


def estimated(model: Path) -> float:
    return ModelShape.from_config(json.loads((model / "config.json").read_text())).arena_bytes_per_token


def largest(artifact: Path) -> float:
    """Arena bytes a token of the graph of most tokens, whose rows fill whole tiles."""
    graph = max(read_graphs(artifact).graphs, key=lambda one: one.max_tokens)
    return graph.arena_bytes / graph.max_tokens


def test_of_bf16(english_artifact: Path) -> None:
    assert estimated(EXAMPLE) == pytest.approx(largest(english_artifact), rel=0.005)


def test_of_f32(tiny_artifact: TinyArtifact) -> None:
    assert estimated(tiny_artifact.model) == pytest.approx(largest(tiny_artifact.artifact), rel=0.02)
