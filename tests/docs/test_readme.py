"""What the README shows is true: its commands, its Python and its C run on the example model, its links exist."""

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

from llmc.runtime.binding.abi import library_candidates

from support.paths import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    """The fenced blocks of a language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def commands() -> list[str]:
    return [line for block in blocks("sh") for line in block.splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, kernel_cache: Path) -> Path:
    """A directory that looks like the root to the README's relative paths, with the model compiled by its command."""
    path = tmp_path_factory.mktemp("readme")
    for name in ("examples", "runtime"):
        (path / name).symlink_to(ROOT / name)
    kernel_cache.mkdir(exist_ok=True)
    (path / "cache").symlink_to(kernel_cache)
    (path / "out").mkdir()
    run(commands()[0], path)
    return path


def run(command: str, folder: Path) -> str:
    """stdout of a command of the README that must succeed; `llmc` is this installation's."""
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


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", README)
    assert "docs/images/pipeline.svg" in links
    assert [link for link in links if not (ROOT / link).exists()] == []


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
    (block,) = blocks("text")
    for line in block.splitlines():
        assert line in makefile.replace("$(BIN)/", ""), line
