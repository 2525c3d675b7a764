"""Tiny checkpoints as files that llama.cpp's converter would write of them, by the gguf package, in F32.

What it takes apart, joins and turns is done here once more, from transformers' side.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from llmc.models import ModelConfig
from llmc.models.config import Heads
from llmc.models.delta_net import DeltaNet

from support.gguf_mamba import architecture_of_granite, of_hybrid, of_mixer, of_shared, with_multipliers
from support.gguf_models import gguf_names, paired

Array = NDArray[Any]
Tensors = dict[str, Array]

ARCHITECTURES = {
    "bamba": "granitehybrid", "cohere": "command-r", "deepseek_v2": "deepseek2", "deepseek_v3": "deepseek2",
    "ernie4_5_moe": "ernie4_5-moe", "falcon_h1": "falcon-h1", "granitemoeshared": "granitemoe",
    "gemma3n_text": "gemma3n", "gemma4_text": "gemma4", "glm": "chatglm", "glm4_moe": "glm4moe",
    "gpt_bigcode": "starcoder", "gpt_neox": "gptneox", "gpt_oss": "gpt-oss", "hunyuan_v1_dense": "hunyuan-dense",
    "kimi_k2": "deepseek2", "lfm2_moe": "lfm2moe", "llama4_text": "llama4", "minimax_m2": "minimax-m2",
    "modernbert": "modern-bert", "nomic_bert": "nomic-bert",
    "phi": "phi2", "qwen2_vl": "qwen2vl", "qwen3_5_moe_text": "qwen35moe", "qwen3_5_text": "qwen35",
    "qwen3_next": "qwen3next", "qwen3_vl": "qwen3vl", "qwen3_vl_moe": "qwen3vlmoe", "roberta": "bert",
    "xlm-roberta": "bert",
}  # fmt: skip
"""By model_type, where llama.cpp calls it otherwise."""
_PAIRED = frozenset({
    "arcee", "baichuan", "bamba", "deepseek", "granitemoe", "granitemoehybrid", "granitemoeshared", "internlm2",
    "minicpm", "nemotron_h", "olmo", "smollm3", "xverse",
})  # fmt: skip
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(\w+)\.weight")
_OF_SEVERAL = re.compile(r"(.+_layernorm\.norms|.+\.altup(?:_unembed)?_projections)\.(\d+)()\.weight")
_NOT_OF_TEXT = re.compile(r"pooler|visual\.|vision_tower\.|embed_vision\.|position_ids$")
# Factors of Gemma 4's layers.
_SCALES = {
    "layer_scalar": "layer_output_scale.weight",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "router.scale": "ffn_gate_inp.scale",
}
# Names that the package's map does not have, as checkpoints of other times have other ones.
_RENAMED = (
    (r"^transformer\.(h\.\d+\.(?:self_attention|input_layernorm|post_attention_layernorm|mlp)|word_emb|ln_f)", r"\1"),
    (r"^(?:bert|roberta)\.", ""),
    (r"e_score_correction_bias$", "e_score_correction.bias"),
    (r"self_attn\.sinks$", "self_attn.sinks.weight"),
    (r"correct_output_scale$", "correct_output_scale.weight"),
    (r"^model\.language_model\.", "model."),
    (r"^model\.(layers\.\d+\.feed_forward\.experts\.w\d)", r"\1"),
    (r"(feed_forward\.expert_bias)$", r"\1.bias"),
    (r"^backbone\.(layers\.\d+)\.mixer\.experts", r"model.\1.mlp.experts"),
)


def _apart(tensors: Tensors, config: ModelConfig) -> Tensors:
    """Tensors of all experts become one of each, as they are in most checkpoints. Those of Gemma 4 stay."""
    found: Tensors = {}
    for name, tensor in tensors.items():
        if ".experts." in name and config.model_type.startswith("gemma4"):
            found[f"{name}.weight"] = tensor
        elif name.endswith("experts.gate_up_proj") and config.model_type != "gpt_oss":
            turned = tensor.swapaxes(1, 2) if config.model_type == "llama4_text" else tensor
            half = turned.shape[1] // 2
            found[name.replace("gate_up_proj", "gate_proj.weight")] = turned[:, :half]
            found[name.replace("gate_up_proj", "up_proj.weight")] = turned[:, half:]
        elif name.endswith("experts.down_proj") and config.model_type != "gpt_oss":
            turned = tensor.swapaxes(1, 2) if config.model_type == "llama4_text" else tensor
            found[f"{name}.weight"] = turned
        else:
            found[name] = tensor
    return found


def _of_gpt_oss(tensors: Tensors) -> Tensors:
    """Rows of gate and up come in turn."""
    found: Tensors = {}
    for name, tensor in tensors.items():
        kind = "bias" if name.endswith("_bias") else "weight"
        turned = tensor.swapaxes(-1, -2) if kind == "weight" and ".experts." in name else tensor
        if "experts.gate_up_proj" in name:
            block = name.partition("gate_up_proj")[0]
            found[f"{block}gate_proj.{kind}"], found[f"{block}up_proj.{kind}"] = turned[:, ::2], turned[:, 1::2]
        elif "experts.down_proj" in name:
            found[f"{name.partition('down_proj')[0]}down_proj.{kind}"] = turned
        else:
            found[name] = tensor
    return found


def _by_group(tensor: Array, config: ModelConfig) -> list[Array]:
    """q, k and v, of a matrix or bias that has those of a group side by side."""
    groups = tensor.reshape(config.num_kv_heads, -1, config.head_dim, *tensor.shape[1:])
    parts = groups[:, :-2], groups[:, -2], groups[:, -1]
    return [part.reshape(-1, *tensor.shape[1:]) for part in parts]


def _of_delta_net(name: str, tensor: Array, net: DeltaNet, *, tiled: bool) -> dict[str, Array]:
    """What becomes of a tensor of a gated delta net. tiled: value heads of a key head come to lie apart."""
    if name.endswith("in_proj_qkvz.weight"):
        each = net.value_size // net.key_heads
        cuts = np.cumsum((net.key_dim, net.key_dim, each))
        q, k, v, z = np.split(tensor.reshape(net.key_heads, -1, tensor.shape[-1]), cuts, axis=1)
        qkv = np.concatenate([part.reshape(-1, tensor.shape[-1]) for part in (q, k, v)])
        return {name.replace("qkvz", "qkv"): qkv, name.replace("qkvz", "z"): z.reshape(-1, tensor.shape[-1])}

    def in_order(rows: Array) -> Array:
        apart = rows.reshape(net.key_heads, net.value_heads // net.key_heads, -1, *rows.shape[1:])
        return apart.swapaxes(0, 1).reshape(rows.shape) if tiled else rows

    if name.endswith(("in_proj_qkv.weight", "conv1d.weight")):
        squeezed, keys = tensor.squeeze(), 2 * net.key_size
        return {name: np.concatenate((squeezed[:keys], in_order(squeezed[keys:])))}
    if name.endswith("out_proj.weight"):
        return {name: in_order(tensor.T).T}
    if name.endswith(".A_log"):
        # Where places are counted, as float64, a vector is not used.
        return {name: in_order(-np.exp(tensor) if tensor.dtype == np.float32 else tensor)}
    if name.endswith(".dt_bias"):
        return {name.replace("dt_bias", "dt_proj.bias"): in_order(tensor)}
    return {name: tensor if name.endswith((".norm.weight", "in_proj_ba.weight")) else in_order(tensor)}


def _parts(name: str, tensor: Array, config: ModelConfig) -> dict[str, Array]:
    """What becomes of one tensor."""
    kind = config.model_type
    if ".linear_attn." in name and config.delta_net is not None:
        return _of_delta_net(name, tensor, config.delta_net, tiled=kind.startswith("qwen3_5"))
    if kind.startswith(("qwen3_5", "qwen3_next")) and name.endswith("norm.weight"):
        return {name: tensor + np.float32(1)}
    if kind in ("bloom", "gpt_neox", "falcon") and "query_key_value" in name:
        return {name: np.concatenate(_by_group(tensor, config))}
    if kind == "internlm2" and "wqkv" in name:
        return {name.replace("wqkv", f"w{p}"): rows for p, rows in zip("qkv", _by_group(tensor, config), strict=True)}
    if kind == "baichuan" and "W_pack" in name:
        return {name.replace("W_pack", f"{p}_proj"): r for p, r in zip("qkv", np.split(tensor, 3), strict=True)}
    if kind == "gpt2" and re.search(r"c_(attn|proj|fc)\.weight$", name):
        return {name: tensor.T}
    if name.endswith("kv_b_proj.weight") and config.latent is not None and kind.startswith(("deepseek", "kimi")):
        latent = config.latent
        heads = tensor.reshape(config.num_heads, latent.plain_dim + latent.value_dim, latent.rank)
        return {
            name.replace("kv_b_proj", "k_b_proj"): heads[:, : latent.plain_dim].swapaxes(1, 2),
            name.replace("kv_b_proj", "v_b_proj"): heads[:, latent.plain_dim :],
        }
    if name.endswith(".conv.conv.weight"):
        return {name: tensor.squeeze(1)}
    if kind == "nemotron" and name.endswith("norm.weight"):
        return {name: tensor + np.float32(1)}
    if kind in ("roberta", "xlm-roberta") and name.endswith("position_embeddings.weight"):
        return {name: tensor[2:]}
    if kind == "dbrx" and ".experts.mlp." in name:
        experts = config.experts
        assert experts is not None
        whole = tensor.reshape(experts.count, experts.intermediate_size, config.hidden_size)
        return {f"{name}.weight": whole.swapaxes(1, 2) if name.endswith("w2") else whole}
    if config.mamba is not None and (".mamba." in name or ".mixer." in name):
        return of_mixer(name, tensor, config.mamba)
    if ".shared_mlp." in name:
        return of_shared(name, tensor, config)
    if kind.startswith("granitemoe") and "input_linear" in name:
        gate, up = np.split(tensor, 2, axis=1)
        block = name.replace("block_sparse_moe.input_linear.weight", "mlp.experts")
        return {f"{block}.gate_proj.weight": gate, f"{block}.up_proj.weight": up}
    return {name: tensor}


def _stacked(tensors: Tensors) -> Tensors:
    """Of experts, of heads' norms, and of matrices of streams, one tensor."""
    found: dict[str, list[tuple[int, Array]]] = {}
    others: Tensors = {}
    for name, tensor in tensors.items():
        expert = _EXPERT.fullmatch(name) or _OF_SEVERAL.fullmatch(name)
        if expert is None:
            others[name] = tensor
        else:
            joined = f"{expert[1].removesuffix('.norms')}.{expert[3]}.weight".replace("..", ".")
            found.setdefault(joined, []).append((int(expert[2]), tensor))
    return others | {name: np.stack([t for _, t in sorted(ts, key=lambda one: one[0])]) for name, ts in found.items()}


