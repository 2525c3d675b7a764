"""Adapters that PEFT itself writes, of experts above all, merged as PEFT merges them. It is no requirement of llmc's:
pip install peft accelerate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.adapters import merged_values
from support.families import CASES
from support.tiny_models import make_tiny_model, reference_model

peft = pytest.importorskip("peft", reason="PEFT is not installed")
pytestmark = pytest.mark.exhaustive

BOTH = ("experts.gate_up_proj", "experts.down_proj")
NAMED = {"target_modules": ["q_proj"], "target_parameters": list(BOTH)}
SETTINGS: dict[str, dict[str, Any]] = {
    "parameters": NAMED,
    "patterns": {**NAMED, "rank_pattern": {"down_proj": 2}, "alpha_pattern": {"gate_up_proj": 5}, "use_rslora": True},
    "all linear": {"target_modules": "all-linear", "exclude_modules": r".*\.visual\..*"},
    "linear layers": {"target_modules": ["q_proj", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"]},
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize(
    "case",
    [
        "mixtral",
        "qwen3_moe",
        "deepseek_v3",
        "glm4_moe",
        "granitemoe",
        "qwen3_5_moe",
        "qwen3_vl_moe",
        "gpt_oss",
        "llama4",
    ],
)
def test_values_are_those_of_pefts_merge(case: str, setting: str, tmp_path: Path) -> None:
    family, overrides = CASES[case]
    model = make_tiny_model(tmp_path / "model", family, **overrides)
    adapted = peft.get_peft_model(reference_model(model), peft.LoraConfig(r=3, lora_alpha=7, **SETTINGS[setting]))
    torch.manual_seed(0)
    with torch.no_grad():
        for name, value in adapted.named_parameters():
            if "lora_B" in name:
                value.normal_()
    adapted.save_pretrained(tmp_path / "adapter")
    adapted.merge_and_unload().save_pretrained(tmp_path / "merged")
    found, expected, plain = (
        merged_values(model, tmp_path / "adapter"),
        merged_values(tmp_path / "merged"),
        merged_values(model),
    )
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=2e-6, atol=2e-6, err_msg=name)
    assert any(not np.array_equal(found[name], value) for name, value in plain.items())
