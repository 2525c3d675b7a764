"""What cache keys depend on, and what they do not."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llmc.cli.main import main
from llmc.compiler.config import CompileConfig, CompileReport
from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.pipeline import compile_model
from llmc.compiler.store import keys as keys_module
from llmc.compiler.store.cache import GraphCache
from llmc.compiler.targets.cpu import backend
from llmc.compiler.targets.cpu import target as cpu
from llmc.compiler.targets.cpu.backend import CpuTarget
from llmc.compiler.targets.cpu.kernels import sources
from llmc.compiler.targets.elf import CODE_SOURCES
from llmc.compiler.targets.gpu import backend as gpu
from llmc.compiler.targets.gpu import opencl
from llmc.compiler.targets.reference import backend as reference
from llmc.compiler.wanted import Wanted, wanted_entries
from llmc.models.sources.registry import open_source

from support.compiled import assert_same_bytes
from support.tiny_models import make_tiny_model

LADDER = "prefill=[2]x[8],decode=[1]x[32]"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[CompileConfig, CompileReport]:
    """A cold compilation with a cache of its own."""
    root = tmp_path_factory.mktemp("keys")
    model = make_tiny_model(root / "model", "qwen3", num_hidden_layers=1)
    config = CompileConfig(
        model=model, output=root / "artifact", cache_dir=root / "cache", buckets=LADDER, target="x86-64-v3", dtype="f32"
    )
    return config, compile_model(config)


def wanted(config: CompileConfig) -> list[Wanted]:
    assert config.cache_dir is not None
    return wanted_entries(config, GraphCache(config.cache_dir))


def keys(config: CompileConfig, kind: str | None = None) -> dict[str, str]:
    """Key by name of the graphs and kernels that a compilation would look for."""
    return {w.name: w.key for w in wanted(config) if kind in (None, w.components["kind"])}


def recompile(config: CompileConfig, output: Path) -> CompileReport:
    return compile_model(replace(config, output=output))


def test_cold_compile_fills_the_cache(compiled: tuple[CompileConfig, CompileReport]) -> None:
    config, report = compiled
    assert report.kernels_compiled == report.num_kernels > 5
    assert report.kernels_cached == 0
    found = wanted(config)
    assert len([w for w in found if w.components["kind"] == "graph"]) == 2
    assert len([w for w in found if w.components["kind"] == "kernel"]) == report.num_kernels
    assert config.cache_dir is not None
    assert {e.key for e in GraphCache(config.cache_dir).entries()} == {w.key for w in found}


def test_warm_compile_compiles_nothing_and_writes_the_same_bytes(
    compiled: tuple[CompileConfig, CompileReport], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, report = compiled

    def fail(*arguments: object) -> None:
        raise AssertionError("compiled or traced with a warm cache")

    monkeypatch.setattr(CpuTarget, "compile", fail)
    monkeypatch.setattr("llmc.compiler.graph.export.export_model", fail)
    warm = recompile(config, tmp_path / "warm")
    assert (warm.kernels_compiled, warm.kernels_cached) == (0, report.num_kernels)
    assert_same_bytes(config.output, tmp_path / "warm")


def test_cold_compile_elsewhere_writes_the_same_bytes(
    compiled: tuple[CompileConfig, CompileReport], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, _ = compiled
    model = tmp_path / "elsewhere" / "model"
    shutil.copytree(config.model, model)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    report = compile_model(replace(config, model=model, output=tmp_path / "out", cache_dir=tmp_path / "cache"))
    assert report.kernels_cached == 0
    assert_same_bytes(config.output, tmp_path / "out")
    assert keys(replace(config, cache_dir=tmp_path / "cache")) == keys(config)


@pytest.mark.parametrize("move", ["home", "cwd", "model", "output", "jobs", "environment"])
def test_keys_do_not_depend_on_places(
    move: str, compiled: tuple[CompileConfig, CompileReport], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, _ = compiled
    before = keys(config)
    if move == "home":
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    elif move == "cwd":
        monkeypatch.chdir(tmp_path)
    elif move == "model":
        shutil.copytree(config.model, tmp_path / "copy")
        config = replace(config, model=tmp_path / "copy")
    elif move == "output":
        config = replace(config, output=tmp_path / "other")
    elif move == "jobs":
        config = replace(config, jobs=7)
    else:
        monkeypatch.setenv("USER", "somebody")
        monkeypatch.setenv("LANG", "tr_TR.UTF-8")
        monkeypatch.setenv("PYTHONHASHSEED", "5")
    assert keys(config) == before


def test_a_weight_changes_no_key(compiled: tuple[CompileConfig, CompileReport], tmp_path: Path) -> None:
    config, _ = compiled
    other = make_tiny_model(tmp_path / "model", "qwen3", num_hidden_layers=1, seed=1)
    assert keys(replace(config, model=other)) == keys(config)


@pytest.mark.parametrize(
    "change",
    [{"target": "haswell"}, {"target": "znver4"}],
)
def test_the_target_changes_every_kernel(change: dict[str, str], compiled: tuple[CompileConfig, CompileReport]) -> None:
    config, _ = compiled
    before, after = wanted(config), wanted(replace(config, **change))  # type: ignore[arg-type]
    assert not {w.key for w in before if w.components["kind"] == "kernel"} & {w.key for w in after}
    graphs = [[w.key for w in found if w.components["kind"] == "graph"] for found in (before, after)]
    # The graph is the same on a target with the same tiles.
    assert (graphs[0] == graphs[1]) == (change["target"] == "haswell")


@pytest.mark.parametrize(
    "change", [{"dtype": "bf16"}, {"kv_dtype": "bf16"}, {"block_size": 16}, {"max_model_len": 16}, {"lora_slots": 2}]
)
def test_what_changes_every_graph(change: dict[str, object], compiled: tuple[CompileConfig, CompileReport]) -> None:
    config, _ = compiled
    changed = replace(config, **change)  # type: ignore[arg-type]
    assert not set(keys(config, "graph").values()) & set(keys(changed, "graph").values())


def test_kv_dtype_changes_only_kernels_that_touch_the_cache(
    compiled: tuple[CompileConfig, CompileReport], tmp_path: Path
) -> None:
    config, first = compiled
    assert config.cache_dir is not None
    shutil.copytree(config.cache_dir, tmp_path / "cache")
    report = compile_model(replace(config, kv_dtype="bf16", output=tmp_path / "artifact", cache_dir=tmp_path / "cache"))
    ops = [w.components["op"] for w in wanted(config) if w.components["kind"] == "kernel"]
    touching = sum(op in ("rope_kv_write", "paged_attention") for op in ops)
    assert (report.kernels_compiled, report.kernels_cached) == (touching, first.num_kernels - touching)


def test_an_added_bucket_compiles_only_what_is_new(
    compiled: tuple[CompileConfig, CompileReport], tmp_path: Path
) -> None:
    config, first = compiled
    assert config.cache_dir is not None
    shutil.copytree(config.cache_dir, tmp_path / "cache")
    # Rows of the same tiles as the prefill graph has: another shape, the same kernels.
    buckets = "prefill=[2]x[8,16],decode=[1]x[32]"
    report = compile_model(replace(config, buckets=buckets, output=tmp_path / "artifact", cache_dir=tmp_path / "cache"))
    assert report.num_graphs == 3
    assert (report.kernels_compiled, report.kernels_cached) == (0, first.num_kernels)


@pytest.mark.parametrize("op", sorted(sources.TEMPLATE_FILES))
def test_a_changed_template_changes_its_kernels_only(
    op: str, compiled: tuple[CompileConfig, CompileReport], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, _ = compiled
    before = keys(config)
    real = sources.source_digest
    monkeypatch.setattr(backend, "source_digest", lambda name, **of: "changed" if name == op else real(name, **of))
    after = {w.name: w for w in wanted(config)}
    changed = {name for name, key in before.items() if after[name].key != key}
    assert changed == {name for name, w in after.items() if w.components.get("op") == op}
    # This model has every op but the generic ones, those of quantized weights, of latent attention, of states, of split
    # contexts, of adapters and of experts.
    quantized = ("embedding_quant", "linear_quant", "quantize_rows", "permute_columns")
    latent = ("head_linear", "latent_attention", "latent_kv_write", "packed_head_linear")
    adapters = ("adapter_shrink", "adapter_expand", "adapter_samples", "adapter_pairs", "adapter_pick", "activate")
    others = ("fused", *quantized, *latent, "short_conv", "delta_rule", "selective_state", *adapters, "merge_attention")
    assert bool(changed) == (op not in others and not op.startswith("expert_"))


def test_source_digests_are_each_templates_own(tmp_path: Path) -> None:
    folder = tmp_path / "kernels"
    shutil.copytree(Path(sources.__file__).parent, folder)
    edited = tmp_path / "edited"

    def digests(folder: Path) -> dict[str, str]:
        return {op: sources.source_digest(op, folder) for op in sources.TEMPLATE_FILES}

    def edit(name: str) -> dict[str, str]:
        shutil.rmtree(edited, ignore_errors=True)
        shutil.copytree(folder, edited)
        with (edited / name).open("a") as file:
            file.write("# edited\n")
        sources.source_digest.cache_clear()
        return digests(edited)

    before = digests(folder)
    assert before == {op: sources.source_digest(op) for op in sources.TEMPLATE_FILES}
    assert len(set(before.values())) == len(before)
    of_experts = {"expert_linear", "expert_linear_quant"}
    assert {op for op, digest in edit("norm.py").items() if digest != before[op]} == {"rms_norm"}
    assert {op for op, digest in edit("builder.py").items() if digest != before[op]} == set(before)
    readers = {"linear", "linear_quant", "embedding_quant", *of_experts}
    assert {op for op, digest in edit("linear/readers/nibbles.py").items() if digest != before[op]} == readers
    by_int8 = readers | {"quantize_rows", "rms_norm", "expert_quantize", "paged_attention", "latent_attention"}
    assert {op for op, digest in edit("ir/int8.py").items() if digest != before[op]} == by_int8


_LOADED = """
import importlib, json, sys
from llmc.compiler.targets.cpu.kernels.sources import TEMPLATE_FILES
from llmc.tvm_import import import_tvm

