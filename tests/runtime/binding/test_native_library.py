"""libllmc.so stands alone: its symbols, the C example built against it, and no compiler stack where it serves."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from llmc.runtime.binding import Artifact, Engine
from llmc.runtime.binding.library import library_candidates, load_library

from support.artifacts import TINY_LADDER, TinyArtifact
from support.paths import ROOT

INCLUDE = ROOT / "runtime" / "native" / "include"
PROMPTS = ([5], [7, 300, 12, 44], [int(t) for t in np.random.default_rng(2).integers(3, 515, 40)])
HEAVY = ("torch", "tvm", "transformers")


@pytest.fixture(scope="module")
def library() -> Path:
    return next(path for path in library_candidates() if path.is_file())


def dynamic_symbols(library: Path, *flags: str) -> set[str]:
    listed = subprocess.run(["nm", "-D", "-P", *flags, library], capture_output=True, text=True, check=True).stdout
    return {line.split()[0].split("@")[0] for line in listed.splitlines()}


def needed(library: Path) -> set[str]:
    listed = subprocess.run(["readelf", "-dW", library], capture_output=True, text=True, check=True).stdout
    return set(re.findall(r"\(NEEDED\).*\[(.+)\]", listed))


def greedy(artifact: Path, prompt: list[int], max_tokens: int) -> list[int]:
    with Artifact(artifact) as opened, Engine(opened) as engine:
        engine.submit(prompt, temperature=0.0, max_tokens=max_tokens)
        tokens = []
        while engine.step():
            tokens += [event.token_id for event in engine.poll() if event.kind == "token"]
    return tokens


def test_another_library_is_refused_in_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "libllmc.so").write_text("not a library")
    for path in (tmp_path / "libllmc.so", Path("/lib/x86_64-linux-gnu/libm.so.6")):
        monkeypatch.setenv("LLMC_LIBRARY", str(path))
        if path.is_file():
            with pytest.raises(ImportError, match=r"is not the library of llmc \(.*unset LLMC_LIBRARY"):
                load_library()


def test_exports_are_exactly_the_header(library: Path) -> None:
    header = re.sub(r"/\*.*?\*/", "", (INCLUDE / "llmc" / "llmc.h").read_text(), flags=re.DOTALL)
    declared = re.findall(r"^LLMC_API\s+[^;(]*?(\w+)\s*\(", header, flags=re.MULTILINE)
    assert len(declared) == len(set(declared)) == header.count("LLMC_API ") - header.count("define LLMC_API ")
    assert {"llmc_version", "llmc_artifact_open", "llmc_engine_step"} < set(declared)
    assert dynamic_symbols(library, "--defined-only") == set(declared)


def test_nothing_but_the_system_is_needed(library: Path) -> None:
    system = {"libc.so.6", "libm.so.6", "libstdc++.so.6", "libgcc_s.so.1", "ld-linux-x86-64.so.2"}
    assert needed(library) <= system | {"libpthread.so.0", "libdl.so.2"}
    foreign = re.compile(r"^(TVM|tvm|Py[A-Z_]|_Py)|N3tvm|NK3tvm|N2at\d|N3c10|N5torch|torch_|omp_|GOMP_|__kmp", re.ASCII)
    assert not [name for name in dynamic_symbols(library, "--undefined-only") if foreign.search(name)]


def test_kernels_need_libc_only(tiny_artifact: TinyArtifact) -> None:
    kernels = tiny_artifact.artifact / "kernels.so"
    assert needed(kernels) <= {"libc.so.6", "libm.so.6"}
    assert not [n for n in dynamic_symbols(kernels, "--undefined-only") if re.search(r"tvm|torch|^_?Py", n, re.I)]


def build_example(library: Path, program: Path) -> None:
    build: list[str | Path] = [
        "cc",
        "-std=c99",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-I",
        INCLUDE,
        ROOT / "examples" / "embed.c",
    ]
    subprocess.run([*build, library, f"-Wl,-rpath,{library.parent}", "-o", program], check=True)


def test_c_example_generates_what_python_generates(library: Path, tiny_artifact: TinyArtifact, tmp_path: Path) -> None:
    program = tmp_path / "embed"
    build_example(library, program)
    for prompt in PROMPTS:
        arguments = [str(tiny_artifact.artifact), "20", *map(str, prompt)]
        done = subprocess.run([program, *arguments], capture_output=True, text=True, check=True, timeout=60)
        found = [int(token) for token in done.stdout.split()]
        assert found == greedy(tiny_artifact.artifact, prompt, 20)
        assert found
    refused = subprocess.run([program, tmp_path, "4", "1"], capture_output=True, text=True, check=False, timeout=60)
    assert refused.returncode == 1
    assert str(tmp_path) in refused.stderr
    numbers = {("4", "x"): "x", ("4", "7", "-1"): "-1", ("4", "5,6"): "5,6", ("4", ""): "",
               ("4", "4294967296"): "4294967296", ("0", "7"): "0", ("many", "7"): "many"}  # fmt: skip
    for words, wrong in numbers.items():
        command: list[str | Path] = [program, tiny_artifact.artifact, *words]
        refused = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        assert refused.returncode == 2
        assert f"'{wrong}' is not a whole number from" in refused.stderr
        assert not refused.stdout
    refused = subprocess.run(
        [program, tiny_artifact.artifact, "4", "99999"], capture_output=True, text=True, timeout=60
    )
    assert refused.returncode == 1
    assert "99999" in refused.stderr


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("valgrind") is None, reason="valgrind is not installed")
def test_c_example_is_clean_under_valgrind(
    library: Path, tiny_artifact: TinyArtifact, kernel_cache: Path, tmp_path: Path
) -> None:
    from support.compiled import compile_tiny

    program, artifact = tmp_path / "embed", tmp_path / "artifact"
    build_example(library, program)
    # valgrind knows no AVX-512.
    compile_tiny(
        tiny_artifact.model, artifact, kernel_cache, buckets=TINY_LADDER, dtype="f32", target="x86-64-v3"
    ).close()
    checks = ["--quiet", "--error-exitcode=9", "--leak-check=full", "--errors-for-leak-kinds=definite"]
    done = subprocess.run(
        ["valgrind", *checks, program, artifact, "8", "5", "7", "9"], capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert [int(token) for token in done.stdout.split()] == greedy(artifact, [5, 7, 9], 8)


def test_the_c_example_is_as_long_as_it_is_said_to_be() -> None:
    lines = (ROOT / "examples" / "embed.c").read_text().splitlines()
    said = re.search(r"/embed\.c\), (\d+) lines", (ROOT / "docs/getting-started.md").read_text())
    assert said is not None
    assert len(lines) == int(said[1])


def test_header_is_valid_cpp(tmp_path: Path) -> None:
    source = tmp_path / "use.cc"
    source.write_text("#include <llmc/llmc.h>\nint main() { return llmc_abi_version() != LLMC_ABI_VERSION; }\n")
    subprocess.run(["c++", "-Wall", "-Werror", "-pedantic", "-fsyntax-only", "-I", INCLUDE, source], check=True)


def loaded_after(code: str, *argv: str) -> str:
    """stdout of `code` in a fresh interpreter in which importing the compiler stack fails."""
    guard = (
        "import sys\n"
        f"for name in {HEAVY!r}: sys.modules[name] = None\n"
        f"{code}\n"
        f"assert not [m for m in sys.modules if m.split('.')[0] in {HEAVY!r} and sys.modules[m] is not None]\n"
        "assert not [m for m in sys.modules if m.startswith('llmc.compiler')]\n"
    )
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", guard, *argv], capture_output=True, text=True, env=environment, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_serving_from_python_needs_no_compiler(tiny_artifact: TinyArtifact) -> None:
    code = (
        "from llmc import LLM, SamplingParams\n"
        "with LLM(sys.argv[1]) as llm:\n"
        f"    out = llm.generate([{PROMPTS[1]}], SamplingParams(max_tokens=8, temperature=0.0))\n"
        "print(list(out[0].outputs[0].token_ids))"
    )
    found = json.loads(loaded_after(code, str(tiny_artifact.artifact)))
    assert found == greedy(tiny_artifact.artifact, PROMPTS[1], 8)


def test_llmc_run_needs_no_compiler(tiny_artifact: TinyArtifact, tmp_path: Path) -> None:
    prompts, results = tmp_path / "p.jsonl", tmp_path / "out.jsonl"
    prompts.write_text("".join(json.dumps({"prompt_token_ids": p}) + "\n" for p in PROMPTS))
    code = "from llmc.cli.main import main\nassert main(sys.argv[1:]) == 0"
    flags = ["--temperature", "0", "--max-tokens", "8", "--prompts", str(prompts), "--output", str(results)]
    loaded_after(code, "run", str(tiny_artifact.artifact), *flags)
    records = [json.loads(line) for line in results.read_text().splitlines()]
    assert [r["token_ids"] for r in records] == [greedy(tiny_artifact.artifact, p, 8) for p in PROMPTS]
