"""docs/onnx.md is true: its commands run, and its operators and opsets are those that are read."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from bench.onnx_bytes import POSITIONS, VOCAB, small_decoder
from llmc.cli import main as cli
from llmc.models.sources.onnx.contrib import CONVERTERS
from llmc.models.sources.onnx.file import OLDEST_OPSET
from llmc.models.sources.onnx.fused import FUSED, MICROSOFT
from llmc.models.sources.onnx.probe import MASK, POSITION_IDS, TOKENS, TYPES

from support.onnx_models import save
from support.paths import ROOT
from support.tiny_encoders import SPECIAL
from support.word_tokenizer import save_words

PAGE = (ROOT / "docs" / "onnx.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_commands_run(tmp_path: Path, kernel_cache: Path, monkeypatch: pytest.MonkeyPatch,
                      capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LLMC_CACHE_DIR", str(kernel_cache))
    (tmp_path / "exported").mkdir()
    save(small_decoder(), tmp_path / "exported" / "model.onnx")
    fields = f'{{"max_position_embeddings": {POSITIONS}, "eos_token_id": 2}}'
    (tmp_path / "exported" / "config.json").write_text(fields)
    save_words(tmp_path / "exported", VOCAB, SPECIAL)
    commands = [shlex.split(line)[1:] for line in re.findall(r"^ {4}(llmc .*)$", PAGE, re.MULTILINE)]
    assert [command[0] for command in commands] == ["compile", "compile", "inspect", "run"]
    for command in commands:
        more = {
            "compile": ["--buckets", "prefill=1x32,decode=1x64", "--jobs", "1", "--overwrite"],
            "run": ["--max-tokens", "3"],
        }.get(command[0], [])
        assert cli.main([*command, *more]) == 0, command
    shown = capsys.readouterr().out
    assert "onnx" in shown


def test_what_it_names_is_read() -> None:
    operators = PAGE.partition("**Operators.**")[2].partition("\n\n")[0]
    fused = {op for domain, op in (*CONVERTERS, *FUSED) if domain == MICROSOFT}
    assert {name for name in re.findall(r"\w+", operators) if name in fused} == fused
    assert f"Opsets {OLDEST_OPSET} and newer" in PAGE
    assert f"opsets below {OLDEST_OPSET}" in PAGE
    for name in (TOKENS, MASK, POSITION_IDS, TYPES):
        assert f"`{name}`" in PAGE
