"""Checkpoints in GPTQ's and AWQ's formats, loaded by transformers with GPTQModel where that is installed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from llmc.cli.main import main

from support.quirky_model import eager_logits

ROOT = Path(__file__).parents[3]
TOKENS = [1, 5, 9, 33, 77, 60, 4]


@pytest.mark.exhaustive
@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_logits_are_those_of_transformers(method: str, tmp_path: Path) -> None:
    pytest.importorskip("gptqmodel")
    out, options = tmp_path / "out", ("--scheme", "w4a16", "--method", method, "--format", method)
    model, text = ROOT / "examples" / "tiny-english", ROOT / "README.md"
    assert main(["quantize", str(model), "-o", str(out), *options, "--calibration", str(text)]) == 0
    loaded = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, device_map="cpu").eval()
    with torch.no_grad():
        want = loaded(torch.tensor([TOKENS])).logits[0].numpy()
    # Its kernels multiply in another precision.
    np.testing.assert_allclose(eager_logits(out, TOKENS, "f32"), want, rtol=0, atol=2e-3 * np.abs(want).max())
