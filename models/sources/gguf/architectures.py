"""llama.cpp architectures that llmc supports, by exact name."""

from __future__ import annotations

from llmc.models.brief import brief
from llmc.models.errors import ModelError
from llmc.models.families.gemma3n import stream_weights
from llmc.models.families.gemma4 import full_weights
from llmc.models.layout import Layout
from llmc.models.sources.gguf import delta_net, falcon_h1, gemma4, granite, mamba, nemotron_h, short_conv, streams
from llmc.models.sources.gguf.architecture import Architecture

_OF_MIXTRAL = Layout(
    router="block_sparse_moe.gate",
    expert_gate_up=("block_sparse_moe.experts.{}.w1.weight", "block_sparse_moe.experts.{}.w3.weight"),
    expert_down="block_sparse_moe.experts.{}.w2.weight",
)
_AROUND = Layout(mlp_norm="pre_feedforward_layernorm")
_ROUTED_AROUND = Layout(mlp_norm=_AROUND.mlp_norm, router="router.proj")
_NEIGHBOURS = Layout(interleaved=True)
_SHARED = Layout(shared="mlp.shared_experts")
_OF_GPT_OSS = Layout(
    expert_gate_up_bias=("mlp.experts.{}.gate_proj.bias", "mlp.experts.{}.up_proj.bias"),
    expert_down_bias="mlp.experts.{}.down_proj.bias",
)
_POSITIONS = Layout(positions="model.embed_positions", embed_norm="model.embed_norm")
# Encoders, with norms after blocks.
_OF_BERT = Layout(
    positions="model.embed_positions",
    embed_norm="model.embed_norm",
    types="model.token_types",
    post_mlp_norm="post_mlp_layernorm",
    dense=("classifier.dense", "classifier.out_proj"),
    other_modules=("classifier.",),
)
_BERT_NORMS = {"attn_output_norm": _OF_BERT.post_attention_norm, "layer_output_norm": _OF_BERT.post_mlp_norm}
_OF_MODERN_BERT = Layout(embed_norm="model.embed_norm", dense=("classifier.dense", "classifier.out_proj"))

