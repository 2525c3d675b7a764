"""Changes an artifact's manifest as its writer would: its checksum fits."""

from __future__ import annotations

import json
from pathlib import Path

from llmc.manifest import write_manifest

MODEL = {
    "model_type": "qwen3", "vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_layers": 1, "num_heads": 1,
    "num_kv_heads": 1, "head_dim": 8, "norm_eps": 1e-5, "rope": {"theta": 1e4, "dim": 8, "scaling": None},
    "max_position_embeddings": 64, "tie_word_embeddings": False, "attention_bias": False, "o_bias": False,
    "mlp_bias": False, "qk_norm": "head", "attention_scale": 8**-0.5, "sliding_window": None, "layer_windows": [0],
    "eos_token_ids": [0], "bos_token_id": None, "dtype": "f32", "norm": "rms", "norm_weight": True, "norm_bias": False,
    "residual": "pre", "parallel_norms": 1, "activation": "silu", "gated": True, "local_rope": None,
    "unrotated_layers": [], "learned_positions": 0, "head_bias": False, "clip_qkv": None,
    "qk_norm_rotated": False, "layer_chunks": [], "sinks": False, "query_growth": None, "alibi": None,
    "attention_cap": None, "embedding_norm": False, "experts": None,
    "embedding_multiplier": 1.0, "residual_multiplier": 1.0, "logit_multiplier": 1.0, "logit_cap": None,
}  # fmt: skip
"""`model` of a manifest that no compiler wrote."""


def edit_manifest(artifact: Path, **changes: object) -> None:
    """Replaces fields of manifest.json."""
    path = artifact / "manifest.json"
    write_manifest(path, {**json.loads(path.read_text()), **changes})
