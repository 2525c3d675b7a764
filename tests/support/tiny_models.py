"""Tiny random checkpoints in Hugging Face format, written by transformers, or of families that it does not have."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TypedDict

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DeepseekVLForConditionalGeneration,
    Gemma3ForConditionalGeneration,
    Gemma4ForConditionalGeneration,
    Gemma4UnifiedForConditionalGeneration,
    Idefics2ForConditionalGeneration,
    Idefics3ForConditionalGeneration,
    InternVLForConditionalGeneration,
    JanusForConditionalGeneration,
    Llama4ForConditionalGeneration,
    LlavaForConditionalGeneration,
    LlavaNextForConditionalGeneration,
    LlavaNextVideoForConditionalGeneration,
    LlavaOnevisionForConditionalGeneration,
    Mistral3ForConditionalGeneration,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2AudioForConditionalGeneration,
    Qwen2VLForConditionalGeneration,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeForConditionalGeneration,
    SmolVLMForConditionalGeneration,
    VoxtralForConditionalGeneration,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3ForCausalLM
from transformers.models.kimi_k25.modeling_kimi_k25 import Kimi_K25ForConditionalGeneration

from support.remote_code.registry import REMOTE, remote_config, run_remote, save_remote


class KimiConfig(DeepseekV3Config):  # type: ignore[misc]
    """Of Kimi K2, which transformers knows by DeepSeek's name alone."""

    model_type = "kimi_k2"


class KimiForCausalLM(DeepseekV3ForCausalLM):  # type: ignore[misc]
    config_class = KimiConfig


AutoConfig.register(KimiConfig.model_type, KimiConfig)
AutoModelForCausalLM.register(KimiConfig, KimiForCausalLM)


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
# Models that read images, whose decoder is a table in their config; and what is theirs alone there.
_WITH_EYES = {
    "deepseek_vl": DeepseekVLForConditionalGeneration,
    "gemma3": Gemma3ForConditionalGeneration,
    "gemma4": Gemma4ForConditionalGeneration,
    "gemma4_unified": Gemma4UnifiedForConditionalGeneration,
    "idefics2": Idefics2ForConditionalGeneration,
    "idefics3": Idefics3ForConditionalGeneration,
    "internvl": InternVLForConditionalGeneration,
    "janus": JanusForConditionalGeneration,
    "kimi_k25": Kimi_K25ForConditionalGeneration,
    "llama4": Llama4ForConditionalGeneration,
    "llava": LlavaForConditionalGeneration,
    "llava_next": LlavaNextForConditionalGeneration,
    "llava_next_video": LlavaNextVideoForConditionalGeneration,
    "llava_onevision": LlavaOnevisionForConditionalGeneration,
    "mistral3": Mistral3ForConditionalGeneration,
    "qwen2_5_vl": Qwen2_5_VLForConditionalGeneration,
    "qwen2_audio": Qwen2AudioForConditionalGeneration,
    "qwen2_vl": Qwen2VLForConditionalGeneration,
    "qwen3_5": Qwen3_5ForConditionalGeneration,
    "qwen3_5_moe": Qwen3_5MoeForConditionalGeneration,
    "qwen3_vl": Qwen3VLForConditionalGeneration,
    "qwen3_vl_moe": Qwen3VLMoeForConditionalGeneration,
    "smolvlm": SmolVLMForConditionalGeneration,
    "voxtral": VoxtralForConditionalGeneration,
}
_OF_TEXT = {
    **dict.fromkeys(("idefics2", "llava_next"), "mistral"),
    **dict.fromkeys(("llava_onevision", "qwen2_audio"), "qwen2"),
    **dict.fromkeys(
        ("deepseek_vl", "idefics3", "janus", "llava", "llava_next_video", "multi_modality", "smolvlm", "voxtral"),
        "llama",
    ),
    "internvl": "qwen3",
    "kimi_k25": "deepseek_v3",
    "mistral3": "ministral3",
}
"""Their decoder's config, where it is not called as the whole is."""
WITHIN = "gemma3n"
_UNSCALED = (
    WITHIN, f"{WITHIN}_text", "gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text",
)  # fmt: skip
"""Whose scores are not scaled."""
BEHIND = "multi_modality"
"""As those, but the tiny ones have the decoder alone."""
_EYES: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
_OWN_EYES = {"vision_config": _EYES}
_CLIP = {"vision_config": {"model_type": "clip_vision_model", **_EYES}}
_SIGLIP = {"vision_config": {"model_type": "siglip_vision_model", **_EYES}}
_QWEN3_EYES: dict[str, Any] = {
    "vision_config": {
        "depth": 1, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 60,
        "num_position_embeddings": 4, "deepstack_visual_indexes": [0],
    },
}  # fmt: skip
_QWEN3_5_EYES = {
    name: {key: value for key, value in table.items() if key != "deepstack_visual_indexes"}
    for name, table in _QWEN3_EYES.items()
}
_OF_EYES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("llava", "llava_next", "llava_next_video"), _CLIP),
    **dict.fromkeys(("deepseek_vl", "llava_onevision"), _SIGLIP),
    **dict.fromkeys(("idefics3", "internvl", "smolvlm"), _OWN_EYES),
    "idefics2": {
        "vision_config": _EYES,
        "perceiver_config": {
            "hidden_size": 60, "resampler_n_latents": 2, "resampler_depth": 1, "resampler_n_heads": 2,
            "resampler_head_dim": 8, "num_key_value_heads": 1,
        },
    },
    "janus": {
        "vision_config": {**_EYES, "projection_dim": 60},
        "vq_config": {
            "num_embeddings": 8, "base_channels": 32, "channel_multiplier": [1], "num_res_blocks": 1,
            "latent_channels": 32, "projection_dim": 60, "image_token_embed_dim": 60,
        },
    },
    "mistral3": {"vision_config": {"model_type": "pixtral", **_EYES}},
    "qwen2_audio": {
        "audio_config": {
            "model_type": "qwen2_audio_encoder", "encoder_layers": 1, "encoder_attention_heads": 2,
            "encoder_ffn_dim": 32, "d_model": 16, "num_mel_bins": 8,
        },
    },
    "voxtral": {
        "audio_config": {
            "model_type": "voxtral_encoder", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
            "num_attention_heads": 2, "num_mel_bins": 8,
        },
    },
    "gemma3": {"vision_config": {"model_type": "siglip_vision_model", **_EYES}, "mm_tokens_per_image": 4},
    "gemma4": {
        "vision_config": {**_EYES, "num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 16},
        "audio_config": None,
    },
    "gemma4_unified": {"vision_config": {"mm_embed_dim": 16, "mm_posemb_size": 4}, "audio_config": None},
    "llama4": {
        "vision_config": {**_EYES, "vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16},
    },
    "kimi_k25": {
        "vision_config": {
            "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
            "pos_emb_height": 4, "pos_emb_width": 4,
        },
        "projection_hidden_size": 16,
    },
    "qwen2_5_vl": {
        "vision_config": {
            "depth": 1, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 60,
            "fullatt_block_indexes": [0],
        },
    },
    "qwen2_vl": {"vision_config": {"depth": 1, "embed_dim": 16, "hidden_size": 60, "mlp_ratio": 2, "num_heads": 2}},
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe"), _QWEN3_EYES),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe"), _QWEN3_5_EYES),
}  # fmt: skip


