"""Windows of layers, however a config states them: those of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from llmc.models import ModelError, load_config

SIZES: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "rms_norm_eps": 1e-6,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MORE: dict[str, dict[str, Any]] = {
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 32},
    "qwen3_moe": EXPERTS,
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "starcoder2": {"norm_epsilon": 1e-5, "rms_norm_eps": None},
    "cohere2": {"layer_norm_eps": 1e-5, "rms_norm_eps": None},
}
USED = {"use_sliding_window": True}
SOME = ["full_attention", "sliding_attention", "sliding_attention"] * 2
ALL = ["full_attention"] * 6

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2 of no size": ("qwen2", {**USED, "sliding_window": None, "max_window_layers": 2}),
    "qwen2 untold size": ("qwen2", {**USED, "max_window_layers": 2}),
    "qwen2 untold layers": ("qwen2", {**USED, "sliding_window": 8}),
    "qwen2 not used": ("qwen2", {"sliding_window": 8, "max_window_layers": 2}),
    "qwen2 types before number": ("qwen2", {**USED, "sliding_window": 8, "max_window_layers": 0, "layer_types": SOME}),
    "qwen2 types without": ("qwen2", {**USED, "sliding_window": 8, "max_window_layers": 0, "layer_types": ALL}),
    "qwen3 of no size": ("qwen3", {**USED, "sliding_window": None, "max_window_layers": 0}),
    "qwen2_vl_text": ("qwen2_vl", {**USED, "sliding_window": None, "max_window_layers": 0}),
    "qwen2_moe": ("qwen2_moe", {**USED, "sliding_window": 8, "max_window_layers": 3}),
    "qwen2_moe untold": ("qwen2_moe", USED),
    "qwen2_moe not used": ("qwen2_moe", {"sliding_window": 8, "max_window_layers": 3}),
    "qwen2_moe types": ("qwen2_moe", {**USED, "sliding_window": 8, "layer_types": SOME}),
    "qwen3_moe": ("qwen3_moe", {**USED, "sliding_window": 8, "max_window_layers": 3}),
    "qwen3_moe of no size": ("qwen3_moe", {**USED, "sliding_window": None}),
    "qwen3_moe untold": ("qwen3_moe", USED),
    "smollm3 untold": ("smollm3", USED),
    "smollm3": ("smollm3", {**USED, "sliding_window": 8}),
    "dots1 untold": ("dots1", {"max_window_layers": 4}),
    "dots1 of no size": ("dots1", {"max_window_layers": 4, "sliding_window": None}),
    "dots1 types": ("dots1", {"max_window_layers": 4, "sliding_window": 8, "layer_types": SOME}),
    "exaone4 untold": ("exaone4", {}),
    "exaone4 of no size": ("exaone4", {"sliding_window": None, "layer_types": ALL}),
    "exaone4 types": ("exaone4", {"sliding_window": 8, "sliding_window_pattern": 2, "layer_types": SOME}),
    "ministral": ("ministral", {"sliding_window": 8}),
    "ministral of no size": ("ministral", {"sliding_window": None}),
    "ministral types": ("ministral", {"sliding_window": 8, "layer_types": SOME}),
    "gpt_oss": ("gpt_oss", {}),
    "gemma2": ("gemma2", {"sliding_window": 8}),
    "gemma3_text pattern": ("gemma3_text", {"sliding_window": 8, "sliding_window_pattern": 3}),
    "gemma3_text types": ("gemma3_text", {"sliding_window": 8, "sliding_window_pattern": 3, "layer_types": SOME}),
    "cohere2 pattern": ("cohere2", {"sliding_window": 8, "sliding_window_pattern": 3}),
    "olmo3": ("olmo3", {"sliding_window": 8}),
    "cwm": ("cwm", {}),
    "mistral untold": ("mistral", {}),
    "mistral of no size": ("mistral", {"sliding_window": None}),
    "phi3": ("phi3", {"sliding_window": 8}),
    "mixtral": ("mixtral", {"sliding_window": 8}),
    "starcoder2": ("starcoder2", {"sliding_window": 8}),
    "ministral3 of no size": ("ministral3", {"sliding_window": None}),
}  # fmt: skip


def written(path: Path, family: str, told: dict[str, Any]) -> Path:
    (path / "config.json").write_text(json.dumps({**SIZES, **MORE.get(family, {}), "model_type": family, **told}))
    return path


@pytest.mark.parametrize("case", CASES)
def test_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    family, told = CASES[case]
    theirs = AutoConfig.from_pretrained(written(tmp_path, family, told)).get_text_config()
    window = theirs.sliding_window or 0
    kinds = getattr(theirs, "layer_types", None) or ["sliding_attention" if window else "full_attention"] * 6
    expected = tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
    ours = load_config(tmp_path)
    assert ours.layer_windows == expected
    assert ours.sliding_window == (max(expected) or None)


@pytest.mark.parametrize(
    ("family", "told"),
    [
        ("qwen2", {"layer_types": SOME}),
        ("qwen2_moe", {**USED, "sliding_window": None}),
        ("smollm3", {**USED, "layer_types": SOME}),
        ("exaone4", {"sliding_window": None, "layer_types": SOME}),
        ("ministral", {"sliding_window": None, "layer_types": SOME}),
        ("gemma2", {"sliding_window": None}),
        ("gpt_oss", {"sliding_window": None}),
        ("olmo3", {"sliding_window": None, "layer_types": SOME}),
    ],
)
def test_a_window_of_no_size_is_refused(family: str, told: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json: layer [01] has sliding_attention, but no window is given"):
        load_config(written(tmp_path, family, told))
