"""docs/adding-a-model.md, followed to the end: its family loads and compiles, and computes what transformers does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from llmc.models.errors import ModelError
from llmc.models.loader import check_checkpoint
from llmc.models.read_config import load_config
from llmc.models.registry import FAMILIES
from llmc.models.sources.registry import open_source

from support.guide import followed, read_guide, run_tests
from support.tiny_models import make_tiny_model

pytestmark = pytest.mark.native


@pytest.mark.slow
def test_the_page_is_followed(tmp_path: Path) -> None:
    guide = read_guide("adding-a-model.md")
    with followed(guide, tmp_path):
        assert run_tests(guide, tmp_path) == 1
    assert "biogpt" not in FAMILIES


def test_a_checkpoint_with_another_norm_is_refused(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", "biogpt", num_hidden_layers=1)
    name, tensors = "biogpt.layers.0.post_norm.weight", load_file(model / "model.safetensors")
    with followed(read_guide("adding-a-model.md"), tmp_path):
        check_checkpoint(load_config(model), open_source(model).checkpoint())
        save_file({**tensors, name: np.ones(60, np.float32)}, model / "model.safetensors")
        with pytest.raises(ModelError, match=f"the tensor {name} of shape"):
            check_checkpoint(load_config(model), open_source(model).checkpoint())
