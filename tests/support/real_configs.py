"""What becomes of each file of a collection of published configs, where there is one (support.paths.SHARED): it
resolves, or is refused with a sentence.

Names follow the folder that they are in, which ends with a colon.
"""

from __future__ import annotations

import re


def _names(listed: str) -> list[str]:
    """The paths of listed files."""
    names, folder = [], ""
    for word in listed.split():
        if word.endswith(":"):
            folder = word[:-1]
        else:
            names.append(f"{folder}/{word}")
    return names


RESOLVED = _names("""
    aiconfigurator:
        MiniMaxAI--MiniMax-M2.5_config.json MiniMaxAI--MiniMax-M2.7_config.json Qwen--Qwen3-0.6B_config.json
        Qwen--Qwen3-1.7B_config.json Qwen--Qwen3-235B-A22B-FP8_config.json Qwen--Qwen3-235B-A22B_config.json
        Qwen--Qwen3-30B-A3B-FP8_config.json Qwen--Qwen3-30B-A3B_config.json
        Qwen--Qwen3-32B-FP8-Static-PerTensor_config.json Qwen--Qwen3-32B-FP8_config.json
        Qwen--Qwen3-32B_config.json Qwen--Qwen3-8B_config.json Qwen--Qwen3-Coder-480B-A35B-Instruct_config.json
        Qwen--Qwen3-VL-235B-A22B-Instruct_config.json Qwen--Qwen3-VL-2B-Instruct_config.json
        Qwen--Qwen3-VL-30B-A3B-Instruct_config.json Qwen--Qwen3-VL-32B-Instruct_config.json
        Qwen--Qwen3-VL-32B-Thinking_config.json Qwen--Qwen3-VL-4B-Instruct_config.json
        Qwen--Qwen3-VL-8B-Instruct_config.json XiaomiMiMo--MiMo-7B-Base_config.json
        deepseek-ai--DeepSeek-R1_config.json deepseek-ai--DeepSeek-V3_config.json
        google--gemma-4-26B-A4B_config.json meta-llama--Llama-4-Maverick-17B-128E-Instruct_config.json
        meta-llama--Llama-4-Scout-17B-16E-Instruct_config.json meta-llama--Meta-Llama-3.1-405B_config.json
        meta-llama--Meta-Llama-3.1-70B_config.json meta-llama--Meta-Llama-3.1-8B_config.json
        mistralai--Mixtral-8x22B-v0.1_config.json mistralai--Mixtral-8x7B-v0.1_config.json
        moonshotai--Kimi-K2-Instruct_config.json moonshotai--Kimi-K2.5_config.json
        nvidia--DeepSeek-V3.1-NVFP4_config.json nvidia--Gemma-4-26B-A4B-NVFP4_config.json
        nvidia--Gemma-4-31B-IT-NVFP4_config.json nvidia--Kimi-K2.5-NVFP4_config.json
        nvidia--Kimi-K2.6-NVFP4_config.json nvidia--Kimi-K2.7-Code-NVFP4_config.json
        nvidia--Llama-3.1-70B-Instruct-FP8_config.json nvidia--MiniMax-M2.5-NVFP4_config.json
        nvidia--MiniMax-M2.7-NVFP4_config.json nvidia--Qwen3-235B-A22B-NVFP4_config.json
        openai--gpt-oss-120b_config.json openai--gpt-oss-20b_config.json
        Qwen--Qwen3.5-122B-A10B_config.json Qwen--Qwen3.5-27B_config.json Qwen--Qwen3.5-35B-A3B_config.json
        Qwen--Qwen3.5-397B-A17B_config.json nvidia--Qwen3.5-122B-A10B-NVFP4_config.json
        nvidia--Qwen3.5-397B-A17B-NVFP4_config.json nvidia--Qwen3.6-27B-NVFP4_config.json
        nvidia--Qwen3.6-35B-A3B-NVFP4_config.json nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-BF16_config.json
        nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-NVFP4_config.json
        nvidia--NVIDIA-Nemotron-3-Super-120B-A12B-FP8_config.json
        nvidia--NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4_config.json
        nvidia--NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16_config.json
        nvidia--NVIDIA-Nemotron-3-Ultra-550B-A55B-FP8_config.json
        nvidia--NVIDIA-Nemotron-3-Ultra-550B-A55B-NVFP4_config.json
        nvidia--NVIDIA-Nemotron-3.5-Lightning-30B-A3B-NVFP4_config.json nvidia--Nemotron-H-56B-Base-8K_config.json
    bloom:
        config.json
    deepseek-v2-ktransformers:
        config.json
    executorch-models/gemma4/config:
        e2b_config.json e4b_config.json
    falcon-180b-chat:
        config.json
    gptq-wizard-vicuna-30b:
        config.json
    llama2-7b-hf:
        config.json
    ome-testdata:
        baichuan2_7b.json bge_large.json chatglm3_6b.json command_r_35b.json dbrx_132b.json deepseek_v3.json
        e5_mistral_7b.json exaone_7.8b.json gemma3.json gemma3_text.json gemma_2_2b.json gemma_2_2b_it.json
        gemma_2_9b.json gemma_7b.json glm4_9b.json gpt_oss_120b.json gpt_oss_20b.json gte_qwen2_7b.json
        internlm2_7b.json janus_1.3b.json kimi_k2_instruct.json llama3.json llama3_1.json llama3_1_405b.json
        llama3_2_1b.json llama3_2_3b.json llama4.json llama4_scout_17b_16e.json llava_1.5_7b_hf.json
        llava_v1.5_7b.json minicpm3_4b.json mistral.json mistral_7b_instruct.json mixtral.json phi3.json
        phimoe.json qwen2.5_0.5b.json qwen2.5_1.5b.json qwen2.5_14b.json qwen2.5_32b.json qwen2.5_3b.json
        qwen2.5_72b.json qwen2.5_7b.json qwen2.5_vl_7b.json qwen2_7b.json qwen2_vl_2b.json qwen2_vl_7b.json
        qwen3_30b.json qwen3_4b.json qwen3_5_27b.json qwen3_5_35b_a3b.json qwen3_8b_fp8.json
        qwen3_embedding_8b.json qwen3_vl_235b.json
        qwen3_vl_2b_instruct.json qwen3_vl_30b_a3b_instruct.json qwen_7b.json skywork_reward_llama.json
        smollm_1.7b.json stablelm_3b.json xverse_7b.json
    wizardlm2-8x22b-mixtral:
        config.json
    """)
