"""Follows a page of docs/ that adds something to llmc: writes its files, makes its changes, runs its tests.

Code of a page is a fenced block behind a line with the file's name, as "`models/families/x.py`:". A block of `diff`
changes a file that is there: a line with + goes behind the one before it, which the file has once, or, behind a line
with -, in its place.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from support.paths import ROOT

MOST_LINES = 60
_BLOCK = re.compile(r"^`([\w./-]+)`:\n\n```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Guide:
    """files: new ones; changes: of files that are there. Both by name."""

    files: dict[str, str]
    changes: dict[str, str]

    def file(self, ending: str) -> str:
        """The name of the one file whose name ends so."""
        (name,) = (name for name in self.files if name.endswith(ending))
        return name


def read_guide(page: str) -> Guide:
    """The code of docs/`page`. Asserts that it is short, that it is all there is, and where it goes."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    blocks = _BLOCK.findall(text)
    assert len(blocks) == len(re.findall(r"^```(?:python|cpp|diff)$", text, re.MULTILINE)), "a block has no file"
    files = {name: code for name, kind, code in blocks if kind != "diff"}
    changes = {name: code for name, kind, code in blocks if kind == "diff"}
    assert len(files) + len(changes) == len(blocks), "a file is there twice"
    assert [name for name in files if (ROOT / name).exists()] == []
    assert [name for name in changes if not (ROOT / name).is_file()] == []
    written = [code.splitlines() for code in files.values()]
    written += [[line for line in code.splitlines() if line.startswith("+")] for code in changes.values()]
    lines = [line for code in written for line in code if line.strip()]
    assert 0 < len(lines) < MOST_LINES, f"{page} has {len(lines)} lines of code"
    return Guide(files, changes)


def changed(text: str, diff: str) -> str:
    """`text` with a block of `diff` applied."""
    lines = text.splitlines()
    at = -1
    for change in diff.splitlines():
        sign, line = change[:1], change[1:]
        if sign == "+":
            at += 1
            lines.insert(at, line)
            continue
        assert sign in (" ", "-"), f"a line of a change begins with {sign!r}"
        assert lines.count(line) == 1, f"{line!r} is {lines.count(line)} times in the file"
        at = lines.index(line)
        if sign == "-":
            del lines[at]
            at -= 1
    return "\n".join(lines) + "\n"


def _module_of(name: str) -> str:
    return "llmc." + name.removesuffix(".py").replace("/", ".")


def _load(name: str, file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _let_find(name: str, folder: Path, stack: ExitStack) -> None:
    """Lets the nearest package that there is find a module, or a folder with it, below `folder`."""
    module, parent = _module_of(name), Path(name).parent
    stack.callback(sys.modules.pop, module, None)
    while not (ROOT / parent).is_dir():
        module, parent = module.rpartition(".")[0], parent.parent
        stack.callback(sys.modules.pop, module, None)
    places = importlib.import_module(module.rpartition(".")[0]).__path__
    places.append(str(folder / parent))
    stack.callback(places.remove, str(folder / parent))


@contextmanager
def followed(guide: Guide, folder: Path) -> Iterator[None]:
    """While it lasts this process has the guide's Python: the files lie below `folder`, where packages look for them
    too, and a changed registry is read as it would be, its new entries those of the installed one."""
    with ExitStack() as stack:
        for name, code in guide.files.items():
            file = folder / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(code, encoding="utf-8")
            if name.endswith(".py") and not name.startswith("tests/"):
                _let_find(name, folder, stack)
        for name, diff in guide.changes.items():
            if not name.endswith(".py"):
                continue
            file = folder / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(changed((ROOT / name).read_text(encoding="utf-8"), diff), encoding="utf-8")
            installed, new = importlib.import_module(_module_of(name)), _load(_module_of(name), file)
            registered: dict[str, int] = {}
            for variable, entries in vars(new).items():
                known = vars(installed).get(variable)
                if variable.isupper() and isinstance(entries, dict) and isinstance(known, dict):
                    for key in entries.keys() - known.keys():
                        known[key] = entries[key]
                        stack.callback(known.pop, key)
                        registered[variable] = registered.get(variable, 0) + 1
            assert set(registered.values()) == {1}, f"the change of {name} registers {registered}"
        yield


def run_tests(guide: Guide, folder: Path) -> int:
    """Runs the tests of a followed guide, each with a `tmp_path` of its own; how many there were."""
    count = 0
    for name in guide.files:
        if not name.startswith("tests/") or not name.endswith(".py"):
            continue
        module = _load(Path(name).stem, folder / name)
        for test, function in list(vars(module).items()):
            if test.startswith("test_"):
                place = folder / "runs" / test
                place.mkdir(parents=True)
                function(place)
                count += 1
    return count
