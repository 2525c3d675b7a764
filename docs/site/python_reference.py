"""The Python reference: what `llmc` exports, and what its results are made of, with signatures and docstrings."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any

import llmc
from llmc.runtime import outputs

from .markdown import heading, prose

_WIDTH = 100
# What llmc exports, by section, and the parts of its results, which are in llmc.runtime.outputs.
_SECTIONS: Mapping[str, tuple[str, ...]] = {
    "Models": ("LLM", "AsyncLLM"),
    "Sampling": ("SamplingParams", "BeamSearchParams", "Guided"),
    "Results": ("RequestOutput", "TokenDelta"),
    "Artifacts": ("artifact_path",),
    "Errors": ("ModelPathError", "RequestError"),
}
_PARTS = (
    outputs.CompletionOutput,
    outputs.TokenLogprob,
    outputs.RequestFailure,
    outputs.Usage,
    outputs.Timings,
    outputs.EmbeddingOutput,
    outputs.ScoreOutput,
    outputs.LabelOutput,
)
_KINDS = (classmethod, staticmethod, property, functools.cached_property)


class UnlistedError(ValueError):
    """llmc exports a name that the reference has no place for; the message is one sentence."""


def page() -> str:
    """The page, in Markdown. Raises UnlistedError."""
    if missing := set(llmc.__all__) - {name for names in _SECTIONS.values() for name in names} - {"__version__"}:
        raise UnlistedError(f"llmc exports {', '.join(sorted(missing))}: give it a section in {__name__}")
    parts = [
        "# Python",
        "[From Python](../python.md) shows how these are used. `from llmc import …` has all but the parts of results, "
        "which calls give back.",
    ]
    for title, names in _SECTIONS.items():
        parts.append(heading(2, title))
        for name in names:
            parts += _described(name, getattr(llmc, name))
        if title == "Results":
            parts.append(heading(2, "Parts of results"))
            for one in _PARTS:
                parts += _described(one.__name__, one)
    return "\n\n".join(parts) + "\n"


def _described(name: str, what: Any) -> Iterator[str]:
    """A class with its public members, or a function."""
    yield heading(3, name, anchor=name)
    if inspect.isclass(what) and issubclass(what, Exception):
        yield _docstring(what, ())
        return
    yield _code(f"class {name}" if inspect.isclass(what) else f"def {name}", what)
    yield _docstring(what, inspect.signature(what).parameters)
    for member, of in members(what) if inspect.isclass(what) else ():
        yield heading(4, f"{name}.{member}", anchor=f"{name}.{member}")
        if isinstance(of, property | functools.cached_property):
            getter: Any = of.fget if isinstance(of, property) else of.func
            yield f"```python\n{member}: {getter.__annotations__.get('return', 'Any')}\n```"
            yield _docstring(of, ())
        else:
            called = of.__func__ if isinstance(of, classmethod | staticmethod) else of
            yield _code(_start(member, of, called), called)
            yield _docstring(of, inspect.signature(called).parameters)


def members(cls: type) -> Iterator[tuple[str, Any]]:
    """Public methods and properties with a docstring, in the order of the source, those of the class before those of
    its bases."""
    seen: set[str] = set()
    for base in cls.__mro__:
        for name, of in vars(base).items():
            if name.startswith("_") or name in seen or not (isinstance(of, _KINDS) or inspect.isfunction(of)):
                continue
            seen.add(name)
            if inspect.getdoc(of):
                yield name, of


def _docstring(of: Any, names: Container[str]) -> str:
    """The docstring, in which the names of parameters have the form of code: all that no English word is, and others
    where they are explained."""
    parts = re.split(r"(`[^`\n]+`|\b[a-z]+(?:_[a-z]+)+\b|\b[a-z]+(?=:))", inspect.getdoc(of) or "")
    return "".join(
        part if part.startswith("`") else f"`{part}`" if i % 2 and part in names else prose(part)
        for i, part in enumerate(parts)
    )


def _start(name: str, of: Any, called: Any) -> str:
    if isinstance(of, classmethod):
        return f"@classmethod\ndef {name}"
    if isinstance(of, staticmethod):
        return f"@staticmethod\ndef {name}"
    is_async = inspect.iscoroutinefunction(called) or inspect.isasyncgenfunction(called)
    return f"async def {name}" if is_async else f"def {name}"


def _code(start: str, of: Callable[..., Any]) -> str:
    """A signature as Python would have it, one parameter a line where one line does not hold all."""
    signature = inspect.signature(of)
    words: list[str] = []
    for one in signature.parameters.values():
        if one.name in ("self", "cls"):
            continue
        if one.kind is one.KEYWORD_ONLY and "*" not in words and not any(word.startswith("*") for word in words):
            words.append("*")
        words.append(_parameter(one, of))
    result = signature.return_annotation
    returned = "" if inspect.isclass(of) or result is signature.empty else f" -> {_shown(result)}"
    line = f"{start}({', '.join(words)}){returned}"
    if max(map(len, line.splitlines())) > _WIDTH:
        line = f"{start}(\n" + "".join(f"    {word},\n" for word in words) + f"){returned}"
    return f"```python\n{line}\n```"


def _parameter(one: inspect.Parameter, of: Any) -> str:
    stars = "*" if one.kind is one.VAR_POSITIONAL else "**" if one.kind is one.VAR_KEYWORD else ""
    annotation = "" if one.annotation is one.empty else f": {_shown(one.annotation)}"
    default = one.default
    if dataclasses.is_dataclass(of):
        field = next(field for field in dataclasses.fields(of) if field.name == one.name)
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
    equal = " = " if annotation else "="
    return f"{stars}{one.name}{annotation}" + ("" if default is one.empty else f"{equal}{default!r}")


def _shown(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
