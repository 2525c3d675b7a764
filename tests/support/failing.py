"""Commands that must fail in one sentence."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from llmc.cli import main as cli


def fails(capsys: pytest.CaptureFixture[str], code: int, argv: Sequence[object], *fragments: str) -> None:
    """Runs the command line; it exits with `code` and says one sentence that holds the fragments."""
    capsys.readouterr()
    assert cli.main([str(argument) for argument in argv]) == code
    captured = capsys.readouterr()
    lines = captured.err.strip().splitlines()
    assert len(lines) == 1, captured.err
    assert lines[0].startswith("llmc: error: ")
    assert "internal error" not in lines[0]
    for fragment in fragments:
        assert fragment in lines[0]


def edit_config(model: Path, **fields: object) -> None:
    config = json.loads((model / "config.json").read_text())
    config.update(fields)
    (model / "config.json").write_text(json.dumps(config))