_REFUSED = {
    "a reward model (reward_token_id) has no next token and is not supported": """
        ome-testdata:
            internlm2_reward.json
        """,
    "lacks the field 'model_type': with dim and n_layers it is a params.json, as Meta, Mistral and ExecuTorch "
    "write it": """
        executorch-models/codegen/config:
            config.json
        executorch-models/gemma/config:
            2b_config.json
        executorch-models/gemma2/config:
            2b_config.json
        executorch-models/gemma3/config:
            1b_config.json
        executorch-models/glm/config:
            1_5b_config.json
        executorch-models/granite/config:
            2b_config.json
        executorch-models/granite_speech/config:
            2b_config.json
        executorch-models/internvl3:
            1b_config.json
        executorch-models/lfm2/config:
            lfm2_1_2b_config.json lfm2_350m_config.json lfm2_5_1_2b_config.json lfm2_5_350m_config.json
            lfm2_700m_config.json
        executorch-models/phi_4_mini/config:
            config.json
        executorch-models/qwen2_5/config:
            0_5b_config.json 1_5b_config.json coder_32b_config.json
        executorch-models/qwen3/config:
            0_6b_config.json 1_7b_config.json 4b_config.json
        executorch-models/qwen3_5/config:
            0_8b_config.json 2b_config.json 4b_config.json
        """,
    "model_type 'clip_vision_model' is not supported": """
        ome-testdata:
            clip_vision_model.json
        """,
    "model_type 'deepseek_ref' (sparse attention) is not supported": """
        aiconfigurator:
            sgl-project--DeepSeek-V4-Flash-FP8_config.json sgl-project--DeepSeek-V4-Pro-FP8_config.json
        """,
    "model_type 'deepseek_v32' (sparse attention) is not supported": """
        aiconfigurator:
            deepseek-ai--DeepSeek-V3.2_config.json nvidia--DeepSeek-V3.2-NVFP4_config.json
        """,
    "model_type 'deepseek_v4' (sparse attention) is not supported": """
        aiconfigurator:
            deepseek-ai--DeepSeek-V4-Flash_config.json deepseek-ai--DeepSeek-V4-Pro_config.json
            nvidia--DeepSeek-V4-Flash-NVFP4_config.json nvidia--DeepSeek-V4-Pro-NVFP4_config.json
        """,
    "model_type 'deepseek_vl_v2' (images) is not supported": """
        ome-testdata:
            deepseek_vl2_tiny.json
        """,
    "model_type 'glm_moe_dsa' (sparse attention) is not supported": """
        aiconfigurator:
            nvidia--GLM-5-NVFP4_config.json nvidia--GLM-5.1-NVFP4_config.json nvidia--GLM-5.2-NVFP4_config.json
            zai-org--GLM-5-FP8_config.json zai-org--GLM-5.1-FP8_config.json zai-org--GLM-5.1_config.json
            zai-org--GLM-5.2-FP8_config.json zai-org--GLM-5.2_config.json zai-org--GLM-5_config.json
        """,
    "model_type 'kimi_k3' (linear attention or state space layers, images, code of its own (auto_map)) "
    "is not supported": """
        aiconfigurator:
            moonshotai--Kimi-K3_config.json
        """,
    "model_type 'mimo_v2_flash' (values shorter than keys, layers of different numbers of heads) is not supported": """
        aiconfigurator:
            XiaomiMiMo--MiMo-V2-Flash_config.json
        """,
    "model_type 'minimax_m3' (sparse attention) is not supported": """
        aiconfigurator:
            MiniMaxAI--MiniMax-M3_config.json
        """,
    "model_type 'minimax_m3_vl' (sparse attention, images, code of its own (auto_map)) is not supported": """
        aiconfigurator:
            nvidia--MiniMax-M3-NVFP4_config.json
        """,
    "model_type 'minimind' (code of its own (auto_map)) is not supported": """
        minimind2-moe:
            config.json
        """,
    "model_type 'mllama' (images) is not supported": """
        ome-testdata:
            llama3_2_11b_vision.json llama3_2_90b_vision.json
        """,
    "model_type 'nemotron-nas' (blocks of different sizes, code of its own (auto_map)) is not supported": """
        aiconfigurator:
            nvidia--Llama-3_3-Nemotron-Super-49B-v1_config.json
        """,
    "model_type 'phi3_v' (images, code of its own (auto_map)) is not supported": """
        ome-testdata:
            phi3_v.json
        """,
    "model_type 'phi3small' (code of its own (auto_map)) is not supported": """
        ome-testdata:
            phi3small.json
        """,
    "model_type 'step3p7' (gates on the results of heads, layers of different numbers of heads) is not supported": """
        aiconfigurator:
            stepfun-ai--Step-3.7-Flash-FP8_config.json stepfun-ai--Step-3.7-Flash_config.json
        """,
}
REFUSED = {name: sentence for sentence, listed in _REFUSED.items() for name in _names(listed)}
"""Sentences by file, up to where they say what llmc supports."""

