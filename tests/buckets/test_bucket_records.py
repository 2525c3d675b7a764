"""Records of what serving did to buckets: misses, saved metrics, what padding cost, and how artifacts differ."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from llmc.buckets.bucket import Bucket, BucketError
from llmc.buckets.misses import Miss, append_misses, read_misses
from llmc.buckets.recorded_use import read_bucket_use, read_missed
from llmc.cli.main import main
from llmc.compiler.store.cache import Difference
from llmc.compiler.store.differences import differing

from support.full_disk import room_for
from support.manifests import edit_manifest

if TYPE_CHECKING:
    from support.artifacts import TinyArtifact

A = Miss(100.0, "decode", 9, 9, 700, Bucket("decode", 16, 1024), 2)
B = Miss(50.0, "prefill", 1, 900, 900, None, 1)
METRICS = """# HELP llmc_bucket_replays_total Replays of a bucket's graph
# TYPE llmc_bucket_replays_total counter
llmc_bucket_replays_total{batch="1",phase="prefill",seq="16"} 30.0
llmc_bucket_tokens_total{batch="1",phase="prefill",seq="16"} 240.0
llmc_bucket_padding_tokens_total{batch="1",phase="prefill",seq="16"} 240.0
llmc_bucket_replay_seconds_total{batch="1",phase="prefill",seq="16"} 0.4
llmc_bucket_padding_seconds_total{batch="1",phase="prefill",seq="16"} 0.1
llmc_bucket_replays_total{batch="2",phase="decode",seq="64"} 10.0
llmc_bucket_replay_seconds_total{batch="2",phase="decode",seq="64"} 0.6
llmc_bucket_misses_total 3.0
llmc_bucket_misses_by_shape_total{blocks="3",phase="decode",sequences="4",tokens="4"} 3.0
"""


@pytest.fixture
def metrics(tmp_path: Path) -> Path:
    path = tmp_path / "metrics.txt"
    path.write_text(METRICS)
    return path


def test_misses_are_added_up_over_lines(tmp_path: Path) -> None:
    path = tmp_path / "misses.jsonl"
    append_misses(path, [A, B])
    append_misses(path, [replace(A, time=70.0, count=5)])
    assert read_misses(path) == [Miss(100.0, "decode", 9, 9, 700, A.bucket, 7), B]
    assert path.read_text().count("llmc_misses") == 1


def test_nothing_missed_writes_nothing(tmp_path: Path) -> None:
    append_misses(tmp_path / "misses.jsonl", [])
    assert not (tmp_path / "misses.jsonl").exists()


def test_a_line_cut_off_by_a_crash_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "misses.jsonl"
    append_misses(path, [A, B])
    path.write_text(path.read_text()[:-20])
    assert read_misses(path) == [A]


def test_a_full_disk_leaves_no_part_of_a_line(tmp_path: Path) -> None:
    path = tmp_path / "misses.jsonl"
    append_misses(path, [A])
    with room_for(path.stat().st_size + 20), pytest.raises(BucketError, match="No space left"):
        append_misses(path, [B])
    append_misses(path, [B])
    assert read_misses(path) == [A, B]


@pytest.mark.parametrize(("miss", "bucket"), [(A, "decode:9x700"), (B, "prefill:1x900")])
def test_the_bucket_that_would_have_held_it(miss: Miss, bucket: str) -> None:
    assert str(miss.wanted) == bucket


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("nonsense\n{}\n", "is not JSON"),
        ('{"time": 1}\n', "is not a miss"),
        (A.line().replace('"decode"', '"warm"') + "\n", "phase 'warm'"),
        (A.line().replace('"count": 2', '"count": 0') + "\n", "count '0'"),
        (A.line().replace('"decode:16x1024"', '"x"') + "\n", "'x' is not a bucket"),
        (A.line().replace("100.0", "-1") + "\n", "time"),
    ],
)
def test_a_bad_record_names_its_line(tmp_path: Path, line: str, says: str) -> None:
    path = tmp_path / "misses.jsonl"
    path.write_text('{"llmc_misses": 1}\n' + line)
    with pytest.raises(BucketError, match=rf"misses\.jsonl:2: .*{says}"):
        read_misses(path)


def test_the_command_shows_misses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "misses.jsonl"
    append_misses(path, [A, B])
    assert main(["buckets", "misses", str(path)]) == 0
    out = capsys.readouterr().out
    assert "decode:16x1024" in out
    assert "3 misses of 2 shapes" in out
    assert main(["buckets", "misses", str(path), str(path), "--top", "1", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["count"], data["shapes"]) == (6, 2)
    assert [(m["count"], m["wanted"]) for m in data["misses"]] == [(4, "decode:9x700")]
    assert main(["buckets", "misses", str(tmp_path / "none")]) == 1
    assert "cannot read the record" in capsys.readouterr().err


def test_saved_metrics_tell_use_and_misses(metrics: Path) -> None:
    decode, prefill = read_bucket_use(metrics)
    assert (prefill.bucket, prefill.replays, prefill.padding, prefill.padding_s) == (
        Bucket("prefill", 1, 16), 30, 0.5, 0.1,
    )  # fmt: skip
    assert (decode.bucket, decode.replays, decode.padding) == (Bucket("decode", 2, 64), 10, 0)
    (missed,) = read_missed(metrics, 16)
    assert (missed.phase, missed.batch, missed.tokens, missed.context, missed.count) == ("decode", 4, 4, 48, 3)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("# nothing\n", "has no bucket counters"),
        ('llmc_bucket_replays_total{batch="x",phase="decode",seq="1"} 1\n', "batch 'x'"),
        ('llmc_bucket_replays_total{batch="1",phase="warm",seq="1"} 1\n', "phase 'warm'"),
        ('llmc_bucket_replays_total{batch="1",phase="decode",seq="1"} many\n', "many"),
    ],
)
def test_bad_metrics_are_named(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "metrics.txt"
    path.write_text(text)
    with pytest.raises(BucketError, match=says):
        read_bucket_use(path)


def test_show_colours_a_grid_by_recorded_use(metrics: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ladder = "prefill=1x[16,32],decode=[1,2]x64"
    assert main(["buckets", "show", ladder, "--use", str(metrics)]) == 0
    out = capsys.readouterr().out
    assert "30 steps; 1 buckets unused" in out
    assert "10 steps; 30.00% of them fit no bucket" in out
    assert main(["buckets", "show", ladder, "--use", str(metrics), "--json"]) == 0
    shares = [row["share"] for row in json.loads(capsys.readouterr().out)["prefill"]]
    assert shares == [1.0, 0.0]
    assert main(["buckets", "show", "prefill=1x32,decode=2x64", "--use", str(metrics)]) == 1
    assert "prefill:1x16, which the ladder does not have" in capsys.readouterr().err
    assert main(["buckets", "show", ladder, "--use", str(metrics), "--trace", str(metrics)]) == 2


def test_inspect_shows_what_padding_cost(
    tiny_artifact: TinyArtifact, metrics: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    artifact = str(tiny_artifact.artifact)
    assert main(["inspect", artifact, "--waste", str(metrics)]) == 0
    out = capsys.readouterr().out
    assert "padding took 100 ms of 1 s of replays, 10.0% (recorded)" in out
    assert main(["inspect", artifact, "--waste", str(metrics), "--format", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)["buckets"]
    assert [(row["bucket"], row["padding_s"]) for row in rows] == [("prefill:1x16", 0.1), ("decode:2x64", 0.0)]
    assert main(["inspect", artifact, "--waste", str(metrics), "--bucket", "decode:2x64"]) == 2
    assert "--waste shows all buckets" in capsys.readouterr().err
    other = tmp_path / "other.txt"
    other.write_text(METRICS.replace('seq="16"', 'seq="17"'))
    assert main(["inspect", artifact, "--waste", str(other)]) == 1
    assert "prefill:1x17, which" in capsys.readouterr().err


# ---- llmc cache diff -----------------------------------------------------------------------------------------------


def test_components_differ_member_by_member() -> None:
    old = {"a": "1", "target": '{"lanes": 8, "name": "x"}', "gone": "y"}
    new = {"a": "1", "target": '{"lanes": 16, "name": "x"}', "more": "z"}
    assert differing(old, new) == [
        Difference("gone", "y", None),
        Difference("more", None, "z"),
        Difference("target.lanes", "8", "16"),
    ]


def test_artifacts_that_differ(tiny_artifact: TinyArtifact, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    artifact, other = tiny_artifact.artifact, tmp_path / "other"
    assert main(["cache", "diff", str(artifact), str(artifact)]) == 0
    assert capsys.readouterr().out.startswith("nothing differs: ")
    shutil.copytree(artifact, other)
    manifest = json.loads((other / "manifest.json").read_text())
    gone = manifest["buckets"].pop()
    manifest["graph_components"]["block_size"] = "64"
    manifest["kernels"][0]["components"]["template"] = "changed"
    edit_manifest(other, **manifest)
    assert main(["cache", "diff", str(artifact), str(other), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["buckets"]["only_a"] == [gone]
    assert [(d["name"], d["new"]) for d in data["graphs"]] == [("block_size", "64")]
    (group,) = data["kernels"]["differ"]
    assert len(group["kernels"]) == 1
    assert [(d["name"], d["new"]) for d in group["components"]] == [("template", "changed")]
    assert main(["cache", "diff", str(artifact), str(other)]) == 0
    out = capsys.readouterr().out
    assert f"buckets only in {artifact}: {gone}" in out
    assert "→ changed" in out


def test_weights_differ_by_their_bytes_alone(
    tiny_artifact: TinyArtifact, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    shutil.copytree(tiny_artifact.artifact, other)
    manifest = json.loads((other / "manifest.json").read_text())
    edit_manifest(other, weights_key="packed on another day", weights_mtime_ns=1)
    assert main(["cache", "diff", str(tiny_artifact.artifact), str(other)]) == 0
    assert capsys.readouterr().out.startswith("nothing differs: ")
    names = list(manifest["weights_crc32"])[:5]
    crcs = {name: crc + (name in names) for name, crc in manifest["weights_crc32"].items()}
    edit_manifest(other, weights_crc32=crcs)
    assert main(["cache", "diff", str(tiny_artifact.artifact), str(other), "--json"]) == 0
    assert {d["name"] for d in json.loads(capsys.readouterr().out)["weights"]} == set(names)
    assert main(["cache", "diff", str(tiny_artifact.artifact), str(other)]) == 0
    assert "5 weights differ: " in capsys.readouterr().out


def test_entries_that_differ(tiny_artifact: TinyArtifact, capsys: pytest.CaptureFixture[str]) -> None:
    kernels = json.loads((tiny_artifact.artifact / "manifest.json").read_text())["kernels"]
    linear = [kernel["key"] for kernel in kernels if kernel["op"] == "linear"][:2]
    where = ["--cache-dir", str(tiny_artifact.cache)]
    assert main(["cache", "diff", *linear, *where]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{linear[0][:16]} and {linear[1][:16]} differ in\n  params.")
    assert main(["cache", "diff", str(tiny_artifact.artifact), linear[0], *where]) == 1
    assert "give two artifacts or two keys" in capsys.readouterr().err
