"""Checkpoints that others quantized, compiled: their numbers are kept, and logits are those of what they stand for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from llmc.cli.main import main
from llmc.compiler.config import CompileConfig
from llmc.compiler.notes import notes
from llmc.compiler.resolve import resolve
from llmc.compiler.targets.cpu.backend import CpuTarget
from llmc.compiler.targets.cpu.quant_packing import unpack_quantized
from llmc.compiler.targets.registry import target_of
from llmc.models.loader import load_parameters
from llmc.models.sources.registry import open_source
from llmc.quantize.formats.base import Quantized, WeightFormat
from llmc.quantize.formats.codes import E8M0, Codes
from llmc.quantize.formats.fp8 import Fp8
from llmc.quantize.formats.integers import Integers

from support.compiled import compile_tiny
from support.inspected import inspected
from support.marks import rare
from support.new_family import targets_here
from support.quantized_checkpoints import (
    make_awq_head_model,
    make_blocks_model,
    make_gptq_head_model,
    make_gptq_model,
    make_int8_model,
    make_mixed_floats_model,
    make_nf4_model,
    make_tied_model,
)
from support.quantized_model import LADDER, assert_company_changes_no_bit, stored_logits_error
from support.verified import Claim, on_targets, verifies

pytestmark = pytest.mark.native
Kept = dict[str, tuple[str, WeightFormat]]
DOWN, OUT, QKV = "mlp.down", "attention.out", "attention.qkv"
HEAD, EMBED = "lm_head", "embed"
MXFP4, NVFP4 = Codes("e2m1", 32, E8M0), Codes("e2m1", 16)
CT = "compressed-tensors"
MODELS: dict[str, tuple[Callable[[Path], Path], str, Kept]] = {
    "gptq": (make_gptq_model, "gptq", {DOWN: ("w4a16", Integers(4, 32, True))}),
    "gptq-8": (lambda path: make_gptq_model(path, 8, -1, symmetric=True), "gptq", {DOWN: ("w8a16", Integers(8))}),
    "int8": (make_int8_model, CT, {DOWN: ("w8a8", Integers(8))}),
    "fp8-blocks": (make_blocks_model, "fp8", {DOWN: ("fp8", Fp8(128)), QKV: ("fp8", Fp8(128))}),
    "mixed": (make_mixed_floats_model, CT, {DOWN: ("mxfp4", MXFP4), OUT: ("nvfp4", NVFP4), QKV: ("fp8", Fp8())}),
    "gptq-head": (make_gptq_head_model, "gptq", {HEAD: ("w8a16", Integers(8, 32, True))}),
    "awq-head": (make_awq_head_model, "awq", {HEAD: ("w4a16", Integers(4, 32, True))}),
    "tied": (make_tied_model, CT, {EMBED: ("w8a16", Integers(8, 32, True)), DOWN: ("w4a16", Integers(4, 32, True))}),
    "nf4": (make_nf4_model, "bitsandbytes", {DOWN: ("nf4", Codes("nf4", 32)), QKV: ("nf4", Codes("nf4", 32))}),
}


@verifies(lambda name: on_targets(Claim("llama", stored=MODELS[name][1])))
@pytest.mark.parametrize("name", [rare(name) if name == "gptq-8" else name for name in MODELS])
def test_numbers_are_kept(name: str, tmp_path: Path, kernel_cache: Path) -> None:
    make, method, kept = MODELS[name]
    model = make(tmp_path / "model")
    for target in targets_here():
        out = tmp_path / target
        artifact = compile_tiny(model, out, kernel_cache, buckets=LADDER, dtype="f32", target=target)
        assert stored_logits_error(model, artifact) <= 2e-5, target
        assert_company_changes_no_bit(artifact)
        artifact.close()
        manifest = json.loads((out / "manifest.json").read_text())
        for kind, (scheme, format) in kept.items():
            said = manifest["weights"][weight_name(kind)]
            assert (said["scheme"], said["format"]) == (scheme, format.record())
        for kind in (HEAD, EMBED):
            assert ("scheme" in manifest["weights"].get(weight_name(kind), {})) == (kind in kept)
        classes = {one["class"]: one for one in inspected(out)["weights_by_class"]}
        backend = target_of(manifest["target"])
        for kind, (_, format) in kept.items():
            found, (n, k) = classes[kind], manifest["weights"][weight_name(kind)]["shape"]
            count = 1 if kind in (HEAD, EMBED) else 2
            assert (found["method"], found["groups"], found["count"]) == (method, format.describe(), count)
            # The rows that fill the last panel up are bytes, too.
            panel = backend.cpu.panel_columns if isinstance(backend, CpuTarget) else 1
            wanted = format.bits_per_weight(k) * -(-n // panel) * panel / n
            assert found["bits_per_weight"] == pytest.approx(wanted, abs=1e-3)
        if isinstance(backend, CpuTarget):
            check_numbers(model, out, kept)


def weight_name(kind: str) -> str:
    return f"{kind}.weight" if kind in (HEAD, EMBED) else f"layers.1.{kind}.weight"


def check_numbers(model: Path, out: Path, kept: Kept) -> None:
    """The artifact has the numbers of the checkpoint, and what lies beside them, bit for bit."""
    source = open_source(model)
    parameters = {p.name: p for p in load_parameters(source.config(), source.checkpoint(), "f32")}
    for kind, (_, format) in kept.items():
        name = weight_name(kind)
        (n, k), stored = parameters[name].shape, parameters[name].stored
        assert stored is not None
        with safe_open(out / "weights.safetensors", "np") as file:
            names = {"numbers": "", **{plane.name: f".{plane.name}" for plane in format.planes(k)}}
            found = unpack_quantized({n: file.get_tensor(name + suffix) for n, suffix in names.items()}, n, k, format)
        wanted = Quantized.empty(format, n, k)
        stored.read(0, wanted)
        assert np.array_equal(found.numbers, wanted.numbers)
        assert all(np.array_equal(found.planes[plane], array) for plane, array in wanted.planes.items())
        assert np.array_equal(found.value().astype(np.float32), parameters[name].value())


def test_what_is_kept_and_what_is_not_is_said(tmp_path: Path) -> None:
    model = make_gptq_model(tmp_path / "model")
    source = open_source(model)
    kept = resolve(CompileConfig(model=model, output=tmp_path / "out"))
    (note,) = notes(kept, source.checkpoint())
    assert note == (
        "attention.out (GPTQ), attention.qkv (GPTQ), mlp.down (GPTQ), mlp.gate_up (GPTQ): kept as stored, w4a16 in "
        "asymmetric groups of 32"
    )


def test_floats_are_said_to_be_kept(tmp_path: Path) -> None:
    model = make_mixed_floats_model(tmp_path / "model")
    assert notes(resolve(CompileConfig(model=model, output=tmp_path / "out")), open_source(model).checkpoint()) == (
        "attention.qkv (COMPRESSED-TENSORS): kept as stored, fp8 in channels",
        "mlp.down (COMPRESSED-TENSORS), mlp.gate_up (COMPRESSED-TENSORS): kept as stored, mxfp4 in groups of 32 that "
        "share a power of two",
        "attention.out (COMPRESSED-TENSORS): kept as stored, nvfp4 in groups of 16",
    )


def test_a_head_that_is_tied_and_stored_apart_is_said_to_be_left(tmp_path: Path) -> None:
    model = make_gptq_head_model(tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    resolved = resolve(CompileConfig(model=model, output=tmp_path / "out"))
    assert notes(resolved, open_source(model).checkpoint())[-1] == (
        "lm_head (GPTQ): not read, for config.json ties it to the embedding; set tie_word_embeddings to false there to "
        "have it"
    )


def test_settings_in_a_file_of_their_own(tmp_path: Path) -> None:
    model = make_gptq_model(tmp_path / "model")
    expected = resolve(CompileConfig(model=model, output=tmp_path / "out")).recipe
    config = json.loads((model / "config.json").read_text())
    settings = config.pop("quantization_config")
    del settings["quant_method"]
    (model / "config.json").write_text(json.dumps(config))
    (model / "quantize_config.json").write_text(json.dumps(settings))
    assert resolve(CompileConfig(model=model, output=tmp_path / "out")).recipe == expected
    assert model / "quantize_config.json" in set(open_source(model).weight_files())


def test_a_damaged_scale_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_gptq_model(tmp_path / "model")
    file = model / "model.safetensors"
    data = bytearray(file.read_bytes())
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    begin, _ = header["model.layers.0.mlp.up_proj.scales"]["data_offsets"]
    data[8 + size + begin : 8 + size + begin + 2] = np.float16(np.nan).tobytes()
    file.write_bytes(data)
    out = tmp_path / "out"
    assert main(["compile", str(model), "-o", str(out), "--buckets", "prefill=[1]x[16],decode=[1]x[32]",
                 "--target", "x86-64-v3", "--no-tokenizer"]) == 1  # fmt: skip
    message = capsys.readouterr().err
    assert "model.layers.0.mlp.up_proj.scales holds the scale nan; download the checkpoint again" in message
    assert not out.exists()
