"""A key of a config that may change what a model computes is read or refused, never ignored."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers import CONFIG_MAPPING

from llmc.compiler.config import CompileConfig
from llmc.compiler.resolve import resolve
from llmc.models import ModelError, open_source
from llmc.models.families.around_text import AROUND_TEXT
from llmc.models.families.family import Family
from llmc.models.families.mamba import OF_MIXERS
from llmc.models.families.nemotron_h import OF_KINDS
from llmc.models.families.qwen3_next import OF_LINEAR
from llmc.models.families.with_images import OF_IMAGES
from llmc.models.fields import Fields
from llmc.models.known_keys import HARMLESS, NEUTRAL, check_known
from llmc.models.registry import FAMILIES

from support.paths import SHARED
from support.real_configs import REFUSED
from support.remote_code.registry import REMOTE, remote_config
from support.tiny_models import BEHIND, make_tiny_model

STRANGE: dict[str, Any] = {
    "attention_chunk_size": 8192,
    "attn_logit_softcap": 30.0,
    "dual_chunk_attention_config": {"chunk_size": 262144},
    "is_causal": False,
    "num_experts": 8,
    "per_layer_config": {"3": {"hidden_act": "relu"}},
    "pruned_heads": {"0": [1]},
    "text_config": {"hidden_size": 64},
    "use_mrope": True,
}
# What the modelling code of transformers takes from a harmless key: nothing in inference, or what a head of another
# kind does, or how exactly or for how many rows at once the same is computed.
_NOT_IN_LOGITS = """
    _attn_implementation attention_dropout attn_pdrop classifier_dropout dropout embd_pdrop embedding_dropout
    hidden_dropout initializer_range is_decoder layerdrop num_labels output_attentions output_hidden_states pad_token_id
    output_router_logits problem_type resid_pdrop residual_dropout return_dict router_aux_loss_coef router_jitter_noise
    summary_activation summary_first_dropout summary_last_dropout
    summary_proj_to_labels summary_type summary_use_proj use_cache attention_softmax_in_fp32
    scale_attention_softmax_in_fp32 reorder_and_upcast_attn emb_pdrop input_jitter_noise
    attention_probs_dropout_prob chunk_size_feed_forward hidden_dropout_prob mlp_dropout initializer_cutoff_factor
    decoder_bias deterministic_flash_attn sparse_prediction sparse_pred_ignore_index altup_coef_clip audio_config
    audio_soft_tokens_per_image audio_token_id vision_soft_tokens_per_image embed_dropout resid_dropout
    embedding_initializer_range
    chunk_size mamba_chunk_size num_logits_to_keep rescale_prenorm_residual time_step_floor time_step_max
    use_mamba_kernels z_loss_coefficient
    """
NOT_IN_LOGITS = OF_IMAGES | set(_NOT_IN_LOGITS.split())
OF_LINEAR_LAYERS = {
    "minimax": ("block_size", "linear_attn_alpha_factor", "linear_attn_beta_factor"),
    **dict.fromkeys(("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"), sorted(OF_LINEAR)),
    **dict.fromkeys(("bamba", "granitemoehybrid"), sorted(OF_MIXERS)),
    "nemotron_h": sorted(OF_KINDS),
}
# Keys that a family reads unless another one decides.
READ_WHERE_THEY_DECIDE = {
    ("falcon", "multi_query"), ("falcon", "num_kv_heads"), ("phi3", "original_max_position_embeddings"),
    ("gemma", "hidden_act"), ("exaone4", "sliding_window_pattern"), ("qwen2", "sliding_window"),
    ("qwen3", "sliding_window"), ("smollm3", "sliding_window"), ("gemma2", "hidden_act"),
    ("qwen2_moe", "sliding_window"), ("qwen3_moe", "sliding_window"), ("qwen2_vl", "sliding_window"),
    ("qwen2_5_vl", "sliding_window"),
    ("exaone_moe", "sliding_window_pattern"), ("gpt_neo", "attention_layers"),
    ("granitemoehybrid", "intermediate_size"),
    ("granitemoehybrid", "num_experts_per_tok"), ("vaultgemma", "hidden_act"),
    *((family, name) for family, names in OF_LINEAR_LAYERS.items() for name in names),
    ("qwen3_next", "moe_intermediate_size"), ("qwen3_next", "shared_expert_intermediate_size"),
    ("qwen3_next", "num_experts_per_tok"), ("qwen3_next", "norm_topk_prob"), ("qwen3_next", "decoder_sparse_step"),
    ("qwen3_next", "mlp_only_layers"),
    ("bloom", "pretraining_tp"), ("bloom", "slow_but_exact"), ("phimoe", "original_max_position_embeddings"),
    ("modernbert", "classifier_activation"), ("modernbert", "classifier_bias"), ("modernbert", "classifier_pooling"),
}  # fmt: skip


NO_DEFAULT: dict[str, dict[str, Any]] = {"minimax": {"layer_types": ["full_attention"] * 32},
              "qwen3_5": {"text_config": {"layer_types": ["full_attention"] * 32}},
              "qwen3_5_moe": {"text_config": {"layer_types": ["full_attention"] * 40}},
              "qwen3_5_moe_text": {"layer_types": ["full_attention"] * 40},
              "qwen3_5_text": {"layer_types": ["full_attention"] * 32},
              "qwen3_next": {"layer_types": ["full_attention"] * 48},
              "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2}, "glm4_moe": {"head_dim": 128},
              "deepseek_v2": {"num_experts_per_tok": 6}}  # fmt: skip
"""What no model goes without, where transformers has no default of use."""


def code_of(model_type: str) -> Path:
    folder: str = CONFIG_MAPPING[model_type].__module__.split(".")[-2]
    return Path(transformers.__path__[0]) / "models" / folder / f"modeling_{folder}.py"


def default_config(model_type: str) -> dict[str, Any]:
    """All keys that transformers writes for the family, or its authors do."""
    if model_type in REMOTE:
        return remote_config(model_type)
    if model_type == BEHIND:
        return {"model_type": BEHIND, "language_config": default_config("llama")}
    settings = {"bos_token_id": 1, "eos_token_id": 2, **NO_DEFAULT.get(model_type, {})}
    config = json.loads(CONFIG_MAPPING[model_type](**settings).to_json_string(use_diff=False))
    assert isinstance(config, dict)
    assert len(json.dumps(config)) >= 500
    return config


_OF_BLOOM: dict[str, Any] = {
    "attention_softmax_in_fp32": True, "bias_dropout_fusion": True, "masked_softmax_fusion": True,
    "skip_bias_add": True, "skip_bias_add_qkv": False, "slow_but_exact": False, "unk_token_id": 0,
}  # fmt: skip
_OF_HUNYUAN: dict[str, Any] = {
    "add_classification_head": False, "anyres_pooling_size": 2, "attention_head_dim": 128, "cla_share_factor": 2,
    "class_num": 0, "dense_list": [4096, 0], "eod_token_id": 127967, "im_start_id": 5, "mask_init_id": 13,
    "norm_type": "hf_rms", "org_vocab_size": 128167, "pad_id": 127961, "pool_type": "last", "use_cla": False,
    "use_qk_norm": True, "use_rotary_pos_emb": True, "rope_theta": 10000.0, "rope_parameters": None,
    "rope_scaling": {
        "alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0, "mscale_all_dim": 0.0,
        "type": "dynamic",
    },
}  # fmt: skip
PUBLISHED: dict[str, dict[str, Any]] = {
    "apertus": {"post_norm": False, "qk_norm": True},
    "bert": {"directionality": "bidi", "pooler_fc_size": 768, "pooler_type": "first_token_transform"},
    "bloom": {**_OF_BLOOM, "offset_alibi": 100},
    "chatglm": {"interleaved_qkv": False, "rotary_percent": 0.5},
    "dots1": {"ep_size": 1, "moe_layer_freq": 1, "scoring_func": "noaux_tc", "topk_method": "noaux_tc"},
    "ernie4_5_moe": {"moe_capacity": [64, 64, 64], "moe_use_aux_free": True, "num_nextn_predict_layers": 1},
    "falcon_h1": {
        "attn_layer_indices": None,
        "mamba_use_mlp": True,
        "mlp_expansion_factor": 8,
        "time_step_floor": 0.0001,
        "time_step_max": 0.1,
        "time_step_min": 0.001,
        "time_step_rank": "auto",
    },
    "gemma3n_text": {"query_pre_attn_scalar": 256},
    "hunyuan_v1_dense": {**_OF_HUNYUAN, "num_experts": 1},
    "hunyuan_v1_moe": {**_OF_HUNYUAN, "num_experts": 64, "moe_topk": [8] * 32, "use_mixed_mlp_moe": True},
    "lfm2": {
        "block_mlp_init_scale": 1.0,
        "block_norm_eps": 1e-5,
        "block_out_init_scale": 1.0,
        "block_use_swiglu": True,
        "block_use_xavier_init": True,
        "conv_dim": 2560,
        "conv_use_xavier_init": True,
        "use_pos_enc": True,
    },
    "minicpm": {"mup_denominator": 32},
    "starcoder2": {"activation_function": "gelu", "mlp_type": "default", "norm_type": "layer_norm"},
    "telechat": _OF_BLOOM,
}
"""What published configs say beyond that: of other code that was trained with, or of other models."""


def unknown(family: Family, config: dict[str, Any], *, allow: bool = False) -> tuple[str, ...]:
    fields = Fields(config, "config.json")
    family.read_config(fields, Fields({}, "generation_config.json"))
    return check_known(fields.origin, fields.unread(), family, allow_unknown=allow)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_an_added_key_is_refused(model_type: str) -> None:
    family, config = FAMILIES[model_type], default_config(model_type)
    assert unknown(family, config) == ()
    known = {name for name in STRANGE if name in config}
    known |= {"num_experts"} if "experts" in json.dumps(config) else set()
    known |= {"is_causal"} if model_type in ("qwen2", "qwen3") else set()
    for name, value in ((name, value) for name, value in STRANGE.items() if name not in known):
        with pytest.raises(ModelError) as refusal:
            unknown(family, {**config, name: value})
        said = rf"config\.json: {name} is .*, which llmc does not know of {model_type} models"
        assert re.match(said, str(refusal.value))
        (warning,) = unknown(family, {**config, name: value}, allow=True)
        assert re.match(f"{said} and ignores", warning)
        assert unknown(family, {**config, name: NEUTRAL.get(name)}) == ()


@pytest.mark.parametrize("model_type", PUBLISHED)
def test_keys_of_published_configs_are_known(model_type: str) -> None:
    family, config = FAMILIES[model_type], {**default_config(model_type), **PUBLISHED[model_type]}
    assert unknown(family, config) == ()
    for name in family.neutral.keys() & PUBLISHED[model_type].keys():
        with pytest.raises(ModelError, match=f"{name} is 'other', which llmc does not know"):
            unknown(family, {**config, name: "other"})


def test_hunyuan_stretches_its_base_wherever_that_is_written() -> None:
    bases = set()
    scaling = {"alpha": 1000.0, "factor": 1.0}
    for changes in (
        {"rope_theta": 5000.0, "rope_scaling": {**scaling, "type": "dynamic"}},
        {"rope_parameters": {**scaling, "rope_type": "dynamic", "rope_theta": 5000.0}},
    ):
        values = {**default_config("hunyuan_v1_dense"), "rope_parameters": None, "head_dim": 128, **changes}
        config = FAMILIES["hunyuan_v1_dense"].read_config(Fields(values, "config.json"), Fields({}, "none"))
        bases.add(config.rope.theta)
    assert bases == {5000.0 * 1000.0 ** (128 / 126)}


# Their texts have one position, whose elements are no matter.
ONE_POSITION = {"qwen3_5_moe_text", "qwen3_5_text"}


@pytest.mark.parametrize(
    "model_type", [name for name in FAMILIES if "rope_parameters" in default_config(name) and name not in ONE_POSITION]
)
def test_a_key_of_the_rope_scaling_counts_too(model_type: str) -> None:
    config = default_config(model_type)
    rope = config["rope_parameters"]
    nested = next((name for name, value in rope.items() if isinstance(value, dict)), None)
    changed = (
        {**rope, nested: {**rope[nested], "mrope_section": [2, 3, 3]}} if nested else {**rope, "mrope_section": [2]}
    )
    with pytest.raises(ModelError, match=r"rope_parameters\..*mrope_section is \["):
        unknown(FAMILIES[model_type], {**config, "rope_parameters": changed})


def test_two_keys_that_contradict_each_other_are_refused() -> None:
    config = default_config("llama")
    config.pop("rope_theta", None)
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}
    base = {**config, "rope_parameters": rope}
    assert unknown(FAMILIES["llama"], {**base, "rope_theta": 5000, "rope_scaling": rope}) == ()
    for changes, said in (
        ({"rope_theta": 10000.0}, "rope_theta is 10000, and 5000 in config.json: rope_parameters"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_parameters is .*, rope_scaling"),
        ({"rope_parameters": {**rope, "type": "dynamic"}}, "rope_type is 'linear' and type 'dynamic'"),
    ):
        with pytest.raises(ModelError, match=said):
            unknown(FAMILIES["llama"], {**base, **changes})


@pytest.mark.parametrize(
    ("model_type", "ours", "theirs"),
    [
        ("telechat", "num_attention_heads", "n_head"),
        ("gpt2", "hidden_size", "n_embd"),
        ("lfm2", "intermediate_size", "block_ff_dim"),
        ("lfm2", "hidden_size", "conv_dim"),
    ],
)
def test_one_fact_under_two_names(model_type: str, ours: str, theirs: str) -> None:
    """As published configs of TeleChat state it. Names that contradict each other are refused."""
    family, config = FAMILIES[model_type], default_config(model_type)
    count = int(config.get(theirs) or config[ours])
    assert unknown(family, {**config, ours: count, theirs: count}) == ()
    with pytest.raises(ModelError, match=f"{theirs} is {2 * count}, which llmc does not know"):
        unknown(family, {**config, ours: count, theirs: 2 * count})


# These have a config alone there, or what reads images: their decoders are those of other families.
_OF_OTHERS = {"exaone", "internlm3", "kimi_k2", "kimi_k25"} | {family.model_type for family in AROUND_TEXT}


@pytest.mark.parametrize("model_type", sorted(FAMILIES.keys() - REMOTE.keys() - _OF_OTHERS))
def test_transformers_takes_nothing_from_a_harmless_key(model_type: str) -> None:
    code = code_of(model_type).read_text()
    asked = set(re.findall(r"\bconfig\.(\w+)", code)) | set(re.findall(r"""config, "(\w+)\"""", code))
    assert {"hidden_size", "vocab_size"} <= asked
    for name in asked & (HARMLESS | FAMILIES[model_type].harmless):
        if name not in NOT_IN_LOGITS:
            assert (model_type, name) in READ_WHERE_THEY_DECIDE, f"{model_type}: modelling code reads {name}"


