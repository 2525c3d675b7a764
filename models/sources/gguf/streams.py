"""Gemma 3n as llama.cpp's files have it: what its further tensors are called, and what its metadata say."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Any

from llmc.models.sources.gguf.reader import Reader

INPUTS_OF_LAYERS = {
    "inp_gate.weight": "per_layer_input_gate.weight",
    "proj.weight": "per_layer_projection.weight",
    "post_norm.weight": "post_per_layer_input_norm.weight",
}
"""Tensors of a layer that mix its token input into its result, theirs to those of a checkpoint."""
INPUTS_OF_MODEL = {
    "per_layer_token_embd.weight": "model.embed_tokens_per_layer.weight",
    "per_layer_model_proj.weight": "model.per_layer_model_projection.weight",
    "per_layer_proj_norm.weight": "model.per_layer_projection_norm.weight",
}
"""The same of tensors that make all layers' token inputs."""
OF_LAYERS = {
    **INPUTS_OF_LAYERS,
    "altup_router.weight": "altup.modality_router.weight",
    "altup_router_norm.weight": "altup.router_norm.weight",
    "altup_predict_coef.weight": "altup.prediction_coefs.weight",
    "altup_correct_coef.weight": "altup.correction_coefs.weight",
    "altup_correct_scale.weight": "altup.correct_output_scale",
    "laurel_l.weight": "laurel.linear_left.weight",
    "laurel_r.weight": "laurel.linear_right.weight",
    "laurel_post_norm.weight": "laurel.post_laurel_norm.weight",
}
"""Tensors of a layer, theirs to those of a checkpoint."""
OF_MODEL = {
    **INPUTS_OF_MODEL,
    "altup_proj.weight": "model.altup_projections.{}.weight",
    "altup_unembd_proj.weight": "model.altup_unembed_projections.{}.weight",
}
"""The same of tensors outside of layers; {} is the number of a matrix in a tensor of several."""
_PERIOD = 5  # of layers, of which the last has no window
_LOCAL_THETA = 10000.0  # of layers with windows, where a file does not say


def read_streams(read: Reader) -> dict[str, Any]:
    """Fields of a gemma3n_text; what a file leaves out is as in the published models. Raises ModelError."""
    return {
        **read.eps(),
        "final_logit_softcapping": read.cap("final_logit_softcapping"),
        "sliding_window": read.integer("attention.sliding_window"),
        "layer_types": read.kinds(_PERIOD),
        "rope_local_base_freq": read.number("rope.freq_base_swa", _LOCAL_THETA),
        "altup_active_idx": read.metadata.integer(read.key("altup.active_idx"), 0, minimum=0),
        "altup_num_inputs": read.integer("altup.num_inputs"),
        "num_kv_shared_layers": read.metadata.integer(read.key("attention.shared_kv_layers"), minimum=0),
        "hidden_size_per_layer_input": read.integer("embedding_length_per_layer_input"),
        "vocab_size_per_layer_input": input_vocab(read),
        "laurel_rank": read.rows("laurel_l.weight") or None,
        "activation_sparsity_pattern": _sparsity(read),
    }


def input_vocab(read: Reader) -> int:
    """Tokens that have an input of each layer; 1 without a table of them."""
    return read.shapes.get("per_layer_token_embd.weight", (1,))[0]


def _sparsity(read: Reader) -> list[float] | None:
    """The part of each layer's gate that does not count, of which files have the standard deviations."""
    key = read.key("activation_sparsity_scale")
    scales = read.metadata.array(key)
    if scales is None:
        return None
    numbers, count = [float(number) for number in scales.numbers()], read.layers()
    if len(numbers) != count or any(math.isnan(number) or number == math.inf for number in numbers):
        raise read.metadata.wrong(key, f"a list of {count} numbers below infinity")
    return [_part(number) for number in numbers]


def _part(deviations: float) -> float:
    """The decimal that the model's authors wrote, where there is one: then a file shares graphs with its checkpoint."""
    if deviations == -math.inf:
        return 0.0
    normal = NormalDist()
    part = normal.cdf(deviations)
    written = round(part, 6)
    near = 0 < written < 1 and math.isclose(normal.inv_cdf(written), deviations, rel_tol=1e-5, abs_tol=1e-6)
    return written if near else part