def make_tiny_model(
    path: str | Path,
    family: str,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str | int = "1GB",
    eyes: Mapping[str, Any] | None = None,
    **overrides: Any,
) -> Path:
    """Saves a random model of `family` to the directory `path` and returns it.

    overrides: fields of the family's config. eyes: of a model that sees, fields beside its text_config.
    The same arguments give the same weights. Weights are large
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
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if family in REMOTE:
            config = remote_config(family, **overrides)
            remote = REMOTE[family][0](config)
            heads = [name for name in remote.state_dict() if name.endswith(("lm_head.weight", "output_layer.weight"))]
            head = remote.get_parameter(heads[0] if heads else "output.weight")
            _randomize(remote, head, tied=config["tie_word_embeddings"])
            save_remote(remote.to(dtype), config, Path(path))
            return Path(path)
        model = _of_transformers(family, {**fields, **overrides}, overrides.keys(), eyes or {})
        tied, unscaled = model.config.tie_word_embeddings, family in _UNSCALED
        _randomize(model, model.get_output_embeddings().weight, tied=tied, of_unscaled_scores=unscaled)
    model.to(dtype).save_pretrained(path, max_shard_size=max_shard_size)
    if family == WITHIN:
        _put_within(Path(path))
    if family == BEHIND:
        _put_behind(Path(path))
    if family == "kimi_k25":
        _with_layers(Path(path))
    return Path(path)


def _with_layers(path: Path) -> None:
    """Calls layers of the decoder so, as published checkpoints do; transformers writes those of the images' model."""
    tensors = load_file(path / "model.safetensors")
    renamed = {
        name.replace("language_model.model.blocks.", "language_model.model.layers."): tensor
        for name, tensor in tensors.items()
    }
    save_file(renamed, path / "model.safetensors", metadata={"format": "pt"})


def _put_within(path: Path) -> None:
    """Makes of a decoder's checkpoint one of the model that reads images and sounds, without what reads those: that
    code of transformers needs a package for images."""
    text = json.loads((path / "config.json").read_text())
    whole = {"model_type": WITHIN, "tie_word_embeddings": text["tie_word_embeddings"], "text_config": text}
    (path / "config.json").write_text(json.dumps(whole))
    tensors = load_file(path / "model.safetensors")
    within = {name.replace("model.", "model.language_model."): tensor for name, tensor in tensors.items()}
    save_file(within, path / "model.safetensors", metadata={"format": "pt"})


