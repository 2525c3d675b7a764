"""Whole models by the numbers of their KV cache: close to transformers, alike on both kinds of target, and their own
bits. Activations are f32, so that the cache alone rounds."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from llmc.compiler.config import CompileConfig, CompileError
from llmc.compiler.resolve import resolve
from llmc.kv_dtypes import KV_DTYPES
from llmc.manifest import read_manifest
from llmc.models.errors import ModelError
from llmc.runtime.binding import Artifact, Replayer

from support.compiled import Pages, check_every_bucket, compile_tiny, random_tokens, relative_error, replay
from support.failing import fails
from support.inspected import inspected
from support.marks import rare
from support.opencl import needs_opencl
from support.parity import FAMILIES, check_bits, reference_logits
from support.quantized_checkpoints import make_int8_model, save_tensors
from support.stored_checkpoints import tensor
from support.tiny_models import make_tiny_model

pytestmark = pytest.mark.native

LADDER = "prefill=[2]x[32],decode=[3]x[64]"
ROUNDING = {"f16": 2.0**-11, "bf16": 2.0**-8, "int8": 1 / 127, "fp8_e4m3": 2.0**-4, "fp8_e5m2": 2.0**-3}
"""The most that a number is rounded by: of itself; of int8 of its head's unit, as most are far from the largest."""
LAYERS = 3


def logits_of(artifact: Artifact, tokens: list[int]) -> np.ndarray:
    """[T, V], a token at a time."""
    replayer, pages = Replayer(artifact, num_threads=1, num_blocks=8), Pages(8, artifact.info.block_size)
    return np.concatenate([replay(replayer, 0, pages, [(0, [token], at)]) for at, token in enumerate(tokens)])


@pytest.mark.parametrize(
    ("name", "kv_dtype"),
    [
        ("qwen3-gqa7", "f16"),
        rare("qwen3-gqa7", "int8"),
        ("mistral-window", "int8"),
        ("qwen3-gqa7", "fp8_e4m3"),
        ("mistral-window", "fp8_e5m2"),
    ],
)
def test_logits_and_bits(kv_dtype: str, name: str, tmp_path: Path, kernel_cache: Path) -> None:
    kind, overrides = FAMILIES[name]
    model = make_tiny_model(tmp_path / "model", kind, **overrides)
    options = {"buckets": LADDER, "dtype": "f32", "kv_dtype": kv_dtype}
    plain = compile_tiny(model, tmp_path / "reference", kernel_cache, **options, target="reference")
    fast = compile_tiny(model, tmp_path / "native", kernel_cache, **options)
    tokens = random_tokens(fast.info.vocab_size, 48)
    expected, alike = reference_logits(model, tokens), logits_of(plain, tokens)
    # What a layer rounds, the next ones see.
    bound = LAYERS * ROUNDING[kv_dtype]
    assert relative_error(alike, expected) < bound
    for artifact in (plain, fast):
        check_every_bucket(artifact, tokens, expected, bound)
        check_bits(artifact)
    # Both store the same numbers, but for those that lie between two and round either way.
    assert relative_error(logits_of(fast, tokens), alike) < bound / 4


@needs_opencl
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kv_dtype"),
    [
        ("mistral-window", "int8"),
        rare("qwen3-gqa7", "bf16"),
        rare("qwen3-gqa7", "fp8_e4m3"),
        rare("mistral-window", "fp8_e5m2"),
    ],
)
def test_logits_and_bits_on_opencl(kv_dtype: str, name: str, tmp_path: Path, kernel_cache: Path) -> None:
    kind, overrides = FAMILIES[name]
    model = make_tiny_model(tmp_path / "model", kind, **overrides)
    options = {"buckets": LADDER, "dtype": "f32", "kv_dtype": kv_dtype, "target": "opencl"}
    artifact = compile_tiny(model, tmp_path / "out", kernel_cache, **options)
    tokens = random_tokens(artifact.info.vocab_size, 48)
    check_every_bucket(artifact, tokens, reference_logits(model, tokens), LAYERS * ROUNDING[kv_dtype])
    check_bits(artifact)


