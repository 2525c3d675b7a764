"""Checkpoints of models with experts and with latent attention that `llmc quantize -o` writes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Mxfp4Config

from llmc.compiler.calibration import driver
from llmc.compiler.calibration.request import CalibrationConfig
from llmc.compiler.calibration.running import LayerRunner
from llmc.compiler.calibration.threads import workers
from llmc.compiler.calibration.work import Work
from llmc.compiler.config import CompileError
from llmc.models.eager import load_model
from llmc.models.loader import load_parameters
from llmc.models.read_config import load_config
from llmc.models.sources.registry import open_source
from llmc.quantize import QuantConfig

from support.calibrated import W4A16, divergence, make_model, quantized, request_of
from support.compiled import assert_same_bytes, check_every_bucket, compile_tiny, random_tokens, relative_error
from support.families import CASES
from support.marks import rare
from support.new_family import targets_here
from support.paged_reference import PagedRunner
from support.tiny_models import make_tiny_model

pytestmark = pytest.mark.native
LADDER = "prefill=[2]x[16,32],decode=[1,3]x[64]"
LEAVES = ("weight_packed", "weight_scale", "weight_shape")


def written(case: str, folder: Path, scheme: str, **more: Any) -> tuple[Path, Path]:
    family, overrides = CASES[case]
    model = make_tiny_model(folder / "model", family, **overrides)
    quant = QuantConfig(scheme, skip=more.pop("skip", ()))
    config = CalibrationConfig(model, folder / "out", quant, jobs=1, **{"method": "rtn", **more})
    driver.quantize_checkpoint(config)
    return model, folder / "out"


@pytest.mark.parametrize(
    ("case", "scheme"),
    [
        pytest.param("deepseek_v3", "w8a16", marks=pytest.mark.slow),
        *(rare(case, "w8a16") for case in ("qwen2_moe", "qwen3_moe", "mixtral", "deepseek_v2-lite", "minicpm3")),
        rare("qwen2_moe", "w4a16"),
        rare("deepseek_v3", "fp8"),
    ],
)
def test_every_matrix_is_rounded_where_it_was(case: str, scheme: str, tmp_path: Path, kernel_cache: Path) -> None:
    """Orders of rows, experts one by one, and what stays as it is: routers, and what latent vectors become."""
    model, output = written(case, tmp_path, scheme)
    before, after = open_source(model), open_source(output)
    plain = {p.name: p for p in load_parameters(before.config(), before.checkpoint(), "f32")}
    steps = {"w8a16": 127, "w4a16": 7, "fp8": 16}[scheme]
    rounded = 0
    for parameter in load_parameters(after.config(), after.checkpoint(), "f32"):
        found, wanted = parameter.value(), plain[parameter.name].value()
        if parameter.stored is None:
            assert np.array_equal(found, wanted), parameter.name
            continue
        rounded += 1
        assert np.abs(found - wanted).max() <= 1.01 * np.abs(wanted).max() / steps, parameter.name
        assert not np.array_equal(found, wanted)
    assert rounded >= 4 * before.config().num_layers
    ignored = json.loads((output / "config.json").read_text())["quantization_config"]["ignore"]
    assert "lm_head" in ignored
    assert any("gate" in name or "kv_b_proj" in name for name in ignored)
    tokens = random_tokens(515, 48)
    expected = PagedRunner(load_model(output)).step([tokens])[0].numpy()
    target = targets_here()[0]
    with compile_tiny(
        output, tmp_path / "artifact", kernel_cache, buckets=LADDER, dtype="f32", target=target
    ) as artifact:
        check_every_bucket(artifact, tokens, expected)


@pytest.mark.parametrize("case", ["gpt_oss", "llama4", "qwen3_vl_moe", "granitemoe", "dbrx"])
def test_experts_of_one_tensor_become_linear_layers(case: str, tmp_path: Path) -> None:
    """An int8 matrix for each expert, which the library of the format reads; the values are within a step."""
    model, output = written(case, tmp_path, "w8a16")
    before, after = open_source(model), open_source(output)
    plain = {p.name: p for p in load_parameters(before.config(), before.checkpoint(), "f32")}
    experts = 0
    for parameter in load_parameters(after.config(), after.checkpoint(), "f32"):
        found, wanted = parameter.value(), plain[parameter.name].value()
        if parameter.stored is None:
            assert np.array_equal(found, wanted), parameter.name
        else:
            assert np.abs(found - wanted).max() <= 1.01 * np.abs(wanted).max() / 127, parameter.name
            experts += "experts" in parameter.name
    assert experts >= 2
    tensors, settings = load_file(output / "model.safetensors"), json.loads((output / "config.json").read_text())
    ignored, group = (settings["quantization_config"][name] for name in ("ignore", "config_groups"))
    for name, tensor in tensors.items():
        if tensor.ndim == 2 and tensor.is_floating_point() and name.endswith(".weight"):
            # Those that read images, too.
            assert name.removesuffix(".weight") in ignored or "embed" in name or "wte" in name, name
    prefix = next(name for name in sorted(tensors) if "experts" in name and name.endswith(".weight_packed"))
    leaves = {leaf: tensors[f"{prefix.removesuffix('weight_packed')}{leaf}"] for leaf in LEAVES}
    compressor = BaseCompressor.get_value_from_registry("pack-quantized")
    library = (
        compressor.decompress(leaves, QuantizationScheme.model_validate(group["group_0"]))["weight"].float().numpy()
    )
    checkpoint = after.checkpoint()
    ours = np.empty(library.shape, np.float32)
    checkpoint.tensor(prefix.replace("_packed", "")).read(0, ours)
    np.testing.assert_allclose(ours, library, rtol=1e-6)
    tokens = random_tokens(200, 24)
    expected, found = (PagedRunner(load_model(path)).step([tokens])[0].numpy() for path in (model, output))
    # A router may choose other experts for single tokens.
    errors = np.linalg.norm(found - expected, axis=1) / np.linalg.norm(expected, axis=1)
    assert np.median(errors) < 0.05


def test_what_is_skipped_of_experts_stays_as_it_is(tmp_path: Path) -> None:
    """Matrices of experts that are not quantized, and biases, lie beside the others' numbers."""
    model, output = written("gpt_oss", tmp_path, "w8a16", skip=("mlp.experts.down",))
    before, after = open_source(model), open_source(output)
    plain = {p.name: p.value() for p in load_parameters(before.config(), before.checkpoint(), "f32")}
    for parameter in load_parameters(after.config(), after.checkpoint(), "f32"):
        if "experts" in parameter.name:
            assert (parameter.stored is None) == ("gate_up.weight" not in parameter.name)
        if parameter.stored is None:
            assert np.array_equal(parameter.value(), plain[parameter.name]), parameter.name


