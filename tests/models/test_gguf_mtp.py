"""Layers for multi-token prediction in GGUF files: the same head as of the checkpoint that was converted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from llmc.models.errors import ModelError
from llmc.models.loader import load_parameters
from llmc.models.sources.registry import open_head, open_source

from support.gguf_cases import TOLD, told_fields
from support.gguf_converter import write_converted
from support.mtp_heads import add_mtp
from support.tiny_models import make_tiny_model

_PARTS = {
    "eh_proj": "nextn.eh_proj", "enorm": "nextn.enorm", "hnorm": "nextn.hnorm",
    "shared_head.norm": "nextn.shared_head_norm", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp", "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp", "mlp.shared_experts.down_proj": "ffn_down_shexp",
}  # fmt: skip
"""Names in a layer, ours and llama.cpp's, without suffixes."""
_OF_QWEN = {
    "fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "norm": "shared_head.norm",
}  # fmt: skip


def _converted(tensors: dict[str, np.ndarray], layers: int) -> dict[str, np.ndarray]:
    """The layer's tensors as llama.cpp's converter writes them."""
    found: dict[str, np.ndarray] = {}
    experts: dict[str, dict[int, np.ndarray]] = {}
    for name, tensor in tensors.items():
        if name.startswith("mtp."):
            part = name.removeprefix("mtp.layers.0.").removeprefix("mtp.").rpartition(".")
            ours, kind = _OF_QWEN.get(part[0], part[0]), part[2]
            value = tensor + np.float32(1) if "norm" in ours else tensor
        elif name.startswith(f"model.layers.{layers}."):
            ours, _, kind = name.removeprefix(f"model.layers.{layers}.").rpartition(".")
            value = tensor
        else:
            continue
        if ours.startswith("mlp.experts."):
            _, _, number, matrix = ours.split(".")
            experts.setdefault(matrix.removesuffix("_proj"), {})[int(number)] = value
        elif ours == "mlp.gate" and kind == "e_score_correction_bias":
            found[f"blk.{layers}.exp_probs_b.bias"] = value
        elif ours in _PARTS:
            found[f"blk.{layers}.{_PARTS[ours]}.{kind}"] = value
    for matrix, each in experts.items():
        found[f"blk.{layers}.ffn_{matrix}_exps.weight"] = np.stack([each[i] for i in sorted(each)])
    return found


@pytest.mark.parametrize("name", ["qwen3_5_text", "glm4_moe"])
def test_the_head_is_that_of_the_checkpoint(name: str, tmp_path: Path) -> None:
    family, fields = told_fields(name, {})
    plain = make_tiny_model(tmp_path / "plain", family, **fields)
    whole = add_mtp(make_tiny_model(tmp_path / "whole", family, **fields))
    config = open_source(plain).config()
    metadata: dict[str, Any] = {**TOLD[name][1], "block_count": 4, "nextn_predict_layers": 1}
    more = _converted(load_file(whole / "model.safetensors"), 3)
    path = tmp_path / "m.gguf"
    write_converted(plain, path, config, metadata, more=more)
    heads = [open_head(None, open_source(one)) for one in (whole, path)]
    ours, theirs = ({p.name: p.value() for p in load_parameters(h.config(), h.checkpoint(), "f32")} for h in heads)
    assert ours.keys() == theirs.keys()
    for parameter, value in ours.items():
        np.testing.assert_allclose(theirs[parameter], value, rtol=1e-6, atol=1e-7, err_msg=parameter)
    # Without the layer, the model is as before, and has no head.
    assert open_source(path).config().num_layers == 3
    write_converted(plain, tmp_path / "none.gguf", config, TOLD[name][1])
    with pytest.raises(ModelError, match=r"which has the tensor blk\.3\.nextn\.eh_proj\.weight; leave out --mtp"):
        open_head(None, open_source(tmp_path / "none.gguf")).checkpoint()
