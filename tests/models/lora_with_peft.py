"""Makes adapters with PEFT and merges them with it. Run by test_lora_peft.py, where PEFT is installed.

usage: lora_with_peft.py MODEL OUT: for each kind writes OUT/KIND, an adapter, and OUT/KIND.merged, a checkpoint. Then
       OUT/added.merged has the kinds of ADDED.
       lora_with_peft.py MODEL OUT SERVED TOKEN…: writes OUT/SERVED, an adapter, and OUT/logits.npy, float32
       [tokens, vocabulary], of the model with it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

KINDS: dict[str, dict[str, Any]] = {
    "plain": {"target_modules": ["q_proj", "v_proj"]},
    "all": {"target_modules": "all-linear", "use_rslora": True, "rank_pattern": {"down_proj": 3}},
    "dora": {"target_modules": ["o_proj", "up_proj"], "use_dora": True},
    "embedding": {"target_modules": ["embed_tokens", "k_proj"], "modules_to_save": ["lm_head"]},
    "head": {"target_modules": ["lm_head", "k_proj"]},
    "tokens": {"target_modules": ["embed_tokens", "lm_head"]},
}
ADDED = ("head", "tokens", "plain")
"""Kinds that PEFT merges into one model."""

SERVED: dict[str, dict[str, Any]] = {
    "ends": {
        "target_modules": ["embed_tokens", "lm_head", "v_proj"],
        "use_rslora": True,
        "rank_pattern": {"lm_head": 3},
    },
    "latent": {
        "target_modules": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"],
        "rank_pattern": {"kv_b_proj": 7},
    },
}
"""Of both ends of a model, and of latent attention."""


def serve(model: str, out: Path, served: str, tokens: list[int]) -> None:
    torch.manual_seed(7)
    config = LoraConfig(r=5, lora_alpha=9, task_type="CAUSAL_LM", init_lora_weights=False, **SERVED[served])
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.mul_(0.3)
        logits = adapted(torch.tensor([tokens])).logits[0]
    adapted.save_pretrained(out / served)
    np.save(out / "logits.npy", logits.numpy())


def main(model: str, out: Path) -> None:
    for kind, settings in KINDS.items():
        torch.manual_seed(7)
        config = LoraConfig(r=5, lora_alpha=9, task_type="CAUSAL_LM", init_lora_weights=False, **settings)
        adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), config)
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if "modules_to_save" in name:
                    parameter.normal_()
        adapted.save_pretrained(out / kind)
        PeftModel.from_pretrained(untied(model), out / kind).merge_and_unload().save_pretrained(out / f"{kind}.merged")
    adapted = PeftModel.from_pretrained(untied(model), out / ADDED[0], adapter_name=ADDED[0])
    for kind in ADDED[1:]:
        adapted.load_adapter(out / kind, adapter_name=kind)
    adapted.merge_and_unload(adapter_names=list(ADDED)).save_pretrained(out / "added.merged")


def untied(model: str) -> Any:
    """The model, with both ends apart: PEFT merges into the weight in place, and so into what shares it."""
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    loaded.lm_head.weight = torch.nn.Parameter(loaded.lm_head.weight.detach().clone())
    loaded.config.tie_word_embeddings = False
    return loaded


if __name__ == "__main__":
    if len(sys.argv) > 3:
        serve(sys.argv[1], Path(sys.argv[2]), sys.argv[3], list(map(int, sys.argv[4:])))
    else:
        main(sys.argv[1], Path(sys.argv[2]))