@pytest.mark.parametrize("kv_dtype", list(KV_DTYPES))
def test_bytes_of_a_block(kv_dtype: str, tmp_path: Path) -> None:
    """The scales are in every count of bytes."""
    model = make_tiny_model(tmp_path / "model", "llama", num_key_value_heads=3, head_dim=24, num_attention_heads=6)
    for target in ("x86-64-v3", "reference"):
        config = CompileConfig(model=model, output=tmp_path / "out", kv_dtype=kv_dtype, target=target, block_size=16)
        record = resolve(config).model_record()
        item, scale = {"f32": (4, 0), "bf16": (2, 0), "f16": (2, 0)}.get(kv_dtype, (1, 4))
        rows = 3 * 16
        assert (record.key_block_bytes, record.value_block_bytes) == (
            rows * (24 * item + scale),
            rows * (32 * item + scale),
        )
        assert record.kv_widths() == (24, 32)
        assert record.kv.name == kv_dtype


def test_an_unknown_dtype_is_one_sentence(tmp_path: Path) -> None:
    known = "auto, f32, bf16, f16, int8, fp8_e4m3, fp8_e5m2"
    with pytest.raises(CompileError, match=rf"^kv_dtype 'int4' is not one of {known}$"):
        CompileConfig(model=tmp_path, output=tmp_path / "out", kv_dtype="int4")


def with_scales(model: Path, values: dict[str, np.ndarray], scheme: dict[str, object]) -> Path:
    """A checkpoint of compressed-tensors that states scales of its KV cache."""
    file, config = model / "model.safetensors", model / "config.json"
    with safe_open(file, "np") as opened:
        kept = {name: opened.get_slice(name).get_dtype() for name in opened.keys()}  # noqa: SIM118
    from llmc.models.sources.folder_checkpoint import FolderCheckpoint

    found = {name: value for name, value in FolderCheckpoint(model).stored_tensors().items() if name in kept}
    found = {name: type(value).of(np.array(value.load()), value.dtype) for name, value in found.items()}
    save_tensors(file, found | {name: tensor(value) for name, value in values.items()})
    settings = json.loads(config.read_text())
    settings["quantization_config"]["kv_cache_scheme"] = scheme
    config.write_text(json.dumps(settings))
    return model


FLOAT = {"type": "float", "num_bits": 8, "strategy": "tensor", "dynamic": False, "symmetric": True}
ATTENTION = "model.layers.{}.self_attn."


def scales_of_layers() -> dict[str, np.ndarray]:
    scales = {ATTENTION.format(layer) + "k_scale": np.array([0.02 + 0.01 * layer], np.float32) for layer in range(2)}
    return scales | {ATTENTION.format(layer) + "v_scale": np.array([0.005], np.float32) for layer in range(2)}


@pytest.mark.slow
def test_scales_of_the_checkpoint(tmp_path: Path, kernel_cache: Path) -> None:
    model = with_scales(make_int8_model(tmp_path / "model"), scales_of_layers(), FLOAT)
    options = {"buckets": LADDER, "dtype": "f32"}
    plain = compile_tiny(model, tmp_path / "f32", kernel_cache, **options)
    tokens = random_tokens(plain.info.vocab_size, 40)
    expected = logits_of(plain, tokens)
    for target in ("native", "reference"):
        out = tmp_path / target
        artifact = compile_tiny(model, out, kernel_cache, **options, kv_dtype="fp8_e4m3", target=target)
        # Inputs of its layers are int8: they round anew what the cache rounded.
        assert relative_error(logits_of(artifact, tokens), expected) < 2 * LAYERS * ROUNDING["fp8_e4m3"]
        check_bits(artifact)
        manifest = read_manifest(out)
        assert (manifest["kv_dtype"], manifest["kv_scales"]) == ("fp8_e4m3", "checkpoint")
        assert inspected(out)["model"]["kv_dtype"] == "fp8_e4m3"
        with safe_open(out / "weights.safetensors", "np") as weights:
            heads = inspected(out)["model"]["num_kv_heads"]
            for layer in range(2):
                stated = np.array([0.02 + 0.01 * layer] * heads + [0.005] * heads, np.float32)
                np.testing.assert_array_equal(weights.get_tensor(f"layers.{layer}.attention.kv_scales"), stated)
    # Scales of floats are none of whole numbers.
    assert not resolve(CompileConfig(model=model, output=tmp_path / "out", kv_dtype="int8")).kv_scales
    assert not resolve(CompileConfig(model=model, output=tmp_path / "out", kv_dtype="f16")).kv_scales


