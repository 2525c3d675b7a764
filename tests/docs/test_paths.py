"""Every path of the repository that the documentation names is there."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from support.paths import ROOT

PAGES = [
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "runtime").glob("*.md")),
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
]
SOURCES = (".py", ".cc", ".c", ".h")
# What readers make as they follow a guide, and a folder of a user's.
NOT_OURS = {
    "adding-a-device.md": {"runtime/native/device/toy/toy_device.cc"},
    "adding-a-format.md": {"quantize/formats/powers.py", "tests/quantize/formats/test_powers.py"},
    "adding-a-kernel.md": {"compiler/ops/running_mean.py", "tests/compiler/ops/test_running_mean.py"},
    "adding-a-model.md": {"models/families/biogpt.py", "tests/models/test_biogpt.py"},
    "adding-a-target.md": {"compiler/targets/twofold/backend.py", "tests/compiler/targets/test_twofold.py"},
    "buckets.md": {"costs/"},
}


def paths_of(text: str, roots: set[str]) -> set[str]:
    """Paths in a page: what stands in backticks, outside blocks of code, and is a source file's name, begins in a
    folder of `roots` or ends as a folder does."""
    prose = re.sub(r"^```.*?^```|^    .*?$", "", text, flags=re.MULTILINE | re.DOTALL)
    words = {word for word in re.findall(r"`([^`\n]+)`", prose) if re.fullmatch(r"[\w.-][\w./-]*", word)}
    return {
        word
        for word in words
        if Path(word).suffix in SOURCES or word.endswith("/") or ("/" in word and word.partition("/")[0] in roots)
    }


@pytest.fixture(scope="module")
def tracked() -> set[str]:
    """Files and folders of the repository; a folder's name ends with a slash."""
    try:
        listed = subprocess.run(["git", "-C", ROOT, "ls-files", "-z"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"the tree is not a clone: {error}")
    files = {name for name in listed.stdout.split("\0") if name and (ROOT / name).exists()}
    return files | {f"{folder}/" for name in files for folder in Path(name).parents if folder.name}


def test_what_counts_as_a_path() -> None:
    text = (
        "`a/b.py` `c.cc` `.py` `a/b` `out/b` `sub/` `/health` `b.json` `a/<x>.py` `a b.py`\n"
        "\n    `block.py`\n\n```\n`fenced.py`\n```\n"
    )
    assert paths_of(text, {"a"}) == {"a/b.py", "c.cc", "a/b", "sub/"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths_are_there(page: Path, tracked: set[str]) -> None:
    """A path may leave out the folders that the text around it speaks of."""
    roots = {name.partition("/")[0] for name in tracked if "/" in name}
    named = paths_of(page.read_text(encoding="utf-8"), roots) - NOT_OURS.get(page.name, set())
    missing = [
        path for path in sorted(named) if not any(f"/{known}".endswith((f"/{path}", f"/{path}/")) for known in tracked)
    ]
    assert not missing


def test_the_pages_name_paths(tracked: set[str]) -> None:
    roots = {name.partition("/")[0] for name in tracked if "/" in name}
    named = {page.name: paths_of(page.read_text(encoding="utf-8"), roots) for page in PAGES}
    assert sum(map(len, named.values())) > 150
    for page, paths in NOT_OURS.items():
        assert paths <= named[page], page
        assert not [path for path in paths if (ROOT / path).exists()]
