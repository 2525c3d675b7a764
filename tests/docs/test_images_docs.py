"""docs/images.md is true: its commands and programs run, and images cost what it says."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from llmc.cli import main as cli
from llmc.images.kinds.kind import Kind
from llmc.images.kinds.registry import KINDS, kind_of
from llmc.runtime.images.image_limits import ImageLimits
from llmc.runtime.images.jpeg_scans import MOST_SCANS
from llmc.runtime.images.picture import FORMATS
from llmc.runtime.images.tower import CACHE_BYTES
from llmc.runtime.server.config import ServerConfig

from support.image_forms import encoded, form_of, picture
from support.paths import ROOT
from support.seeing_chat import Seeing, compile_seeing_chat, make_seeing_chat
from support.server_harness import running_server

PAGE = (ROOT / "docs" / "images.md").read_text(encoding="utf-8")
OVER_HTTP, IN_PYTHON = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
# As in the published files.
PUBLISHED: dict[str, dict[str, Any]] = {
    "SmolVLM 256M and 500M": {"edge": 512, "patch": 16, "merge": 4, "longest": 2048},
    "SmolVLM 2.2B": {"edge": 384, "patch": 14, "merge": 3, "longest": 1536},
    "Mistral Small 3.1": {"edge": None, "patch": 14, "merge": 2, "longest": 1540},
    "Qwen3-VL and Qwen3.5": {"least": 65536, "patch": 16, "merge": 2, "longest": 1 << 24},
}


@pytest.fixture(scope="module")
def seeing(kernel_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Seeing:
    return compile_seeing_chat(tmp_path_factory.mktemp("seeing"), "smolvlm", kernel_cache)


@pytest.fixture
def folder(seeing: Seeing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the names of the page are."""
    (tmp_path / "smolvlm.llmc").symlink_to(seeing.text)
    (tmp_path / "smolvlm-images.llmc").symlink_to(seeing.tower)
    (tmp_path / "cat.jpg").write_bytes(encoded(picture(80, 60), "JPEG"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _command(name: str) -> list[str]:
    (line,) = re.findall(rf"^ {{4}}llmc ({name} .*)$", PAGE, re.MULTILINE)
    return shlex.split(line)


def test_compile_makes_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernel_cache: Path) -> None:
    model = make_seeing_chat(tmp_path / "model", "smolvlm")
    monkeypatch.chdir(tmp_path)
    line = [str(model) if word == "HuggingFaceTB/SmolVLM-256M-Instruct" else word for word in _command("compile")]
    more = ["--buckets", "prefill=1x16,decode=1x64", "--dtype", "f32", "--cache-dir", str(kernel_cache), "--jobs", "1"]
    assert cli.main([*line, *more]) == 0
    given = {word for word in (*_command("run"), *_command("serve")) if word.endswith(".llmc")}
    assert given == {path.name for path in tmp_path.glob("*.llmc")}


def test_run_answers(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*_command("run"), "--max-tokens", "4"]) == 0
    assert capsys.readouterr().out.strip()


def test_the_program_in_python_runs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(IN_PYTHON, "docs/images.md", "exec"), {})
    assert len(capsys.readouterr().out.splitlines()) >= 2


def test_the_client_runs(folder: Path, seeing: Seeing, capsys: pytest.CaptureFixture[str]) -> None:
    with running_server(seeing.text, images=seeing.tower, served_model_names=("smolvlm",)) as server:
        exec(compile(OVER_HTTP.replace("http://127.0.0.1:8000", server.url), "docs/images.md", "exec"), {})
    assert capsys.readouterr().out.strip()


def _kind(path: Path, patch: int, merge: int, longest: int, edge: int | None = None, least: int | None = None) -> Kind:
    vision, pictures = {"patch_size": patch, "image_size": edge}, {"size": {"longest_edge": longest}}
    if least is not None:
        size = {"longest_edge": longest, "shortest_edge": least}
        whole = {"model_type": "qwen3_vl", "image_token_id": 10, "vision_config": {"patch_size": patch}}
        files: dict[str, Any] = {"config.json": whole, "preprocessor_config.json": {"size": size, "patch_size": patch}}
        return kind_of(form_of(path, files))
    config: dict[str, Any] = {"model_type": "mistral3", "image_token_index": 10, "spatial_merge_size": merge}
    if edge is not None:
        config = {"model_type": "smolvlm", "image_token_id": 10, "scale_factor": merge}
        pictures["max_image_size"] = {"longest_edge": edge}
    files = {"config.json": {**config, "vision_config": vision}, "preprocessor_config.json": pictures}
    return kind_of(form_of(path, files))


def test_costs(tmp_path: Path) -> None:
    table = PAGE.partition("<!-- costs: begin -->\n")[2].partition("<!-- costs: end -->")[0].splitlines()
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in table)
    sizes = [tuple(map(int, size.split("x"))) for size in head[1:]]
    assert [row[0] for row in rows] == list(PUBLISHED)
    for index, (name, *told) in enumerate(rows):
        kind = _kind(tmp_path / str(index), **PUBLISHED[name])
        assert [kind.tiling(width, height).num_rows for width, height in sizes] == list(map(int, told)), name
    largest = _kind(tmp_path / "largest", **PUBLISHED["Mistral Small 3.1"])
    assert f"{largest.form.most_patches:,} patches" in PAGE


def test_what_it_says_of_the_code() -> None:
    types = re.findall(r"`(\w+)`", PAGE.partition("| `model_type` |")[2].partition("\n\n")[0])
    assert sorted(types) == sorted(name for kind in KINDS.values() for name in kind.MODEL_TYPES)
    limits = ImageLimits()
    assert f"`--max-images`, {limits.images} |" in PAGE
    assert ServerConfig(Path(), ()).max_images == limits.images
    assert f"{limits.bytes >> 20} MiB in Python" in PAGE
    assert f"| {limits.pixels:,}, checked" in PAGE
    assert f"| scans of a progressive JPEG | {MOST_SCANS};" in PAGE
    assert f"longer side | {limits.side:,} |" in PAGE
    assert f"up to {CACHE_BYTES >> 20} MiB" in PAGE
    assert "Images are JPEG, PNG, WebP, GIF or BMP." in PAGE
    assert sorted(FORMATS) == ["BMP", "GIF", "JPEG", "PNG", "WEBP"]
