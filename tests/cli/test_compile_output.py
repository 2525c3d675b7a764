"""What `llmc compile` puts where: over which artifacts, beside which files, with which tokenizer and what warnings."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from llmc.buckets import Bucket
from llmc.cli import main as cli
from llmc.cli.render.compile_progress import progress_bar
from llmc.compiler import pipeline
from llmc.compiler.config import CompileConfig, CompileError
from llmc.compiler.extend import add_buckets
from llmc.compiler.pipeline import compile_model
from llmc.compiler.resolve import resolve
from llmc.compiler.store.bundle import create_bundle
from llmc.models.context import sound_scaling, trained_length
from llmc.models.read_config import load_config

from support.artifacts import TINY_LADDER, TinyArtifact
from support.compiled import assert_same_bytes
from support.manifests import edit_manifest
from support.paths import ROOT

ENGLISH = ROOT / "examples" / "tiny-english"


@pytest.fixture
def artifact(tiny_artifact: TinyArtifact, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_artifact.artifact, tmp_path / "artifact"))


@pytest.fixture
def model(tiny_artifact: TinyArtifact, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_artifact.model, tmp_path / "model"))


@pytest.fixture
def run(tiny_artifact: TinyArtifact, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Exit code and stderr of `llmc compile` with a cache that has every kernel of the tiny ladder."""

    def of(model: Path, output: Path, *options: str, tokenizer: bool = False) -> tuple[int, str]:
        argv = ["compile", str(model), "-o", str(output), "--cache-dir", str(tiny_artifact.cache), *options]
        given = {"--buckets": TINY_LADDER, "--dtype": "f32"}
        argv += [word for name, value in given.items() if name not in options for word in (name, value)]
        code = cli.main([*argv, *(() if tokenizer else ("--no-tokenizer",))])
        return code, capsys.readouterr().err

    return of


# ---- what is replaced ------------------------------------------------------------------------------------------


def test_the_same_model_and_options_are_made_again(
    run: Callable[..., tuple[int, str]], model: Path, artifact: Path, tiny_artifact: TinyArtifact
) -> None:
    # Files of another day in another place are the same model.
    assert run(model, artifact) == (0, "")
    assert_same_bytes(artifact, tiny_artifact.artifact)


@pytest.mark.parametrize(
    ("options", "differs"),
    [
        (("--buckets", "prefill=[1]x[16,32],decode=[1,2]x[64]"), r"\(buckets differ\)"),
        (("--buckets", "prefill=[1]x[16,32],decode=[1]x[64]"), r"\(max_num_seqs, buckets differ\)"),
        (("--quant", "w8a8"), r"\(weights differ\)"),
        (("--kv-dtype", "bf16"), r"\(kv_dtype differ\)"),
        (("--target", "x86-64-v3"), r"\(target differ\)"),
        (("--tune",), r"\(tuned differ\)"),
    ],
)
def test_other_options_are_refused_at_once(
    options: tuple[str, ...], differs: str, run: Callable[..., tuple[int, str]], model: Path, artifact: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("llmc.compiler.pipeline.build_kernels", lambda *_: pytest.fail("refused too late"))
    if "--target" in options:
        # Whatever this machine is.
        target = json.loads((artifact / "manifest.json").read_text())["target"]
        edit_manifest(artifact, target={**target, "name": "mine"})
    before = {file.name: file.read_bytes() for file in artifact.iterdir()}
    code, err = run(model, artifact, *options)
    assert code == 1
    assert re.search(rf"{artifact} is an artifact of another model or other options {differs}: add --overwrite", err)
    assert {file.name: file.read_bytes() for file in artifact.iterdir()} == before


def test_overwrite_replaces_another_artifact(run: Callable[..., tuple[int, str]], model: Path, artifact: Path) -> None:
    smaller = ("--buckets", "prefill=[1]x[16],decode=[1]x[64]")
    assert run(model, artifact, *smaller)[0] == 1
    assert run(model, artifact, *smaller, "--overwrite")[0] == 0
    assert json.loads((artifact / "manifest.json").read_text())["buckets"] == ["prefill:1x16", "decode:1x64"]


def test_other_weights_and_files_are_refused(
    run: Callable[..., tuple[int, str]], model: Path, artifact: Path, tiny_artifact: TinyArtifact
) -> None:
    file = model / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-2] ^= 1
    file.write_bytes(data)
    code, err = run(model, artifact)
    assert code == 1
    assert "(values of weights differ)" in err
    assert_same_bytes(artifact, tiny_artifact.artifact)
    shutil.copy(tiny_artifact.model / file.name, file)
    (model / "generation_config.json").write_text('{"temperature": 0.5}')
    code, err = run(model, artifact)
    assert code == 1
    assert "generation_config.json" in err
    (model / "generation_config.json").unlink()
    code, err = run(model, artifact)
    assert code == 1
    assert "(generation_config.json differ)" in err
    (model / "generation_config.json").write_text('{"temperature": 0.5}')
    assert run(model, artifact, "--overwrite")[0] == 0
    assert (artifact / "generation_config.json").read_text() == '{"temperature": 0.5}'


