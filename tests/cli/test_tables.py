"""Tables in a terminal of 80 columns: nothing is cut, whatever its width."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from llmc.buckets.trace import write_trace
from llmc.cli.main import main
from llmc.cli.render.cache_reasons import shortened
from llmc.cli.render.tables import print_table
from llmc.compiler.rounding import LayerError, Rounding
from llmc.compiler.store.bundle import create_bundle
from llmc.compiler.store.cache import Difference
from llmc.compiler.store.differences import differing

from support.artifacts import TinyArtifact
from support.paths import ROOT
from support.planning import made_up_trace

WIDTH = 80


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """stdout of a command line in 80 columns."""
    monkeypatch.setenv("COLUMNS", str(WIDTH))

    def of(*argv: object) -> str:
        assert main([str(arg) for arg in argv]) == 0, capsys.readouterr().err
        return capsys.readouterr().out

    return of


def printed(table: Table, width: int = WIDTH, keys: int = 1, terminal: bool = True) -> str:
    out = io.StringIO()
    print_table(table, Console(file=out, width=width, force_terminal=terminal, color_system=None), keys)
    return out.getvalue()


def wide(columns: int, cell: int = 14) -> tuple[Table, list[str]]:
    table, cells = Table(title="of many columns", box=SIMPLE_HEAD), []
    for i in range(columns):
        table.add_column(f"head{i}", no_wrap=True)
    for row in range(3):
        texts = [f"{row}.{i}".ljust(cell, "x") for i in range(columns)]
        table.add_row(*texts)
        cells += texts
    return table, cells


@pytest.mark.parametrize("columns", [1, 3, 5, 12])
@pytest.mark.parametrize("keys", [0, 1, 2])
def test_a_wide_table_goes_on_below(columns: int, keys: int) -> None:
    table, cells = wide(columns)
    text = printed(table, keys=min(keys, columns))
    assert max(map(len, text.splitlines())) <= WIDTH
    assert "…" not in text
    for cell in (*cells, *(f"head{i}" for i in range(columns))):
        assert re.search(rf"\b{re.escape(cell)}\b", text), cell
    assert text.count("of many columns") == 1


def test_each_band_names_its_rows() -> None:
    table, cells = wide(12)
    bands = [band for band in printed(table).split("\n\n") if band.strip()]
    assert len(bands) > 1
    assert all(cells[0] in band for band in bands)


def test_a_cell_wider_than_the_terminal_goes_on_in_the_next_line() -> None:
    table, cells = wide(2, cell=WIDTH + 30)
    text = "".join(re.findall(r"\S+", printed(table)))
    assert all(text.count(cell[-20:]) for cell in cells)
    assert "…" not in text


def test_prose_takes_more_lines_and_no_band() -> None:
    table = Table("variable", box=SIMPLE_HEAD)
    table.add_column("what it does", overflow="fold")
    words = [f"word{i}" for i in range(40)]
    table.add_row("NAME", " ".join(words))
    text = printed(table)
    assert [word for word in words if word not in text.split()] == []
    assert text.count("variable") == 1
    assert max(map(len, text.splitlines())) <= WIDTH


def test_a_pipe_gets_one_band(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    table, cells = wide(12)
    lines = [line.split() for line in printed(table, terminal=False).splitlines()]
    assert cells[:12] in lines


def test_every_table_is_printed_so() -> None:
    """Rich cuts the cells of a table that is too wide; `print_table` does not."""
    for file in (*(ROOT / "cli").glob("*.py"), *(ROOT / "bench").glob("*.py")):
        text = file.read_text()
        if file.name != "tables.py" and "rich.table import Table" in text:
            assert "print_table" in text, f"{file} prints a rich table"
            assert not re.search(r"\.print\((table|shown)\)", text), f"{file} prints a rich table"


def test_misses(run: Callable[..., str], tmp_path: Path) -> None:
    rows = [
        ("decode", 9, 9, 700, "decode:16x1024", 3),
        ("prefill", 4, 400, 128, None, 30_000),
        ("mixed", 64, 131_072, 131_072, "mixed:128x262144", 30_000_000),
    ]
    fields = ("phase", "batch", "tokens", "context", "bucket", "count")
    lines = [{"llmc_misses": 1}, *({"time": 1.7e9, **dict(zip(fields, row, strict=True))} for row in rows)]
    file = tmp_path / "misses.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)) + "\n")
    text = run("buckets", "misses", file)
    for value in ("decode:9x700", "prefill:4x100", "mixed:64x131072", "mixed:128x262144", "decode:16x1024",
                  "nothing, split or failed", "30,000,000", "131072", "99.9%", "2023-11-1"):  # fmt: skip
        assert value in text
    assert "…" not in text


def test_quantize(run: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    layers = (LayerError("model.layers.17.mlp.down_proj.weight.of.a.long.name", "w4a16", 0.12345),)
    made = Rounding(4.56, 123_456_789_012, 0.0987, layers)
    monkeypatch.setattr("llmc.compiler.rounding.rounding_of", lambda *_: made)
    monkeypatch.setattr("llmc.cli.quantize._perplexity", lambda *_: 12345.678)
    options = ("--schemes", "w8a8,w4a8", "--group-size", "32", "--asymmetric", "--layers")
    text = run("quantize", ROOT / "examples" / "tiny-english", *options, "--text", ROOT / "README.md")
    for value in ("w4a8", "asymmetric groups of 32", "4.56", "117737.6", "9.87%", "12345.678", layers[0].name, "12.35"):
        assert value in " ".join(text.split()), value
    assert "…" not in text


def test_plan_simulate_and_show(run: Callable[..., str], tmp_path: Path) -> None:
    trace, ladder = tmp_path / "trace.jsonl", tmp_path / "planned.toml"
    write_trace(trace, made_up_trace(60))
    text = run("buckets", "plan", "--trace", trace, "--max-graphs", "6", "-o", ladder)
    data = json.loads(run("buckets", "plan", "--trace", trace, "--max-graphs", "6", "--json"))
    assert "…" not in text
    assert all(row["name"] in text for phase in data["phases"].values() for row in phase.get("compared", []))
    many = [f"prefill=1x[{2**i},{4096}],decode=[1,16]x4096" for i in range(5, 11)]
    text = run("buckets", "simulate", "--trace", trace, *(word for one in many for word in ("--buckets", one)))
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 2 * WIDTH
    text = run("buckets", "show", "prefill=[1,2,4]x[128],decode=1:1:40x[512]", "--trace", trace)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= WIDTH
    assert all(re.search(rf"\b{batch}\b", text) for batch in range(1, 41))


def test_no_identifier_of_a_difference_is_cut() -> None:
    digests = ("0123456789abcdef" * 4, "fedcba9876543210" * 4)
    assert shortened(*digests) == digests
    old, new = (json.dumps([["epilogue", "none"], ["columns", count]]) for count in (128_256, 151_936))
    assert differing({"params": old}, {"params": new}) == [Difference("params.columns", "128256", "151936")]


def test_what_lists_an_artifact(run: Callable[..., str], tiny_artifact: TinyArtifact, tmp_path: Path) -> None:
    manifest = json.loads((tiny_artifact.artifact / "manifest.json").read_text())
    symbols = [kernel["symbol"] for kernel in manifest["kernels"]]
    text = run("inspect", tiny_artifact.artifact)
    assert all(name in text for name in (*symbols, *manifest["buckets"], *manifest["weights_crc32"]))
    at = ("--cache-dir", tiny_artifact.cache)
    listed = run("cache", "ls", *at)
    assert all(symbol in listed and kernel["key"][:16] in listed
               for symbol, kernel in zip(symbols, manifest["kernels"], strict=True))  # fmt: skip
    missing = run("cache", "why", tiny_artifact.artifact, "--cache-dir", tmp_path / "empty")
    assert symbols[0] in missing
    bundle = tmp_path / "tiny.bundle"
    create_bundle([tiny_artifact.artifact], bundle)
    text = run("bundle", "inspect", bundle)
    assert manifest["target"]["name"] in text
    assert manifest["fingerprint"] not in text or "…" not in text
