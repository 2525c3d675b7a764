"""Checkpoints that others quantized, compiled: their numbers are kept, and logits are those of what they stand for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from llmc.cli.inspect import artifact_data
from llmc.cli.main import main
from llmc.compiler.config import CompileConfig
from llmc.compiler.resolve import resolve
from llmc.compiler.targets.cpu.backend import CpuTarget
from llmc.compiler.targets.cpu.quant_packing import unpack_quantized
from llmc.compiler.targets.registry import target_of
from llmc.models.sources.registry import open_source
from llmc.quantize.formats.integers import Integers
from llmc.runtime.graphs_file import read_graphs

from support.compiled import compile_tiny
from support.new_family import targets_here
from support.quantized_checkpoints import make_gptq_model, make_int8_model
from support.quantized_model import LADDER, assert_company_changes_no_bit, stored_logits_error

pytestmark = pytest.mark.native
MODELS: dict[str, tuple[Callable[[Path], Path], str, Integers]] = {
    "gptq": (make_gptq_model, "w4a16", Integers(4, 32, True)),
    "gptq-8": (lambda path: make_gptq_model(path, 8, -1, symmetric=True), "w8a16", Integers(8)),
    "int8": (make_int8_model, "w8a8", Integers(8)),
}


@pytest.mark.parametrize("name", list(MODELS))
def test_numbers_are_kept(name: str, tmp_path: Path, kernel_cache: Path) -> None:
    make, scheme, format = MODELS[name]
    model = make(tmp_path / "model")
    for target in targets_here():
        out = tmp_path / target
        artifact = compile_tiny(model, out, kernel_cache, buckets=LADDER, dtype="f32", target=target)
        assert stored_logits_error(model, artifact) <= 2e-5, target
        assert_company_changes_no_bit(artifact)
        artifact.close()
        manifest = json.loads((out / "manifest.json").read_text())
        assert manifest["weights"]["layers.1.mlp.down.weight"]["scheme"] == scheme
        assert manifest["weights"]["layers.1.mlp.down.weight"]["format"] == format.record()
        assert "scheme" not in manifest["weights"]["lm_head.weight"]
        classes = {one["class"]: one for one in artifact_data(read_graphs(out), manifest)["weights_by_class"]}
        assert classes["mlp.down"]["method"] == name.replace("int8", "compressed-tensors").removesuffix("-8")
        assert (classes["mlp.down"]["groups"], classes["mlp.down"]["count"]) == (format.describe(), 2)
        assert classes["mlp.down"]["bits_per_weight"] == pytest.approx(format.bits_per_weight(96), abs=1e-3)
        assert classes["lm_head"]["method"] == "-"
        found = target_of(manifest["target"])
        if isinstance(found, CpuTarget):
            with safe_open(out / "weights.safetensors", "np") as file:
                names = {"numbers": "", **{plane.name: f".{plane.name}" for plane in format.planes(96)}}
                arrays = {n: file.get_tensor(f"layers.1.mlp.down.weight{suffix}") for n, suffix in names.items()}
            value = np.empty((64, 96), np.float32)
            open_source(model).checkpoint().tensor("model.layers.1.mlp.down_proj.weight").read(0, value)
            assert np.array_equal(unpack_quantized(arrays, 64, 96, format).value().astype(np.float32), value)


def test_what_is_kept_and_what_is_not_is_said(tmp_path: Path) -> None:
    model = make_gptq_model(tmp_path / "model")
    source = open_source(model)
    kept = resolve(CompileConfig(model=model, output=tmp_path / "out"))
    (note,) = kept.notes(source.checkpoint())
    assert note == (
        "attention.out (GPTQ), attention.qkv (GPTQ), mlp.down (GPTQ), mlp.gate_up (GPTQ): kept as stored, w4a16 in "
        "asymmetric groups of 32"
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