ARCHITECTURES = {
    architecture.name: architecture
    for architecture in (
        # Also Mistral's and InternLM3's models, which converters store as llama.
        Architecture("llama", "llama", paired=True, mixture=Architecture("llama", "mixtral", _OF_MIXTRAL, paired=True)),
        Architecture("qwen2", "qwen2"),
        Architecture("qwen3", "qwen3"),
        # Decoders of models that read images, whose own tensors are another file.
        Architecture("qwen2vl", "qwen2"),
        Architecture("qwen3vl", "qwen3"),
        Architecture("qwen3vlmoe", "qwen3_moe"),
        Architecture("gemma", "gemma"),
        Architecture("gemma2", "gemma2", _AROUND),
        Architecture("gemma3", "gemma3_text", _AROUND),
        Architecture(
            "gemma3n",
            "gemma3n_text",
            _AROUND,
            of_layers=streams.OF_LAYERS,
            of_model=streams.OF_MODEL,
            weights=stream_weights,
        ),
        Architecture(
            "gemma4",
            "gemma4_text",
            _ROUTED_AROUND,
            of_layers=gemma4.OF_LAYERS,
            of_model=streams.INPUTS_OF_MODEL,
            weights=full_weights,
        ),
        Architecture("granite", "granite", paired=True),
        Architecture("olmo2", "olmo2"),
        Architecture("qwen2moe", "qwen2_moe"),
        Architecture("qwen3moe", "qwen3_moe"),
        Architecture("qwen3next", "qwen3_next", delta_net.BY_KEY_HEAD, of_layers=delta_net.OF_LAYERS),
        # Also Qwen3.6; decoders of models that read images.
        Architecture("qwen35", "qwen3_5_text", delta_net.LAYOUT, of_layers=delta_net.OF_LAYERS, tiled=True),
        Architecture("qwen35moe", "qwen3_5_moe_text", delta_net.LAYOUT, of_layers=delta_net.OF_LAYERS, tiled=True),
        Architecture("starcoder2", "starcoder2", Layout(up="mlp.c_fc", down="mlp.c_proj"), gated=False),
        Architecture("apertus", "apertus", gated=False),
        Architecture("arcee", "arcee", paired=True, gated=False),
        Architecture("baichuan", "baichuan", paired=True),
        Architecture("bloom", "bloom", _POSITIONS, gated=False),
        Architecture("chatglm", "glm", _NEIGHBOURS),
        Architecture("command-r", "cohere", _NEIGHBOURS),
        Architecture("cohere2", "cohere2", _NEIGHBOURS),
        Architecture("dbrx", "dbrx", others={"attn_output_norm": Layout().mlp_norm}),
        Architecture("deepseek", "deepseek", _SHARED, paired=True),
        Architecture("deepseek2", "deepseek_v2", _SHARED),
        Architecture("dots1", "dots1", _SHARED),
        Architecture("ernie4_5", "ernie4_5", _NEIGHBOURS),
        Architecture("ernie4_5-moe", "ernie4_5_moe", Layout(interleaved=True, shared=_SHARED.shared)),
        Architecture("exaone", "exaone"),
        Architecture("exaone4", "exaone4"),
        Architecture("falcon", "falcon", gated=False),
        Architecture("falcon-h1", "falcon_h1", falcon_h1.LAYOUT, of_layers=falcon_h1.OF_LAYERS, scaled=True),
        Architecture(
            "glm4",
            "glm4",
            Layout(
                interleaved=True,
                post_attention_norm="post_self_attn_layernorm",
                post_mlp_norm="post_mlp_layernorm",
            ),
        ),
        Architecture("glm4moe", "glm4_moe", _SHARED),
        Architecture("gpt2", "gpt2", _POSITIONS, gated=False),
        Architecture("gptneox", "gpt_neox", gated=False),
        Architecture("gpt-oss", "gpt_oss", _OF_GPT_OSS, truncated=False),
        Architecture("granitemoe", "granitemoe", paired=True),
        # Also Bamba, of whose heads a half is rotated.
        Architecture(
            "granitehybrid",
            "granitemoehybrid",
            granite.LAYOUT,
            paired=True,
            whole_heads=True,
            of_layers=mamba.OF_LAYERS,
        ),
        Architecture("hunyuan-dense", "hunyuan_v1_dense"),
        Architecture("internlm2", "internlm2", paired=True),
        Architecture("lfm2", "lfm2", short_conv.LAYOUT, of_layers=short_conv.OF_LAYERS, of_model=short_conv.OF_MODEL),
        Architecture(
            "lfm2moe", "lfm2_moe", short_conv.LAYOUT, of_layers=short_conv.OF_LAYERS, of_model=short_conv.OF_MODEL
        ),
        Architecture("llama4", "llama4_text", _NEIGHBOURS),
        Architecture("minicpm", "minicpm", paired=True),
        Architecture("minicpm3", "minicpm3"),
        Architecture("minimax-m2", "minimax_m2"),
        Architecture("mpt", "mpt", gated=False),
        Architecture("nemotron", "nemotron", gated=False),
        Architecture(
            "nemotron_h", "nemotron_h", nemotron_h.LAYOUT, paired=True, gated=False, of_layers=nemotron_h.OF_LAYERS
        ),
        Architecture(
            "nemotron_h_moe", "nemotron_h", nemotron_h.LAYOUT, paired=True, gated=False, of_layers=nemotron_h.OF_LAYERS
        ),
        Architecture("olmo", "olmo", paired=True),
        Architecture("olmoe", "olmoe"),
        Architecture("orion", "orion"),
        Architecture("phi2", "phi", gated=False),
        Architecture("phi3", "phi3"),
        Architecture("phimoe", "phimoe"),
        Architecture("qwen", "qwen"),
        Architecture("seed_oss", "seed_oss"),
        Architecture("smollm3", "smollm3", paired=True),
        Architecture("stablelm", "stablelm"),
        Architecture("starcoder", "gpt_bigcode", _POSITIONS, gated=False),
        Architecture("xverse", "xverse", paired=True),
        # BERT, RoBERTa and XLM-RoBERTa; positions begin at 0 in files.
        Architecture("bert", "bert", _OF_BERT, gated=False, others=_BERT_NORMS),
        Architecture("nomic-bert", "nomic_bert", _OF_BERT, others=_BERT_NORMS),
        Architecture("modern-bert", "modernbert", _OF_MODERN_BERT),
    )
}


def get_architecture(name: str, origin: str) -> Architecture:
    """The architecture `name`. Raises ModelError naming the known ones."""
    found = ARCHITECTURES.get(name)
    if found is None:
        raise ModelError(
            f"{origin}: architecture {brief(name)} is not supported; supported are {', '.join(ARCHITECTURES)}"
        )
    return found
