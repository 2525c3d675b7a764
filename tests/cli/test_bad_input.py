"""Bad input to `llmc compile` and `llmc run`: one sentence with the offending value, the right exit code, no damage."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from llmc.cli import main as cli
from llmc.graphs_format import SECTIONS
from llmc.runtime.binding import Artifact

from support.artifacts import TinyArtifact
from support.damage import flip, keep, snapshot
from support.failing import edit_config, fails
from support.paths import ROOT

SMALL = "prefill=1x16,decode=1x64"


@pytest.fixture
def model(tiny_artifact: TinyArtifact, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_artifact.model, tmp_path / "model")


@pytest.fixture
def artifact(tiny_artifact: TinyArtifact, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_artifact.artifact, tmp_path / "artifact")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt_token_ids": [5, 6, 7]}\n')
    return path


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
    "no config": (lambda m: (m / "config.json").unlink(), "nor a model directory (no config.json)"),
    "empty config": (lambda m: keep(m / "config.json", 0), "config.json is not valid JSON"),
    "truncated config": (lambda m: keep(m / "config.json", 90), "config.json is not valid JSON"),
    "config of zeros": (lambda m: (m / "config.json").write_bytes(b"\0" * 50), "config.json is not valid JSON"),
    "config is a list": (lambda m: (m / "config.json").write_text("[]"), "JSON list"),
    "unknown model_type": (lambda m: edit_config(m, model_type="gpt5"), "'gpt5'"),
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


def test_a_model_that_writes_needs_decode_buckets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = ROOT / "examples" / "tiny-english"
    fails(capsys, 1, ["compile", model, "-o", tmp_path / "out", "--buckets", "prefill=1x16"], "no decode buckets")
    assert not (tmp_path / "out").exists()
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
    "other version": (lambda a: patch_graphs(a, 8, 99), "version 99"),
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


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--max-num-seqs", "99"), "--max-num-seqs is 99 but"),
        (("--kv-bytes", "1"), "--kv-bytes is 1 but"),
        (("--kv-bytes", "500TiB"), "--kv-bytes is 549755813888000; use at most"),
        (("--threads", "9999"), "--threads is '9999'; use"),
        (("--swap-space", "1"), "leave the swap space out"),
    ],
)
def test_the_engine_names_flags(
    artifact: Path, prompts: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, str], says: str
) -> None:
    """Its errors have the names of the API, which the command line does not know."""
    fails(capsys, 1, ["run", artifact, "--prompts", prompts, *flags], says)


@pytest.mark.parametrize("command", ["run", "serve"])
@pytest.mark.parametrize(
    ("flag", "value", "why"),
    [
        ("--cpu-offload-gib", "4", "4.0 has no effect: the artifact is for a CPU"),
        ("--device-number", "0", "0 has no effect: the artifact is for a CPU"),
        ("--steps-in-flight", "2", "2 has no effect: the artifact has no ranks"),
        ("--overlap-sums", "off", "off has no effect: the artifact has no ranks"),
    ],
)
def test_flags_without_effect_are_refused(
    artifact: Path, capsys: pytest.CaptureFixture[str], command: str, flag: str, value: str, why: str
) -> None:
    prompts = ("--prompt", "a") if command == "run" else ("--port", "0")
    fails(capsys, 2, [command, artifact, *prompts, flag, value], why, flag)


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


@pytest.mark.parametrize("arguments", [["--port", "99999"], ["--port=99999"], ["--port", "80a"]])
def test_the_value_of_a_flag_is_named_once(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "nowhere", *arguments]) == 2
    value = arguments[-1].removeprefix("--port=")
    assert capsys.readouterr().err.count(value) == 1


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


def test_an_artifact_that_is_collected_as_soon_as_it_is_compiled(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    compiled = subprocess.CompletedProcess([], 0, f"{gone}\n")
    monkeypatch.setattr(subprocess, "run", lambda *command, **options: compiled)
    for command in ("serve", "warmup"):
        fails(capsys, 1, [command, model], f"{gone} was removed as soon as it was compiled: stop `llmc cache gc`")
