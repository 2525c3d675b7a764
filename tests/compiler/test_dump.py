"""`llmc compile --dump`: what each phase made, and an artifact that is the same with it and without."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from llmc.buckets import Bucket
from llmc.cli import main as cli
from llmc.compiler.config import CompileError, no_progress
from llmc.compiler.extend import add_buckets
from llmc.compiler.phases import Phase, PhaseClock, check_dump, chosen, drive
from llmc.compiler.pipeline import PHASES
from llmc.runtime.graphs_file import read_graphs

from support.artifacts import TinyArtifact
from support.compiled import assert_same_bytes
from support.paths import ROOT

ARGUMENTS = ["--no-tokenizer", "--dtype", "f32", "--buckets", "prefill=[1]x[16],decode=[1,2]x[32]"]


@pytest.mark.parametrize("target", ["native", "reference"])
def test_every_phase_shows_what_it_made(
    tiny_artifact: TinyArtifact, kernel_cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], target: str
) -> None:
    dump = tmp_path / "dump"
    argv = ["compile", str(tiny_artifact.model), *ARGUMENTS, "--target", target, "--cache-dir", str(kernel_cache)]
    assert cli.main([*argv, "-o", str(tmp_path / "with"), "--dump", str(dump)]) == 0
    assert cli.main([*argv, "-o", str(tmp_path / "without"), "--json"]) == 0
    assert_same_bytes(tmp_path / "with", tmp_path / "without")

    folders = sorted(path.name for path in dump.iterdir())
    assert folders == ["2-load", "3-trace", "4-graphs", "6-kernels", "7-weights"]
    tables = read_graphs(tmp_path / "with")
    settings = json.loads((dump / "2-load" / "settings.json").read_text())
    assert settings["buckets"] == [graph.name for graph in tables.graphs]
    assert "torch.ops.llmc" in (dump / "3-trace" / "exported.txt").read_text()
    lowered, sites = ((dump / "3-trace" / name).read_text() for name in ("lowered.txt", "sites.txt"))
    assert all(f'"llmc_site_{i}"' in lowered for i in range(len(sites.splitlines())))
    commands = (dump / "4-graphs" / "decode-1x32.commands.txt").read_text().splitlines()
    graph = next(graph for graph in tables.graphs if graph.name == "decode:1x32")
    assert commands[0] == f"arena of {graph.arena_bytes} bytes"
    assert [line.split()[1].rstrip(":") for line in commands[1:]] == [
        tables.kernels[command.kernel].symbol for command in tables.commands_of(graph)
    ]
    assert "R.memory.alloc_storage" in (dump / "4-graphs" / "decode-1x32.bound.txt").read_text()
    shown = {path.name for path in (dump / "6-kernels").iterdir()}
    for kernel in tables.kernels:
        assert {f"{kernel.symbol}.json", f"{kernel.symbol}.tir.txt"} <= shown
        assert kernel.symbol in (dump / "6-kernels" / f"{kernel.symbol}.tir.txt").read_text()
        if target == "native":
            assert kernel.symbol in (dump / "6-kernels" / f"{kernel.symbol}.asm").read_text()
    layout = (dump / "7-weights" / "layout.txt").read_text().splitlines()
    assert [line.split()[-1] for line in layout] == [weight.name for weight in tables.weights]
    assert [line.split()[3] for line in layout] == [weight.layout for weight in tables.weights]
    text = capsys.readouterr().out
    seconds = json.loads(text[text.index("{\n") :])["phase_seconds"]
    assert [name for name in seconds if name != "start"] == [
        phase.name for phase in PHASES if phase.name not in ("download", "tune")
    ]


def test_a_dump_replaces_nothing(
    tiny_artifact: TinyArtifact, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.txt").write_text("precious")
    argv = ["compile", str(tiny_artifact.model), "-o", str(tmp_path / "out"), *ARGUMENTS, "--dump", str(tmp_path)]
    assert cli.main(argv) == 1
    assert "a dump replaces nothing: give --dump a new directory" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.txt"]
    with pytest.raises(CompileError, match="mine"):
        check_dump(tmp_path / "mine.txt", tmp_path / "out")
    check_dump(tmp_path / "new", tmp_path / "out")
    with pytest.raises(CompileError, match="beside it"):
        check_dump(tmp_path / "out" / "dump", tmp_path / "out")


def test_an_added_bucket_is_shown_too(tiny_artifact: TinyArtifact, tmp_path: Path) -> None:
    cache = shutil.copytree(tiny_artifact.cache, tmp_path / "cache")
    argv = ["compile", str(tiny_artifact.artifact), "--add", "prefill:1x48", "--cache-dir", str(cache)]
    assert cli.main([*argv, "-o", str(tmp_path / "with"), "--dump", str(tmp_path / "dump")]) == 0
    assert cli.main([*argv, "-o", str(tmp_path / "without")]) == 0
    assert_same_bytes(tmp_path / "with", tmp_path / "without")

    dump = tmp_path / "dump"
    assert sorted(path.name for path in dump.iterdir()) == ["2-load", "3-trace", "4-graphs", "6-kernels", "7-weights"]
    settings = json.loads((dump / "2-load" / "settings.json").read_text())
    assert settings["buckets"][-1] == "prefill:1x48"
    assert "torch.ops.llmc" in (dump / "3-trace" / "exported.txt").read_text()
    listed = {path.name for path in (dump / "4-graphs").iterdir()}
    assert {"decode-1x64.commands.txt", "prefill-1x48.commands.txt", "prefill-1x48.bound.txt"} <= listed
    kernels = {kernel.symbol for kernel in read_graphs(tmp_path / "with").kernels}
    assert {path.name.partition(".")[0] for path in (dump / "6-kernels").iterdir()} == kernels
    with pytest.raises(CompileError, match="which holds the artifact alone"):
        add_buckets(tiny_artifact.artifact, [Bucket("decode", 1, 16)], dump=tiny_artifact.artifact / "dump")


def test_phases_run_in_order_when_they_are_wanted(tmp_path: Path) -> None:
    def dump(state: list[str], folder: Path) -> None:
        (folder / "state.txt").write_text(",".join(state))

    def note(name: str) -> Phase[list[str]]:
        return Phase(
            name,
            lambda state, on_step: state.append(name),
            wanted=lambda state: name != "never",
            dump=dump,
        )

    state: list[str] = []
    clock = PhaseClock(no_progress)
    phases = [note("first"), note("never"), note("last")]
    drive(phases, state, clock, tmp_path / "dump")
    assert state == ["first", "last"] == list(clock.seconds)
    found = {path.parent.name: path.read_text() for path in (tmp_path / "dump").rglob("state.txt")}
    assert found == {"1-first": "first", "3-last": "first,last"}
    # A driver's choice of them keeps their order and numbers, and may do something else in one.
    state.clear()
    names = ("last", "never")
    drive(chosen(phases, names, last=lambda state, _: state.append("other")), state, clock, tmp_path / "chosen")
    assert state == ["other"]
    assert [path.name for path in (tmp_path / "chosen").iterdir()] == ["3-last"]
    with pytest.raises(AssertionError, match="nowhere"):
        chosen(phases, ("first", "nowhere"))


def test_the_pages_have_the_phases() -> None:
    docs = ROOT / "docs"
    table = (docs / "architecture.md").read_text()
    debugging = (docs / "debugging.md").read_text()
    for number, phase in enumerate(PHASES, 1):
        if phase.name != "download":
            assert f"| {phase.name}" in table
        assert (f"| `{number}-{phase.name}` |" in debugging) == (phase.dump is not None)
