"""bench/gpu on the host: a bundle that no weights are in, random ones, and the whole list of judgements."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from argparse import Namespace
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from bench.gpu import measure
from bench.gpu.baseline import baseline
from bench.gpu.measure import Bench, Report, check, judge_conformance, ways_of
from bench.gpu.random_model import write_random_model
from bench.gpu.stand_ins import built
from bench.gpu.step_limits import Limits, Model
from bench.gpu.time_limit import HUNG
from bench.gpu.torch_model import TorchModel, read_weights
from llmc.compiler.store.bundle import create_bundle
from llmc.compiler.store.described import model_config
from llmc.models import load_config
from llmc.models.config import ModelConfig
from llmc.runtime.binding import Artifact
from llmc.runtime.binding.library import library_candidates

from support.compiled import compile_tiny
from support.cuda import fake_nvcc, kernels_on_host, stub_library
from support.families import CASES
from support.native_build import native_program
from support.paths import ROOT
from support.tiny_models import make_tiny_model

_SHAPE = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}


_FEW = """\
# On a machine with torch alone: nothing else is found, but for the repository.
import sys
class Few:
    def find_spec(self, name, path=None, target=None):
        parts = {"bench", "llmc", "numpy", "torch", "torchgen", "typing_extensions", *sys.stdlib_module_names}
        if name.split(".")[0] not in parts:
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Few())
"""


@pytest.mark.slow
def test_the_script_judges_and_measures(tmp_path: Path, kernel_cache: Path) -> None:
    model = write_random_model(_SHAPE, tmp_path / "model")
    with fake_nvcc(tmp_path):
        compile_tiny(
            model, tmp_path / "compiled", kernel_cache, buckets="prefill=[2]x[64],decode=[2]x[128]", dtype="bf16",
            target="cuda:sm_80", tokenizer="none",
        ).close()  # fmt: skip
        create_bundle([tmp_path / "compiled"], tmp_path / "tiny.bundle")
    (tmp_path / "shape.json").write_text(json.dumps(_SHAPE))
    (tmp_path / "few").mkdir()
    (tmp_path / "few" / "sitecustomize.py").write_text(_FEW)
    environment = {
        **os.environ,
        "PYTHON": sys.executable,
        "PYTHONPATH": str(tmp_path / "few"),
        "LLMC_LIBRARY": str(next(path for path in library_candidates() if path.is_file())),
        "LLMC_CUDA_LIBRARY": str(stub_library(tmp_path)),
        "STUB_CUDA_KERNELS": str(kernels_on_host(tmp_path / "compiled", tmp_path)),
        "PATH": "/usr/bin:/bin",
    }
    options = ["--shape", tmp_path / "shape.json", "--work", tmp_path / "work", "--torch-device", "cpu"]
    options += ["--conformance", native_program("device_conformance"), "--seconds", "0", "--no-compiled"]
    options += ["--tokens", "3"]
    command = [ROOT / "bench" / "gpu" / "run.sh", tmp_path / "tiny.bundle", *options]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    judged = [line.split(":")[0] for line in done.stdout.splitlines() if line.startswith("ok")]
    assert judged == [
        "ok  conformance, graphs", "ok  conformance, launches", "ok  conformance, some graphs",
        "ok  conformance, streamed", "ok  conformance, read in place",
        "ok  parity with torch in float32", "ok  bit-exactness", "ok  LLM.generate of tiny",
    ]  # fmt: skip
    report = json.loads((tmp_path / "work" / "report.json").read_text())
    rows = report["buckets of tiny.bundle"]
    assert {row["by"] for row in rows} == {"graphs", "launches", "streamed", "read in place"}
    assert len(rows) == 8
    assert all((row["of_bus"] > 0) == (row["by"] == "streamed") for row in rows)
    assert all(0 < row["of_limit"] < 1 for row in rows)  # a step of kernels on the host is slow
    assert all(row["host_us"] > 0 for row in rows)
    assert [(row["cell"], row["reached"]) for row in report["cells"]] == [
        ("decode, fewest sequences", False), ("decode, most sequences", False), ("prefill", False),
    ]  # fmt: skip
    assert report["baseline"]["name"].startswith("plain torch")
    uploaded, generated = report["upload of tiny.bundle"], report["generation of tiny.bundle"]
    assert uploaded["of_copies"] == uploaded["bytes_s"] / report["limits"]["upload_bytes_s"] > 0
    assert (generated["sequences"], generated["prompt_tokens"], generated["output_tokens"]) == (2, 32, 6)
    assert generated["tokens_s"] > 0
    # Another run does not check or measure again.
    again = subprocess.run([str(part) for part in command], capture_output=True, text=True, env=environment)
    assert again.returncode == 0, again.stdout[-3000:] + again.stderr[-3000:]
    assert "ok  " not in again.stdout
    assert again.stdout.count("as found before") == 7
    assert json.loads((tmp_path / "work" / "report.json").read_text()) == report


@pytest.mark.parametrize("case", ["deepseek_v2-lite", "gpt_oss"])
def test_stand_ins_make_the_same_configuration(case: str, tmp_path: Path) -> None:
    """With nested parts, from what JSON keeps of them."""
    family, fields = CASES[case]
    config = load_config(make_tiny_model(tmp_path, family, **fields))
    kept = json.loads(json.dumps(asdict(config)))
    assert built(ModelConfig, kept) == model_config(kept) == config


def test_kernels_that_begin_early_are_measured_both_ways() -> None:
    for target, in_turn in (("cuda:sm_90", False), ("cuda:sm_80,sm_90a+dependent", True)):
        artifact = SimpleNamespace(info=SimpleNamespace(target_name=target, rank_weight_bytes=3 << 30))
        ways = ways_of(cast(Artifact, artifact))
        assert ({"dependent_launches": 0} in ways.values()) == in_turn
        assert {"graphs", "launches", "some graphs"} <= ways.keys()


def test_only_wgmma_may_fail_its_checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["bf16.bundle", "early.bundle", "wgmma.bundle", "both.bundle"]
    plain, early, wide, both = bundles = [tmp_path / name for name in names]
    options = ("", "+dependent", "+wgmma-many", "+dependent+wgmma")
    targets = {bundle: f"cuda:sm_80,sm_90a{of}" for bundle, of in zip(bundles, options, strict=True)}
    facts = {bundle: SimpleNamespace(info=SimpleNamespace(target_name=name)) for bundle, name in targets.items()}

    def refused(*_: object) -> None:
        check("bit-exactness", passed=False)

    monkeypatch.setattr(Bench, "check", refused)
    monkeypatch.setattr(measure, "Artifact", lambda path: nullcontext(facts[path]))
    given = Namespace(bundles=bundles, work=tmp_path, shape="qwen2.5-0.5b")
    bench = Bench(given, _SHAPE, report := Report(tmp_path / "report.json", {}))
    assert not bench.passes(wide, wide)
    assert not bench.passes(both, both)
    for bundle in (plain, early):
        with pytest.raises(SystemExit):
            bench.passes(bundle, bundle)
    # What others are compared with has to pass.
    given.bundles.reverse()
    with pytest.raises(SystemExit):
        bench.passes(both, both)
    found = json.loads((tmp_path / "report.json").read_text())
    assert found == {"key": {}, **{f"refused {one.name}": targets[one] for one in (wide, both)}}
    monkeypatch.setattr(Bench, "check", lambda *_: None)
    assert bench.passes(wide, wide)
    assert f"refused {wide.name}" not in report.found


def test_a_child_that_hangs_is_ended_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "device_conformance"
    program.write_text("#!/bin/sh\necho case 12\nexec sleep 3600\n")
    program.chmod(0o755)
    artifact = SimpleNamespace(info=SimpleNamespace(target_name="cuda:sm_80", rank_weight_bytes=1))
    monkeypatch.setattr(measure, "Artifact", lambda _: nullcontext(artifact))
    with pytest.raises(SystemExit):
        judge_conformance(program, tmp_path, [], 3.0)
    # A busy machine may end it before it has said a word.
    said = r"FAILED  conformance, graphs: it has not ended within 0\.5 seconds(: case 12)?\n"
    assert re.fullmatch(said, capsys.readouterr().out)


_HANGS = """\
import sys, time
from pathlib import Path
from bench.gpu.measure import Report
report = Report(Path(sys.argv[1]), {"of": "test"}, 1)
report.part("limits", lambda: {"bytes_s": 1})
report.part("numbers of wide.bundle", lambda: time.sleep(3600))
"""


def test_a_part_that_hangs_ends_the_run_and_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bundle of wgmma is left out by the next run, as one whose numbers are wrong. Any other one is tried again."""
    path = tmp_path / "report.json"
    path.write_text(json.dumps({"key": {"of": "test"}, "hung": ["numbers of many.bundle"]}))
    done = subprocess.run([sys.executable, "-c", _HANGS, path], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (HUNG, "HUNG  numbers of wide.bundle: it did not end within 1 s\n")
    hung = ["numbers of many.bundle", "numbers of wide.bundle"]
    found = {"key": {"of": "test"}, "limits": {"bytes_s": 1}, "hung": hung}
    assert json.loads(path.read_text()) == found
    first, wide = tmp_path / "bf16.bundle", tmp_path / "wide.bundle"
    given = Namespace(bundles=[first, wide], work=tmp_path, shape="qwen2.5-0.5b")
    bench = Bench(given, _SHAPE, Report(path, {"of": "test"}))
    monkeypatch.setattr(Bench, "check", lambda *_: None)
    for target, passes in (("cuda:sm_90a+wgmma", False), ("cuda:sm_90a", True)):
        artifact = SimpleNamespace(info=SimpleNamespace(target_name=target))
        monkeypatch.setattr(measure, "Artifact", lambda _, found=artifact: nullcontext(found))
        assert bench.passes(wide, wide) == passes


def test_baselines_are_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both see the tokens at their positions: the last logits of a prompt are those of the plain model."""
    model = write_random_model(_SHAPE, tmp_path / "model")
    plain = TorchModel(_SHAPE, read_weights(_SHAPE, model, "cpu", torch.bfloat16)).logits([7] * 12)[-1]
    for library in (True, False):
        if not library:
            monkeypatch.setitem(sys.modules, "transformers", None)
        found = baseline(_SHAPE, model, "cpu", compiled=False)
        assert found.name.startswith("transformers" if library else "plain torch")
        rows = found.step(2, 12, 12)()
        assert isinstance(rows, torch.Tensor)
        for row in rows.reshape(2, -1):
            torch.testing.assert_close(row, plain, atol=0.02 * float(plain.abs().max()), rtol=0)
        step = found.step(2, 1, 2)
        for _ in range(3):  # more than the cache has room for
            logits = step()
            assert isinstance(logits, torch.Tensor)
            assert torch.isfinite(logits).all()


def test_what_a_step_needs_at_least() -> None:
    shape = {**_SHAPE, "tie_word_embeddings": False}
    linear = 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 96)
    needs = Model.of(shape, weight_bytes=100_000, kv_token_bytes=256)
    assert needs == Model(100_000 - 2 * 300 * 64, 256, linear, 300 * 64, 2 * 2 * 4 * 16)
    # Of 3 new tokens behind 10: they read 13, and are 11, 12 and 13 pairs.
    memory, products = Limits(1.0, 1e30, 1.0), Limits(1e30, 1.0, 1.0)
    assert needs.least_s(memory, [(3, 10)]) == needs.weights + 13 * 256
    assert needs.least_s(products, [(3, 10)]) == 2 * (3 * linear + 300 * 64 + 36 * needs.pairs)