def test_gpt_oss_in_its_own_format(calibrated: Callable[[str], Path], tmp_path: Path) -> None:
    """Numbers that transformers reads, of experts alone; they are those of the other format."""
    model, mxfp4 = calibrated("gpt_oss"), QuantConfig("mxfp4")
    output = quantized(model, tmp_path / "own", mxfp4, "gptq", layout="mxfp4")
    settings = Mxfp4Config(dequantize=True)
    reference = AutoModelForCausalLM.from_pretrained(output, dtype=torch.float32, quantization_config=settings)
    tokens = random_tokens(250, 24)
    with torch.no_grad():
        expected = reference(torch.tensor([tokens])).logits[0].numpy()
    assert relative_error(PagedRunner(load_model(output)).step([tokens])[0].numpy(), expected) < 1e-3
    source = open_source(output)
    stored = [p.name for p in load_parameters(source.config(), source.checkpoint(), "f32") if p.stored is not None]
    assert stored
    assert all("experts" in name for name in stored)
    nearest = divergence(quantized(model, tmp_path / "rtn", mxfp4, "rtn", layout="mxfp4"), model)
    assert divergence(output, model) < 0.9 * nearest


EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
CALIBRATED: dict[str, dict[str, Any]] = {
    "qwen3_moe": {**EXPERTS, "num_experts": 4, "norm_topk_prob": True},
    "qwen2_moe": {**EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 64, "mlp_only_layers": [1]},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32, "sliding_window": 16},
    "llama4_text": {
        "num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size": 32, "intermediate_size_mlp": 64,
    },
    "deepseek_v3": {
        **EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
        "first_k_dense_replace": 1, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16, "v_head_dim": 16, "head_dim": None, "num_key_value_heads": 4,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Tiny models by family, made once."""
    folder = tmp_path_factory.mktemp("mixtures")

    @cache
    def model(family: str) -> Path:
        return make_model(folder / family, family, **CALIBRATED[family])

    return model


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss", "llama4_text", rare("qwen2_moe")])
def test_methods_that_look_at_text_are_closer(family: str, calibrated: Callable[[str], Path], tmp_path: Path) -> None:
    model = calibrated(family)
    nearest = divergence(quantized(model, tmp_path / "rtn", W4A16, "rtn"), model)
    assert divergence(quantized(model, tmp_path / "gptq"), model) < 0.7 * nearest
    assert divergence(quantized(model, tmp_path / "awq", W4A16, "awq"), model) < 0.9 * nearest


def test_awq_moves_ranges_of_what_routers_read(calibrated: Callable[[str], Path], tmp_path: Path) -> None:
    """By powers of two: what a router makes of a token keeps every bit, and with 8 bits the model is the same."""
    model = shutil.copytree(calibrated("qwen2_moe"), tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    norms = [name for name in tensors if "post_attention_layernorm" in name]
    for name in norms:
        tensors[name][::13] *= 12
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    output = quantized(model, tmp_path / "out", QuantConfig("w8a16"), "awq")
    found = load_file(output / "model.safetensors")
    moved = 0
    for router in (name for name in tensors if name.endswith(("mlp.gate.weight", "shared_expert_gate.weight"))):
        factor = found[router] / tensors[router]
        assert bool((factor == factor[0]).all())
        assert bool((torch.frexp(factor).mantissa == 0.5).all())
        moved += int((factor != 1).any())
        norm = f"{router.partition('.mlp.')[0]}.post_attention_layernorm.weight"
        assert torch.equal(found[norm] * factor[0], tensors[norm])
    assert moved == 2
    nearest = quantized(model, tmp_path / "rtn", QuantConfig("w8a16"), "rtn")
    assert divergence(output, model) < max(2e-3, 2 * divergence(nearest, model))


@pytest.mark.parametrize("method", ["gptq", rare("awq")])
def test_bytes_depend_neither_on_threads_nor_on_a_kill(
    method: str, calibrated: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is told of experts is the same, too."""
    model = calibrated("qwen3_moe")
    few = {"samples": 2, "sample_tokens": 16}
    whole = driver.quantize_checkpoint(request_of(model, tmp_path / "one", W4A16, method, **few))
    quantized(model, tmp_path / "two", W4A16, method, jobs=3, **few)
    assert_same_bytes(tmp_path / "one", tmp_path / "two")
    keep = Work.keep

    def killed(self: Work, index: int, *given: Any) -> None:
        keep(self, index, *given)
        if index == 0:
            raise KeyboardInterrupt

    monkeypatch.setattr(Work, "keep", killed)
    request = request_of(model, tmp_path / "three", W4A16, method, **few)
    with pytest.raises(KeyboardInterrupt):
        driver.quantize_checkpoint(request)
    monkeypatch.setattr(Work, "keep", keep)
    again = driver.quantize_checkpoint(request)
    assert again.resumed == 1
    assert_same_bytes(tmp_path / "one", tmp_path / "three")
    assert whole.notes == again.notes
    assert "of 8 experts saw fewer tokens than their inputs have elements: other tokens" in whole.notes[0]


@pytest.mark.parametrize("method", ["gptq", rare("awq")])
def test_experts_that_saw_hardly_any_token_are_rounded_to_nearest(
    method: str, calibrated: Callable[[str], Path], tmp_path: Path
) -> None:
    model = calibrated("qwen3_moe")
    report = driver.quantize_checkpoint(request_of(model, tmp_path / "few", W4A16, method, samples=1, sample_tokens=4))
    assert report.notes == (
        "8 of 8 experts saw less than a token for 8 elements of their inputs: they are rounded to nearest; give a "
        "longer text to calibrate them",
    )
    few, nearest = (load_file(path / "model.safetensors") for path in (report.output, quantized(
        model, tmp_path / "rtn", W4A16, "rtn")))  # fmt: skip
    downs = [name for name in few if "experts" in name and "down_proj" in name]
    assert downs
    assert all(torch.equal(few[name], nearest[name]) for name in downs)


@pytest.mark.parametrize("layout", ["gptq", "awq"])
def test_layouts_of_integers_hold_experts(layout: str, calibrated: Callable[[str], Path], tmp_path: Path) -> None:
    """The same numbers as compressed-tensors has, with scales in f16."""
    model = calibrated("qwen3_moe")
    quant = replace(W4A16, asymmetric=layout == "awq")
    found = {}
    for name in (layout, "compressed-tensors"):
        output = quantized(model, tmp_path / name, quant, "rtn", layout=name)
        source = open_source(output)
        found[name] = {p.name: p for p in load_parameters(source.config(), source.checkpoint(), "f32")}
    for name, parameter in found[layout].items():
        assert (parameter.stored is None) == (found["compressed-tensors"][name].stored is None), name
        # What lies between two numbers may become the other one.
        assert (np.abs(parameter.value() - found["compressed-tensors"][name].value()) > 2e-3).mean() < 0.01


@pytest.mark.parametrize("family", ["deepseek_v3", rare("qwen3_moe")])
def test_transformers_reads_it(family: str, calibrated: Callable[[str], Path], tmp_path: Path) -> None:
    output = quantized(calibrated(family), tmp_path / "out")
    tokens = random_tokens(250, 24)
    reference = AutoModelForCausalLM.from_pretrained(output, dtype=torch.float32)
    with torch.no_grad():
        expected = reference(torch.tensor([tokens])).logits[0].numpy()
    assert relative_error(PagedRunner(load_model(output)).step([tokens])[0].numpy(), expected) < 1e-3


@pytest.mark.parametrize("case", ["falcon_h1", "granitemoehybrid", "lfm2", "minimax", "nemotron_h", "qwen3_next"])
def test_layers_of_another_kind_are_not_calibrated(case: str, tmp_path: Path) -> None:
    """Their norms have other readers, or are stored less one, or layers have states, or one block."""
    config = load_config(make_tiny_model(tmp_path / "model", case, **CASES[case][1]))
    with workers(1) as threads, pytest.raises(CompileError, match=f"layers of {case} are of a kind that .* not know"):
        LayerRunner(config, 16, threads)


def test_what_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match="has experts, whose inputs other layers read, too, so --method smoothquant"):
        written("qwen2_moe", tmp_path / "smooth", "w8a8", method="smoothquant", text="A text.")
    with pytest.raises(CompileError, match="has experts, for which --target-kl chooses nothing; leave it out"):
        written("qwen2_moe", tmp_path / "target", "w4a16", text="A text.", target_kl=0.1)
    with pytest.raises(CompileError, match="has latent attention, which --format gguf does not hold; leave it out"):
        written("minicpm3", tmp_path / "format", "w4a16", layout="gguf")
    with pytest.raises(CompileError, match="qwen3_moe has no experts in tensors NAME_blocks; use --format compressed"):
        written("qwen3_moe", tmp_path / "stacks", "mxfp4", layout="mxfp4")
