"""Families by exact model_type, and building a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmc.models.brief import brief
from llmc.models.config import ModelConfig
from llmc.models.errors import ModelError
from llmc.models.families.apertus import APERTUS
from llmc.models.families.around_text import AROUND_TEXT
from llmc.models.families.baichuan import BAICHUAN
from llmc.models.families.bamba import BAMBA
from llmc.models.families.bert import BERT, ROBERTA, XLM_ROBERTA
from llmc.models.families.bloom import BLOOM
from llmc.models.families.chatglm import CHATGLM
from llmc.models.families.cohere import COHERE, COHERE2
from llmc.models.families.dbrx import DBRX
from llmc.models.families.deepseek import DEEPSEEK
from llmc.models.families.deepseek_latent import DEEPSEEK_V2, DEEPSEEK_V3, GLM4_MOE_LITE, KIMI_K2, YOUTU
from llmc.models.families.eagle import EAGLE
from llmc.models.families.eagle3 import ARCHITECTURES as EAGLE_3_ARCHITECTURES
from llmc.models.families.eagle3 import EAGLE_3
from llmc.models.families.ernie_moe import ERNIE4_5_MOE
from llmc.models.families.exaone import EXAONE
from llmc.models.families.exaone4 import EXAONE4
from llmc.models.families.falcon import FALCON
from llmc.models.families.falcon_h1 import FALCON_H1
from llmc.models.families.family import Family
from llmc.models.families.gemma import GEMMA, GEMMA2, GEMMA3, GEMMA3_TEXT, VAULTGEMMA
from llmc.models.families.gemma3n import GEMMA3N, GEMMA3N_TEXT
from llmc.models.families.gemma4 import GEMMA4, GEMMA4_TEXT, GEMMA4_UNIFIED, GEMMA4_UNIFIED_TEXT
from llmc.models.families.glm import GLM, GLM4
from llmc.models.families.gpt2 import GPT2, GPT_BIGCODE
from llmc.models.families.gpt_neo import GPT_NEO
from llmc.models.families.gpt_neox import GPT_NEOX
from llmc.models.families.gpt_oss import GPT_OSS
from llmc.models.families.gptj import CODEGEN, GPTJ
from llmc.models.families.granite import GRANITE, GRANITEMOE, GRANITEMOEHYBRID, GRANITEMOESHARED, HYPERCLOVAX
from llmc.models.families.hunyuan import HUNYUAN_V1_DENSE, HUNYUAN_V1_MOE
from llmc.models.families.internlm import INTERNLM, INTERNLM2, INTERNLM3
from llmc.models.families.kimi_k25 import KIMI_K25
from llmc.models.families.lfm2 import LFM2, LFM2_MOE
from llmc.models.families.llama import LLAMA
from llmc.models.families.llama4 import LLAMA4, LLAMA4_TEXT
from llmc.models.families.llama_relatives import (
    AQUILA,
    ARCEE,
    CWM,
    ERNIE4_5,
    HELIUM,
    JAIS2,
    MIMO,
    MINICPM,
    NEMOTRON,
    ORION,
    SEED_OSS,
    XVERSE,
)
from llmc.models.families.minicpm3 import MINICPM3
from llmc.models.families.minimax import MINIMAX, MINIMAX_TEXT_01
from llmc.models.families.minimax_m2 import MINIMAX_M2
from llmc.models.families.mistral import MINISTRAL, MINISTRAL3, MISTRAL
from llmc.models.families.mixtral import MIXTRAL
from llmc.models.families.modernbert import MODERNBERT
from llmc.models.families.mpt import MPT
from llmc.models.families.mtp import MTP
from llmc.models.families.nemotron_h import NEMOTRON_H
from llmc.models.families.nomic_bert import NOMIC_BERT
from llmc.models.families.olmo import OLMO, OLMO2, OLMO3
from llmc.models.families.olmoe import OLMOE
from llmc.models.families.onnx import ONNX
from llmc.models.families.opt import OPT
from llmc.models.families.phi import PHI
from llmc.models.families.phi3 import PHI3
from llmc.models.families.phimoe import PHIMOE
from llmc.models.families.pixtral_tower import PIXTRAL_TOWER
from llmc.models.families.qwen import QWEN
from llmc.models.families.qwen2 import QWEN2
from llmc.models.families.qwen2_vl import QWEN2_5_VL, QWEN2_VL
from llmc.models.families.qwen3 import QWEN3
from llmc.models.families.qwen3_5 import QWEN3_5, QWEN3_5_MOE, QWEN3_5_MOE_TEXT, QWEN3_5_TEXT
from llmc.models.families.qwen3_next import QWEN3_NEXT
from llmc.models.families.qwen3_vl import QWEN3_VL, QWEN3_VL_MOE
from llmc.models.families.qwen_moe import QWEN2_MOE, QWEN3_MOE
from llmc.models.families.qwen_tower import QWEN2_TOWER, QWEN3_TOWER
from llmc.models.families.siglip_tower import SIGLIP_TOWER
from llmc.models.families.sigmoid_mixtures import DOTS1, EXAONE_MOE, GLM4_MOE, SOLAR_OPEN
from llmc.models.families.smollm3 import SMOLLM3
from llmc.models.families.stablelm import STABLELM
from llmc.models.families.starcoder2 import STARCODER2
from llmc.models.families.telechat import TELECHAT
from llmc.models.fields import Fields
from llmc.models.unsupported import unsupported_parts

if TYPE_CHECKING:
    from llmc.models.blocks.decoder import Decoder

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        LLAMA,
        MISTRAL,
        QWEN2,
        QWEN3,
        APERTUS,
        AQUILA,
        ARCEE,
        *AROUND_TEXT,
        BAICHUAN,
        BAMBA,
        BERT,
        BLOOM,
        CHATGLM,
        CODEGEN,
        COHERE,
        COHERE2,
        CWM,
        DBRX,
        DEEPSEEK,
        DEEPSEEK_V2,
        DEEPSEEK_V3,
        DOTS1,
        ERNIE4_5,
        ERNIE4_5_MOE,
        EXAONE,
        EXAONE4,
        EXAONE_MOE,
        FALCON,
        FALCON_H1,
        GEMMA,
        GEMMA2,
        GEMMA3,
        GEMMA3_TEXT,
        GEMMA3N,
        GEMMA3N_TEXT,
        GEMMA4,
        GEMMA4_TEXT,
        GEMMA4_UNIFIED,
        GEMMA4_UNIFIED_TEXT,
        GLM,
        GLM4,
        GLM4_MOE,
        GLM4_MOE_LITE,
        GPT2,
        GPTJ,
        GPT_BIGCODE,
        GPT_NEO,
        GPT_NEOX,
        GPT_OSS,
        GRANITE,
        GRANITEMOE,
        GRANITEMOEHYBRID,
        GRANITEMOESHARED,
        HELIUM,
        HUNYUAN_V1_DENSE,
        HUNYUAN_V1_MOE,
        HYPERCLOVAX,
        INTERNLM,
        INTERNLM2,
        INTERNLM3,
        JAIS2,
        LFM2,
        LFM2_MOE,
        LLAMA4,
        LLAMA4_TEXT,
        MIMO,
        MINICPM,
        MINICPM3,
        MINIMAX,
        MINIMAX_M2,
        MINIMAX_TEXT_01,
        MINISTRAL,
        MINISTRAL3,
        KIMI_K2,
        KIMI_K25,
        MIXTRAL,
        MODERNBERT,
        MPT,
        NEMOTRON,
        NEMOTRON_H,
        NOMIC_BERT,
        OLMO,
        OLMO2,
        OLMO3,
        OLMOE,
        OPT,
        ORION,
        PHI,
        PHI3,
        PHIMOE,
        QWEN,
        QWEN2_MOE,
        QWEN3_5,
        QWEN3_5_MOE,
        QWEN3_5_MOE_TEXT,
        QWEN3_5_TEXT,
        QWEN3_MOE,
        QWEN3_NEXT,
        QWEN2_VL,
        QWEN2_5_VL,
        QWEN3_VL,
        QWEN3_VL_MOE,
        ROBERTA,
        SEED_OSS,
        SMOLLM3,
        SOLAR_OPEN,
        STABLELM,
        STARCODER2,
        TELECHAT,
        VAULTGEMMA,
        XVERSE,
        XLM_ROBERTA,
        YOUTU,
    )
}


_UNNAMED = {
    family.model_type: family
    for family in (EAGLE, EAGLE_3, MTP, ONNX, PIXTRAL_TOWER, QWEN2_TOWER, QWEN3_TOWER, SIGLIP_TOWER)
}


def get_family(model_type: str) -> Family:
    """The family of a model_type; includes internal ones for ONNX graphs, drafting heads and towers. Raises ModelError
    naming the supported ones."""
    family = _UNNAMED.get(model_type) or FAMILIES.get(model_type)
    if family is None:
        raise ModelError(f"model_type {brief(model_type)} is not supported; supported are {', '.join(FAMILIES)}")
    return family


# model_type for configurations that lack one, by the authors' own class.
_TYPES_OF_CLASSES = {"configuration_xlm_roberta.XLMRobertaFlashConfig": "xlm-roberta"}


# Published EAGLE heads: their model_type is that of the model they draft for.
_GUESSING_HEADS = frozenset({"LlamaForCausalLMEagle", "EagleLlamaForCausalLM", *EAGLE_3_ARCHITECTURES})
_KEYS_OF_PARAMS = ("dim", "n_layers")
"""Keys of a params.json, in the names of Meta's own code."""


