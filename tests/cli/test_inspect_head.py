"""What `llmc inspect` says of a head that guesses, and of its model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmc.cli.main import main

from support.families import CASES
from support.mtp_heads import add_mtp
from support.tiny_models import make_tiny_model


def test_how_many_tokens_a_head_may_guess(
    tmp_path: Path, kernel_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    family, fields = CASES["mimo"]
    model = add_mtp(make_tiny_model(tmp_path / "m", family, **fields))
    output = tmp_path / "m.llmc"
    options = ["--no-tokenizer", "--cache-dir", str(kernel_cache), "--jobs", "1"]
    options += ["--buckets", "prefill=[1]x8,decode=[1]x64"]
    assert main(["compile", str(model), "-o", str(output), "--mtp", "--draft-vocab", "60", *options]) == 0
    capsys.readouterr()
    assert main(["inspect", str(tmp_path / "m-mtp.llmc")]) == 0
    assert "head: reads hidden states of 60 numbers, guesses 60 of 515 tokens" in capsys.readouterr().out
    assert main(["inspect", str(tmp_path / "m-mtp.llmc"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["model"]["draft_vocab_size"] == 60
    assert main(["inspect", str(output)]) == 0
    assert "hidden states of 60 numbers are left for a head" in capsys.readouterr().out
