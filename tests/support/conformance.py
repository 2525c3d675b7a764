"""Small models that between them have every kernel, and the device conformance suite run on their artifacts."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from llmc.cuda_loader import cuda_library
from llmc.quantize import QuantConfig
from llmc.runtime.graphs_file import read_graphs

from support.artifacts import made_once
from support.compiled import compile_tiny
from support.mamba_families import OF_MAMBA
from support.qwen_families import OF_QWEN
from support.tiny_models import make_tiny_model

# Rows and contexts that no tile, partition or block divides.
LADDER = "prefill=[1,3]x[16,80],decode=[1,5]x[32,80],mixed=[4]x[48]"
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "f32": ("llama", {}, {"dtype": "f32"}),
    "bf16, norms of q and k": ("qwen3", {}, {"dtype": "bf16"}),
    "f16": ("qwen2", {"tie_word_embeddings": True}, {"dtype": "f16"}),
    "a window": ("mistral", {"sliding_window": 24}, {"dtype": "bf16"}),
    "w8a8": ("llama", {}, {"dtype": "bf16", "quant": QuantConfig("w8a8")}),
    "w4a16": ("qwen2", {}, {"dtype": "f32", "quant": QuantConfig("w4a16")}),
    "states": ("qwen3_5_text", OF_QWEN["qwen3_5_text"][1], {"dtype": "bf16"}),
    "Mamba-2": ("bamba", OF_MAMBA["bamba"][1], {"dtype": "f32"}),
    "states alone": ("lfm2", {"layer_types": ["conv"] * 3}, {"dtype": "f32"}),
}
"""Kind, fields of its config, and how it is compiled."""
OPTIONS = {
    "cpu": ({"threads": "1"}, {"threads": "3", "pin": "0"}, {"threads": "2", "eager": "1"}),
    "opencl": ({}, {"eager": "1"}),
    "cuda": ({}, {"eager": "1"}, {"graph_mib": "2"}),
}
"""Ways to open each kind of device; a kind that is not here is opened with its defaults."""


def conformance_artifact(name: str, target: str, folder: Path, cache: Path) -> Path:
    """A model of MODELS, compiled below `folder`."""
    kind, overrides, options = MODELS[name]
    model = make_tiny_model(folder / "model", kind, **overrides)
    compile_tiny(model, folder / "out", cache, buckets=LADDER, target=target, tokenizer="none", **options).close()
    return folder / "out"


def shared_artifact(name: str, target: str, factory: pytest.TempPathFactory, cache: Path) -> Path:
    """The same, made once for all tests of a run."""
    place = f"conformance-{target}-{list(MODELS).index(name)}"

    def make(root: Path) -> None:
        conformance_artifact(name, target, root, cache)

    return made_once(factory, place, make) / "out"


def check_conformance(suite: Path, artifact: Path, programs: Path | None = None) -> None:
    """Runs the suite on a device of the kind that the artifact is for, opened in every way that OPTIONS has.
    programs: its cache, where it has one."""
    kind = read_graphs(artifact).target.kind
    cached = {} if programs is None else {"cache": str(programs)}
    folder = {"opencl": cached, "cuda": {"library": cuda_library()}}.get(kind, {})
    for ways in OPTIONS.get(kind, ({},)):
        given = [f"{key}={value}" for key, value in {**folder, **ways}.items()]
        run = subprocess.run([suite, kind, artifact, *given], capture_output=True, text=True, timeout=600)
        assert run.returncode == 0, f"{run.stdout}\n{run.stderr[:4000]}"
        assert " 0 failures" in run.stdout
