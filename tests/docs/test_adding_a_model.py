"""docs/adding-a-model.md, followed to the end: its family compiles, and computes what its twist on a Llama says."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from llmc.models.errors import ModelError
from llmc.models.read_config import load_config
from llmc.models.registry import FAMILIES, get_family

from support.compiled import random_tokens, relative_error
from support.guide import followed, read_guide, run_tests
from support.new_family import checkpoint_of
from support.quirky_model import eager_logits

pytestmark = pytest.mark.native


def test_the_page_is_followed(tmp_path: Path) -> None:
    guide = read_guide("adding-a-model.md")
    with followed(guide, tmp_path):
        assert run_tests(guide, tmp_path) == 1
    assert "parallel" not in FAMILIES


def side_by_side(layer: Any, hidden_states: torch.Tensor, **others: Any) -> torch.Tensor:
    """A layer of transformers' Llama as the page has it."""
    normed = layer.input_layernorm(hidden_states)
    attended, _ = layer.self_attn(hidden_states=normed, **others)
    made: torch.Tensor = hidden_states + attended + layer.mlp(normed)
    return made


def test_the_module_is_that_of_an_independent_one(tmp_path: Path) -> None:
    with followed(read_guide("adding-a-model.md"), tmp_path):
        model = checkpoint_of(get_family("parallel"), tmp_path / "model", use_bias=True)
        tokens = random_tokens(load_config(model).vocab_size, 40)
        found = eager_logits(model, tokens, "f32")
    llama = load_llama(model)
    with torch.no_grad():
        expected = llama(torch.tensor([tokens])).logits[0].numpy()
    assert relative_error(found, expected) < 1e-5
    assert np.ptp(expected) > 1


def load_llama(model: Path) -> Any:
    """transformers' Llama with the weights of a checkpoint of the page's family."""
    config = transformers.LlamaConfig.from_pretrained(model)
    config.attention_bias = config.mlp_bias = True
    llama = transformers.LlamaForCausalLM.from_pretrained(
        model, config=config, attn_implementation="eager", dtype=torch.float32
    )
    for layer in llama.model.layers:
        layer.forward = types.MethodType(side_by_side, layer)
    return llama.eval()


def test_a_checkpoint_with_a_second_norm_is_refused(tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    from llmc.models.loader import check_checkpoint
    from llmc.models.sources.registry import open_source

    with followed(read_guide("adding-a-model.md"), tmp_path):
        model = checkpoint_of(get_family("parallel"), tmp_path / "model")
        name = "model.layers.1.post_attention_layernorm.weight"
        tensors = load_file(model / "model.safetensors")
        save_file({**tensors, name: np.ones(60, np.float32)}, model / "model.safetensors")
        with pytest.raises(ModelError, match=f"the tensor {name} of shape"):
            check_checkpoint(load_config(model), open_source(model).checkpoint())
