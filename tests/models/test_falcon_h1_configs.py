"""What configs of Falcon-H1 say, and where its multipliers are."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmc.compiler.config import CompileConfig
from llmc.compiler.resolve import resolve
from llmc.compiler.store.keys import weights_components
from llmc.compiler.targets.registry import resolve_target
from llmc.models import ModelError, load_config, load_parameters, open_source
from llmc.models.config import ModelConfig
from llmc.models.fields import Fields
from llmc.models.mamba import Mamba2
from llmc.models.registry import get_family

from support.falcon_h1_families import OF_FALCON_H1
from support.tiny_models import make_tiny_model

_COMMON: dict[str, Any] = {
    "model_type": "falcon_h1", "vocab_size": 515, "hidden_size": 60, "intermediate_size": 100, "num_hidden_layers": 3,
    "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 20, "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}  # fmt: skip
_NO_MULTIPLIERS: dict[str, Any] = {
    "attention_in_multiplier": 1.0, "attention_out_multiplier": 1.0, "key_multiplier": 1.0, "ssm_in_multiplier": 1.0,
    "ssm_out_multiplier": 1.0, "mlp_multipliers": None, "ssm_multipliers": None,
}  # fmt: skip


def read(case: str = "falcon_h1", **changes: Any) -> ModelConfig:
    return from_json({**_COMMON, **OF_FALCON_H1[case][1], **changes})


def from_json(fields: dict[str, Any]) -> ModelConfig:
    return get_family("falcon_h1").read_config(Fields(fields, "config.json"), Fields({}, "none"))


# Hidden and inner size, layers, heads, KV heads and their size; mixers' size, heads and state; vocabulary, tied or not.
@pytest.mark.parametrize(
    ("sizes", "states", "vocabulary", "tied", "parameters"),
    [
        ((512, 768, 24, 8, 2, 64), (768, 24, 64), 32768, True, 91_131_072),
        ((1024, 2048, 36, 8, 2, 64), (1536, 24, 128), 32784, False, 521_411_104),
        ((3072, 12288, 44, 12, 2, 128), (3072, 24, 256), 130048, False, 7_585_513_568),
    ],
    ids=["tiny-90m", "0.5b", "7b"],
)
def test_published_sizes(
    sizes: tuple[int, ...], states: tuple[int, ...], vocabulary: int, tied: bool, parameters: int
) -> None:
    names = "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim"
    of_mixers = {"mamba_d_ssm": states[0], "mamba_n_heads": states[1], "mamba_d_state": states[2], "mamba_n_groups": 1}
    fields: dict[str, Any] = {**dict(zip(names.split(), sizes, strict=True)), **of_mixers, "mamba_d_head": "auto"}
    config = read(**fields, vocab_size=vocabulary, tie_word_embeddings=tied)
    targets = get_family("falcon_h1").weight_map(config).targets
    assert sum(math.prod(target.shape) for target in targets) == parameters
    assert config.num_kv_layers == 2 * config.num_layers


def without(*names: str) -> dict[str, Any]:
    return {name: value for name, value in {**_COMMON, **OF_FALCON_H1["falcon_h1"][1]}.items() if name not in names}


def mixers(config: ModelConfig) -> Mamba2:
    assert config.mamba is not None
    return config.mamba


def test_a_null_or_a_missing_key_is_that_of_transformers() -> None:
    of_hidden = mixers(read(mamba_d_ssm=None, mamba_d_head="auto"))
    assert (of_hidden.size, of_hidden.head_dim) == (120, 20)
    missing = without("mamba_n_heads", "mamba_d_head", "mamba_d_ssm", "mamba_n_groups", "num_key_value_heads")
    config = from_json({**missing, "num_attention_heads": 8})
    net = mixers(config)
    assert (config.num_kv_heads, net.size, net.heads, net.groups) == (8, 1024, 128, 1)
    assert read(num_key_value_heads=None).num_kv_heads == 3
    assert (mixers(read()).conv_bias, mixers(read(mamba_conv_bias=None)).conv_bias) == (True, False)


@pytest.mark.parametrize(("before", "norm"), [(True, "read"), (False, "gated"), (None, "gated")])
def test_the_norm_of_results(before: bool | None, norm: str) -> None:
    for normed, found in ((True, norm), (False, "none"), (None, "none")):
        assert mixers(read(mamba_rms_norm=normed, mamba_norm_before_gate=before)).norm == found
    assert mixers(read(mamba_rms_norm=True)).norm == "read"


def test_multipliers_are_in_small_vectors(tmp_path: Path) -> None:
    """No matrix has one: its values are the checkpoint's, and adapters and quantized weights are those of others."""
    path = make_tiny_model(tmp_path / "model", "falcon_h1", **OF_FALCON_H1["falcon_h1-biases"][1])
    config = load_config(path)
    ones = read("falcon_h1-biases", **_NO_MULTIPLIERS)
    checkpoint = open_source(path).checkpoint()
    values, plain = ({p.name: p.value() for p in load_parameters(of, checkpoint, "f32")} for of in (config, ones))
    changed = {name for name, value in values.items() if not np.array_equal(value, plain[name])}
    parts = ("attention_norm.weight", "mlp_norm.weight", "convolution.weight", ".bias")
    assert changed == {name for name in values if name.endswith(parts)}