def _put_behind(path: Path) -> None:
    """Makes of a decoder's checkpoint one of Janus as its authors publish it, whose code transformers lacks."""
    text = json.loads((path / "config.json").read_text())
    whole = {"model_type": BEHIND, "language_config": text, "aligner_config": {"cls": "MlpProjector"}}
    (path / "config.json").write_text(json.dumps(whole))
    behind = {f"language_model.{name}": one for name, one in load_file(path / "model.safetensors").items()}
    behind["aligner.layers.0.weight"] = torch.ones(4, 4)
    save_file(behind, path / "model.safetensors", metadata={"format": "pt"})


def _from_behind(path: Path, dtype: torch.dtype) -> Any:
    config = CONFIG_MAPPING["llama"](**json.loads((path / "config.json").read_text())["language_config"])
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=dtype)
    name, tensors = "language_model.", load_file(path / "model.safetensors")
    model.load_state_dict({at.removeprefix(name): one for at, one in tensors.items() if at.startswith(name)})
    return model.eval()


def _from_within(path: Path, dtype: torch.dtype) -> Any:
    """The decoder of such a checkpoint."""
    config = CONFIG_MAPPING[f"{WITHIN}_text"](**json.loads((path / "config.json").read_text())["text_config"])
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=dtype)
    tensors = load_file(path / "model.safetensors")
    missing, unknown = model.load_state_dict(
        {name.replace("model.language_model.", "model."): tensor for name, tensor in tensors.items()}, strict=False
    )
    assert not unknown
    assert set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    return model.eval()


def _of_transformers(family: str, fields: dict[str, Any], told: Collection[str], eyes: Mapping[str, Any]) -> Any:
    """told: fields that its config must have; of the others it takes those that it knows. eyes: as in
    `make_tiny_model`."""
    with_text = f"{family}_text" if family in (*_WITH_EYES, WITHIN) else family
    kind = CONFIG_MAPPING[_OF_TEXT.get(family, with_text)]
    known = {*kind.__dataclass_fields__, *kind.attribute_map, *told}
    config = kind(**{name: value for name, value in fields.items() if name in known})
    if family in _WITH_EYES:
        tied = {"tie_word_embeddings": fields["tie_word_embeddings"]}
        usual = _OF_EYES[family]
        seeing = {**usual, **eyes}
        if "vision_config" in eyes:
            seeing["vision_config"] = {**usual["vision_config"], **eyes["vision_config"]}
        return _WITH_EYES[family](CONFIG_MAPPING[family](text_config=config.to_dict(), **seeing, **tied))
    return AutoModelForCausalLM.from_config(config)


def _randomize(model: nn.Module, head: torch.Tensor, *, tied: bool, of_unscaled_scores: bool = False) -> None:
    """of_unscaled_scores: norms of q have what divides scores elsewhere. Without that a softmax takes one key, which
    hinges on roundings."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 and name.endswith((".weight", "router.scale", "per_expert_scale")):
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(std=0.1 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5)
        # Logits are spread out, so that greedy tokens do not hinge on rounding; a tied embedding is small instead, so
        # that the layers decide and the model does not just repeat its last token.
        head.mul_(0.25 if tied else 2.0)
        for name, parameter in model.named_parameters():
            if of_unscaled_scores and name.endswith("q_norm.weight"):
                parameter.mul_(parameter.shape[0] ** -0.5)
            if name.endswith("modality_router.weight"):
                # What it makes is divided by the hidden size: as it is, streams would count less than 16 bits round.
                parameter.mul_(parameter.shape[1] / 4)
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.normal_(std=0.1)
            if name.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.5)


def reference_model(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The model of transformers, by its plain code; of Falcon with ALiBi that adds the bias twice, torch's once."""
    config = json.loads((path / "config.json").read_text())
    if config["model_type"] in REMOTE:
        return run_remote(path, dtype)
    if config["model_type"] == WITHIN:
        return _from_within(path, dtype)
    if config["model_type"] == BEHIND:
        return _from_behind(path, dtype)
    if config["model_type"] in _WITH_EYES:
        kind = _WITH_EYES[config["model_type"]]
        whole = kind.from_pretrained(path, attn_implementation="eager", dtype=dtype).eval()
        # Llama 4's own forward fails on a text without images.
        return whole.language_model if config["model_type"] == "llama4" else whole
    code = "sdpa" if config["model_type"] == "falcon" and config.get("alibi") else "eager"
    # torch's products of groups of experts have no float64.
    experts = {"experts_implementation": "eager"} if dtype == torch.float64 else {}
    return AutoModelForCausalLM.from_pretrained(path, attn_implementation=code, dtype=dtype, **experts).eval()


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
