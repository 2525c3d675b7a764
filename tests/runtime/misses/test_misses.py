"""Miss policies and the record of misses: what a ladder with a hole does to a run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from llmc.buckets.bucket import Bucket, BucketError
from llmc.buckets.misses import HEADER, append_misses, read_misses
from llmc.cli.main import main
from llmc.runtime.binding import Artifact, Engine
from llmc.runtime.binding.statistics import BucketMiss
from llmc.runtime.misses.record import MissRecorder, prepare_record, to_miss
from llmc.runtime.misses.watch import MissWatch

from support.compiled import random_tokens

BLOCK = 16
WANTED = Bucket("decode", 3, 64)


def run(artifact: Path, policy: str, num: int = 3) -> tuple[list[list[int]], list[str | None], list[BucketMiss], int]:
    """Tokens and failures of `num` requests of two blocks, the misses and their count."""
    with Artifact(artifact) as opened, Engine(opened, num_threads=2, miss_policy=policy, prefix_cache=False) as engine:
        ids = [
            engine.submit(random_tokens(opened.info.vocab_size, 20, seed), max_tokens=6, temperature=0, ignore_eos=True)
            for seed in range(num)
        ]
        tokens: dict[int, list[int]] = {i: [] for i in ids}
        errors: dict[int, str | None] = dict.fromkeys(ids)
        while engine.step():
            for event in engine.poll():
                if event.kind == "token":
                    tokens[event.request_id].append(event.token_id)
                if event.kind == "failed":
                    errors[event.request_id] = event.error_message
            engine.check_integrity()
        return list(tokens.values()), list(errors.values()), engine.bucket_misses(), engine.stats.num_bucket_misses


def test_policies_give_the_same_bits_or_fail(holed: Path) -> None:
    alone = [run(holed, "error", num=1)[0][0]]
    larger, errors, misses, count = run(holed, "larger")
    assert errors == [None] * 3
    assert larger[0] == alone[0]
    assert {miss.graph for miss in misses} == {1} or {miss.graph for miss in misses} == {0}
    assert sum(miss.count for miss in misses) == count == 5
    assert {(m.phase, m.num_seqs, m.num_tokens, m.num_blocks, m.wanted) for m in misses} == {
        ("decode", 3, 3, 2, WANTED)
    }
    split, errors, misses, count = run(holed, "split")
    assert split == larger
    assert errors == [None] * 3
    assert {(m.num_seqs, m.graph) for m in misses} == {(3, None)}
    assert count == sum(miss.count for miss in misses) >= 5
    strict, errors, misses, count = run(holed, "error")
    assert strict[:2] == larger[:2]
    assert errors[:2] == [None, None]
    assert errors[2] is not None
    assert "add bucket decode:3x64" in errors[2]
    assert count == 1


class Counted:
    """An engine's counters, set by hand."""

    def __init__(self, misses: list[BucketMiss]) -> None:
        self.misses = misses

    @property
    def stats(self) -> Counted:
        return self

    @property
    def num_bucket_misses(self) -> int:
        return sum(miss.count for miss in self.misses)

    def bucket_misses(self) -> list[BucketMiss]:
        return self.misses


def test_the_watch_tells_each_miss_once() -> None:
    one, other = BucketMiss("decode", 3, 3, 2, 4, 1, wanted=WANTED), BucketMiss("decode", 3, 3, 2, 1, wanted=WANTED)
    engine = Counted([one])
    told: list[BucketMiss] = []
    watch = MissWatch(engine, [told.extend], look_s=3600)  # type: ignore[arg-type]
    watch._look()
    watch._look()
    assert told == [one]
    engine.misses = [replace(one, count=6), other]
    watch.close()
    watch.close()
    assert told == [one, replace(one, count=2), other]


def test_a_broken_observer_stops_nothing() -> None:
    told: list[BucketMiss] = []

    def broken(_: object) -> None:
        raise OSError("disk full")

    miss = BucketMiss("decode", 3, 3, 2, 4, wanted=WANTED)
    MissWatch(Counted([miss]), [broken, told.extend], look_s=3600).close()  # type: ignore[arg-type]
    assert told == [miss]


