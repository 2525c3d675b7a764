"""Writes the tables of models.md from what the tests declare that they verify: python -m docs.write_models.

What models of a family are called is in models.json. All else is collected from the tests (tests/support/verified.py).
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from llmc.models.registry import FAMILIES
from llmc.quantize.formats.registry import SCHEMES
from llmc.task_names import TASKS

ROOT = Path(__file__).resolve().parents[1]
PAGE, NAMES = ROOT / "docs" / "models.md", ROOT / "docs" / "models.json"
BEGIN, END = "<!-- {}: python -m docs.write_models -->", "<!-- end of {} -->"
_FLOATS = ("f32", "bf16", "f16")
_STORED = {
    "awq": "AWQ",
    "bitsandbytes": "bitsandbytes",
    "compressed-tensors": "compressed-tensors",
    "fp8": "FP8",
    "gguf": "GGUF",
    "gptq": "GPTQ",
    "mxfp4": "MXFP4",
}


def collected() -> dict[str, dict[str, list[dict[str, str]]]]:
    """What pytest collects: {"verifies": {test: [claim, …]}, "refuses": {test: [limit, …]}}."""
    marks = ("@verifies(", "@refuses(")
    files = [str(file) for file in sorted((ROOT / "tests").rglob("test_*.py")) if _has(file, marks)]
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "verified.json"
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
        run = subprocess.run(
            [*command, f"--verified={found}", *files], cwd=ROOT, capture_output=True, text=True, check=False
        )
        if run.returncode:
            raise SystemExit(f"pytest collected nothing:\n{run.stdout[-2000:]}{run.stderr[-2000:]}")
        said: dict[str, dict[str, list[dict[str, str]]]] = json.loads(found.read_text(encoding="utf-8"))
    return said


def _has(file: Path, marks: Iterable[str]) -> bool:
    text = file.read_text(encoding="utf-8")
    return any(mark in text for mark in marks)


def _each(of_tests: Mapping[str, list[dict[str, str]]]) -> list[dict[str, str]]:
    return [one for found in of_tests.values() for one in found]


def families(names: Mapping[str, Any], limits: Mapping[str, list[dict[str, str]]]) -> Iterator[str]:
    """A row for each family: its models, what they are built of, and what tests see refused."""
    yield "| model_type | models | what it is built of | refused |"
    yield "|---|---|---|---|"
    refused = _each(limits)
    for family in sorted(FAMILIES):
        what = sorted({limit["what"] for limit in refused if limit["family"] == family})
        models = f"{names[family]['models']}{' and images' if FAMILIES[family].tower is not None else ''}"
        cells = (f"`{family}`", models, names[family]["built"], "; ".join(what))
        yield _row(cells)


def out_of_reach(limits: Mapping[str, list[dict[str, str]]]) -> Iterator[str]:
    """A row for each family that llmc has not, and that a test sees refused by what it is built of."""
    yield "| model_type | built of |"
    yield "|---|---|"
    refused = {limit["family"]: limit["what"] for limit in _each(limits) if limit["family"] not in FAMILIES}
    for family, what in sorted(refused.items()):
        yield _row((f"`{family}`", what))


def comparisons(claims: Mapping[str, list[dict[str, str]]]) -> Iterator[str]:
    """A row for each family and task: types, --quant, how checkpoints were stored, and targets, as tests compare.
    Targets twice: those of logits, and those of greedy ids."""
    yield "| model_type | task | types | `--quant` | quantized checkpoints | targets | greedy ids |"
    yield "|---|---|---|---|---|---|---|"
    found = _each(claims)
    for family in sorted(FAMILIES):
        for task in TASKS[1:]:
            of_both = [claim for claim in found if (claim["family"], claim["task"]) == (family, task)]
            if not of_both:
                continue
            of_task = [claim for claim in of_both if claim["what"] == "logits"]
            of_ids = [claim for claim in of_both if claim["what"] == "ids"]
            schemes = {claim["scheme"] for claim in of_task}
            stored = {claim["stored"] for claim in of_task}
            types = {claim["dtype"] for claim in of_task if not claim["scheme"] and not claim["stored"]}
            cells = (
                f"`{family}`",
                task,
                ", ".join(dtype for dtype in _FLOATS if dtype in types),
                ", ".join(scheme for scheme in SCHEMES if scheme in schemes),
                ", ".join(said for name, said in _STORED.items() if name in stored),
                *(", ".join(sorted({claim["target"] for claim in some})) for some in (of_task, of_ids)),
            )
            yield _row(cells)


def _row(cells: Iterable[str]) -> str:
    return "".join(f"| {cell} " if cell else "| " for cell in cells) + "|"


def rendered(page: str, said: Mapping[str, Mapping[str, list[dict[str, str]]]]) -> str:
    """The page with its tables written anew."""
    names = json.loads(NAMES.read_text(encoding="utf-8"))
    tables = {
        "families": families(names, said["refuses"]),
        "out of reach": out_of_reach(said["refuses"]),
        "comparisons": comparisons(said["verifies"]),
    }
    for name, rows in tables.items():
        begin, end = BEGIN.format(name), END.format(name)
        before, marker, rest = page.partition(begin)
        _, closing, after = rest.partition(end)
        if not marker or not closing:
            raise SystemExit(f"{PAGE.name} lacks the lines {begin} and {end}")
        page = "\n".join((f"{before}{begin}", *rows, f"{end}{after}"))
    return page


def main() -> None:
    PAGE.write_text(rendered(PAGE.read_text(encoding="utf-8"), collected()), encoding="utf-8")


if __name__ == "__main__":
    main()
