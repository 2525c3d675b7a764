"""Files that Optimum itself exports, compiled: logits and vectors are those of onnxruntime.

LLMC_OPTIMUM_PYTHON is the Python of an environment with optimum-onnx, which wants another transformers than the tests:
python -m venv optimum && optimum/bin/pip install optimum-onnx onnxruntime "transformers<4.58" torch
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from llmc import LLM

from support import optimum_exports
from support.compiled import check_every_bucket, compile_tiny, random_tokens
from support.onnx_models import Runtime
from support.optimum_exports import DECODERS, ENCODERS
from support.tiny_encoders import check_close, pooled

PYTHON = os.environ.get("LLMC_OPTIMUM_PYTHON", "")
pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(not PYTHON, reason="LLMC_OPTIMUM_PYTHON names no Python with optimum-onnx"),
]


def exported(family: str, folder: Path) -> Path:
    script = str(Path(optimum_exports.__file__))
    run = subprocess.run([PYTHON, script, family, str(folder)], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    return folder / "exported" / "model.onnx"


@pytest.mark.parametrize("family", DECODERS)
def test_decoders(family: str, tmp_path: Path, kernel_cache: Path) -> None:
    graph = exported(family, tmp_path)
    ladder = "prefill=[2]x[16,32],decode=[1]x64"
    with compile_tiny(graph, tmp_path / "out", kernel_cache, buckets=ladder, dtype="f32", tokenizer="none") as artifact:
        tokens = random_tokens(artifact.info.vocab_size)
        check_every_bucket(artifact, tokens, Runtime(graph).logits(tokens))


@pytest.mark.parametrize("family", ENCODERS)
def test_encoders(family: str, tmp_path: Path, kernel_cache: Path) -> None:
    graph = exported(family, tmp_path)
    options = {"buckets": "prefill=[2]x[64]", "dtype": "f32", "tokenizer": "none", "pooling": "mean"}
    compile_tiny(graph, tmp_path / "out", kernel_cache, **options).close()
    runtime, rng = Runtime(graph), np.random.default_rng(3)
    texts = [[int(t) for t in rng.integers(4, 99, length)] for length in (5, 40)]
    with LLM(tmp_path / "out", num_threads=1) as llm:
        for text, found in zip(texts, llm.embed(texts), strict=True):
            check_close(found.vector, pooled(runtime.run(text), "mean", normalised=True))