def _their_name(name: str, names: gguf.TensorNameMap) -> str:
    if scale := re.search(r"layers\.(\d+)\.(layer_scalar|router\.\w+)$", name):
        return f"blk.{scale[1]}.{_SCALES[scale[2]]}"
    renamed = [re.sub(old, new, name) for old, new in _RENAMED]
    for candidate in (*(new for new in renamed if new != name), name):
        for tried in (candidate, candidate.removeprefix("transformer."), f"model.{candidate}"):
            found = names.get_name(tried, try_suffixes=(".weight", ".bias"))
            if found is not None:
                return str(found)
    raise KeyError(name)


def _architecture(config: ModelConfig, kind: str) -> str:
    if kind == "granitemoehybrid":
        return architecture_of_granite(config)
    if kind == "nemotron_h" and config.experts is not None:
        return "nemotron_h_moe"
    return ARCHITECTURES.get(kind, kind)


def write_converted(
    model: Path,
    path: Path,
    config: ModelConfig,
    given: Mapping[str, Any] | None = None,
    type: Callable[[str], Type] = lambda name: Type.F32,
    *,
    latent_apart: bool = True,
    more: Mapping[str, Array] | None = None,
    dequantized: Path | None = None,
) -> dict[str, Array]:
    """The checkpoint `model`, of this configuration, as the file `path`. Returns what the file's tensors stand for.

    given: metadata, which go before those that the configuration implies; null for none. type: of matrices whose rows
    are whole blocks, by the file's name. latent_apart: as today's converter has latent attention, not as older ones.
    more: further tensors. dequantized: a directory that becomes the checkpoint that has the values of the file.
    """
    fields = json.loads((model / "config.json").read_text())
    tensors: Tensors = {}
    for file in sorted(model.glob("*.safetensors")):
        tensors |= {name: tensor.astype(np.float32) for name, tensor in load_file(file).items()}
    kind = fields["model_type"]
    architecture = _architecture(config, kind)
    names = gguf_names(architecture)
    writer = gguf.GGUFWriter(path, architecture)
    _add_metadata(writer, _metadata(config, fields) | dict(given or {}), architecture)
    if kind == "apertus":
        for part, add in (("alpha_p", writer.add_xielu_alpha_p), ("alpha_n", writer.add_xielu_alpha_n)):
            add([float(tensors[f"model.layers.{i}.mlp.act_fn.{part}"][0]) for i in range(config.num_layers)])
    if kind == "falcon_h1" and config.mamba is not None:
        tensors = with_multipliers(tensors, fields, config.mamba)
    for name, tensor in (more or {}).items():
        writer.add_tensor(name, tensor)
    stood: Tensors = {}
    for theirs, rows in _converted(tensors, config, kind, names, latent_apart=latent_apart).items():
        matrix = rows.ndim > 1 and rows.shape[-1] % 32 == 0 and not theirs.endswith("_norm.weight")
        code = type(theirs) if matrix else Type.F32
        data = rows if code == Type.F32 else gguf.quants.quantize(rows, code)
        writer.add_tensor(theirs, data, raw_dtype=code)
        stood[theirs] = rows if code == Type.F32 else gguf.quants.dequantize(data, code)
    scaling = config.rope.scaling
    for name, factors in (
        ("rope_factors_short.weight", scaling.frequency_factors if scaling else None),
        ("rope_factors_long.weight", scaling.long_factors if scaling else None),
    ):
        if factors is not None and scaling is not None and scaling.rope_type == "longrope":
            writer.add_tensor(name, np.array(factors, np.float32))
    if scaling is not None and scaling.rope_type == "proportional":
        rotated = np.arange((scaling.head_dim or 0) // 2) < config.rope.dim // 2
        writer.add_tensor("rope_freqs.weight", np.where(rotated, 1, 1e30).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if dequantized is not None:
        places = _converted(_numbered(tensors), config, kind, names, latent_apart=latent_apart)
        _write_values(model, dequantized, stood, places)
    return stood


def _converted(
    tensors: Tensors, config: ModelConfig, kind: str, names: gguf.TensorNameMap, *, latent_apart: bool
) -> Tensors:
    """The tensors of a file by its names. kind: the model_type of the checkpoint."""
    tensors = _of_gpt_oss(tensors) if kind == "gpt_oss" else _apart(tensors, config)
    parts: Tensors = {}
    for name, tensor in tensors.items():
        left_out = ".act_fn." in name or name.endswith("pooler.dense.bias")
        if not left_out and not (name == "lm_head.weight" and config.tie_word_embeddings):
            whole = name.endswith("kv_b_proj.weight") and not latent_apart
            parts |= {name: tensor} if whole else _parts(name, tensor, config)
    found: Tensors = {}
    for name, tensor in _stacked(parts).items():
        if _NOT_OF_TEXT.search(name):
            continue
        theirs = _their_name(name, names)
        if kind in _PAIRED and re.search(r"attn_[qk]\.(weight|bias)", theirs):
            tensor = paired(tensor, config.num_heads if "attn_q" in theirs else config.num_kv_heads)
        rows = np.ascontiguousarray(tensor)
        if theirs.endswith("exp_probs_b.bias") or "_shexp" in theirs or "attn_sinks" in theirs:
            rows = rows.squeeze() if rows.shape[0] == 1 else rows
        found[theirs] = rows
    return found


def _numbered(tensors: Tensors) -> Tensors:
    """With the number of each element in its place, counted over all tensors."""
    found, at = {}, 0
    for name, tensor in tensors.items():
        found[name] = np.arange(at, at + tensor.size, dtype=np.float64).reshape(tensor.shape)
        at += tensor.size
    return found


def _write_values(model: Path, folder: Path, stood: Tensors, places: Tensors) -> None:
    """The checkpoint with the values that a file's matrices stand for; places: where each element of the file is in
    the checkpoint. What converters compute of vectors stays what it is."""
    (file,) = model.glob("*.safetensors")
    tensors = load_file(file)
    flat = np.concatenate([tensor.astype(np.float32).ravel() for tensor in tensors.values()])
    for name, values in stood.items():
        if values.ndim > 1 and not name.endswith("ssm_a"):
            flat[places[name].astype(np.int64)] = values
    shutil.copytree(model, folder)
    ends = np.cumsum([tensor.size for tensor in tensors.values()])[:-1]
    parts = zip(tensors.items(), np.split(flat, ends), strict=True)
    save_file({name: part.reshape(old.shape) for (name, old), part in parts}, folder / file.name, {"format": "pt"})


def _metadata(config: ModelConfig, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Keys that most architectures have, without its name."""
    latent, experts, scaling = config.latent, config.experts, config.rope.scaling
    found: dict[str, Any] = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        f"attention.layer_norm_{'rms_' if config.norm == 'rms' else ''}epsilon": config.norm_eps,
    }
    if config.rope.theta is not None:
        found |= {"rope.freq_base": config.rope.theta, "rope.dimension_count": config.rope.dim}
    if latent is None:
        found |= {"attention.key_length": config.head_dim, "attention.value_length": config.head_dim}
    else:
        apart = {"attention.key_length_mla": latent.query_dim, "attention.value_length_mla": latent.value_dim}
        plain = {"attention.key_length": latent.query_dim}
        found |= {"attention.kv_lora_rank": latent.rank, "rope.dimension_count": latent.rotated_dim}
        found |= {"attention.q_lora_rank": latent.query_rank} if latent.query_rank else {}
        if config.model_type == "minicpm3":
            found |= plain
        else:
            found |= {**apart, "attention.key_length": config.head_dim, "attention.value_length": latent.rank}
    if config.full_heads is not None:
        found |= _of_gemma4(config, config.full_heads, fields.get("text_config", fields))
    if (net := config.delta_net) is not None:
        found |= {
            "ssm.conv_kernel": net.taps,
            "ssm.state_size": net.key_dim,
            "ssm.group_count": net.key_heads,
            "ssm.time_step_rank": net.value_heads,
            "ssm.inner_size": net.value_size,
        }
    if (conv := config.short_conv) is not None:
        of_layers = [0 if layer in conv.layers else config.num_kv_heads for layer in range(config.num_layers)]
        found |= {"shortconv.l_cache": conv.taps, "attention.head_count_kv": of_layers}
    if config.sliding_window:
        found["attention.sliding_window"] = config.sliding_window
    if experts is not None:
        found |= {
            "expert_count": experts.count,
            "expert_used_count": experts.top_k,
            "expert_feed_forward_length": experts.intermediate_size,
        }
        if experts.scores == "sigmoid":
            found["expert_gating_func"] = 2
        if experts.scale != 1.0 or experts.scores == "sigmoid":
            found |= {"expert_weights_scale": experts.scale, "expert_weights_norm": experts.normalised}
        if experts.groups > 1:
            found |= {"expert_group_count": experts.groups, "expert_group_used_count": experts.top_groups}
    if scaling is not None and scaling.rope_type == "yarn":
        found |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": scaling.factor,
            "rope.scaling.original_context_length": scaling.original_max_position_embeddings,
        }
        for part, beta in (("fast", scaling.beta_fast), ("slow", scaling.beta_slow)):
            found |= {} if beta is None else {f"rope.scaling.yarn_beta_{part}": beta}
        if scaling.mscale_all_dim:
            found["rope.scaling.yarn_log_multiplier"] = 0.1 * scaling.mscale_all_dim
    elif scaling is not None and scaling.rope_type == "longrope":
        found["rope.scaling.original_context_length"] = scaling.original_max_position_embeddings
        original, most = scaling.original_max_position_embeddings, config.max_position_embeddings
        usual = float((1 + np.log(most / original) / np.log(original)) ** 0.5) if most > original else 1.0
        found["rope.scaling.attn_factor"] = scaling.attention_factor or usual
    return found | of_hybrid(config, fields)


def _of_gemma4(config: ModelConfig, full: Heads, fields: Mapping[str, Any]) -> dict[str, Any]:
    """What differs between layers with a window and those without, whose heads are `full`."""
    windowed, shared = [bool(window) for window in config.layer_windows], fields["num_kv_shared_layers"]
    assert config.local_rope is not None
    found: dict[str, Any] = {
        "attention.shared_kv_layers": shared,
        "embedding_length_per_layer_input": fields["hidden_size_per_layer_input"],
        "attention.sliding_window_pattern": windowed,
        **{f"attention.{part}_length": full.head_dim for part in ("key", "value")},
        **{f"attention.{part}_length_swa": config.head_dim for part in ("key", "value")},
        "rope.dimension_count": full.head_dim,
        "rope.dimension_count_swa": config.local_rope.dim,
        "rope.freq_base_swa": config.local_rope.theta,
    }
    if fields["use_double_wide_mlp"]:
        found["feed_forward_length"] = list(config.layer_sizes)
    if full.keys_are_values:
        found["attention.head_count_kv"] = [config.heads(layer).num_kv_heads for layer in range(config.num_layers)]
    return found


def _add_metadata(writer: gguf.GGUFWriter, values: Mapping[str, Any], architecture: str) -> None:
    for name, value in values.items():
        key = f"{architecture}.{name}"
        match value:
            case None:
                continue
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case str():
                writer.add_string(key, value)
            case _:
                writer.add_array(key, value)