def test_the_record_names_shapes_and_graphs(holed: Path, tmp_path: Path) -> None:
    path = tmp_path / "misses.jsonl"
    with Artifact(holed) as opened:
        graphs = opened.graphs()
    recorder = MissRecorder(path, lambda: graphs, BLOCK)
    recorder.take([BucketMiss("decode", 3, 3, 2, 4, 1, wanted=WANTED), BucketMiss("decode", 3, 3, 2, 1, wanted=WANTED)])
    found = {miss.bucket: miss for miss in read_misses(path)}
    served = found[Bucket("prefill", 4, 64)]
    assert (served.batch, served.tokens, served.context, served.count) == (3, 3, 32, 4)
    assert served.wanted == Bucket("decode", 3, 32)
    assert found[None].count == 1
    assert to_miss(BucketMiss("prefill", 1, 7, 1, 2, wanted=Bucket("prefill", 1, 64)), graphs, BLOCK).wanted == Bucket(
        "prefill", 1, 7
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
def test_a_full_disk_costs_misses_and_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "misses.jsonl"
    path.symlink_to("/dev/full")
    recorder = MissRecorder(path, list, BLOCK)
    miss = BucketMiss("decode", 3, 3, 2, 4, wanted=WANTED)
    recorder.take([miss])
    recorder.take([miss])
    (warning,) = caplog.messages
    assert warning.startswith(f"cannot write the record of misses {path}: No space left on device")
    path.unlink()
    recorder.take([miss])
    assert [one.count for one in read_misses(path)] == [4]


def test_a_record_is_continued_behind_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "misses.jsonl"
    prepare_record(path)
    assert path.read_bytes() == b""
    miss = to_miss(BucketMiss("decode", 3, 3, 2, 4, wanted=WANTED), [], BLOCK)
    append_misses(path, [miss])
    whole = path.read_bytes()
    path.write_bytes(whole + whole.splitlines()[1][:20])
    prepare_record(path)
    assert path.read_bytes() == whole
    path.write_bytes(json.dumps(HEADER).encode()[:7])
    prepare_record(path)
    assert path.read_bytes() == b""
    path.write_text("notes\n")
    with pytest.raises(BucketError, match="is not a record of misses"):
        prepare_record(path)
    assert path.read_text() == "notes\n"
    with pytest.raises(BucketError, match="cannot write the record of misses"):
        prepare_record(tmp_path / "nowhere" / "x")


def test_run_records_and_misses_shows(holed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record, prompts = tmp_path / "misses.jsonl", tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt_token_ids": random_tokens(60, 20, s)}) + "\n" for s in range(3)))
    common = ["run", str(holed), "--prompts", str(prompts), "--max-tokens", "6", "--ignore-eos", "--temperature", "0"]
    texts = {}
    for policy in ("larger", "split", "error"):
        assert main([*common, "--quiet", "--json", "--miss-policy", policy, "--record-misses", str(record)]) in (0, 1)
        texts[policy] = [r["token_ids"] for r in json.loads(capsys.readouterr().out)["results"]]
    assert texts["larger"] == texts["split"]
    assert texts["error"][:2] == texts["larger"][:2]
    assert main(["buckets", "misses", str(record), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert {row["wanted"] for row in data["misses"]} == {"decode:3x32"}
    assert {row["bucket"] for row in data["misses"]} == {None, "prefill:1x64"} or {
        row["bucket"] for row in data["misses"]
    } == {None, "prefill:4x64"}


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["run", "{artifact}", "--prompt", "x", "--miss-policy", "wait"], "'wait' is unknown: use larger, split"),
        (["serve", "{artifact}", "--miss-policy", "wait"], "'wait' is unknown: use larger, split"),
        (["run", "{model}", "--prompt", "x", "--miss-policy", "error"], "compiles nothing"),
        (["serve", "{artifact}", "--miss-policy", "error", "--ready-after", "hot"], "use --ready-after all"),
    ],
)
def test_wrong_usage(holed: Path, arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    where = {"artifact": str(holed), "model": str(holed.parent / "model")}
    assert main([argument.format(**where) for argument in arguments]) == 2
    assert why in capsys.readouterr().err
