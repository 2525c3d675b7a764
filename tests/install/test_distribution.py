"""The distribution's name: PyPI's `llmc` is another project, so no hint installs it, and its presence is told."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import llmc
from llmc.cli import main as cli
from llmc.distribution import NAME, install_compiler, name_clash

from support.paths import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
TEXTS = {".py", ".md", ".toml", ".service", ".sh", ".cc", ".h", ".yml", ""}


@pytest.fixture
def other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The dist-info of PyPI's llmc in a folder of packages on sys.path."""
    info = tmp_path / "site-packages" / "llmc-0.1.2.dist-info"
    info.mkdir(parents=True)
    (info / "RECORD").write_text("llmc-0.1.2.dist-info/METADATA,sha256=x,463\nllmc/__init__.py,sha256=y,3865\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(info.parent)])
    return info


def test_the_name_is_the_projects_and_its_version_the_packages() -> None:
    assert PROJECT["project"]["name"] == NAME
    assert PROJECT["project"]["version"] == llmc.__version__
    assert PROJECT["project"]["scripts"] == {"llmc": "llmc.cli.entry:main"}


def test_the_license_is_apache_2() -> None:
    assert PROJECT["project"]["license"] == "Apache-2.0"
    (name,) = PROJECT["project"]["license-files"]
    text = (ROOT / name).read_text()
    assert text.split()[:4] == ["Apache", "License", "Version", "2.0,"]
    assert "END OF TERMS AND CONDITIONS" in text


def test_links_of_the_projects_papers_lead_somewhere() -> None:
    links = {
        link
        for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
        for link in re.findall(r"\]\(([^)#:]+)\)", (ROOT / name).read_text())
    }
    assert {"LICENSE", "runtime/COMPATIBILITY.md"} <= links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_no_text_installs_the_other_project() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    wrong, hints = [], 0
    for name in filter(None, listed.split("\0")):
        path = ROOT / name
        if path.suffix not in TEXTS or path == Path(__file__) or not path.is_file():
            continue
        for line in path.read_text(encoding="utf-8").splitlines():
            hints += NAME in line
            # `llmc` as a requirement: with extras, or behind `pip install`.
            if re.search(r"(?<![\w/.-])llmc\[|pip install( -\S+| [^\s'\"-]\S*)* ['\"]?llmc(?![\w-])", line):
                wrong.append(f"{name}: {line.strip()}")
    assert wrong == []
    assert hints > 3


def test_the_hint_names_an_extra_of_the_project_and_the_index_of_uv() -> None:
    found = re.fullmatch(r"pip install '(\S+)\[(\w+)\]' --extra-index-url (\S+)", install_compiler())
    assert found is not None
    assert found[1] == NAME
    assert found[2] in PROJECT["project"]["optional-dependencies"]
    (index,) = PROJECT["tool"]["uv"]["index"]
    assert (found[3], index["name"]) == (index["url"], PROJECT["tool"]["uv"]["sources"]["torch"]["index"])


def test_without_the_other_project_nothing_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert name_clash() is None
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().err == ""


def test_both_installed_is_told_with_what_to_do(other: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    shown = capsys.readouterr()
    assert shown.out == f"llmc {llmc.__version__}\n"
    assert shown.err == (
        f"llmc: warning: PyPI's llmc is another project and overwrites files of llmc-aot in {other.parent}: "
        "pip uninstall llmc, then pip install --force-reinstall --no-deps llmc-aot\n"
    )


def test_where_the_other_package_was_installed_last_nothing_runs(
    other: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delattr(llmc, "__getattr__")  # which knows what is imported at first use
    monkeypatch.delattr(llmc, "artifact_path", raising=False)
    assert cli.main(["--version"]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("llmc: error: PyPI's llmc is another project")


@pytest.mark.parametrize("record", ["_editable_skbc_llmc.py,sha256=x,1\n", "", b"\xff\xfe"])
def test_a_distribution_that_does_not_own_the_package_is_no_clash(other: Path, record: str | bytes) -> None:
    (other / "RECORD").write_bytes(record if isinstance(record, bytes) else record.encode())
    assert name_clash() is None
    (other / "RECORD").unlink()
    assert name_clash() is None


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_make_installs_again_when_the_native_library_changes() -> None:
    rules = subprocess.run(["make", "-C", ROOT, "-rpnq"], capture_output=True, text=True, check=False).stdout
    (needed,) = re.findall(r"^\.venv/\.installed: (.*)$", rules, re.MULTILINE)
    native = ROOT / "runtime" / "native"
    sources = [path for path in native.rglob("*") if path.suffix in (".cc", ".h", ".map")]
    built = {path.relative_to(ROOT).as_posix() for path in sources if native / "tests" not in path.parents}
    assert len(built) > 50
    assert {"pyproject.toml", "runtime/native/CMakeLists.txt"} | built == set(needed.split())
