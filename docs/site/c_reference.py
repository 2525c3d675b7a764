"""The C reference: every declaration of llmc.h under the heading of its section, with the comment in front of it."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .markdown import heading, prose

HEADER = Path("runtime/native/include/llmc/llmc.h")
_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
_SECTION = re.compile(r"/\* -{3,} (?P<title>[^:\n]+?)(?:: (?P<rest>[^\n]*?))? -{3,} \*/")
_NAMES = (
    re.compile(r"^LLMC_API\b[^(]*?\b(?P<name>llmc_\w+)\(", re.DOTALL),
    re.compile(r"^typedef struct (?P<name>llmc_\w+)\b"),
    re.compile(r"^typedef \w+ (?P<name>llmc_\w+);"),
    re.compile(r"^#define (?P<name>LLMC_\w+) \S"),
)
# What only compilers read.
_PREAMBLE = re.compile(
    r"^(?:#(?:ifndef|ifdef|if|else|endif|include)\b.*|#define LLMC_(?:API|LLMC_H_)\b.*|extern \"C\" \{|\})$"
)


@dataclass(frozen=True)
class Declaration:
    """names: all that it declares, of which the first is its heading."""

    names: tuple[str, ...]
    comment: str
    code: str


@dataclass(frozen=True)
class Section:
    """title: "" for what stands before the first one. texts: comments that belong to no declaration."""

    title: str
    subtitle: str
    texts: tuple[str, ...]
    declarations: tuple[Declaration, ...]


class HeaderError(ValueError):
    """A part of the header that is no declaration this reads; the message shows it."""


def page(root: Path) -> str:
    """The page, in Markdown; root: of the repository."""
    read = list(sections((root / HEADER).read_text(encoding="utf-8")))
    known = {name: of.names[0] for section in read for of in section.declarations for name in of.names}
    parts = ["# C", "All of `llmc.h`. [The C ABI](../c-abi.md) says how its parts work together."]
    for section in read:
        if section.title:
            parts.append(heading(2, section.title[0].upper() + section.title[1:]))
        if section.subtitle:
            parts.append(_linked(section.subtitle[0].upper() + section.subtitle[1:], known) + ".")
        parts += [_linked(text, known) for text in section.texts]
        for of in section.declarations:
            title = of.names[0] if len(of.names) == 1 else f"{of.names[0]} … {of.names[-1]}"
            parts.append(heading(3, title, anchor=of.names[0]))
            parts.append(f"```c\n{of.code}\n```")
            if of.comment:
                parts.append(_linked(of.comment, known, but=of.names))
    return "\n\n".join(parts) + "\n"


def sections(header: str) -> Iterator[Section]:
    """The sections of a header, in order. Raises HeaderError."""
    marks = list(_SECTION.finditer(header))
    ends = [mark.start() for mark in marks] + [len(header)]
    yield _section("", "", header[: ends[0]])
    for mark, end in zip(marks, ends[1:], strict=True):
        yield _section(mark["title"], mark["rest"] or "", header[mark.end() : end])


def _section(title: str, subtitle: str, text: str) -> Section:
    texts: list[str] = []
    declarations: list[Declaration] = []
    comment = ""
    for part in _parts(text):
        if not part.startswith("/*"):
            declarations.append(Declaration(_names(part), comment, part))
            comment = ""
            continue
        # A comment that another one, or an empty line, follows belongs to nothing.
        texts += [comment] if comment else []
        comment = _plain(part)
        if text[text.index(part) + len(part) :].startswith("\n\n"):
            texts.append(comment)
            comment = ""
    return Section(title, subtitle, tuple(texts), tuple(declarations))


def _parts(text: str) -> Iterator[str]:
    """Comments that begin a line, and declarations with the comments in them, up to the end of the line."""
    lines = iter(text.splitlines())
    for line in lines:
        if not line.strip() or _PREAMBLE.match(line):
            continue
        part = line
        while not _whole(part):
            following = next(lines, None)
            if following is None:
                raise HeaderError(f"{part!r} does not end")
            part += "\n" + following
        yield part


def _whole(part: str) -> bool:
    if part.startswith("/*"):
        return part.endswith("*/")
    code = _COMMENT.sub("", part)
    if "/*" in code or code.count("{") != code.count("}"):
        return False
    return code.startswith("#define") or code.rstrip().endswith(";")


def _names(declaration: str) -> tuple[str, ...]:
    code = _COMMENT.sub("", declaration)
    if code.startswith("enum {"):
        return tuple(re.findall(r"\b(LLMC_\w+) = ", code))
    for pattern in _NAMES:
        if found := pattern.match(code):
            return (found["name"],)
    raise HeaderError(f"{declaration!r} is no declaration that the reference knows")


def _plain(comment: str) -> str:
    """The text of a comment, a paragraph a line."""
    inner = comment.removeprefix("/*").removesuffix("*/")
    lines = textwrap.dedent("\n".join(re.sub(r"^ \* ?", "", line) for line in inner.splitlines())).strip().splitlines()
    return "\n".join(line.strip() for line in lines)


def _linked(text: str, known: dict[str, str], but: tuple[str, ...] = ()) -> str:
    """The text with names of the header in the form of code; those declared elsewhere lead there."""

    def shown(part: str) -> str:
        if part.startswith("`"):
            return part
        if part not in known:
            return prose(part)
        return f"`{part}`" if part in but else f"[`{part}`](#{known[part]})"

    return "".join(map(shown, re.split(r"(`[^`\n]+`|\b(?:llmc_|LLMC_)\w+)", text)))
