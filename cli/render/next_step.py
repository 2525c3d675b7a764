"""Output of `llmc` alone: models and artifacts found here, and a suggestion for the next command."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from llmc.model_path import is_model

_MOST_FOLDERS = 1000  # a directory with many more files is no place for artifacts
_MOST_SHOWN = 5
_HUB_MODEL = "Qwen/Qwen3-0.6B"


def next_step(here: Path, cache: Path) -> str:
    """Lines for a terminal. here: the current directory, searched with its subfolders for artifacts and models. cache:
    llmc's cache directory, which may not exist."""
    found = sorted(_places(here))
    artifacts = [path for path in found if (path / "graphs.bin").is_file()]
    models = [path for path in found if path not in artifacts and is_model(path)]
    lines = ["llmc compiles language models ahead of time and runs them.", ""]
    if artifacts:
        lines += _listed("Artifacts here:", artifacts, here)
        first = _typed(artifacts[0], here)
        lines += _commands(
            (f'llmc run {first} --prompt "Once upon a time"', "writes on"),
            (f"llmc serve {first}", "an OpenAI-compatible server and a chat page"),
            (f"llmc inspect {first}", "what is compiled, and what it costs"),
        )
    elif models:
        lines += _listed("No artifact here yet. Models here:", models, here)
        first = _typed(models[0], here)
        lines += _commands((f"llmc compile {first} -o model.llmc", "makes an artifact"))
    else:
        lines += ["No artifact and no model here yet.", ""]
        lines += _commands(
            (f"llmc compile {_HUB_MODEL} -o model.llmc", "downloads a model and makes an artifact"),
            (f"llmc serve {_HUB_MODEL}", "the same, cached, and serves it"),
        )
    cached = sum(1 for path in _folders(cache / "artifacts") if (path / "graphs.bin").is_file())
    if cached:
        compiled = "1 model that was" if cached == 1 else f"{cached} models that were"
        lines += [f"The cache has {compiled} compiled on the way: llmc cache ls", ""]
    lines += _commands(
        ("llmc doctor", "what this machine is"),
        ("llmc --help", "every command"),
    )
    return "\n".join(lines).rstrip()


def _places(here: Path) -> Iterator[Path]:
    """Candidate paths for artifacts and models: here, and two folders deep, as out/tiny."""
    yield here
    for folder in _folders(here):
        yield folder
        if not (folder / "config.json").is_file() and not (folder / "graphs.bin").is_file():
            yield from _folders(folder)
    yield from (path for path in _entries(here) if path.suffix == ".gguf")


def _folders(folder: Path) -> list[Path]:
    return [path for path in _entries(folder) if path.is_dir() and not path.name.startswith(".")]


def _entries(folder: Path) -> list[Path]:
    try:
        return list(islice(folder.iterdir(), _MOST_FOLDERS))
    except OSError:
        return []  # missing or unreadable


def _listed(title: str, paths: list[Path], here: Path) -> list[str]:
    more = len(paths) - _MOST_SHOWN
    rest = [f"  and {more} more"] if more > 0 else []
    return [title, *(f"  {_typed(path, here)}" for path in paths[:_MOST_SHOWN]), *rest, ""]


def _typed(path: Path, here: Path) -> str:
    return shlex.quote(str(path.relative_to(here)))


def _commands(*rows: tuple[str, str]) -> list[str]:
    width = max(len(command) for command, _ in rows)
    return [*(f"  {command:{width}}  {what}" for command, what in rows), ""]
