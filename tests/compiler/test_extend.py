"""Buckets added to an artifact: nothing else of it changes, in place or into a new one, and nobody's bucket is lost."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from llmc.buckets import Bucket, BucketError
from llmc.cli.main import main
from llmc.compiler.config import CompileConfig, CompileError
from llmc.compiler.extend import add_buckets
from llmc.compiler.pipeline import compile_model
from llmc.runtime.binding import Artifact, Replayer
from llmc.runtime.graphs_file import read_graphs

from support.artifacts import TinyArtifact
from support.compiled import Pages, random_tokens, replay
from support.manifests import edit_manifest

pytestmark = pytest.mark.native

NEW = [Bucket("prefill", 1, 48), Bucket("decode", 2, 32)]
ADD = """
import sys
from pathlib import Path
from llmc.buckets import Bucket
from llmc.compiler.extend import add_buckets
add_buckets(Path(sys.argv[1]), [Bucket.parse(sys.argv[2])], cache_dir=Path(sys.argv[3]))
"""


@pytest.fixture
def artifact(tiny_artifact: TinyArtifact, tmp_path: Path) -> Path:
    path = tmp_path / "artifact"
    shutil.copytree(tiny_artifact.artifact, path)
    return path


@pytest.fixture
def cache(tiny_artifact: TinyArtifact, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_artifact.cache, tmp_path / "cache"))


def names(artifact: Path) -> list[str]:
    return [graph.name for graph in read_graphs(artifact).graphs]


def logits(artifact: Path, graph: int, tokens: list[int]) -> np.ndarray:
    with Artifact(artifact) as opened, Replayer(opened, num_threads=2, num_blocks=16) as replayer:
        return replay(replayer, graph, Pages(16, opened.info.block_size), [(0, tokens, 0)])


def test_nothing_else_changes(artifact: Path, cache: Path) -> None:
    before = read_graphs(artifact)
    manifest = json.loads((artifact / "manifest.json").read_text())
    weights = (artifact / "weights.safetensors").stat()
    tokens = random_tokens(before.model.vocab_size, 12)
    old = [logits(artifact, index, tokens[: 1 if g.name.startswith("decode") else 12])
           for index, g in enumerate(before.graphs)]  # fmt: skip
    report = add_buckets(artifact, NEW, cache_dir=cache)
    assert (report.added, report.present, report.num_graphs) == (("prefill:1x48", "decode:2x32"), (), 8)
    after = read_graphs(artifact)
    count = len(before.graphs)
    assert after.graphs[:count] == before.graphs
    assert after.commands[: len(before.commands)] == before.commands
    assert after.operands[: len(before.operands)] == before.operands
    assert [k.symbol for k in after.kernels[: len(before.kernels)]] == [k.symbol for k in before.kernels]
    assert [graph.name for graph in after.graphs[count:]] == ["prefill:1x48", "decode:2x32"]
    assert after.weights == before.weights
    now = (artifact / "weights.safetensors").stat()
    assert now.st_size == weights.st_size
    if report.weights == "linked":
        assert now.st_ino == weights.st_ino
    found = json.loads((artifact / "manifest.json").read_text())
    changed = {name for name in found if found[name] != manifest[name]}
    assert changed <= {"buckets", "bytes", "kernels", "sha256"}
    assert found["kernels"][: len(manifest["kernels"])] == manifest["kernels"]
    for index, expected in enumerate(old):
        graph = before.graphs[index]
        same = logits(artifact, index, tokens[: 1 if graph.name.startswith("decode") else 12])
        assert same.tobytes() == expected.tobytes()
    # And the new graph computes those bits, too.
    assert logits(artifact, count, tokens).tobytes() == old[0].tobytes()
    with Artifact(artifact) as opened:
        opened.verify()


def test_a_new_kernel_leaves_the_others_where_they_are(
    tiny_artifact: TinyArtifact, cache: Path, tmp_path: Path
) -> None:
    artifact = tmp_path / "small"
    ladder = "prefill=[1]x[16],decode=[8]x[64]"  # no graph of two rows: kernels of another row tile
    compile_model(CompileConfig(tiny_artifact.model, artifact, ladder, dtype="f32", cache_dir=cache))
    before = read_graphs(artifact)
    report = add_buckets(artifact, [Bucket("decode", 2, 64)], cache_dir=cache)
    after = read_graphs(artifact)
    assert report.kernels_added == len(after.kernels) - len(before.kernels) > 0
    assert [k.symbol for k in after.kernels[: len(before.kernels)]] == [k.symbol for k in before.kernels]
    assert after.graphs[: len(before.graphs)] == before.graphs
    with Artifact(artifact) as opened:
        assert opened.info.num_kernels == len(after.kernels)


def test_the_recorded_limit_of_tokens_grows_with_the_ladder(artifact: Path, cache: Path) -> None:
    # A ladder that was written without a limit has that of its largest bucket, here 2 x 32.
    assert json.loads((artifact / "manifest.json").read_text())["max_num_batched_tokens"] == 64
    add_buckets(artifact, [Bucket("prefill", 2, 48)], cache_dir=cache)
    assert json.loads((artifact / "manifest.json").read_text())["max_num_batched_tokens"] == 96


def test_adding_is_compiling_with_the_bucket(tiny_artifact: TinyArtifact, artifact: Path, cache: Path,
                                             tmp_path: Path) -> None:  # fmt: skip
    add_buckets(artifact, NEW, cache_dir=cache)
    add_buckets(artifact, [Bucket("decode", 1, 16)], cache_dir=cache)
    ladder = tmp_path / "ladder.json"
    ladder.write_text(json.dumps({"prefill": [[1, 16], [1, 32], [1, 48], [2, 16], [2, 32]],
                                  "decode": [[1, 16], [1, 64], [2, 32], [2, 64]]}))  # fmt: skip
    whole = tmp_path / "whole"
    compile_model(CompileConfig(tiny_artifact.model, whole, str(ladder), dtype="f32", cache_dir=cache))
    assert sorted(names(artifact)) == sorted(names(whole))
    assert (artifact / "weights.safetensors").read_bytes() == (whole / "weights.safetensors").read_bytes()
    graphs = {n: g for n, g in zip(names(whole), read_graphs(whole).graphs, strict=True)}
    for graph in read_graphs(artifact).graphs:
        assert graph.arena_bytes == graphs[graph.name].arena_bytes
        assert graph.num_commands == graphs[graph.name].num_commands


def test_into_a_new_artifact(artifact: Path, cache: Path, tmp_path: Path) -> None:
    before = {file.name: file.read_bytes() for file in artifact.iterdir()}
    output = tmp_path / "other"
    report = add_buckets(artifact, NEW, output, cache_dir=cache)
    assert report.artifact == output
    assert {file.name: file.read_bytes() for file in artifact.iterdir()} == before
    assert names(output)[: len(names(artifact))] == names(artifact)
    assert {file.name for file in output.iterdir()} == set(before)


def test_what_is_there_stays(artifact: Path, cache: Path) -> None:
    inode = (artifact / "graphs.bin").stat().st_ino
    report = add_buckets(artifact, [Bucket("decode", 1, 64)], cache_dir=cache)
    assert (report.added, report.present, report.weights) == ((), ("decode:1x64",), "kept")
    assert (artifact / "graphs.bin").stat().st_ino == inode


def test_where_files_cannot_be_linked(artifact: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(fcntl, "ioctl", refuse)
    weights = artifact / "weights.safetensors"
    content = weights.read_bytes()
    assert add_buckets(artifact, NEW, cache_dir=cache).weights == "copied"
    assert weights.read_bytes() == content


@pytest.mark.parametrize(
    ("bucket", "why"),
    [
        ("decode:99x64", "holds 99 sequences but the artifact runs at most 2"),
        ("decode:1x99999", "max-model-len of the artifact is 64"),
        ("prefill:1x65", "max-model-len of the artifact is 64"),
        ("mixed:2x1", "2 sequences but 1 tokens"),
    ],
)
def test_a_bucket_beyond_the_limits(artifact: Path, cache: Path, bucket: str, why: str) -> None:
    before = {file.name: file.read_bytes() for file in artifact.iterdir()}
    with pytest.raises((CompileError, BucketError), match=why):
        add_buckets(artifact, [Bucket("decode", 1, 32), Bucket.parse(bucket)], cache_dir=cache)
    assert {file.name: file.read_bytes() for file in artifact.iterdir()} == before
    assert [file.name for file in artifact.parent.iterdir() if ".tmp-" in file.name] == []


def test_an_artifact_of_another_compiler(artifact: Path, cache: Path) -> None:
    manifest = json.loads((artifact / "manifest.json").read_text())
    edit_manifest(artifact, graph_components={**manifest["graph_components"], "sources": "0" * 64})
    with pytest.raises(CompileError, match=r"another version of the compiler \(sources differ\)"):
        add_buckets(artifact, NEW, cache_dir=cache)
    kernels = [{**k, "key": "0" * 64} for k in manifest["kernels"]]
    edit_manifest(artifact, graph_components=manifest["graph_components"], kernels=kernels)
    with pytest.raises(CompileError, match="made by another version of the compiler"):
        add_buckets(artifact, NEW, cache_dir=cache)
    edit_manifest(artifact, kernels=manifest["kernels"], weights_crc32={n: 1 for n in manifest["weights_crc32"]})
    with pytest.raises(CompileError, match=r"graphs\.bin is damaged or was written by another version"):
        add_buckets(artifact, NEW, cache_dir=cache)


@pytest.mark.parametrize("damage", ["{", "[]", "{}", '{"buckets": ["x"]}', '{"buckets": 3}'])
def test_a_damaged_manifest(artifact: Path, cache: Path, damage: str) -> None:
    (artifact / "manifest.json").write_text(damage)
    with pytest.raises(CompileError, match=r"manifest\.json"):
        add_buckets(artifact, NEW, cache_dir=cache)


def test_many_at_once_lose_nothing(artifact: Path, cache: Path) -> None:
    wanted = ["decode:1x16", "decode:2x16", "prefill:1x48", "prefill:2x48"]
    running = [subprocess.Popen([sys.executable, "-P", "-c", ADD, artifact, bucket, cache]) for bucket in wanted]
    assert [process.wait() for process in running] == [0] * len(wanted)
    assert sorted(names(artifact)[6:]) == sorted(wanted)
    assert sorted(file.name for file in artifact.parent.iterdir()) == ["artifact", "cache"]
    with Artifact(artifact) as opened:
        opened.verify()


def test_killed_while_adding(artifact: Path, cache: Path) -> None:
    start = len(names(artifact))
    for delay in (0.1, 0.3, 0.5, 0.7, 0.9):
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", ADD, artifact, f"prefill:1x{40 + int(10 * delay)}", cache]
        )
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        process.wait()
        with Artifact(artifact) as opened:
            opened.verify()
            assert opened.info.num_graphs == len(names(artifact)) >= start
    add_buckets(artifact, NEW, cache_dir=cache)
    assert [file.name for file in artifact.parent.iterdir() if ".tmp-" in file.name] == []


def test_the_command(artifact: Path, cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["compile", str(artifact), "--add", "decode:2x32", "--add", "decode:1x64", "--cache-dir", str(cache)]
    assert main([*arguments, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["added"], report["present"]) == (["decode:2x32"], ["decode:1x64"])
    assert main(arguments) == 0
    assert "is in" in capsys.readouterr().out
    assert main([*arguments, "-o", str(tmp_path / "new")]) == 0
    assert names(tmp_path / "new") == names(artifact)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--add", "decode:2"], "is not a bucket"),
        (["--add", "decode:2x32", "--dtype", "bf16"], "--dtype is fixed by the artifact"),
        ([], "OUT is missing"),
    ],
)
def test_wrong_usage(artifact: Path, arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compile", str(artifact), *arguments]) == 2
    assert why in capsys.readouterr().err


def test_only_artifacts_are_extended(tiny_artifact: TinyArtifact, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compile", str(tiny_artifact.model), "--add", "decode:2x32"]) == 2
    assert "is not an artifact" in capsys.readouterr().err