def test_other_multipliers_are_other_packed_weights() -> None:
    """Of the same files of weights, whose config.json says something else."""
    keys = [
        weights_components((), read(attention_out_multiplier=by), 64, resolve_target("reference"), b"")
        for by in (0.5, 0.6)
    ]
    assert keys[0] != keys[1]


def test_stated_scales_of_the_kv_cache_are_those_of_our_keys_and_values(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "model", "falcon_h1", **OF_FALCON_H1["falcon_h1-biases"][1])
    file = tmp_path / "kv_cache_scales.json"
    cache = {"dtype": "float8_e4m3fn", "scaling_factor": {"0": {str(layer): 0.02 + layer for layer in range(3)}}}
    file.write_text(json.dumps({"model_type": "falcon_h1", "kv_cache": cache}))
    found = resolve(CompileConfig(model=path, output=tmp_path / "out", kv_dtype="fp8_e4m3", kv_scales=file))
    values = {p.name: p.value() for p in found.whole_parameters(open_source(path).checkpoint()) if "kv_sc" in p.name}
    assert values.keys() == {f"layers.{layer}.attention.kv_scales" for layer in (0, 2, 4)}
    # What attention adds has the factors 0.6 of its result and 0.5 / 1.6 of rows between layers, and keys lack 0.7.
    of_values = 0.6 * 0.5 / 1.6
    expected = np.array([2.02 * of_values / 0.7, 2.02 * of_values], np.float32)
    np.testing.assert_allclose(values["layers.4.attention.kv_scales"], expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"mamba_d_head": 9}, "mamba_n_heads 6 of 9 elements are not the 48 of mamba_d_ssm"),
        ({"mamba_d_ssm": None}, "mamba_n_heads 6 of 8 elements are not the 120 of mamba_expand times hidden_size"),
        ({"mamba_n_groups": 4}, "mamba_n_groups 4 does not divide the 6 heads of mixers"),
        ({"hidden_act": "gelu"}, "Mamba-2 mixers with the activation gelu are not supported"),
        ({"mlp_multipliers": [1.0]}, "field 'mlp_multipliers' is .* where a list of 2 numbers was expected"),
        ({"ssm_multipliers": [1.0, 1.0, 0.0, 1.0, 1.0]}, "ssm_multipliers: field '2' is 0.0 where a positive number"),
        ({"key_multiplier": -1.0}, "field 'key_multiplier' is -1.0 where a positive number was expected"),
        ({"mlp_multipliers": [1.0, 1e-6]}, "multipliers whose products and quotients are not from 0.001 to 1000"),
    ],
)
def test_what_does_not_go_together_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        read(**changes)
