"""Adapters that PEFT makes, against what it merges itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from llmc.models.loader import load_parameters
from llmc.models.sources.registry import open_source

from support.client_tools import installed, make_environment, run
from support.tiny_models import make_tiny_model

KINDS = ("plain", "all", "dora", "embedding", "head")


@pytest.mark.slow
def test_peft_merges_alike(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", "llama")
    tools = installed("peft", make_environment(tmp_path / "environment"))
    script = Path(__file__).with_name("lora_with_peft.py")
    run(tools, ["python", str(script), str(model), str(tmp_path)], tmp_path)
    for kind in KINDS:
        ours = open_source(model, [tmp_path / kind])
        theirs = open_source(tmp_path / f"{kind}.merged")
        merged = {p.name: p.value() for p in load_parameters(theirs.config(), theirs.checkpoint(), "f32")}
        for parameter in load_parameters(ours.config(), ours.checkpoint(), "f32"):
            np.testing.assert_allclose(parameter.value(), merged[parameter.name], rtol=2e-6, atol=2e-6)
