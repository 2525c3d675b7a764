"""Flags of `llmc serve` that other commands take as one text: refused before a server starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmc.cli.main import EXIT_USAGE, main
from llmc.cli.serve_flags import serve_flags


def test_words_are_kept_as_they_are() -> None:
    text = "--threads 2 --served-model-name 'two words' --kv-bytes=1GiB"
    assert serve_flags(text) == ("--threads", "2", "--served-model-name", "two words", "--kv-bytes=1GiB")
    assert serve_flags("") == serve_flags(None) == ()


@pytest.mark.parametrize(
    ("flags", "fault"),
    [
        ("--thread-count 2", "No such option: --thread-count"),
        ("--threads many", "'many' is not a valid"),
        ("--threads", "requires an argument"),
        ("other.llmc", "unexpected extra argument(s) (other.llmc)"),
        ("--threads '2", "No closing quotation"),
        ("--help", "starts no server"),
    ],
)
@pytest.mark.parametrize("command", [["route", "--spawn", "2"], ["deploy"]])
def test_what_no_server_takes_is_one_sentence(
    command: list[str], flags: str, fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, str(tmp_path), "--serve-flags", flags]) == EXIT_USAGE
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 1
    assert "--serve-flags" in told[0]
    assert fault in told[0]
