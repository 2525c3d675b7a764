"""GGUF files of models with gated short convolutions: logits are those of transformers, and what is no such file is
refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmc.models import ModelError, open_source
from llmc.models.eager import load_model

from support.gguf_cases import TOLD, told_fields
from support.gguf_converter import write_converted
from support.paged_reference import PagedRunner
from support.parity import reference_logits
from support.tiny_models import make_tiny_model


@pytest.mark.parametrize("case", ["lfm2", "lfm2-biases", "lfm2_moe"])
def test_logits_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    family, sizes = told_fields(case)
    model, path = make_tiny_model(tmp_path / "m", family, **sizes), tmp_path / "m.gguf"
    write_converted(model, path, open_source(model).config(), TOLD[case][1])
    tokens = [int(t) for t in np.random.default_rng(5).integers(3, 500, 40)]
    found, expected = PagedRunner(load_model(path)).step([tokens])[0].numpy(), reference_logits(model, tokens)
    assert np.abs(found - expected).max() <= 1e-4 * np.abs(expected).max()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, sizes = told_fields("lfm2")
    return make_tiny_model(tmp_path_factory.mktemp("lfm2") / "m", family, **sizes)


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({"attention.head_count_kv": [1, 1, 0]}, r"layer 0 has a convolution \(shortconv.conv.weight\), other than"),
        ({"attention.head_count_kv": [0, 0, 0]}, r"layer 1 lacks a convolution \(shortconv.conv.weight\), other than"),
        ({"attention.head_count_kv": [0, 1, 2]}, "a list of 3 integers, each 0 or the same number was expected"),
        ({"attention.head_count_kv": [0, 1]}, "a list of 3 integers, each 0 or the same number was expected"),
        ({"attention.head_count_kv": 1}, "layer 0 has a convolution"),
        ({"attention.head_count_kv": None}, "lacks the metadata lfm2.attention.head_count_kv"),
        ({"shortconv.l_cache": 1}, "conv_L_cache 1 is not from 2 to 64"),
        ({"shortconv.l_cache": None}, "lacks the metadata lfm2.shortconv.l_cache"),
        ({"attention.causal": False}, "where true was expected"),
    ],
)
def test_what_is_no_such_file_is_refused(metadata: dict[str, Any], said: str, model: Path, tmp_path: Path) -> None:
    write_converted(model, tmp_path / "m.gguf", open_source(model).config(), metadata)
    with pytest.raises(ModelError, match=said):
        open_source(tmp_path / "m.gguf").config()