_SIZE = re.compile(r"(?<![A-Za-z0-9.])(\d+(?:\.\d+)?)[bB](?![A-Za-z0-9])")
_OTHER_SIZES = {
    "Llama-4-Maverick-17B": 400.0, "Llama-4-Scout-17B": 108.0, "llama4_scout_17b": 108.0,  # a token uses 17
    "Mixtral-8x22B": 141.0, "wizardlm2-8x22b": 141.0, "Mixtral-8x7B": 46.7,  # experts share the rest
    "Qwen3-VL-2B": 1.72, "qwen3_vl_2b": 1.72, "qwen2_vl_2b": 1.54,  # without what reads images
    "janus_1.3b": 1.65,  # with embeddings
    "gemma_2_2b": 2.61, "gemma_7b": 8.54, "llama3_2_1b": 1.24,
    "dbrx_132b": 158.0,  # the file has 48 layers, where DBRX has 40
    "qwen3_5_27b": 17.4, "qwen3_5_35b_a3b": 22.1,  # other sizes than those of the models of that name
}  # fmt: skip
"""Billions of parameters where they are not the number in the name, which has these words."""


def size_in_name(name: str) -> float | None:
    """Billions of parameters, as the path of a config tells; None if it does not."""
    for words, size in _OTHER_SIZES.items():
        if words in name:
            return size
    found = _SIZE.search(name)
    return None if found is None else float(found[1])