def test_a_copy_made_at_the_same_time_is_not_the_same_checkpoint(
    run: Callable[..., tuple[int, str]], model: Path, artifact: Path
) -> None:
    """Names, sizes and times of files are equal, their bytes are not."""
    assert run(model, artifact)[0] == 0
    other = model.with_name("other")
    shutil.copytree(model, other)  # with times
    file = other / "model.safetensors"
    times = file.stat()
    data = bytearray(file.read_bytes())
    data[-2] ^= 1
    file.write_bytes(data)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert run(other, artifact, "--overwrite")[0] == 0
    assert run(model, artifact)[0] == 1


# ---- what is never removed -------------------------------------------------------------------------------------


@pytest.mark.parametrize("precious", ["precious.txt", "src/main.c", "chat_template.jinja"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_files_that_no_manifest_lists_are_refused(
    precious: str, overwrite: bool, run: Callable[..., tuple[int, str]], model: Path, artifact: Path
) -> None:
    file = artifact / precious
    file.parent.mkdir(exist_ok=True)
    file.write_text("years of work")
    code, err = run(model, artifact, *(("--overwrite",) if overwrite else ()))
    assert code == 1
    named = precious.partition("/")[0]
    assert f"{artifact} holds {named}, which the manifest of the artifact there does not list" in err
    assert file.read_text() == "years of work"


@pytest.mark.parametrize("manifest", ["", "{}", "[]", '{"files": 3}', '{"files": [3]}', '{"files": ["precious.txt"'])
def test_what_only_looks_like_an_artifact_is_refused(
    manifest: str, run: Callable[..., tuple[int, str]], model: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    (output / "src").mkdir(parents=True)
    for name, text in {"graphs.bin": "", "manifest.json": manifest, "src/main.c": "int", "precious.txt": "x"}.items():
        (output / name).write_text(text)
    code, err = run(model, output, "--overwrite")
    assert code == 1
    assert "does not say which files are the artifact's" in err
    assert (output / "src" / "main.c").read_text() == "int"
    assert (output / "precious.txt").read_text() == "x"


def test_a_manifest_cannot_give_away_other_files(
    run: Callable[..., tuple[int, str]], model: Path, artifact: Path
) -> None:
    (artifact / "precious.txt").write_text("x")
    edit_manifest(artifact, files=["generation_config.json", "precious.txt"])
    code, err = run(model, artifact, "--overwrite")
    assert code == 1
    assert "holds precious.txt" in err
    assert (artifact / "precious.txt").read_text() == "x"


def test_adding_in_place_keeps_what_is_not_llmcs(artifact: Path, tiny_artifact: TinyArtifact, tmp_path: Path) -> None:
    (artifact / "notes").mkdir()
    (artifact / "notes" / "today.txt").write_text("years of work")
    (artifact / "link").symlink_to("nowhere")
    cache = Path(shutil.copytree(tiny_artifact.cache, tmp_path / "cache"))
    add_buckets(artifact, [Bucket("decode", 1, 32)], cache_dir=cache)
    assert (artifact / "notes" / "today.txt").read_text() == "years of work"
    assert (artifact / "link").is_symlink()
    # Into another directory goes the artifact alone, and over no other one.
    add_buckets(artifact, [Bucket("decode", 2, 32)], tmp_path / "new", cache_dir=cache)
    listed = set(json.loads((tmp_path / "new" / "manifest.json").read_text())["files"])
    assert {file.name for file in (tmp_path / "new").iterdir()} - listed == {
        "graphs.bin", "kernels.so", "manifest.json", "weights.safetensors"
    }  # fmt: skip
    add_buckets(artifact, [Bucket("decode", 2, 32)], tmp_path / "new", cache_dir=cache)
    with pytest.raises(CompileError, match=r"\(buckets differ\): add --overwrite"):
        add_buckets(artifact, [Bucket("decode", 2, 16)], tmp_path / "new", cache_dir=cache)
    add_buckets(artifact, [Bucket("decode", 2, 16)], tmp_path / "new", cache_dir=cache, overwrite=True)


def test_applying_a_bundle_follows_the_same_rules(
    model: Path, artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], tiny_artifact: TinyArtifact,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("LLMC_CACHE_DIR", str(tmp_path / "cache"))
    bundle = tmp_path / "b"
    create_bundle([artifact], bundle)
    argv = ["bundle", "apply", str(bundle), str(model), "-o", str(artifact)]
    assert cli.main(argv) == 1
    assert "tokenizer.json is missing" in capsys.readouterr().err
    assert cli.main([*argv, "--no-tokenizer"]) == 0
    assert_same_bytes(artifact, tiny_artifact.artifact)
    manifest = json.loads((artifact / "manifest.json").read_text())
    edit_manifest(artifact, buckets=manifest["buckets"][1:])
    assert cli.main([*argv, "--no-tokenizer"]) == 1
    assert "(buckets differ)" in capsys.readouterr().err
    assert cli.main([*argv, "--no-tokenizer", "--overwrite"]) == 0
    assert_same_bytes(artifact, tiny_artifact.artifact)
    (artifact / "precious.txt").write_text("x")
    assert cli.main([*argv, "--no-tokenizer", "--overwrite"]) == 1
    assert "holds precious.txt" in capsys.readouterr().err


# ---- the tokenizer ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("tokenizer.json", None, "is missing: add it, or compile with --no-tokenizer"),
        ("tokenizer.json", "{", "is not a tokenizer ("),
        ("tokenizer.json", '{"model": {}}', "is not a tokenizer ("),
        ("tokenizer_config.json", "[]", "is not a JSON object: correct it"),
        ("special_tokens_map.json", "{", "is not a JSON object: correct it"),
    ],
)
def test_a_model_without_a_sound_tokenizer_is_refused(
    name: str, text: str | None, said: str, run: Callable[..., tuple[int, str]], model: Path, tmp_path: Path
) -> None:
    shutil.copy(ENGLISH / "tokenizer.json", model)
    if text is None:
        (model / name).unlink()
    else:
        (model / name).write_text(text)
    output = tmp_path / "out"
    code, err = run(model, output, tokenizer=True)
    assert code == 1
    assert str(model / name) in err
    assert said in err
    assert err.count("\n") == 1
    assert not output.exists()
    if text is not None:
        with pytest.raises(CompileError, match="correct it"):
            compile_model(CompileConfig(model, output, TINY_LADDER))
    assert run(model, output)[0] == 0
    assert not (output / name).exists()
    assert not (output / "tokenizer.json").exists()


# ---- the context -----------------------------------------------------------------------------------------------


def english(folder: Path, **changes: object) -> Path:
    """The example's config alone, with changes."""
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((ENGLISH / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


def test_a_context_that_is_cut_says_so(tmp_path: Path) -> None:
    long = english(tmp_path / "long", max_position_embeddings=32768)
    config = CompileConfig(model=long, output=tmp_path / "out", max_num_seqs=1)
    default = resolve(config)
    assert (default.max_model_len, default.model_len, default.cut_by) == (4096, 32768, "default")
    (warning,) = default.warnings()
    assert warning == "the context is cut to 4096 of the model's 32768 tokens: --max-model-len 32768 compiles all of it"
    asked = resolve(replace(config, max_model_len=8192))
    assert (asked.cut_by, asked.warnings()) == ("option", ())
    by_buckets = resolve(replace(config, buckets="prefill=1x[128],decode=1x[512]"))
    assert (by_buckets.max_model_len, by_buckets.cut_by, by_buckets.warnings()) == (512, "buckets", ())
    whole = resolve(replace(config, max_model_len=32768))
    assert (whole.cut_by, whole.warnings()) == (None, ())


ROPE = {"llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512}}


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("kind", [None, "linear", "dynamic", "yarn", "llama3"])
def test_a_context_beyond_the_training_names_a_sound_scaling(family: str, kind: str | None, tmp_path: Path) -> None:
    scaling = None if kind is None else {"rope_type": kind, "factor": 2.0, **ROPE.get(kind, {})}
    changes = {"model_type": family, "rope_parameters": None, "rope_scaling": scaling, "rope_theta": 10000.0}
    model = english(tmp_path / "model", **changes)
    trained = trained_length(load_config(model))
    assert trained == {None: 512, "llama3": 512}.get(kind, 1024)
    config = CompileConfig(model=model, output=tmp_path / "out", max_num_seqs=1, max_model_len=4096)
    assert resolve(replace(config, max_model_len=trained)).warnings() == ()
    (warning,) = resolve(config).warnings()
    assert warning.startswith(f"max-model-len 4096 is beyond the {trained} tokens that the model was trained for")
    advice = sound_scaling(load_config(model), 4096)
    assert json.dumps(advice) in warning
    expected = kind if kind in ("linear", "dynamic", "yarn") else "yarn" if kind else None
    assert advice["rope_type"] == (expected or ("yarn" if family.startswith("qwen") else "dynamic"))
    # The advice is what it says: with it there is nothing to warn of.
    sound = english(tmp_path / "sound", **{**changes, "rope_scaling": advice})
    assert resolve(replace(config, model=sound)).warnings() == ()


def test_the_command_and_inspect_say_so(
    run: Callable[..., tuple[int, str]], model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = model / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "max_position_embeddings": 48}))
    output = tmp_path / "out"
    code, err = run(model, output, "--max-model-len", "64")
    assert code == 0
    assert err.startswith("llmc: warning: max-model-len 64 is beyond the 48 tokens that the model was trained for")
    assert json.loads((output / "manifest.json").read_text())["context"] == {"model_len": 48, "cut_by": None}
    assert cli.main(["inspect", str(output)]) == 0
    assert "up to 64 tokens (the model was trained for 48) and " in capsys.readouterr().out


def test_compiling_on_the_way_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("LLMC_CACHE_DIR", str(tmp_path / "cache"))

    def compiled(config: CompileConfig, _: object) -> SimpleNamespace:
        config.output.mkdir()
        (config.output / "graphs.bin").touch()
        return SimpleNamespace(warnings=("the context is cut",), notes=())

    monkeypatch.setattr(pipeline, "compile_model", compiled)
    pipeline.compile_cached(english(tmp_path / "model"))
    assert [record.getMessage() for record in caplog.records] == ["llmc: warning: the context is cut"]


@pytest.mark.parametrize("collected", [2, 3])
def test_what_is_compiled_on_the_way_is_held_or_refused(
    collected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """collected: compilations that a collection removes at once."""
    monkeypatch.setenv("LLMC_CACHE_DIR", str(tmp_path / "cache"))
    made: list[Path] = []

    def compiled(config: CompileConfig, _: object) -> SimpleNamespace:
        made.append(config.output)
        if len(made) > collected:
            config.output.mkdir()
            (config.output / "graphs.bin").touch()
        return SimpleNamespace(warnings=(), notes=())

    monkeypatch.setattr(pipeline, "compile_model", compiled)
    if collected < 3:
        assert (pipeline.compile_cached(english(tmp_path / "model")) / "graphs.bin").is_file()
    else:
        with pytest.raises(CompileError, match=r"is removed as fast as it is compiled: stop `llmc cache gc`"):
            pipeline.compile_cached(english(tmp_path / "model"))
    assert len(made) == 3


def test_inspect_tells_what_cut_the_context(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", str(artifact)]) == 0
    assert "up to 64 tokens of the model's 128 (by the largest decode bucket) and " in capsys.readouterr().out
    assert cli.main(["inspect", str(artifact), "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["context"] == {"model_len": 128, "cut_by": "buckets"}


# ---- progress --------------------------------------------------------------------------------------------------


def test_every_phase_begins_unknown_and_ends_full(tiny_artifact: TinyArtifact, tmp_path: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    config = CompileConfig(
        tiny_artifact.model, tmp_path / "out", TINY_LADDER, dtype="f32", cache_dir=tiny_artifact.cache
    )
    report = compile_model(config, lambda *call: calls.append(call))
    phases = list(report.phase_seconds)
    assert phases == ["load", "trace", "graphs", "kernels", "weights", "link", "publish"]
    assert list(dict.fromkeys(name for name, _, _ in calls)) == phases
    for phase in phases:
        mine = [(done, total) for name, done, total in calls if name == phase]
        assert mine[0] == (0, 0)
        assert mine[-1][0] == mine[-1][1] > 0
    assert ("graphs", report.num_graphs, report.num_graphs) in calls


def test_bars_end_full(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Console, "is_terminal", property(lambda _: True))
    with progress_bar() as progress:
        for phase, steps in (("load", 1), ("trace", 1), ("graphs", 6)):
            progress(phase, 0, 0)
            for done in range(steps if steps > 1 else 0):
                progress(phase, done + 1, steps)
            progress(phase, steps, steps)
    shown = [line for line in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().err).splitlines() if line]
    last = {line.split()[0]: line for line in shown}
    assert "6/6" in last["graphs"]
    for phase in ("load", "trace"):
        assert "/" not in last[phase]
        assert last[phase].split()[1] == last["graphs"].split()[1], "the bar is full"


# ---- serving without a tokenizer -------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "said"), [("{", "cannot read "), (None, "is gone: compile the model again")])
def test_a_server_without_its_tokenizer_is_never_ready(
    text: str | None, said: str, chat_artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    artifact = Path(shutil.copytree(chat_artifact, tmp_path / "artifact"))
    file = artifact / "tokenizer.json"
    edit_manifest(artifact, files=[file.name])
    if text is None:
        file.unlink()
    else:
        file.write_text(text)
    assert cli.main(["serve", str(artifact), "--port", "0"]) == 1
    err = capsys.readouterr().err
    assert f"{file}" in err
    assert said in err
    assert "ready" not in err
    assert "listening" not in err
