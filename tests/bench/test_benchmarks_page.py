"""docs/benchmarks.md shows what bench/results has, all of it, and README's figures are among them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from bench.peers.page import PAGE, filled, shown, write_page
from bench.peers.results import FORMAT, RESULTS, Results, label, median, text
from bench.peers.store import StoreError

from support.paths import ROOT

NAMES = sorted(path.stem for path in RESULTS.glob("*.json"))


def test_the_page_is_what_the_results_say() -> None:
    """python -m bench.peers page writes it."""
    page = PAGE.read_text(encoding="utf-8")
    assert filled(page) == page


def test_the_page_shows_every_part_of_every_file_once() -> None:
    found = shown(PAGE.read_text(encoding="utf-8"))
    assert sorted(found) == NAMES
    assert {name: sorted(parts) for name, parts in found.items()} == {
        name: sorted(Results.load(name).parts()) for name in NAMES
    }


def test_people_write_no_table_of_the_page() -> None:
    page = PAGE.read_text(encoding="utf-8")
    by_hand = re.sub(r"<!-- bench/results .*?<!-- end -->", "", page, flags=re.DOTALL)
    assert "\n|" in page
    assert [line for line in by_hand.splitlines() if line.startswith("|")] == []


def test_figures_of_the_readme_are_published() -> None:
    rows = Results.load("emerald-rapids-qwen2.5-0.5b").document["speed"]
    known = {
        label(row["engine"], row["variant"]): [
            median(row["prefill"]["512"]), median(row["decode"]["1"]), median(row["decode"]["8"])
        ]
        for row in rows
    }  # fmt: skip
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    heads = "| engine | prefill of 512 tokens | decode, 1 sequence | 8 sequences |\n|---|---|---|---|\n"
    stated = [line.strip("| ").split(" | ") for line in readme.split(heads)[1].split("\n\n")[0].splitlines()]
    assert len(stated) > 5
    assert {name: cells for name, *cells in stated} == {name: known[name] for name, *_ in stated}


def test_sentences_of_the_readme_state_published_figures() -> None:
    document = Results.load("emerald-rapids-qwen2.5-0.5b").document
    reading = [row["reading"] for row in document["speed"] if row["engine"] == "llmc"]
    (start,) = (row["native"] for row in document["start"] if (row["engine"], row["variant"]) == ("llmc", "bf16"))
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert f"{min(reading)} to {max(reading)} % of the measured bandwidth" in readme
    assert f"0.5B model {start} s after its start" in readme
    (zen,) = (
        row["figures"]["prefill:512"][0]
        for row in Results.load("zen-5-qwen2.5-0.5b").document["ratios"]
        if (row["variant"], row["peer"]) == ("w4a16", ["openvino", "int4"])
    )
    assert (zen < 1) == ("`w4a16` is slower than OpenVINO's int4 at prompts" in readme)


def ordered(value: Any) -> bool:
    """Whether a figure's least is not above its median, nor that above its most."""
    if not isinstance(value, list):
        return True
    *middle, least, most = value
    return all(least <= one <= most for one in [least, *middle])


@pytest.mark.parametrize("name", NAMES)
def test_ranges_hold_their_medians(name: str) -> None:
    document = Results.load(name).document
    figures = list(document.get("limits", {}).values())
    for row in document.get("speed", []):
        figures += [*row["prefill"].values(), *row["decode"].values()]
    for row in document.get("ratios", []):
        figures += row["figures"].values()
    for row in (*document.get("start", []), *document.get("serve", [])):
        figures += [row.get(column) for column in ("python", "native", "memory", "served", "offline", "beside")]
    for table in document.get("tables", {}).values():
        assert {len(row["values"]) + 1 for row in table["rows"]} == {len(table["heads"])}
        figures += [value for row in table["rows"] for value in row["values"]]
    assert figures
    assert [figure for figure in figures if not ordered(figure)] == []


@pytest.mark.parametrize(
    ("value", "unit", "decimals", "written"),
    [
        (1.9, "", None, "1.9"),
        (64, "%", None, "64 %"),
        ([1.5, 1.25, 1.666], "", 2, "1.50 (1.25–1.67)"),
        ([70, 67, 74], "%", None, "70 % (67–74)"),
        ([6.6, 8.0], "", None, "6.6–8.0"),
        (None, "%", 2, "–"),
    ],
)
def test_figures_are_written_so(value: Any, unit: str, decimals: int | None, written: str) -> None:
    assert text(value, unit, decimals) == written


def test_what_stands_between_blocks_stays_and_new_results_get_a_section(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Figures\n\n<!-- bench/results a: limits -->\nold\n<!-- end -->\n\nBy hand.\n")
    stated = {"format": FORMAT, "title": "m on a", "machine": "one CPU", "date": "2026-01-01", "limits": {"read": 1234}}
    for name in ("a", "b"):
        (tmp_path / f"{name}.json").write_text(json.dumps(stated))
    limits = "Limits: 1,234 GB/s read."
    first = f"# Figures\n\n<!-- bench/results a: limits -->\n\n{limits}\n\n<!-- end -->\n\nBy hand.\n"
    write_page(["a"], page, tmp_path)
    assert page.read_text() == first
    for _ in range(2):
        write_page(["b"], page, tmp_path)
        assert page.read_text() == (
            f"{first}\n## m on a\n\nThe machine: one CPU, 2026-01-01. tok/s are medians of the rounds.\n\n"
            f"<!-- bench/results b: limits -->\n\n{limits}\n\n<!-- end -->\n"
        )


@pytest.mark.parametrize(
    ("marker", "sentence"),
    [
        ("gone: speed", "gone.json does not exist: publish the run"),
        ("other: speed", "other.json has no published figures of format 1"),
        ("a: speed", "bench/results/a.json has no 'speed': it has limits"),
    ],
)
def test_a_block_without_results_is_told(marker: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"format": FORMAT, "limits": {"read": 1}}))
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(StoreError, match=re.escape(sentence)):
        filled(f"<!-- bench/results {marker} -->\n<!-- end -->", tmp_path)
