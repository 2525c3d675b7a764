"""Experts in MXFP4, as gpt-oss has them: the decoding of transformers is the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from llmc.quantize import QuantizeError
from llmc.quantize.checkpoints import StoredTensor

from support.stored_checkpoints import Tensors, find, tensor, whole

EXPERTS, N, GROUPS = 3, 24, 4
NAME = "model.layers.0.mlp.experts.gate_up_proj"
LEFT = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
CONFIG = {"quant_method": "mxfp4", "modules_to_not_convert": LEFT}


def stored() -> Tensors:
    rng = np.random.default_rng(4)
    blocks = rng.integers(0, 256, (EXPERTS, N, GROUPS, 16)).astype(np.uint8)
    scales = rng.integers(110, 135, (EXPERTS, N, GROUPS)).astype(np.uint8)
    return {f"{NAME}_blocks": tensor(blocks), f"{NAME}_scales": tensor(scales)}


def test_values_are_those_of_transformers() -> None:
    torch = pytest.importorskip("torch")
    reference = pytest.importorskip("transformers.integrations.mxfp4")
    tensors = stored()
    blocks, scales = (torch.from_numpy(tensors[f"{NAME}_{part}"].load()) for part in ("blocks", "scales"))
    # [experts, K, N], for inputs are multiplied from the left.
    expected = reference.convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).transpose(1, 2).numpy()
    found = find(CONFIG, tensors)
    assert found.matrices == {}
    assert found.parts == set(tensors)
    assert len(found.experts[NAME]) == EXPERTS
    for expert, matrix in enumerate(found.experts[NAME]):
        assert (matrix.format.kind, matrix.format.group_size, matrix.format.scale_kind) == ("e2m1", 32, "e8m0")
        np.testing.assert_array_equal(whole(matrix), expected[expert])
    assert found.shapes(tensors) == {NAME: (EXPERTS, N, 32 * GROUPS)}


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        ({}, {"_scales": None}, f"{NAME}_scales is missing, not U8"),
        ({}, {"_scales": tensor(np.zeros((3, 24, 5), np.uint8))}, r"_scales is 'U8' \[3, 24, 5\], not U8 \[3, 24, 4\]"),
        ({}, {"_blocks": tensor(np.zeros((3, 24, 4, 8), np.uint8))}, r"not U8 \[experts, N, K / 32, 16\]"),
        ({}, {"_blocks": tensor(np.zeros((3, 24, 4, 16), np.int8))}, "_blocks is 'I8'"),
        ({}, {"_blocks": None}, "the checkpoint has no tensor NAME_blocks"),
        ({"modules_to_not_convert": ["model.layers.*.mlp"]}, {}, f"leaves '{NAME}' as it is"),
        ({}, {"_scales": tensor(np.full((3, 24, 4), 255, np.uint8))}, f"{NAME}_scales holds the scale nan"),
    ],
)
def test_refused(config: dict[str, Any], changes: dict[str, StoredTensor | None], message: str) -> None:
    tensors = stored()
    for part, other in changes.items():
        del tensors[f"{NAME}{part}"]
        if other is not None:
            tensors[f"{NAME}{part}"] = other
    with pytest.raises(QuantizeError, match=message):
        find(CONFIG | config, tensors).experts[NAME][0].rows(0, N)
