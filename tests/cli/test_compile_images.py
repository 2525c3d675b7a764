"""`llmc compile --images`, and what `llmc inspect` says of both artifacts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmc.cli.main import main

from support.towers import make_seeing


def test_two_artifacts_and_what_they_are(
    tmp_path: Path, kernel_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, output = make_seeing(tmp_path / "m", "mistral3"), tmp_path / "m.llmc"
    options = ["--images", "--no-tokenizer", "--cache-dir", str(kernel_cache), "--jobs", "1", "--dtype", "f32"]
    options += ["--buckets", "prefill=[1]x8,decode=[1]x64", "--json"]
    assert main(["compile", str(model), "-o", str(output), *options]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["artifact"], report["images"]["artifact"]) == (str(output), str(tmp_path / "m-images.llmc"))
    said = {}
    for name in ("m", "m-images"):
        assert main(["inspect", str(tmp_path / f"{name}.llmc")]) == 0
        said[name] = capsys.readouterr().out
        assert "head: reads hidden states" not in said[name]
        assert main(["inspect", str(tmp_path / f"{name}.llmc"), "--json"]) == 0
        data = json.loads(capsys.readouterr().out)
        assert data["model"]["states_use"] == ("taken" if name == "m-images" else "placed")
        assert (data["images"] is None) == (name == "m")
    assert "images: rows of 60 numbers can take the place of tokens; --images makes them" in said["m"]
    assert (
        "images: reads patches of 64 numbers, 4 of which make a row of 60 for its model; give it as --images of that"
        in said["m-images"]
    )
    assert "vectors of 60" not in said["m-images"]
    # The same again replaces nothing and refuses nothing.
    assert main(["compile", str(model), "-o", str(output), *options]) == 0


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--mtp"], "--images and --mtp do not go together yet: leave out one of them"),
        (["--eagle", "head"], "--images and --eagle do not go together yet: leave out one of them"),
        (
            ["--add", "decode:1x64"],
            "--images changes every graph, and --add none: compile the model again with --images",
        ),
    ],
)
def test_flags_that_do_not_go_together(flags: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compile", "m", "-o", "out", "--images", *flags]) == 2
    assert says in " ".join(capsys.readouterr().err.split())
