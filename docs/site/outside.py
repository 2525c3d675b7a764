"""Files that pages link to and that are not in docs/: pages of their own, and sources, which the site shows."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Mapping
from pathlib import Path

# Pages by their path in the repository, with that of the site.
PAGES: Mapping[str, str] = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "examples/README.md": "examples.md",
    "runtime/FORMAT.md": "format.md",
    "runtime/COMPATIBILITY.md": "compatibility.md",
}
SOURCES = "source"
_LANGUAGES: Mapping[str, str] = {".cc": "cpp", ".h": "cpp", ".py": "python", ".c": "c", ".sh": "sh", ".json": "json"}
_LANGUAGE_OF_NAME: Mapping[str, str] = {"Dockerfile": "docker"}
_LINK = re.compile(r"(?<=\]\()(?P<path>[^()\s#:]+)(?P<anchor>#[^()\s]*)?(?=\))")
_CODE = re.compile(r"^```[\s\S]*?^```[ ]*$|`[^`\n]+`|^(?: {4}.*\n)+", re.MULTILINE)
_NOT_SHOWN = "---\nsearch:\n  exclude: true\n---\n\n"


class Linker:
    """Rewrites links of pages to where the site has what they lead to, and notes the sources it must have.

    sources: site path of each source that a link leads to → its path in the repository.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self.sources: dict[str, str] = {}

    def rewrite(self, text: str, origin: str, page: str) -> str:
        """The Markdown of a page with its links rewritten. origin: its path in the repository; page: in the site."""
        return outside_code(text, lambda prose: _LINK.sub(lambda link: self._target(link, origin, page), prose))

    def _target(self, link: re.Match[str], origin: str, page: str) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(origin), link["path"]))
        if path in PAGES:
            found = PAGES[path]
        elif path.startswith("docs/"):
            found = path.removeprefix("docs/")
        elif not path.startswith("..") and (self._root / path).exists():
            found = f"{SOURCES}/{path}" + ("/index.md" if (self._root / path).is_dir() else ".md")
            self.sources[found] = path
        else:
            # The build finds that it leads nowhere.
            return link[0]
        return posixpath.relpath(found, posixpath.dirname(page) or ".") + (link["anchor"] or "")


def outside_code(text: str, change: Callable[[str], str]) -> str:
    """`text` with all but its code changed: blocks, fenced or indented, and what stands in backticks."""
    parts, end = [], 0
    for code in _CODE.finditer(text):
        parts += [change(text[end : code.start()]), code[0]]
        end = code.end()
    return "".join([*parts, change(text[end:])])


def for_the_site(text: str) -> str:
    """`text` in the site's Markdown: what belongs to an item of a list is indented by four spaces, where CommonMark is
    content with the width of the item's mark."""
    return outside_code(text, lambda prose: re.sub(r"^(?: {3}(?=\S)|  (?=- ))", "    ", prose, flags=re.MULTILINE))


def source_page(root: Path, path: str, tracked: Callable[[str], list[str]]) -> str:
    """A page that shows a file of the repository, or lists those of a folder; the search does not find it.

    tracked: the files below a folder.
    """
    title = f"{_NOT_SHOWN}# {path}\n\n"
    file = root / path
    if file.is_dir():
        return title + "\n".join(f"- `{name}`" for name in tracked(path)) + "\n"
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".md":
        return _NOT_SHOWN + text
    language = _LANGUAGES.get(file.suffix) or _LANGUAGE_OF_NAME.get(file.name, "text")
    return f"{title}````{language}\n{text}````\n"
