"""What README and docs/getting-started.md show is true: commands, Python and C run, links lead somewhere."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import onnx
import pytest

from llmc.runtime.binding.library import library_candidates

from support.paths import ROOT

PAGES = {name: (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/getting-started.md")}


def blocks(language: str, text: str = PAGES["docs/getting-started.md"]) -> list[str]:
    """The fenced blocks of a language in a page, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def commands() -> list[str]:
    return [line for block in blocks("sh") for line in block.splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, kernel_cache: Path) -> Path:
    """A directory that looks like the root to relative paths, with the model compiled by the page's first command."""
    path = tmp_path_factory.mktemp("readme")
    for name in ("examples", "runtime"):
        (path / name).symlink_to(ROOT / name)
    kernel_cache.mkdir(exist_ok=True)
    (path / "cache").symlink_to(kernel_cache)
    (path / "out").mkdir()
    run(commands()[0], path)
    return path


def run(command: str, folder: Path) -> str:
    """stdout of a command that must succeed; `llmc` is this installation's."""
    library = next(path for path in library_candidates() if path.is_file())
    environment = {**os.environ, "LLMC_CACHE_DIR": str(folder / "cache"), "LLMC_LIBRARY": str(library)}
    words = (
        command
        if not command.startswith("llmc ")
        else shlex.join([sys.executable, "-P", "-m", "llmc.cli.main"]) + command[4:]
    )
    result = subprocess.run(
        words, shell=True, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, f"{command}\n{result.stderr}"
    return result.stdout


def test_commands_run(folder: Path) -> None:
    shown = {command: run(command, folder) for command in commands()[1:]}
    used = {command.split()[1] for command in shown if command.startswith("llmc")}
    assert used == {"compile", "inspect", "run", "cache", "quantize", "buckets", "warmup", "bundle"}

    def by_start(start: str) -> str:
        return next(text for command, text in shown.items() if command.startswith(start))

    assert "decode:4x256" in by_start("llmc inspect")
    assert by_start("llmc run").startswith("The evening passed")
    assert len((folder / "out/answers.jsonl").read_text().splitlines()) == 5
    nodes = {node.name: node for node in onnx.load(folder / "out/decode.onnx").graph.node}
    for name, node in nodes.items():
        (layer,) = (a.i for a in node.attribute if a.name == "layer")
        assert layer == (int(name.split(".")[1]) if name.startswith("layers.") else -1), name
    down = {fact.key: fact.value for fact in nodes["layers.0.mlp.down"].metadata_props}
    assert down["input_names"] == "['x', 'weight', 'residual']"
    assert (down["category"], down["namespace"]) == ("Layer", "layers/0/mlp")
    assert "entries" in by_start("llmc cache ls")
    assert len(by_start("out/embed").split()) == 20


def test_python_runs(folder: Path) -> None:
    (block,) = blocks("python")
    (folder / "example.py").write_text(block)
    lines = run(shlex.join([sys.executable, "-P", "example.py"]), folder)
    assert lines.startswith("The evening passed")
    assert "\nShe was" in lines


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    links = re.findall(r"\]\(([^)#:]+)[)#]", PAGES[page])
    assert len(links) > 5
    assert [link for link in links if not (ROOT / page).parent.joinpath(link).exists()] == []


def test_the_readme_is_short() -> None:
    assert len(PAGES["README.md"].splitlines()) <= 120


def test_pictures_are_well_formed_and_described() -> None:
    pictures = sorted((ROOT / "docs" / "images").glob("*.svg"))
    assert pictures
    for picture in pictures:
        root = ElementTree.parse(picture).getroot()
        assert root.get("viewBox")
        for tag in ("title", "desc"):
            text = root.findtext(f"{{http://www.w3.org/2000/svg}}{tag}")
            assert text, f"{picture.name} has no {tag}"


def test_the_bench_commands_are_those_of_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text()
    (block,) = blocks("text", (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8"))
    for line in block.splitlines():
        assert line in makefile.replace("$(BIN)/", ""), line
