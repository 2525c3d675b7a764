"""What MkDocs calls while it builds the site (mkdocs.yml names this file)."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import get_plugin_logger
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from docs.site import c_reference, cli_reference, http_reference, outside, python_reference
from docs.site.assets import loaded_from_elsewhere
from docs.site.dialect import read_otherwise

# What it warns of fails a strict build, at its end.
log = get_plugin_logger("llmc")
ROOT = Path(__file__).resolve().parents[2]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that are not in docs/, with their links rewritten, as those of docs/ are."""
    linker = outside.Linker(ROOT)
    texts = {page: ((ROOT / path).read_text(encoding="utf-8"), path) for path, page in outside.PAGES.items()}
    for file in files.documentation_pages():
        texts[file.src_uri] = (file.content_string, f"docs/{file.src_uri}")
    for page, text in _references().items():
        texts[page] = (text, f"docs/{page}")
    for page, (text, origin) in texts.items():
        _put(files, config, page, outside.for_the_site(linker.rewrite(text, origin, page)))
    _add_sources(files, config, linker)
    return files


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Warns where the site shows a page otherwise than readers of its file see it."""
    path = {site: path for path, site in outside.PAGES.items()}.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    if (ROOT / path).is_file():
        found = list(read_otherwise((ROOT / path).read_text(encoding="utf-8"), output))
        if found:
            log.warning("%s is read otherwise by the site: %s", path, "; ".join(found))
    return output


def on_post_build(config: MkDocsConfig) -> None:
    """Warns where a page would ask the network for something."""
    for found in loaded_from_elsewhere(Path(config.site_dir)):
        log.warning("%s: the site must load without network", found)


def _references() -> Mapping[str, str]:
    return {
        "reference/cli.md": cli_reference.page(),
        "reference/http.md": http_reference.page(),
        "reference/c.md": c_reference.page(ROOT),
        "reference/python.md": python_reference.page(),
    }


def _add_sources(files: Files, config: MkDocsConfig, linker: outside.Linker) -> None:
    """Sources that pages link to, and those that these link to, if they are pages themselves."""
    done: set[str] = set()
    while missing := linker.sources.keys() - done:
        for page in sorted(missing):
            path = linker.sources[page]
            text = outside.source_page(ROOT, path, _tracked)
            _put(files, config, page, linker.rewrite(text, path, page) if path.endswith(".md") else text)
            done.add(page)


def _put(files: Files, config: MkDocsConfig, page: str, text: str) -> None:
    if (old := files.get_file_from_path(page)) is not None:
        files.remove(old)
    files.append(File.generated(config, page, content=text))


def _tracked(folder: str) -> list[str]:
    """Files of the repository below a folder: all that are there, where the tree is no clone."""
    listed = subprocess.run(["git", "ls-files", "--", folder], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode == 0:
        return listed.stdout.splitlines()
    return sorted(str(file.relative_to(ROOT)) for file in (ROOT / folder).rglob("*") if file.is_file())
