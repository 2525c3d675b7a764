"""The template of reports without a browser: what is escaped, what is refused, colours that can be told apart."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from llmc.runtime.report.charts import Curve, curves, error_bars, histogram
from llmc.runtime.report.page import DATA_ID, Page, ReportError, key, section, write_page
from llmc.runtime.report.table import Column, Row, table
from llmc.runtime.report.words import byte_count, microseconds, number, percent

from support.paths import ROOT

EVIL = "</script><script>alert(1)</script><!-- & \"'"


def test_names_are_text_wherever_they_stand() -> None:
    parts = (section(EVIL, note=EVIL), table(EVIL, [Column(EVIL, help=EVIL)], [Row([EVIL], help=EVIL)]))
    page = Page(EVIL, EVIL, (*parts, key([(EVIL, "red", "box")])), EVIL, [EVIL], {EVIL: EVIL}).html()
    assert "alert(1)</script>" not in page
    assert page.count("<script") == 1
    (held,) = re.findall(f'<script type="application/json" id="{DATA_ID}">(.*?)</script>', page)
    assert json.loads(held) == {EVIL: EVIL}
    assert "script-src 'none'" in page


def test_numbers_that_json_has_not_are_null() -> None:
    page = Page("t", "l", (), "m", data=[float("nan"), {"x": (float("inf"), 1.5)}]).html()
    assert f'id="{DATA_ID}">[null, {{"x": [null, 1.5]}}]</script>' in page


def test_a_page_lets_in_its_own_scripts_alone() -> None:
    page = Page("t", "l", (), "m", data={}, scripts=("timeline.js", "graph.js")).html()
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy.startswith("default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-")
    assert policy.count("sha256-") == 2
    assert not re.search(r"https?://(?!www\.w3\.org/)|@import|url\(|innerHTML|eval\(", page)


def test_what_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="cannot write report"):
        write_page("x", tmp_path / "no" / "x.html")
    write_page("x", tmp_path / "x.html")
    assert [file.name for file in tmp_path.iterdir()] == ["x.html"]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (number(0), "0"),
        (number(0.012345), "0.0123"),
        (number(999.96), "1,000"),
        (number(12345), "12,300"),
        (number(-2.5), "−2.5"),
        (number(None), "–"),
        (microseconds(0.5), "0.5 µs"),
        (microseconds(1234), "1.23 ms"),
        (microseconds(2.5e6), "2.5 s"),
        (byte_count(999), "999 bytes"),
        (byte_count(1234567), "1.23 MB"),
        (percent(0.1234), "12.3 %"),
        (percent(None), "–"),
    ],
)
def test_figures_in_words(text: str, wanted: str) -> None:
    assert text == wanted


def test_charts_of_little_or_nothing() -> None:
    """Runs of one request, or of none that completed."""
    assert "No latencies were measured" in histogram([], "latencies", "ms")
    for values in ([3.0], [0.0, 0.0], [5.0, 5.0, 5.0], [-12.0], [1e-9, 1e9]):
        assert "nan" not in histogram(values, "latencies", "ms")
        assert "nan" not in curves("t", [Curve("c", [0.0] * len(values), values)], "x", "y")
    assert "nan" not in curves("t", [Curve("c", [], [])], "x", "y")
    assert "<svg" in error_bars("t", [("a", 0.5, None), ("b", 1.0, 0.1)])


# ---- colours ---------------------------------------------------------------------------------------------------------


def colours() -> dict[str, tuple[str, str]]:
    """The names of light-dark() colours in the tokens and the reports' own."""
    files = (ROOT / "runtime" / "look" / "tokens.css", ROOT / "runtime" / "report" / "report.css")
    text = "".join(file.read_text(encoding="utf-8") for file in files)
    pairs = re.findall(r"--([\w-]+): light-dark\((#\w{6}), (#\w{6})\)", text)
    return {name: (light, dark) for name, light, dark in pairs}


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: str, b: str) -> float:
    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("dark", [0, 1])
def test_letters_and_marks_have_contrast(dark: int) -> None:
    """WCAG 2.2: 4.5 for letters, 3 for marks; axe-core does not look at letters in pictures."""
    found = {name: pair[dark] for name, pair in colours().items()}
    for ground in ("panel", "ground", "raised"):
        for letters in ("text", "dim", "accent"):
            assert contrast(found[letters], found[ground]) >= 4.5, (letters, ground)
    for mark in ("s1", "s2", "s3", "s4", "s5", "s6", "waste"):
        assert contrast(found[mark], found["panel"]) >= 3, mark
        assert contrast(found[mark], found["raised"]) >= 3, mark
    # Letters within bars have the colour of the panel.
    for bar in ("s1", "s2", "s6"):
        assert contrast(found["panel"], found[bar]) >= 4.5, bar
