"""Adapters that PEFT makes, against what it merges itself, and against its own model with one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llmc.models.loader import load_parameters
from llmc.models.sources.registry import open_source
from llmc.runtime.llm import LLM
from llmc.runtime.params import SamplingParams

from support.client_tools import installed, make_environment, run
from support.compiled import compile_tiny, random_tokens
from support.families import CASES
from support.tiny_models import make_tiny_model

KINDS = ("plain", "all", "dora", "embedding", "head", "tokens")
MERGED = {kind: (kind,) for kind in KINDS} | {"added": ("head", "tokens", "plain")}
"""Adapters by the name of the checkpoint into which PEFT has merged them."""


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_peft_merges_alike(tied: bool, tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", "llama", tie_word_embeddings=tied)
    tools = installed("peft", make_environment(tmp_path / "environment"))
    script = Path(__file__).with_name("lora_with_peft.py")
    run(tools, ["python", str(script), str(model), str(tmp_path)], tmp_path)
    for name, kinds in MERGED.items():
        ours = open_source(model, [tmp_path / kind for kind in kinds])
        theirs = open_source(tmp_path / f"{name}.merged")
        merged = {p.name: p.value() for p in load_parameters(theirs.config(), theirs.checkpoint(), "f32")}
        for parameter in load_parameters(ours.config(), ours.checkpoint(), "f32"):
            np.testing.assert_allclose(parameter.value(), merged[parameter.name], rtol=2e-6, atol=2e-6)


@pytest.mark.slow
@pytest.mark.native
@pytest.mark.parametrize(
    ("served", "family", "fields"),
    [
        ("ends", "qwen2", {"tie_word_embeddings": True}),
        ("latent", "deepseek_v2", CASES["deepseek_v2"][1]),
        ("latent", "deepseek_v3", CASES["deepseek_v3"][1]),
    ],
)
def test_peft_serves_alike(
    served: str, family: str, fields: dict[str, Any], tmp_path: Path, kernel_cache: Path
) -> None:
    """By name: of both ends of a model that share their weight, and of latent attention."""
    model = make_tiny_model(tmp_path / "model", family, **{**fields, "num_hidden_layers": 1})
    tools, tokens = installed("peft", make_environment(tmp_path / "environment")), random_tokens(515, 12)
    script = Path(__file__).with_name("lora_with_peft.py")
    run(tools, ["python", str(script), str(model), str(tmp_path), served, *map(str, tokens)], tmp_path)
    options = {"buckets": "prefill=1x16,decode=1x32", "dtype": "f32", "block_size": 16, "lora_slots": 2}
    compile_tiny(model, tmp_path / "artifact", kernel_cache, **options).close()
    logits = torch.log_softmax(torch.from_numpy(np.load(tmp_path / "logits.npy")).double(), -1)
    expected = [float(logits[i, token]) for i, token in enumerate(tokens[1:])]
    with LLM(tmp_path / "artifact", num_threads=1, lora={served: tmp_path / served}) as llm:
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        (found,) = llm.generate(tokens, params, lora=served)
    assert found.prompt_logprobs is not None
    np.testing.assert_allclose([one.logprob for one in found.prompt_logprobs], expected, atol=2e-4, rtol=0)