def with_model_type(fields: Fields) -> Fields:
    """A config.json with its model_type taken from auto_map, if it has none itself."""
    if fields.has("model_type") or not fields.has("auto_map"):
        return fields
    classes = fields.raw("auto_map")
    # A class from another hub repository has that repository's name in front.
    named = str(classes.get("AutoConfig", "")).rpartition("--")[2] if isinstance(classes, dict) else ""
    return fields.with_values(model_type=_TYPES_OF_CLASSES[named]) if named in _TYPES_OF_CLASSES else fields


def family_of(fields: Fields) -> Family:
    """The family of a config.json. Raises ModelError that lists what an unknown model is built from."""
    if not fields.has("model_type") and all(map(fields.has, _KEYS_OF_PARAMS)):
        raise ModelError(
            f"{fields.origin} lacks the field 'model_type': with {' and '.join(_KEYS_OF_PARAMS)} it is a params.json, "
            "as Meta, Mistral and ExecuTorch write it; give the config.json of the model in transformers' format"
        )
    model_type = fields.text("model_type")
    architectures = fields.raw("architectures", [])
    for name in architectures if isinstance(architectures, list) else ():
        if isinstance(name, str) and name in _GUESSING_HEADS:
            raise ModelError(
                f"{fields.origin}: {name} is a head that guesses from the hidden states of another model: compile that "
                "model, with this directory as --eagle"
            )
    if model_type in FAMILIES:
        return FAMILIES[model_type]
    parts = ", ".join(unsupported_parts(fields.values))
    raise ModelError(
        f"{fields.origin}: model_type {brief(model_type)}{f' ({parts})' if parts else ''} is not supported; supported "
        f"are {', '.join(FAMILIES)}"
    )


def build_model(config: ModelConfig, act_dtype: str, max_len: int) -> Decoder:
    """Builds the module of `config` without values, on the default device; use `torch.device("meta")` to only trace it.

    act_dtype: "f32", "bf16" or "f16". max_len: positions in the rotary tables.
    """
    return get_family(config.model_type).build(config, act_dtype, max_len)
