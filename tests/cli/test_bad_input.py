"""Bad input to `llmc compile` and `llmc run`: one sentence with the offending value, the right exit code, no damage."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from llmc.cli import main as cli
from llmc.compiler import pipeline
from llmc.graphs_format import SECTIONS, VERSION
from llmc.runtime.binding import Artifact

from support.artifacts import TINY_LADDER, TinyArtifact
from support.failing import edit_config, fails
from support.manifests import edit_manifest

SMALL = "prefill=1x16,decode=1x64"


@pytest.fixture
def model(tiny_artifact: TinyArtifact, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_artifact.model, tmp_path / "model")


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture
def artifact(tiny_artifact: TinyArtifact, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_artifact.artifact, tmp_path / "artifact")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt_token_ids": [5, 6, 7]}\n')
    return path


def keep(path: Path, count: int) -> None:
    path.write_bytes(path.read_bytes()[:count])


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


def become_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def become_shards(model: Path, shard: str) -> None:
    """The weights of a model become those that an index names."""
    (model / "model.safetensors").unlink()
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"lm_head.weight": shard}}))


def patch_graphs(artifact: Path, offset: int, value: int) -> None:
    """Overwrites a u32 of graphs.bin."""
    data = bytearray((artifact / "graphs.bin").read_bytes())
    struct.pack_into("<I", data, offset, value)
    struct.pack_into("<I", data, 28, zlib.crc32(data[32:], zlib.crc32(data[:28])))
    (artifact / "graphs.bin").write_bytes(data)


def patch_level(artifact: Path, level: int) -> None:
    """Has the artifact demand another level of the device."""
    entry = 64 + 24 * (SECTIONS["target"] - 1)
    (offset,) = struct.unpack_from("<Q", (artifact / "graphs.bin").read_bytes(), entry + 8)
    patch_graphs(artifact, offset + 24, level)


# ---- models ----------------------------------------------------------------------------------------------------

MODEL_DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no directory": (shutil.rmtree, "model"),
    "no config": (lambda m: (m / "config.json").unlink(), "config.json does not exist"),
    "empty config": (lambda m: keep(m / "config.json", 0), "config.json is not valid JSON"),
    "truncated config": (lambda m: keep(m / "config.json", 90), "config.json is not valid JSON"),
    "config of zeros": (lambda m: (m / "config.json").write_bytes(b"\0" * 50), "config.json is not valid JSON"),
    "config is a list": (lambda m: (m / "config.json").write_text("[]"), "JSON list"),
    "unknown model_type": (lambda m: edit_config(m, model_type="gpt2"), "'gpt2'"),
    "hidden_size is text": (lambda m: edit_config(m, hidden_size="wide"), "'wide'"),
    "negative layers": (lambda m: edit_config(m, num_hidden_layers=-3), "-3"),
    "other vocabulary": (lambda m: edit_config(m, vocab_size=999), "999"),
    "no weights": (lambda m: (m / "model.safetensors").unlink(), "model.safetensors"),
    "empty weights": (lambda m: keep(m / "model.safetensors", 0), "model.safetensors is empty"),
    "weights of 5 bytes": (lambda m: keep(m / "model.safetensors", 5), "truncated or corrupt"),
    "weights without data": (lambda m: keep(m / "model.safetensors", 4000), "truncated or corrupt"),
    "last byte missing": (lambda m: keep(m / "model.safetensors", -1), "truncated or corrupt"),
    "flipped header": (lambda m: flip(m / "model.safetensors", 8), "truncated or corrupt"),
    "huge header": (lambda m: flip(m / "model.safetensors", 6), "truncated or corrupt"),
    "weights are a directory": (
        lambda m: become_folder(m / "model.safetensors"),
        "cannot be read",
    ),
    "index without shards": (
        lambda m: become_shards(m, "a.safetensors"),
        "a.safetensors does not exist",
    ),
    "shard outside": (
        lambda m: become_shards(m, "../x.safetensors"),
        "'../x.safetensors'",
    ),
}


@pytest.mark.parametrize("damage", list(MODEL_DAMAGE))
def test_damaged_model(
    damage: str, model: Path, tiny_artifact: TinyArtifact, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    apply, fragment = MODEL_DAMAGE[damage]
    apply(model)
    output = tmp_path / "out"
    argv = ["compile", model, "-o", output, "--buckets", SMALL, "--no-tokenizer", "--cache-dir", tiny_artifact.cache]
    # Damage is found before anything is traced or compiled.
    fails(capsys, 1, argv, fragment)
    assert not list(tmp_path.glob("out*"))


# ---- flags -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "fragment"),
    [
        ("", "empty"),
        ("garbage", "'garbage'"),
        ("prefill=1x16", "no decode"),
        ("prefill=0x16,decode=1x64", "0"),
        ("prefill=1x-5,decode=1x64", "-5"),
        ("prefill=1x16,decode=99999999999999999999x64", "99999999999999999999"),
        ("prefill=1x99999999999,decode=1x64", "99999999999"),
        ("prefill=1:1:4096x1:1:4096,decode=1x64", "limit is 4096"),
        ("prefill=1:0:9x16,decode=1x64", "step 0"),
        ("prefill=9:1:2x16,decode=1x64", "9"),
        ("prefill=[1,1]x16,decode=1x64", "twice"),
        ("prefill=[1,2x16,decode=1x64", "brackets"),
        ("chat=1x16,decode=1x64", "'chat'"),
        ("/nowhere/buckets.toml", "/nowhere/buckets.toml"),
    ],
)
def test_absurd_buckets(spec: str, fragment: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fails(capsys, 2, ["compile", "model", "-o", tmp_path / "out", "--buckets", spec], fragment)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("flags", "fragment"),
    [
        (["--bogus"], "--bogus"),
        (["--target", "z80"], "'z80'"),
        (["--dtype", "f8"], "'f8'"),
        (["--block-size", "24"], "24"),
        (["--max-num-seqs", "5000"], "5000"),
        (["--max-model-len", "100000000"], "100000000"),
        (["--max-model-len", "0"], "0"),
        (["--jobs", "-1"], "-1"),
        (["--jobs", "two"], "'two'"),
    ],
)
def test_wrong_compile_flags(
    flags: list[str], fragment: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fails(capsys, 2, ["compile", model, "-o", tmp_path / "out", *flags], fragment)
    assert not list(tmp_path.glob("out*"))


# ---- artifacts -------------------------------------------------------------------------------------------------

ARTIFACT_DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "other version": (lambda a: patch_graphs(a, 8, 7), "version 7"),
    "other magic": (lambda a: flip(a / "graphs.bin", 0), "graphs.bin"),
    "flipped graphs": (lambda a: flip(a / "graphs.bin", 2000), "graphs.bin"),
    "truncated graphs": (lambda a: keep(a / "graphs.bin", 3000), "graphs.bin"),
    "empty graphs": (lambda a: keep(a / "graphs.bin", 0), "graphs.bin"),
    "no weights": (lambda a: (a / "weights.safetensors").unlink(), "weights.safetensors"),
    "truncated weights": (lambda a: keep(a / "weights.safetensors", -64), "weights.safetensors"),
    "empty weights": (lambda a: keep(a / "weights.safetensors", 0), "weights.safetensors"),
    "no kernels": (lambda a: (a / "kernels.so").unlink(), "kernels.so"),
    "truncated kernels": (lambda a: keep(a / "kernels.so", 9000), "kernels.so"),
    "flipped kernels": (lambda a: flip(a / "kernels.so", 9000), "kernels.so"),
    "flipped header of the weights": (lambda a: flip(a / "weights.safetensors", 20), "weights.safetensors"),
    "kernels are text": (lambda a: (a / "kernels.so").write_text("hello"), "kernels.so"),
    "graphs are a directory": (lambda a: become_folder(a / "graphs.bin"), "graphs.bin"),
    "no graphs": (lambda a: (a / "graphs.bin").unlink(), "graphs.bin"),
}


@pytest.mark.parametrize("damage", list(ARTIFACT_DAMAGE))
def test_damaged_artifact(damage: str, artifact: Path, prompts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    apply, fragment = ARTIFACT_DAMAGE[damage]
    apply(artifact)
    before = snapshot(artifact)
    fails(capsys, 1, ["run", artifact, "--prompts", prompts], fragment, str(artifact))
    assert snapshot(artifact) == before


def test_artifact_for_another_isa(
    tiny_artifact: TinyArtifact, artifact: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    patch_level(artifact, 6)
    fails(capsys, 1, ["run", artifact, "--prompts", prompts], str(artifact))
    if "amx_tile" not in Path("/proc/cpuinfo").read_text():
        patch_level(artifact, 5)
        fails(capsys, 1, ["run", artifact, "--prompts", prompts], "AMX", "compile it for this machine")


@pytest.mark.slow
def test_compile_for_another_isa(
    tiny_artifact: TinyArtifact, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Artifact(tiny_artifact.artifact) as opened:
        runs_everything = opened.info.target_level >= 5
    output = tmp_path / "out"
    argv = [
        "compile",
        tiny_artifact.model,
        "-o",
        output,
        "--target",
        "sapphirerapids",
        "--buckets",
        "prefill=1x1,decode=1x16",
        "--no-tokenizer",
    ]
    assert cli.main([*map(str, argv), "--cache-dir", str(tiny_artifact.cache)]) == 0
    assert json.loads((output / "manifest.json").read_text())["target"]["name"] == "sapphirerapids"
    if not runs_everything:
        fails(capsys, 1, ["run", output, "--prompts", prompts], "AMX", "compile it for this machine")


# ---- requests --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "fragments"),
    [
        ({"prompt_token_ids": [5] * 64}, ("64 tokens", "max-model-len is 64")),
        ({"prompt_token_ids": [5] * 5000}, ("5000 tokens", "max-model-len is 64")),
        ({"prompt_token_ids": [5, 515]}, ("515", "0 to 514")),
        ({"prompt_token_ids": [5, -1]}, ("-1",)),
        ({"prompt_token_ids": [5, 1 << 70]}, (str(1 << 70),)),
        ({"prompt_token_ids": [5, 1.5]}, ("1.5",)),
        ({"prompt_token_ids": [True]}, ("True",)),
        ({"prompt_token_ids": []}, ("line 2", "non-empty")),
        ({"prompt_token_ids": "5 6"}, ("line 2",)),
        ({"text": "hello"}, ("line 2", "'text'")),
        ({"prompt": "needs a tokenizer"}, ("tokenizer.json is missing",)),
        (["prompt"], ("line 2", "not a JSON object")),
    ],
)
def test_bad_requests(
    line: object,
    fragments: tuple[str, ...],
    tiny_artifact: TinyArtifact,
    prompts: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with prompts.open("a") as file:
        file.write(json.dumps(line) + "\n")
    output = tmp_path / "results.jsonl"
    fails(capsys, 1, ["run", tiny_artifact.artifact, "--prompts", prompts, "--output", output], *fragments)
    # The good prompt before it did not run either.
    assert not output.exists() or not output.read_bytes()


def test_not_json_and_missing_paths(
    tiny_artifact: TinyArtifact, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fails(capsys, 1, ["run", tmp_path / "nowhere", "--prompts", prompts], "nowhere")
    fails(capsys, 1, ["run", tmp_path, "--prompts", prompts], "neither an artifact")
    fails(capsys, 1, ["run", tiny_artifact.artifact, "--prompts", tmp_path / "no.jsonl"], "no.jsonl")
    prompts.write_bytes(b'{"prompt": "\xff"}\n')
    fails(capsys, 1, ["run", tiny_artifact.artifact, "--prompts", prompts], "not UTF-8")
    prompts.write_text('{"prompt_token_ids": [1, 2\n')
    fails(capsys, 1, ["run", tiny_artifact.artifact, "--prompts", prompts], "line 1", "not valid JSON")


# ---- output ----------------------------------------------------------------------------------------------------


def compile_argv(tiny: TinyArtifact, output: Path) -> list[str]:
    options = ["--buckets", TINY_LADDER, "--dtype", "f32", "--no-tokenizer", "--cache-dir", tiny.cache]
    return [str(argument) for argument in ("compile", tiny.model, "-o", output, *options)]


def test_output_of_others_is_refused_untouched(
    tiny_artifact: TinyArtifact, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, file = tmp_path / "folder", tmp_path / "file"
    folder.mkdir()
    (folder / "thesis.tex").write_text("years of work")
    file.write_text("precious")
    before = snapshot(tmp_path)
    for output in (folder, file):
        fails(capsys, 1, compile_argv(tiny_artifact, output), str(output), "is not an llmc artifact")
    fails(capsys, 1, compile_argv(tiny_artifact, file / "below"), str(file / "below"))
    assert snapshot(tmp_path) == before
    # The model itself is not an artifact either.
    weights = (tiny_artifact.model / "model.safetensors").read_bytes()
    fails(capsys, 1, compile_argv(tiny_artifact, tiny_artifact.model), "is not an llmc artifact")
    assert (tiny_artifact.model / "model.safetensors").read_bytes() == weights


def test_artifact_is_replaced_also_through_a_link(tiny_artifact: TinyArtifact, artifact: Path, tmp_path: Path) -> None:
    edit_manifest(artifact, format_version=2, kernels=[])
    link = tmp_path / "link"
    link.symlink_to(artifact)
    opened = Artifact(artifact)  # a reader of the old one keeps it
    assert cli.main(compile_argv(tiny_artifact, link)) == 0
    assert link.is_symlink()
    assert json.loads((artifact / "manifest.json").read_text())["format_version"] == VERSION
    assert opened.info.vocab_size == 515
    assert sorted(p.name for p in tmp_path.iterdir()) == ["artifact", "link"]


def test_compiling_again_mends_damaged_weights(tiny_artifact: TinyArtifact, artifact: Path) -> None:
    weights = artifact / "weights.safetensors"
    good = weights.read_bytes()
    before = weights.stat().st_ino
    assert cli.main(compile_argv(tiny_artifact, artifact)) == 0
    assert weights.stat().st_ino == before  # whole ones are kept

    def rot() -> None:
        times = weights.stat()
        flip(weights, len(good) - 100)
        os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))

    damages: list[Callable[[], object]] = [
        lambda: keep(weights, -64),
        lambda: flip(weights, len(good) - 100),
        rot,
        weights.unlink,
    ]
    for damage in damages:
        damage()
        assert cli.main(compile_argv(tiny_artifact, artifact)) == 0
        assert weights.read_bytes() == good


def test_killed_compilation_leaves_nothing_broken(tiny_artifact: TinyArtifact, tmp_path: Path) -> None:
    output = tmp_path / "out"
    # Killed with everything but the manifest written, and the staging directory there.
    code = (
        "import os, signal, sys\n"
        "from llmc.cli.main import main\n"
        "from llmc.compiler import pipeline\n"
        "def die(*_): os.kill(os.getpid(), signal.SIGKILL)\n"
        "pipeline.write_manifest = die\n"
        "main(sys.argv[1:])\n"
    )
    cache = shutil.copytree(tiny_artifact.cache, tmp_path / "cache")
    argv = compile_argv(TinyArtifact(tiny_artifact.model, tiny_artifact.artifact, cache), output)
    killed = subprocess.run([sys.executable, "-P", "-c", code, *argv], capture_output=True, timeout=60, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not output.exists()
    (left,) = tmp_path.glob("out.tmp-*")
    assert not (left / "manifest.json").exists()
    bystanders = [tmp_path / "out.tmp-notes", tmp_path / "out2.tmp-00000000", tmp_path / "out.tmp-00000000"]
    for folder in bystanders:
        folder.mkdir()
        (folder / "precious.txt").write_text("x")
    assert cli.main(["cache", "verify", "--cache-dir", str(cache)]) == 0
    assert cli.main(argv) == 0
    assert not left.exists()
    assert all((folder / "precious.txt").is_file() for folder in bystanders)
    for name in ("graphs.bin", "weights.safetensors", "kernels.so"):
        assert (output / name).read_bytes() == (tiny_artifact.artifact / name).read_bytes()


@pytest.mark.parametrize("step", ["write_weights", "graphs_bin", "write_manifest"])
def test_killed_compilation_leaves_the_old_artifact(
    step: str, tiny_artifact: TinyArtifact, artifact: Path, tmp_path: Path
) -> None:
    shutil.rmtree(tiny_artifact.cache / "packed", ignore_errors=True)  # so that weights are not reused
    before = snapshot(artifact)
    code = (
        "import os, signal, sys\n"
        "from llmc.cli.main import main\n"
        "from llmc.compiler import pipeline\n"
        f"assert hasattr(pipeline, {step!r})\n"
        f"pipeline.{step} = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "main(sys.argv[1:])\n"
    )
    argv = compile_argv(tiny_artifact, artifact)
    killed = subprocess.run([sys.executable, "-P", "-c", code, *argv], capture_output=True, timeout=120, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert snapshot(artifact) == before
    with Artifact(artifact) as opened:
        opened.verify()
    assert len(list(tmp_path.glob("artifact.tmp-*"))) == 1
    assert cli.main(argv) == 0
    assert [p.name for p in tmp_path.iterdir()] == ["artifact"]


def test_staging_of_a_living_compilation_stays(tiny_artifact: TinyArtifact, tmp_path: Path) -> None:
    from llmc.compiler.store.staging import staged_directory

    output = tmp_path / "out"
    with staged_directory(output) as first:
        (first / "graphs.bin").write_text("first")
        (first / "manifest.json").write_text('{"files": []}')
        with staged_directory(output) as second:
            (second / "graphs.bin").write_text("second")
            (second / "manifest.json").write_text('{"files": []}')
        assert (output / "graphs.bin").read_text() == "second"
        assert first.is_dir()
    assert (output / "graphs.bin").read_text() == "first"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_replacing_works_without_atomic_exchange(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from llmc.compiler.store import staging

    monkeypatch.setattr(staging, "_exchange", lambda one, other: False)
    for text in ("first", "second"):
        with staging.staged_directory(tmp_path / "out") as staged:
            (staged / "graphs.bin").write_text(text)
            (staged / "manifest.json").write_text('{"files": []}')
    assert (tmp_path / "out" / "graphs.bin").read_text() == "second"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


# ---- full disk -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", ["write_weights", "copy_files", "write_manifest"])
def test_full_disk_leaves_the_old_artifact(
    step: str,
    tiny_artifact: TinyArtifact,
    artifact: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(pipeline, step, full)
    shutil.rmtree(tiny_artifact.cache / "packed", ignore_errors=True)  # so that weights are not reused
    before = snapshot(artifact)
    for output in (artifact, tmp_path / "new"):
        fails(capsys, 1, compile_argv(tiny_artifact, output), "No space left on device", str(output), "free space")
    assert snapshot(artifact) == before
    assert [p.name for p in tmp_path.iterdir()] == ["artifact"]


def test_limit_on_file_size_leaves_the_old_artifact(
    tiny_artifact: TinyArtifact, artifact: Path, tmp_path: Path
) -> None:
    """The system itself refuses the write, wherever tests run."""
    weights = artifact / "weights.safetensors"
    shutil.rmtree(tiny_artifact.cache / "packed", ignore_errors=True)  # so that weights are not reused
    before = snapshot(artifact)
    code = (
        "import resource, sys\n"
        "from llmc.cli.main import main\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({weights.stat().st_size // 2},) * 2)\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    argv = [sys.executable, "-P", "-c", code, *compile_argv(tiny_artifact, artifact)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"llmc: error: cannot write {artifact}: File too large"), done.stderr
    assert snapshot(artifact) == before
    assert [p.name for p in tmp_path.iterdir()] == ["artifact"]


def test_full_file_system(tiny_artifact: TinyArtifact, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", disk], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("cannot mount a tmpfs here")
    try:
        fails(capsys, 1, compile_argv(tiny_artifact, disk / "out"), "No space left on device", str(disk / "out"))
        assert not list(disk.iterdir())
        cacheless = [*compile_argv(tiny_artifact, tmp_path / "out")[:-1], str(disk / "cache")]
        (disk / "ballast").write_bytes(b"\0" * (400 << 10))
        fails(capsys, 1, cacheless, "No space left on device", "LLMC_CACHE_DIR")
        assert not list(tmp_path.glob("out*"))
    finally:
        subprocess.run(["umount", disk], check=True)
