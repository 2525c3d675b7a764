"""`llmc quantize -o` of GPT-2, whose matrices are stored as [inputs, outputs]."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2LMHeadModel
from transformers.pytorch_utils import Conv1D

from llmc.compiler.config import CompileError
from llmc.models.loader import load_parameters
from llmc.models.sources.registry import open_source
from llmc.quantize import QuantConfig
from llmc.quantize.rtn import quantize

from support.calibrated import W4A16, logits
from support.calibrated import quantized as written
from support.compiled import check_every_bucket, compile_tiny, random_tokens, relative_error
from support.tiny_models import make_tiny_model

TOKENS = random_tokens(515)
SKIPPING = replace(W4A16, skip=("attention.out", "mlp.down"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "n_inner": 96}
    sizes["tie_word_embeddings"] = True
    return make_tiny_model(tmp_path_factory.mktemp("turned") / "model", "gpt2", **sizes)


def gptq_weight(of_layer: dict[str, torch.Tensor]) -> torch.Tensor:
    """[inputs, outputs], as AutoGPTQ and GPTQModel unpack 4 bits: numbers down the inputs, zero points less one."""
    shifts = torch.arange(0, 32, 4)
    numbers = (of_layer["qweight"][:, None, :] >> shifts[None, :, None]) & 15
    zeros = (of_layer["qzeros"][:, :, None] >> shifts) & 15
    groups = of_layer["g_idx"].long()
    scales, of_groups = of_layer["scales"].float(), zeros.flatten(1) + 1
    return (numbers.flatten(0, 1) - of_groups[groups]).float() * scales[groups]


def packed_weight(of_layer: dict[str, torch.Tensor], settings: dict[str, Any]) -> torch.Tensor:
    """[inputs, outputs], by the library of compressed-tensors."""
    scheme = QuantizationScheme.model_validate(settings["config_groups"]["group_0"])
    library = BaseCompressor.get_value_from_registry(settings["format"])
    weight: torch.Tensor = library.decompress(of_layer, scheme)["weight"]
    return weight.float().T


def as_others_read_it(model: Path, output: Path) -> GPT2LMHeadModel:
    """The float model with the written numbers in its layers."""
    settings = json.loads((output / "config.json").read_text())["quantization_config"]
    tensors, theirs = load_file(output / "model.safetensors"), AutoModelForCausalLM.from_pretrained(model)
    for prefix, module in theirs.named_modules():
        own = {n.removeprefix(f"{prefix}."): t for n, t in tensors.items() if n.startswith(f"{prefix}.")}
        if isinstance(module, Conv1D) and "weight" not in own:
            gptq = settings["quant_method"] == "gptq"
            module.weight.data = gptq_weight(own) if gptq else packed_weight(own, settings)
        elif isinstance(module, Conv1D):  # it stays as the model has it, transposed
            assert torch.equal(own["weight"], module.weight)
    return theirs.float()


@pytest.mark.parametrize(
    ("quant", "layout"),
    [
        (W4A16, "compressed-tensors"),
        (QuantConfig("w8a16"), "compressed-tensors"),
        (QuantConfig("mxfp4"), "compressed-tensors"),
        (W4A16, "gptq"),
        (SKIPPING, "gptq"),
    ],
)
def test_others_read_what_llmc_reads(quant: QuantConfig, layout: str, model: Path, tmp_path: Path) -> None:
    output = written(model, tmp_path / "out", quant, "rtn", layout=layout, text=None)
    with torch.no_grad():
        expected = as_others_read_it(model, output)(torch.tensor([TOKENS])).logits[0].numpy()
    assert relative_error(logits(output, TOKENS), expected) < 1e-4
    # And that is near the model before.
    assert 1e-3 < relative_error(logits(model, TOKENS), expected) < (0.05 if quant.scheme == "w8a16" else 0.5)


@pytest.mark.parametrize("layout", ["compressed-tensors", "gptq", "awq"])
def test_rows_are_rounded_as_those_of_a_linear_layer(layout: str, model: Path, tmp_path: Path) -> None:
    sources = open_source(model), open_source(written(model, tmp_path / "out", W4A16, "rtn", layout=layout, text=None))
    plain, found = ({p.name: p for p in load_parameters(s.config(), s.checkpoint(), "f32")} for s in sources)
    assert plain.keys() == found.keys()
    for name, parameter in plain.items():
        kind = name.removeprefix("layers.0.").removeprefix("layers.1.")
        if kind not in ("attention.qkv.weight", "attention.out.weight", "mlp.up.weight", "mlp.down.weight"):
            assert np.array_equal(found[name].value(), parameter.value()), name
            continue
        assert found[name].stored is not None, name
        rounded = quantize(parameter.value(), W4A16.layers.weight)
        error = np.linalg.norm(found[name].value() - parameter.value())
        assert 0 < error <= 1.2 * np.linalg.norm(rounded.value() - parameter.value()), name


@pytest.mark.native
@pytest.mark.parametrize(("quant", "layout"), [(W4A16, "compressed-tensors"), (SKIPPING, "gptq")])
def test_what_is_written_compiles(
    quant: QuantConfig, layout: str, model: Path, tmp_path: Path, kernel_cache: Path
) -> None:
    output = written(model, tmp_path / "out", quant, "rtn", layout=layout, text=None)
    artifact = compile_tiny(
        output, tmp_path / "artifact", kernel_cache, buckets="prefill=[4]x[12],decode=[4]x[64]", dtype="f32"
    )
    check_every_bucket(artifact, TOKENS, logits(output, TOKENS))
    weights = json.loads((tmp_path / "artifact" / "manifest.json").read_text())["weights"]
    assert weights["layers.1.mlp.up.weight"]["format"]["kind"] == "integers"


def test_a_checkpoint_of_the_decoder_alone(model: Path, tmp_path: Path) -> None:
    """The first ones have no `transformer.` in front."""
    bare = tmp_path / "bare"
    bare.mkdir()
    tensors = load_file(model / "model.safetensors")
    tensors = {name.removeprefix("transformer."): t for name, t in tensors.items() if name != "lm_head.weight"}
    save_file(tensors, bare / "model.safetensors")
    (bare / "config.json").write_text((model / "config.json").read_text())
    output, other = (
        written(path, tmp_path / name, W4A16, "rtn", text=None) for path, name in ((bare, "a"), (model, "b"))
    )
    assert np.array_equal(logits(output, TOKENS), logits(other, TOKENS))


@pytest.mark.parametrize("scheme", ["fp8", "w8a8"])
def test_numbers_that_are_called_a_weight_are_not_written(scheme: str, model: Path, tmp_path: Path) -> None:
    """vLLM and transformers transpose what is called so."""
    with pytest.raises(CompileError, match=r"c_attn\.weight transposed, as .* give --scheme w4a16, w8a16 or mxfp4"):
        written(model, tmp_path / "out", QuantConfig(scheme), "rtn", text=None)
    assert not (tmp_path / "out").exists()