def _rotates_parts(model_type: str) -> bool:
    """Whether transformers reads the rotated share of each head."""
    return any("partial_rotary_factor" in file.read_text() for file in code_of(model_type).parent.glob("*.py"))


# NemotronH rotates nothing.
_NOT_WHOLE = {"nemotron_h"}


@pytest.mark.parametrize(
    "model_type",
    sorted(name for name in FAMILIES.keys() - REMOTE.keys() - _OF_OTHERS - _NOT_WHOLE if not _rotates_parts(name)),
)
def test_a_share_of_heads_is_refused_where_transformers_reads_none(model_type: str) -> None:
    family, config = FAMILIES[model_type], default_config(model_type)
    assert unknown(family, {**config, "partial_rotary_factor": 1.0}) == ()
    with pytest.raises(ModelError, match=r"partial_rotary_factor is 0\.75, which llmc does not know of"):
        unknown(family, {**config, "partial_rotary_factor": 0.75})


def test_the_command_refuses_and_warns(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "m", "llama", num_hidden_layers=1)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "attention_chunk_size": 64}))
    with pytest.raises(ModelError, match=r"attention_chunk_size is 64.*llama models.*--allow-unknown-config"):
        resolve(CompileConfig(model=path, output=tmp_path / "out"))
    allowed = resolve(CompileConfig(model=path, output=tmp_path / "out", allow_unknown_config=True))
    (warning,) = allowed.warnings()
    assert "attention_chunk_size is 64" in warning
    assert open_source(path, allow_unknown_config=True).config() == allowed.model


def real_configs() -> list[Path]:
    """Of families that llmc has."""
    files = [*SHARED.glob("configs/**/*.json"), *SHARED.glob("tokenizers/*/config.json")]
    return [file for file in sorted(files) if json.loads(file.read_text()).get("model_type") in FAMILIES]


@pytest.mark.skipif(not SHARED.is_dir(), reason=f"no configs at {SHARED / 'configs'}")
def test_real_configs_are_known() -> None:
    """But for one that is no model of text, and for those with layers of linear attention."""
    refused = set()
    files = real_configs()
    assert len(files) > 30
    for file in files:
        config = json.loads(file.read_text())
        try:
            unknown(FAMILIES[config["model_type"]], config)
        except ModelError:
            refused.add(file)
    known = {SHARED / "configs" / name for name in REFUSED}
    assert refused == known & set(files)
