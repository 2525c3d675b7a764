"""Models that read images or sounds, around a text model: LLaVA, Mistral 3, InternVL, SmolVLM, Voxtral and more.

config.json says in a table of which family the text model is. A text alone passes through nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from llmc.models.brief import brief
from llmc.models.config import ModelConfig
from llmc.models.errors import ModelError
from llmc.models.families.family import Family
from llmc.models.families.llama import LLAMA
from llmc.models.families.mistral import MINISTRAL3, MISTRAL
from llmc.models.families.pixtral_tower import read_pixtral_tower
from llmc.models.families.qwen2 import QWEN2
from llmc.models.families.qwen3 import QWEN3
from llmc.models.families.siglip_tower import read_siglip_tower
from llmc.models.families.with_images import harmless_with_images, neutral_with_images, text_fields, within
from llmc.models.fields import Fields
from llmc.models.layout import LLAMA_LAYOUT, behind

_TIED = "tie_word_embeddings"
_FLAT = "llava"
"""A model whose authors' own checkpoints have the text model's fields and tensors in the midst of others."""
_FLAT_KEYS = """
    freeze_mm_mlp_adapter freeze_mm_vision_resampler image_aspect_ratio image_crop_resolution image_split_resolution
    mm_hidden_size mm_patch_merge_type mm_projector_lr mm_projector_type mm_resampler_type mm_use_im_patch_token
    mm_use_im_start_end mm_vision_select_feature mm_vision_select_layer mm_vision_tower mm_vision_tower_lr
    tune_mm_mlp_adapter tune_mm_vision_resampler unfreeze_mm_vision_tower use_mm_proj
    """
# Encoders of images and sounds, what joins them to the text model, and places of their tokens.
_OTHER_KEYS = """
    _pad_token_id aligner_config audio_config audio_token_id audio_token_index downsample_ratio gen_aligner_config
    gen_head_config gen_vision_config hidden_size ignore_index image_grid_pinpoints image_seq_length
    multimodal_projector_bias perceiver_config projector_hidden_act scale_factor spatial_merge_size
    spatial_pool_mode spatial_pool_stride use_image_newline_parameter video_seq_length video_token_index
    vision_aspect_ratio vision_feature_layer vision_feature_select_strategy vocab_size vq_config
    """
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def _usual(*sizes: int, positions: int, **more: Any) -> dict[str, Any]:
    """Values that transformers assumes, so that published files omit them. sizes: those of _SIZES."""
    return {"rms_norm_eps": 1e-6, **dict(zip(_SIZES, sizes, strict=True)), "max_position_embeddings": positions, **more}


_BEGIN_END = {"bos_token_id": 1, "eos_token_id": 2}
TEXTS: Mapping[str, tuple[Family, dict[str, Any]]] = {
    "llama": (LLAMA, _usual(32000, 4096, 11008, 32, 32, positions=2048, **_BEGIN_END)),
    "mistral": (MISTRAL, _usual(32000, 4096, 14336, 32, 32, positions=131072, num_key_value_heads=8, **_BEGIN_END)),
    "ministral3": (
        MINISTRAL3,
        _usual(
            131072, 4096, 14336, 34, 32, positions=262144, num_key_value_heads=8, head_dim=128, rms_norm_eps=1e-5,
            **_BEGIN_END,
        ),
    ),
    "qwen2": (QWEN2, _usual(151936, 4096, 22016, 32, 32, positions=32768)),
    "qwen3": (QWEN3, _usual(151936, 4096, 22016, 32, 32, positions=32768, head_dim=128)),
}  # fmt: skip
"""By model_type: the family, and values that published files omit."""


def _reader(texts: tuple[str, ...], table: str, either_ties: bool) -> Callable[[Fields, Fields], ModelConfig]:
    """texts: supported text models; a config that names none means the first. either_ties: an embedding is tied if one
    of both tables says so."""

    def read_config(fields: Fields, generation: Fields) -> ModelConfig:
        model_type, text = fields.text("model_type"), fields.table(table)
        if text is None and model_type == _FLAT:
            return replace(LLAMA.read_config(fields, generation), model_type=model_type)
        kind = texts[0] if text is None else text.text("model_type", texts[0])
        if kind not in texts:
            raise ModelError(
                f"{fields.origin}: a {model_type} model around {brief(kind)} is not supported; one around "
                f"{', '.join(texts)} is"
            )
        if either_ties and text is not None and (fields.flag(_TIED, False) or text.flag(_TIED, False)):
            fields = fields.with_values(tie_word_embeddings=True)
        family, usual = TEXTS[kind]
        config = family.read_config(text_fields(fields, {**usual, "model_type": kind}, table), generation)
        return replace(config, model_type=model_type)

    return read_config


def _family(
    model_type: str,
    texts: tuple[str, ...],
    modules: Iterable[str],
    *,
    name: str = "language_model",
    inside: bool = False,
    table: str = "text_config",
    either_ties: bool = False,
    tower: Callable[[Fields, ModelConfig], ModelConfig] | None = None,
) -> Family:
    """modules: parts that llmc does not use. name: of the text model in a checkpoint. inside: published files have it
    within `model`."""
    others = tuple(modules)
    around = replace(behind(LLAMA_LAYOUT, f"{name}."), other_modules=others)
    maps = [around.weight_map, within(LLAMA_LAYOUT, *others, name=name).weight_map]
    if model_type == _FLAT:
        modules_of_flat = ("model.mm_projector.", "model.vision_tower.", "model.image_newline")
        maps.append(replace(LLAMA_LAYOUT, other_modules=modules_of_flat).weight_map)
    if inside:
        maps.reverse()
    families = [TEXTS[text][0] for text in texts]
    own = f"{_OTHER_KEYS} {_FLAT_KEYS if model_type == _FLAT else ''}".split()
    harmless = frozenset(key for family in families for key in family.harmless)
    neutral = {key: value for family in families for key, value in family.neutral.items()}
    return Family(
        model_type,
        _reader(texts, table, either_ties),
        maps[0],
        other_maps=tuple(maps[1:]),
        harmless=harmless_with_images(harmless, table) | frozenset(own),
        neutral=neutral_with_images(neutral, table),
        tower=tower,
    )


_CLASSIC = ("llama", "mistral", "qwen2")
_SEES = ("vision_tower.", "multi_modal_projector.")
_SEES_ROWS = (*_SEES, "image_newline")
_HEARS = ("audio_tower.", "multi_modal_projector.")
_CONNECTED = ("vision_model.", "connector.")
_JANUS = ("vision_model.", "aligner.", "vqmodel.", "generation_embeddings.", "generation_aligner.", "generation_head.")
_JANUS_AS_PUBLISHED = ("vision_model.", "aligner.", "gen_vision_model.", "gen_aligner.", "gen_head.", "gen_embed.")
AROUND_TEXT = (
    _family("deepseek_vl", ("llama",), ("vision_model.", "aligner."), inside=True),
    _family("idefics2", ("mistral",), _CONNECTED, name="text_model", inside=True),
    _family("idefics3", ("llama",), _CONNECTED, name="text_model", inside=True, tower=read_siglip_tower),
    _family("internvl", ("qwen2", "qwen3", "llama"), _SEES),
    _family("janus", ("llama",), _JANUS, inside=True),
    _family("llava", _CLASSIC, _SEES, either_ties=True),
    _family("llava_next", _CLASSIC, _SEES_ROWS),
    _family("llava_next_video", _CLASSIC, _SEES_ROWS),
    _family("llava_onevision", ("qwen2",), _SEES_ROWS, either_ties=True),
    _family("mistral3", ("mistral", "ministral3"), _SEES, tower=read_pixtral_tower),
    _family("multi_modality", ("llama",), _JANUS_AS_PUBLISHED, table="language_config"),
    _family("qwen2_audio", ("qwen2",), _HEARS),
    _family("smolvlm", ("llama",), _CONNECTED, name="text_model", inside=True, tower=read_siglip_tower),
    _family("voxtral", ("llama",), _HEARS),
)
"""One family for each model_type."""