import_tvm()
package = "llmc.compiler.targets.cpu.kernels"
found = {}
for op, name in TEMPLATE_FILES.items():
    shared = "llmc.compiler.targets.coefficients"
    for module in [module for module in sys.modules if module.startswith((package, shared))]:
        del sys.modules[module]
    importlib.import_module(f"{package}.{name}")
    importlib.import_module(f"{package}.codegen")
    prefixes = (f"{package}.", "llmc.compiler.targets.elf.", "llmc.compiler.targets.tir_steps", shared)
    found[op] = [module.__file__ for name, module in sys.modules.items() if name.startswith(prefixes)]
print(json.dumps(found))
"""


def test_a_digest_covers_every_module_that_a_template_imports() -> None:
    folder = Path(sources.__file__).parent
    answer = subprocess.run([sys.executable, "-c", _LOADED], capture_output=True, text=True, check=True)
    for op, files in json.loads(answer.stdout).items():
        digested = {*(folder / name for name in sources.source_files(op)), *CODE_SOURCES}
        assert {Path(file).resolve() for file in files} == {file.resolve() for file in digested}, op


@pytest.mark.parametrize("source", CODE_SOURCES, ids=lambda file: file.name)
def test_how_tir_becomes_code_is_in_the_digest_of_every_target(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without what it remembers.
    monkeypatch.setattr(backend, "source_digest", sources.source_digest.__wrapped__)

    def digests() -> list[str]:
        targets = [backend.named("haswell"), reference.named("reference")]
        # GPUs have a code generator of their own, with the same steps.
        targets += [opencl.named("opencl")] if source.name == "tir_steps.py" else []
        return [target.template_digest(KernelSpec.of("linear", "linear")) for target in targets]

    before = digests()
    assert digests() == before
    edited = tmp_path / source.name
    edited.write_bytes(source.read_bytes() + b"# edited\n")
    for module in (sources, reference):
        monkeypatch.setattr(module, "CODE_SOURCES", tuple(edited if file == source else file for file in CODE_SOURCES))
    monkeypatch.setattr(gpu, "_BESIDE", tuple(edited if file == source else file for file in gpu._BESIDE))
    after = digests()
    assert all(one != other for one, other in zip(before, after, strict=True))


def test_sets_that_a_target_withholds_change_its_kernels(
    compiled: tuple[CompileConfig, CompileReport], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, _ = compiled
    before = keys(config, "kernel")
    monkeypatch.setattr(cpu, "_UNPROMISED", (*cpu._UNPROMISED, "sse5"))
    after = keys(config, "kernel")
    assert before.keys() == after.keys()
    assert not set(before.values()) & set(after.values())


@pytest.mark.parametrize("name", ["pipeline.py", "targets/cpu/kernels/linear/kernel.py", "targets/cpu/target.py"])
def test_any_source_of_the_compiler_changes_a_cached_artifact(
    name: str, compiled: tuple[CompileConfig, CompileReport], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, _ = compiled
    target = backend.named("haswell")
    before = keys_module.artifact_components(open_source(config.model).all_files(), target)
    shutil.copytree(Path(keys_module.__file__).parent.parent, tmp_path / "compiler")
    real, copies = keys_module.compiler_digest, (tmp_path / "compiler", *keys_module._PACKAGES[1:])
    assert real(copies) == before["sources"]
    with (tmp_path / "compiler" / name).open("a") as file:
        file.write("# edited\n")
    real.cache_clear()
    monkeypatch.setattr(keys_module, "compiler_digest", lambda: real(copies))
    after = keys_module.artifact_components(open_source(config.model).all_files(), target)
    assert {part for part in before if before[part] != after[part]} == {"sources"}


def why(config: CompileConfig, capsys: pytest.CaptureFixture[str], *options: str) -> list[dict[str, Any]]:
    """What `llmc cache why` answers about a compilation with the options of `compiled` and some more."""
    same = ("--buckets", LADDER, "--target", config.target, "--dtype", config.dtype)
    assert (
        main(["cache", "why", str(config.model), *same, *options, "--cache-dir", str(config.cache_dir), "--json"]) == 0
    )
    answers: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return answers


def test_why_takes_the_options_of_compile(
    compiled: tuple[CompileConfig, CompileReport], capsys: pytest.CaptureFixture[str]
) -> None:
    config, report = compiled
    answers = why(config, capsys)
    assert len(answers) == report.num_graphs + 1 + report.num_kernels
    assert all(answer["cached"] for answer in answers)
    *graphs, trace = why(config, capsys, "--quant", "w4a8", "--group-size", "32")
    assert trace["cached"], "a quantized model is traced as the one that is not"
    for answer in graphs:
        assert not answer["cached"]
        (difference,) = answer["differences"]
        assert difference["name"] == "quantization"
        assert difference["old"] is None
        assert difference["new"].startswith("w4a8 in symmetric groups of 32")


def test_why_names_the_target_and_says_a_reason_once(
    compiled: tuple[CompileConfig, CompileReport], capsys: pytest.CaptureFixture[str]
) -> None:
    config, report = compiled
    *graphs, trace = why(config, capsys, "--target", "znver4")
    assert trace["cached"]
    assert len(graphs) == report.num_graphs == 2
    for answer in graphs:
        (difference,) = answer["differences"]
        assert difference["name"] == "target"
        assert difference["old"].startswith("x86-64-v3, tiles ")
        assert difference["new"].startswith("znver4, tiles ")
    buckets = ("--buckets", LADDER, "--target", "znver4", "--dtype", "f32", "--cache-dir", str(config.cache_dir))
    assert main(["cache", "why", str(config.model), *buckets]) == 0
    first, *reasons = capsys.readouterr().out.splitlines()
    assert first.startswith("1 of 3 entries are in the cache ")
    assert reasons[0].startswith("prefill:2x8 and 1 more graphs: not cached; ")
    assert len(reasons) == 2
    assert reasons[1].startswith("    target: x86-64-v3, tiles ")


def test_why_of_other_shapes_is_one_reason(
    compiled: tuple[CompileConfig, CompileReport], capsys: pytest.CaptureFixture[str]
) -> None:
    config, _ = compiled
    larger = ("--buckets", "prefill=[4,8,16]x[32],decode=[1]x[32]", "--target", "x86-64-v3", "--dtype", "f32")
    model = ("cache", "why", str(config.model), *larger, "--max-model-len", "32", "--cache-dir", str(config.cache_dir))
    assert main([*model]) == 0
    lines = capsys.readouterr().out.splitlines()
    (reason,) = [line for line in lines if "not cached" in line]
    assert reason.startswith("prefill:4x32 and 2 more graphs: not cached; ")
    (tokens,) = [line for line in lines if line.startswith("    shape.tokens: ")]
    assert all(f"→ {32 * batch}" in tokens for batch in (4, 8, 16))


def test_why_of_an_artifact_takes_no_options_of_compile(
    compiled: tuple[CompileConfig, CompileReport], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cache", "why", str(compiled[0].output), "--quant", "w4a8"]) == 2
    assert "--quant is fixed by the artifact" in " ".join(capsys.readouterr().err.split())
