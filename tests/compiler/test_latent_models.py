"""Models with latent attention: compiled against transformers, their cache, their checkpoints in FP8."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from llmc.compiler.config import CompileConfig
from llmc.compiler.dry_run import describable, dry_run
from llmc.compiler.resolve import resolve
from llmc.graphs_records import kv_block_bytes
from llmc.models.eager import load_model
from llmc.quantize import QuantConfig

from support.compiled import check_every_bucket, compile_tiny, random_tokens
from support.families import CASES
from support.new_family import targets_here
from support.paged_reference import PagedRunner
from support.parity import reference_logits
from support.paths import SHARED
from support.quantized_checkpoints import make_blocks_model
from support.tiny_models import make_tiny_model
from support.verified import Claim, on_targets, verifies

pytestmark = pytest.mark.native


def tiny(case: str, folder: Path, **more: Any) -> Path:
    family, overrides = CASES[case]
    return make_tiny_model(folder, family, **{**overrides, **more})


@pytest.mark.parametrize("kv_dtype", ["int8", pytest.param("fp8_e4m3", marks=pytest.mark.exhaustive)])
def test_keys_of_one_byte(kv_dtype: str, tmp_path: Path, kernel_cache: Path) -> None:
    """Kernels of a CPU and the plain ones come as close to transformers as numbers of so many bits allow."""
    model = tiny("deepseek_v2-lite", tmp_path / "model")
    tokens = random_tokens(90)
    expected = reference_logits(model, tokens)
    for target in (targets_here()[0], "reference"):
        artifact = compile_tiny(
            model, tmp_path / target, kernel_cache, buckets="prefill=1x32,decode=[1,4]x64", dtype="f32", target=target,
            kv_dtype=kv_dtype,
        )  # fmt: skip
        check_every_bucket(artifact, tokens, expected, bound={"int8": 0.02, "fp8_e4m3": 0.1}[kv_dtype])
        artifact.close()


def test_the_cache_has_one_key_a_token(tmp_path: Path) -> None:
    model = tiny("deepseek_v2", tmp_path / "model")
    for target in targets_here():
        options: dict[str, Any] = {"model": model, "output": tmp_path / "out", "target": target, "block_size": 32}
        resolved = resolve(CompileConfig(**options, kv_dtype="bf16"))
        record, latent = resolved.model_record(), resolved.model.latent
        assert latent is not None
        assert record.num_kv_heads == 1
        assert record.key_block_bytes == 32 * 2 * (latent.rank + latent.rotated_dim)
        assert record.value_block_bytes == 0
        assert record.kv_widths() == (latent.key_dim, 0)
        whole = resolve(CompileConfig(**options, kv_dtype="int8")).model_record()
        assert (whole.key_block_bytes, whole.value_block_bytes) == (32 * (latent.key_dim + 2 * 4), 0)
        assert whole.kv_widths() == (latent.key_dim, 0)


def test_head_matrices_keep_their_dtype(tmp_path: Path) -> None:
    model = tiny("deepseek_v3", tmp_path / "model")
    recipe = resolve(CompileConfig(model=model, output=tmp_path, quant=QuantConfig("w8a16"))).recipe
    assert "layers.0.attention.q.weight" in recipe.schemes
    assert not any("_up.weight" in name for name in recipe.schemes if ".attention." in name)


def test_published_names_and_what_guesses_further_tokens(tmp_path: Path) -> None:
    model = tiny("deepseek_v3", tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    assert "model.layers.1.mlp.experts.0.gate_proj.weight" in tensors
    before = {name: value.clone() for name, value in load_model(model).state_dict().items()}
    save_file({**tensors, "model.layers.3.eh_proj.weight": np.ones((3, 4), np.float32)}, model / "model.safetensors")
    after = load_model(model).state_dict()
    assert before.keys() == after.keys()
    assert all(bool((after[name] == value).all()) for name, value in before.items())


@pytest.mark.slow
@verifies(lambda: on_targets(Claim("deepseek_v3", stored="fp8")))
def test_a_checkpoint_in_fp8(tmp_path: Path, kernel_cache: Path) -> None:
    """Matrices of heads are floats, all others keep their numbers."""
    _, sizes = CASES["deepseek_v3"]
    sizes = {**sizes, "num_attention_heads": 4, "num_key_value_heads": 4, "qk_nope_head_dim": 40, "kv_lora_rank": 136}
    sizes["head_dim"] = sizes["qk_rope_head_dim"]
    model = make_blocks_model(tmp_path / "model", "deepseek_v3", **sizes)
    tokens = random_tokens(515, 24)
    expected = PagedRunner(load_model(model)).step([tokens])[0].numpy()
    buckets = "prefill=[2]x[16],decode=[3]x[64]"
    for target in targets_here():
        out = tmp_path / target
        with compile_tiny(model, out, kernel_cache, buckets=buckets, dtype="f32", target=target) as artifact:
            check_every_bucket(artifact, [*tokens, *tokens], np.concatenate([expected, expected]))
        weights = json.loads((out / "manifest.json").read_text())["weights"]
        assert weights["layers.0.attention.kv.weight"]["method"] == "fp8"
        assert "scheme" not in weights["layers.0.attention.key_up.weight"]


@pytest.mark.skipif(not (SHARED / "configs").is_dir(), reason="needs the shared configurations")
@pytest.mark.parametrize(
    ("name", "layers", "rank", "experts"),
    [
        ("deepseek-v2-ktransformers/config.json", 27, None, 64),
        ("aiconfigurator/deepseek-ai--DeepSeek-V3_config.json", 61, 1536, 256),
        ("aiconfigurator/deepseek-ai--DeepSeek-R1_config.json", 61, 1536, 256),
        ("aiconfigurator/moonshotai--Kimi-K2-Instruct_config.json", 61, 1536, 384),
    ],
)
def test_real_configurations(name: str, layers: int, rank: int | None, experts: int) -> None:
    file = SHARED / "configs" / name
    resolved = resolve(CompileConfig(model=file, output=file), describable(file))
    model, record = resolved.model, resolved.model_record()
    assert model.latent is not None
    assert model.experts is not None
    assert (model.num_layers, model.latent.query_rank, model.experts.count) == (layers, rank, experts)
    assert kv_block_bytes(record, ()) // record.block_size == layers * 576 * 2
    scaling = model.rope.scaling
    assert scaling is not None
    assert scaling.mscale_all_dim is not None
    grown = 0.1 * scaling.mscale_all_dim * np.log(scaling.factor) + 1.0
    assert model.attention_scale == pytest.approx(192**-0.5 * grown**2)


@pytest.mark.skipif(not (SHARED / "configs").is_dir(), reason="needs the shared configurations")
def test_minicpm3_as_published() -> None:
    file = SHARED / "configs" / "ome-testdata" / "minicpm3_4b.json"
    resolved = resolve(CompileConfig(model=file, output=file), describable(file))
    model, record = resolved.model, resolved.model_record()
    assert model.latent is not None
    assert (model.latent.query_rank, model.latent.key_dim, model.latent.value_dim) == (768, 288, 64)
    assert kv_block_bytes(record, ()) // record.block_size == 62 * 288 * 2
    assert (model.embedding_multiplier, model.logit_multiplier) == (12.0, 0.1)
    assert model.residual_multiplier == pytest.approx(1.4 / 62**0.5)
    assert model.rope.scaling is not None
    assert model.rope.scaling.rope_type == "longrope"


@pytest.mark.skipif(not (SHARED / "configs").is_dir(), reason="needs the shared configurations")
@pytest.mark.exhaustive
def test_a_real_configuration_in_full_size(tmp_path: Path) -> None:
    file = SHARED / "configs" / "deepseek-v2-ktransformers" / "config.json"
    found = dry_run(CompileConfig(model=file, output=file, cache_dir=tmp_path))
    assert found.parameters == 15_706_484_224
    assert found.kv_bytes_per_token == 27 * 576 * 2
