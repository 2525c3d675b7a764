"""Config keys that a family does not read: known ones without effect are accepted, all others refused.

A key is harmless only if transformers' modelling code takes nothing from it that could change a logit: it concerns
training, generation or loading. A key that has no effect at one value is neutral at that value.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from llmc.models.brief import brief, brief_name
from llmc.models.errors import ModelError
from llmc.models.families.family import Family

_WHERE_IT_COMES_FROM = """
    _name_or_path _commit_hash _from_model_config architectures auto_map transformers_version transformers.js_config
    tokenizer_class
    tokenizer_model_max_length tokenizer_padding_side is_llama_config unsloth_version unsloth_fixed
    """
# torch_dtype, eos_token_id and bos_token_id are read unless something newer states the same.
_OF_LOADERS = """
    quantization_config compression_config _pre_quantization_dtype torch_dtype torchscript use_bfloat16 tf_legacy_loss
    xla_device attn_implementation _attn_implementation _attn_implementation_autoset _flash_attn_2_enabled
    use_flash_attn use_flash_attention
    chunk_size_feed_forward tie_last_hidden_states pretraining_tp is_decoder
    """
_OF_TRAINING = """
    attention_dropout attention_probs_dropout_prob attn_pdrop activation_dropout classifier_dropout dropout embd_pdrop
    embedding_dropout hidden_dropout hidden_dropout_prob layerdrop resid_pdrop residual_dropout summary_first_dropout
    initializer_factor initializer_range init_std gradient_checkpointing use_gradient_checkpointing
    neftune_noise_alpha router_aux_loss_coef output_router_logits router_jitter_noise aux_loss_alpha seq_aux
    """
_OF_OUTPUTS = """
    id2label label2id num_labels problem_type finetuning_task task_specific_params summary_activation
    summary_last_dropout summary_proj_to_labels summary_type summary_use_proj output_attentions output_hidden_states
    output_past output_scores return_dict return_dict_in_generate use_cache cache_implementation
    sbert_ce_default_activation_function sentence_transformers
    """
_OF_GENERATION = """
    eos_token_id bos_token_id pad_token_id cls_token_id mask_token_id sep_token_id unk_token_id decoder_start_token_id
    forced_bos_token_id forced_eos_token_id prefix max_length min_length max_new_tokens do_sample early_stopping
    num_beams num_beam_groups num_return_sequences diversity_penalty temperature top_k top_p typical_p
    repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids suppress_tokens
    begin_suppress_tokens remove_invalid_values exponential_decay_length_penalty
    """
# Context lengths, which some rope scalings read from here.
_LENGTHS = "max_sequence_length model_max_length original_max_position_embeddings n_ctx"

HARMLESS = frozenset(
    " ".join((_WHERE_IT_COMES_FROM, _OF_LOADERS, _OF_TRAINING, _OF_OUTPUTS, _OF_GENERATION, _LENGTHS)).split()
)
"""Keys without effect at any value, in every family."""

NEUTRAL: Mapping[str, Any] = {
    "add_cross_attention": False,
    "attention_bias": False,
    "is_causal": True,
    "is_encoder_decoder": False,
    "mlp_bias": False,
    "per_layer_config": {},
    "pruned_heads": {},
    "rope_interleaved": False,
    "tie_encoder_decoder": False,
    "use_bidirectional_attention": False,
    "use_mrope": False,
    "partial_rotary_factor": 1.0,
    "rope_parameters.factor": 1.0,
    "rope_parameters.partial_rotary_factor": 1.0,
    "rope_scaling.factor": 1.0,
    "rope_scaling.partial_rotary_factor": 1.0,
    "rope_scaling.finetuned": True,
}
"""Keys and the values at which they have no effect, in every family.

A factor is read by every scaling that has one; tensors show whether a bias exists.
"""


def nested(table: str, names: Iterable[str]) -> frozenset[str]:
    """Names of keys in a nested table of config.json."""
    return frozenset(f"{table}.{name}" for name in names)


def check_known(
    origin: str, unread: Iterable[tuple[str, Any]], family: Family, *, allow_unknown: bool
) -> tuple[str, ...]:
    """Sentences about unread keys that may matter, with their values.

    Raises ModelError for the first one unless unknown keys are allowed. origin: the configuration's name in errors.
    """
    said = [
        f"{origin}: {brief_name(name)} is {brief(value)}, which llmc does not know of {family.model_type} models"
        for name, value in _unknown(unread, family)
    ]
    if said and not allow_unknown:
        raise ModelError(
            f"{said[0]} and which may change what they compute; take it out if it does not, or ignore it with "
            "--allow-unknown-config of llmc compile"
        )
    return tuple(f"{one} and ignores: the model may compute something else than its authors mean" for one in said)


def _unknown(unread: Iterable[tuple[str, Any]], family: Family) -> Iterator[tuple[str, Any]]:
    neutral = {**NEUTRAL, **family.neutral}
    for name, value in unread:
        if name in HARMLESS or name in family.harmless:
            continue
        if name in neutral and isinstance(value, bool) == isinstance(neutral[name], bool) and value == neutral[name]:
            continue
        # The value that a family without windows assumes.
        if name == "layer_types" and isinstance(value, list) and set(map(str, value)) == {"full_attention"}:
            continue
        yield name, value
