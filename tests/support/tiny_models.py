"""Tiny random checkpoints in Hugging Face format, written by transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypedDict

import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING


class ModelFields(TypedDict, total=False):
    """Fields of a model's config in transformers."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    max_window_layers: int
    sliding_window: int | None
    use_sliding_window: bool
    layer_types: list[str]
    attention_bias: bool
    mlp_bias: bool
    tie_word_embeddings: bool
    eos_token_id: int
    rope_parameters: dict[str, Any]


FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


def make_tiny_model(
    path: str | Path,
    family: str,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str | int = "1GB",
    **overrides: Any,
) -> Path:
    """Saves a random model of `family` to the directory `path` and returns it.

    overrides: fields of the family's transformers config. The same arguments give the same weights. Weights are large
    enough that logits differ clearly and norms and biases are not trivial.
    """
    fields: dict[str, Any] = {
        "vocab_size": 515,
        "hidden_size": 60,
        "intermediate_size": 100,
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 20,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        **({"sliding_window": None} if family == "mistral" else {}),
    }
    kind = CONFIG_MAPPING[family]
    known = {*kind.__dataclass_fields__, *kind.attribute_map}
    fields = {**{name: value for name, value in fields.items() if name in known}, **overrides}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(kind(**fields))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() == 1 and name.endswith(".weight"):
                    parameter.uniform_(0.5, 1.5)
                else:
                    parameter.normal_(std=0.1 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5)
            # Logits are spread out, so that greedy tokens do not hinge on rounding; a tied embedding is small instead,
            # so that the layers decide and the model does not just repeat its last token.
            model.get_output_embeddings().weight.mul_(0.25 if model.config.tie_word_embeddings else 2.0)
    model.to(dtype).save_pretrained(path, max_shard_size=max_shard_size)
    return Path(path)


def reference_model(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The model of transformers, by its plain code; of Falcon with ALiBi that adds the bias twice, torch's once."""
    config = json.loads((path / "config.json").read_text())
    code = "sdpa" if config["model_type"] == "falcon" and config.get("alibi") else "eager"
    return AutoModelForCausalLM.from_pretrained(path, attn_implementation=code, dtype=dtype).eval()


def greedy_of_transformers(path: Path, prompt: list[int], count: int) -> tuple[list[int], torch.Tensor]:
    """Ids and logits [count, V] without a cache: every step runs the whole text.

    transformers' cache for a window of w keeps `keys[:, :, -w + 1 :]`, which for 1 is all of them.
    """
    model = reference_model(path)
    ids, rows = list(prompt), []
    with torch.no_grad():
        for _ in range(count):
            rows.append(model(torch.tensor([ids]), use_cache=False).logits[0, -1].float())
            ids.append(int(rows[-1].argmax()))
    return ids[len(prompt) :], torch.stack(rows)
