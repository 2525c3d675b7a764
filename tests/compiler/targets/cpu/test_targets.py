"""The same model on other instruction set levels than this machine's best."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers

from llmc.compiler.config import CompileConfig
from llmc.compiler.pipeline import compile_model
from llmc.compiler.targets.base import TargetError
from llmc.compiler.targets.cpu import target as cpu
from llmc.compiler.targets.cpu.kernels import builder
from llmc.compiler.targets.cpu.kernels.codegen import llvm_text
from llmc.compiler.targets.cpu.target import TARGETS, enable, native_target, runs_here
from llmc.cpu_levels import NATIVE_TARGET, PRODUCT_LEVELS, TARGET_LEVELS
from llmc.runtime.binding import Artifact, Engine, LlmcError, Replayer
from llmc.runtime.binding.handle import library
from llmc.runtime.binding.library import library_candidates
from llmc.runtime.graphs_file import read_graphs

from support.artifacts import TinyArtifact
from support.compiled import Pages, compile_tiny, replay
from support.cpu_level import machine_level
from support.lower_levels import lower_levels
from support.marks import rare
from support.tiny_models import make_tiny_model

pytestmark = pytest.mark.native
LADDER = "prefill=[4]x[12],decode=[4]x[64]"  # one row tile, so few kernels
AVX512_BF16_LEVEL, AMX_LEVEL = 4, 5


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), "qwen3", head_dim=24)


@pytest.fixture(scope="module")
def text() -> list[int]:
    return [int(t) for t in np.random.default_rng(2).integers(3, 515, 40)]


def disassembly(library: Path) -> str:
    tool = shutil.which("objdump") or shutil.which("llvm-objdump")
    if tool is None:
        pytest.skip("no objdump")
    return subprocess.run([tool, "-d", str(library)], check=True, capture_output=True, text=True).stdout


# float32 differs by rounding only. bf16 keeps 8 bits of mantissa, float16 11: weights and activations round by up to
# 2^-9 or 2^-12 each, through 3 layers.
@pytest.mark.parametrize(("dtype", "bound"), [("f32", 1e-4), ("bf16", 3e-2), rare("f16", 4e-3)])
def test_x86_64_v3(dtype: str, bound: float, model: Path, text: list[int], tmp_path: Path) -> None:
    artifact = compile_tiny(
        model, tmp_path / "out", tmp_path / "cache", buckets=LADDER, dtype=dtype, target="x86-64-v3"
    )
    assert artifact.info.target_level == 1
    reference = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        expected = reference(torch.tensor([text])).logits[0].numpy()
    graphs = {graph.phase: index for index, graph in enumerate(artifact.graphs())}
    replayer = Replayer(artifact, num_threads=2, num_blocks=16)
    pages = Pages(16, artifact.info.block_size)
    # Two prompts ragged in one graph, then a token of each, then the rest of the first in one chunk.
    rows = list(replay(replayer, graphs["prefill"], pages, [(0, text[:17], 0), (1, text[:9], 0)]))
    rows += list(replay(replayer, graphs["decode"], pages, [(0, text[17:18], 17), (1, text[9:10], 9)]))
    rows += list(replay(replayer, graphs["prefill"], pages, [(0, text[18:], 18)]))
    wanted = expected[[16, 8, 17, 9, 39]]
    assert np.abs(np.array(rows) - wanted).max() / np.abs(wanted).max() < bound
    code = disassembly(tmp_path / "out" / "kernels.so")
    assert re.search(r"\bvfn?madd\d+ps\b", code)
    assert "%zmm" not in code
    assert "%k1" not in code
    if dtype == "f32":
        with Engine(artifact, num_threads=2) as engine:
            engine.submit(text[:9], temperature=0.0, max_tokens=40, ignore_eos=True)
            while engine.step():
                pass
            ids = [event.token_id for event in engine.poll() if event.kind == "token"]
        with torch.no_grad():
            best = reference(torch.tensor([text[:9] + ids])).logits[0].argmax(-1)
        assert ids == best[8:-1].tolist()


@pytest.mark.parametrize(("target", "level"), [("znver4", AVX512_BF16_LEVEL), ("sapphirerapids", AMX_LEVEL)])
def test_an_artifact_demands_what_its_target_has(target: str, level: int, model: Path, tmp_path: Path) -> None:
    report = compile_model(
        CompileConfig(
            model=model,
            output=tmp_path / "out",
            cache_dir=tmp_path / "cache",
            buckets="prefill=[1]x[1],decode=[1]x[64]",
            dtype="bf16",
            target=target,
        )
    )
    assert report.target == target
    code = disassembly(tmp_path / "out" / "kernels.so")
    assert ("vdpbf16ps" in code) == (level == AVX512_BF16_LEVEL)
    assert ("tdpbf16ps" in code) == ("tmm" in code) == (level == AMX_LEVEL)
    assert read_graphs(tmp_path / "out").target.level == level
    if runs_here(TARGETS[target]):
        assert Artifact(tmp_path / "out").info.target_level == level
        return
    with pytest.raises(LlmcError, match="this CPU has") as caught, Artifact(tmp_path / "out") as opened:
        Replayer(opened)
    assert caught.value.name == "unsupported_target"
    assert "\n" not in str(caught.value)


def test_levels_follow_from_the_instruction_sets() -> None:
    assert {name: target.isa_level for name, target in TARGETS.items()} == TARGET_LEVELS
    for target in TARGETS.values():
        withheld = {name.removeprefix("-") for name in target.mattr}
        assert withheld.isdisjoint(target.instruction_sets)
        assert ("amx-tile" in withheld) == (target.isa_level < AMX_LEVEL)
        assert target.int8_tiles == target.bf16_tiles == (target.isa_level >= AMX_LEVEL)
        assert target.bf16_dot == (target.isa_level == AVX512_BF16_LEVEL)
        assert (target.bf16_dot or target.bf16_tiles) == (target.isa_level >= PRODUCT_LEVELS["bf16"])
        assert target.int8_dot == (target.isa_level >= PRODUCT_LEVELS["int8"])


# (target, type, operation, the instruction that LLVM has for it on that CPU outside the target's instruction sets)
TEMPTATIONS = [
    ("icelake-server", "<64 x i8>", "lshr {t} %v, splat (i8 3)", "gf2p8affineqb"),
    ("znver4", "<64 x i8>", "call {t} @llvm.ctpop.v64i8({t} %v)", "vpopcntb"),
    ("sapphirerapids", "<32 x half>", "fadd {t} %v, %v", "vaddph"),
]


@pytest.mark.parametrize(("name", "kind", "operation", "instruction"), TEMPTATIONS)
def test_code_keeps_to_the_instruction_sets(name: str, kind: str, operation: str, instruction: str) -> None:
    target = TARGETS[name]
    helper = f"""
