"""Slopes of ALiBi against those of transformers, for any number of heads, and the bias that Falcon rounds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers.models.bloom.modeling_bloom import _get_alibi_slopes
from transformers.models.falcon.modeling_falcon import build_alibi_tensor
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

from llmc.models import load_config, ops
from llmc.models.alibi import mpt_slopes, paper_slopes

from support.tiny_models import make_tiny_model


@pytest.mark.parametrize("heads", [1, 2, 3, 5, 8, 12, 40, 71, 112, 128])
def test_slopes(heads: int) -> None:
    paper = _get_alibi_slopes(heads, torch.device("cpu"))
    torch.testing.assert_close(torch.tensor(paper_slopes(heads)), paper, rtol=1e-5, atol=0)
    for bias_max in (8, 16):
        mpt = build_mpt_alibi_tensor(heads, 2, bias_max)[:, 0, 0]  # of the key before the query
        torch.testing.assert_close(-torch.tensor(mpt_slopes(heads, bias_max)), mpt, rtol=1e-6, atol=0)


def test_falcon_rounds() -> None:
    expected = build_alibi_tensor(torch.ones(1, 700, dtype=torch.int64), 12, torch.float32)
    found = ops._bias(torch.tensor(paper_slopes(12)), torch.tensor([699]), torch.arange(700), 0.5, rounded=True)
    assert torch.equal(found, expected * 0.5)


def test_alibi_bias_max_of_mpt_counts(tmp_path: Path) -> None:
    """transformers has 8 whatever config.json says."""
    path = make_tiny_model(tmp_path / "m", "mpt", hidden_size=64, num_attention_heads=4, num_hidden_layers=1)
    fields = json.loads((path / "config.json").read_text())
    fields["attn_config"]["alibi_bias_max"] = 16
    (path / "config.json").write_text(json.dumps(fields))
    alibi = load_config(path).alibi
    assert alibi is not None
    assert alibi.slopes == mpt_slopes(4, 16) != mpt_slopes(4, 8)
