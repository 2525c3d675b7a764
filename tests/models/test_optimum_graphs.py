"""Graphs that Optimum itself exported: what llmc recovers computes what onnxruntime does.

They are of tiny random models, by optimum-onnx 0.1.0 with transformers 4.57.6; support/optimum_exports.py writes them.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from llmc.models.eager import load_model

from support.compiled import random_tokens, relative_error
from support.onnx_models import Runtime
from support.optimum_exports import SMALL, STORED
from support.paged_reference import PagedRunner

FOLDER = Path(__file__).parent / "optimum"
# onnxruntime rounds between operators; llmc in f32 does not.
BOUNDS = {"gemma_f16": 2e-2}


@pytest.mark.parametrize("name", STORED)
def test_it_computes_the_same(name: str) -> None:
    graph = FOLDER / name / "model.onnx"
    tokens, runtime = random_tokens(SMALL["vocab_size"], 24), Runtime(graph)
    found = PagedRunner(load_model(graph)).step([tokens])[0].numpy()
    if name.endswith("_labels"):
        expected, found = runtime.run(tokens), found[0]
    else:
        expected = runtime.logits(tokens)
    if STORED[name][0] == "bert":
        # The vector of a text is its first row, of length 1.
        expected, found = expected[:1] / np.linalg.norm(expected[0]), found[:1]
    assert relative_error(found, expected) < BOUNDS.get(name, 1e-4)