declare <64 x i8> @llvm.ctpop.v64i8(<64 x i8>)
define i32 @llmc_tempt(ptr %p) #0 {{
  %v = load {kind}, ptr %p, align 1
  %r = {operation.format(t=kind)}
  store {kind} %r, ptr %p, align 1
  ret i32 0
}}
attributes #0 = {{ alwaysinline nounwind "target-cpu"="{target.mcpu}" }}
"""
    kernel = builder.Kernel("tempting", [("x", "float32")], helper)
    with kernel as k:
        builder.do("tempt", builder.at(k["x"], 0))
    func = kernel.function()
    unbound = SimpleNamespace(mcpu=target.mcpu, mattr=())
    assert instruction in llvm_text(func, unbound, "asm")  # type: ignore[arg-type]
    bound = llvm_text(func, target, "asm")
    assert instruction not in bound
    assert "tempting:" in bound


CPUS = [
    ("GenuineIntel", "sapphirerapids", "sapphirerapids"),
    ("GenuineIntel", "sapphirerapids without AMX", "icelake-server"),
    ("GenuineIntel", "sapphirerapids without AMX-INT8", "icelake-server"),
    ("GenuineIntel", "cooperlake", "cooperlake"),
    ("AuthenticAMD", "cooperlake", "znver4"),
    ("GenuineIntel", "cascadelake", "icelake-server"),
    ("GenuineIntel", "skylake-avx512", "x86-64-v4"),
    ("AuthenticAMD", "haswell", "x86-64-v3"),
]
AVX2_FLAGS = "fpu sse4_2 avx avx2 fma f16c bmi1 bmi2 abm movbe popcnt"
AVX512_FLAGS = f"{AVX2_FLAGS} avx512f avx512bw avx512cd avx512dq avx512vl"
FLAGS = {
    "haswell": AVX2_FLAGS,
    "skylake-avx512": AVX512_FLAGS,
    "cascadelake": f"{AVX512_FLAGS} avx512_vnni",
    "cooperlake": f"{AVX512_FLAGS} avx512_vnni avx512_bf16",
    "sapphirerapids without AMX": f"{AVX512_FLAGS} avx512_vnni avx512_bf16 avx512_fp16",
    "sapphirerapids without AMX-INT8": f"{AVX512_FLAGS} avx512_vnni avx512_bf16 avx512_fp16 amx_tile amx_bf16",
    "sapphirerapids": f"{AVX512_FLAGS} avx512_vnni avx512_bf16 avx512_fp16 amx_tile amx_bf16 amx_int8",
}


@pytest.mark.parametrize(("vendor", "cpu", "expected"), CPUS)
def test_native_target(vendor: str, cpu: str, expected: str, tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\nvendor_id\t: {vendor}\nflags\t\t: {FLAGS[cpu]}\n")
    assert native_target(str(cpuinfo)).name == expected


def test_enabling_what_this_machine_has() -> None:
    enable(native_target())
    if native_target().int8_tiles:
        enable(TARGETS["sapphirerapids"])
    if "amx_tile" not in Path("/proc/cpuinfo").read_text():
        with pytest.raises(TargetError, match="does not let this process use AMX, which sapphirerapids needs"):
            enable(TARGETS["sapphirerapids"])


def test_a_cpu_without_avx2_is_refused(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"vendor_id : GenuineIntel\nflags : {AVX2_FLAGS.replace('avx2', '')}\n")
    with pytest.raises(TargetError, match="lacks AVX2"):
        native_target(str(cpuinfo))


def test_every_lower_level_has_a_target() -> None:
    assert lower_levels(1) == []
    assert lower_levels(AMX_LEVEL) == ["x86-64-v3", "x86-64-v4", "icelake-server", "cooperlake"]


def test_compiler_and_runtime_see_the_same_machine() -> None:
    assert max(target.isa_level for target in TARGETS.values() if runs_here(target)) == machine_level()
    assert runs_here(native_target())


def test_the_machine_is_taken_for_a_lesser_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_cpu", lambda _=None: ("AuthenticAMD", frozenset(FLAGS["cooperlake"].split())))
    monkeypatch.setenv(NATIVE_TARGET, "")
    assert native_target().name == "znver4"
    for name, runs in (("haswell", 2), ("icelake-server", 5)):
        monkeypatch.setenv(NATIVE_TARGET, name)
        assert native_target() == TARGETS[name]
        assert sum(map(runs_here, TARGETS.values())) == runs
    for name in ("sapphirerapids", "z80"):
        monkeypatch.setenv(NATIVE_TARGET, name)
        with pytest.raises(
            TargetError, match=f"LLMC_NATIVE_TARGET is '{name}'; .* one that this CPU runs: x86-64-v3, "
        ):
            native_target()
        with pytest.raises(TargetError, match="LLMC_NATIVE_TARGET"):
            runs_here(TARGETS["x86-64-v3"])


def test_the_runtime_keeps_to_the_level_too(tiny_artifact: TinyArtifact) -> None:
    before = machine_level()
    try:
        library().llmc_machine_limit_isa_level(0)
        assert machine_level() == 0
        artifact = Artifact(tiny_artifact.artifact)
        with pytest.raises(LlmcError, match=r"this CPU has less than x86-64-v3 \(level 0\)") as caught:
            Replayer(artifact)
        assert caught.value.name == "unsupported_target"
    finally:
        library().llmc_machine_limit_isa_level(before)
    Replayer(artifact, num_threads=1).close()
    artifact.close()


@pytest.mark.parametrize(("value", "expected"), [("haswell", "1"), ("z80", "LLMC_NATIVE_TARGET is 'z80'; unset it")])
def test_the_environment_is_the_default_of_the_level(value: str, expected: str) -> None:
    code = (
        "from llmc.runtime.binding.handle import library\n"
        "try: print(library().llmc_machine_get_isa_level())\nexcept Exception as e: print(e)"
    )
    environment = {**os.environ, NATIVE_TARGET: value}
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, env=environment)
    assert done.stdout.startswith(expected), done.stderr


@pytest.mark.skipif(platform.machine() != "x86_64", reason="tile registers are of x86-64")
def test_the_probe_of_limits_has_loops_of_tile_products() -> None:
    library = next(path for path in library_candidates() if path.is_file())
    code = disassembly(library)
    assert [code.count(name) for name in ("tdpbf16ps", "tdpbusd")] == [4, 4]