@pytest.mark.parametrize("value", [np.nan, -1.0, 0.0, np.inf])
def test_scales_that_are_none_are_one_sentence(value: float, tmp_path: Path) -> None:
    scales = scales_of_layers() | {ATTENTION.format(1) + "v_scale": np.array([value], np.float32)}
    model = with_scales(make_int8_model(tmp_path / "model"), scales, FLOAT)
    with pytest.raises(
        ModelError, match=rf"layers\.1\.self_attn\.v_scale has the scale {value}, which is not positive"
    ):
        resolve(CompileConfig(model=model, output=tmp_path / "out", kv_dtype="fp8_e4m3"))


def scales_file(folder: Path, model_type: str, scales: list[float]) -> Path:
    """As vLLM wrote them."""
    path = folder / "kv_cache_scales.json"
    by_layer = {str(layer): scale for layer, scale in enumerate(scales)}
    cache = {"dtype": "float8_e4m3fn", "scaling_factor": {"0": by_layer}}
    path.write_text(json.dumps({"model_type": model_type, "kv_cache": cache}))
    return path


@pytest.mark.slow
def test_scales_of_a_file(tmp_path: Path, kernel_cache: Path) -> None:
    model = make_tiny_model(tmp_path / "model", "qwen2", num_hidden_layers=2)
    options = {"buckets": LADDER, "dtype": "f32"}
    plain = compile_tiny(model, tmp_path / "f32", kernel_cache, **options)
    tokens = random_tokens(plain.info.vocab_size, 40)
    expected = logits_of(plain, tokens)
    fp8 = {**options, "kv_dtype": "fp8_e4m3"}
    kept = []
    # The second is of the same model, whose packed weights are known by then.
    for scales in ([0.02, 0.03], [0.02, 0.04]):
        file, out = scales_file(tmp_path, "qwen2", scales), tmp_path / f"fp8-{scales[1]}"
        artifact = compile_tiny(model, out, kernel_cache, **fp8, kv_scales=file)
        assert relative_error(logits_of(artifact, tokens), expected) < LAYERS * ROUNDING["fp8_e4m3"]
        check_bits(artifact)
        assert read_manifest(out)["kv_scales"] == "file"
        with safe_open(out / "weights.safetensors", "np") as weights:
            kept.append([float(weights.get_tensor(f"layers.{layer}.attention.kv_scales").max()) for layer in (0, 1)])
    np.testing.assert_array_equal(np.array(kept, np.float32), np.array([[0.02, 0.03], [0.02, 0.04]], np.float32))


def test_a_file_of_scales_needs_its_type_of_cache(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_tiny_model(tmp_path / "model", "qwen2", num_hidden_layers=2)
    command = ["compile", model, "-o", tmp_path / "out", "--quantization-param-path"]
    file = scales_file(tmp_path, "qwen2", [0.02, 0.03])
    fails(capsys, 1, [*command, file], "kv_cache_scales.json", "but this one is f32", "--kv-dtype fp8_e4m3")
    other = [*command, scales_file(tmp_path, "llama", [0.02, 0.03]), "--kv-dtype", "fp8_e4m3"]
    fails(capsys, 1, other, "scales of a model of type 'llama'")
    fails(capsys, 1, [*command, tmp_path / "none.json", "--kv-dtype", "fp8_e4m3"], "none.json does not exist")
