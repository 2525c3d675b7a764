"""The artifact for a path: the path itself, or an artifact compiled from the model there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path


class ModelPathError(ValueError):
    """A path that is neither an artifact nor a model that can be compiled here; the message is one sentence."""


def artifact_path(path: str | Path, progress: Callable[[str, int, int], None] | None = None) -> Path:
    """`path` if it is an artifact; for a model, the artifact compiled from it with default settings.

    A model is a directory, a GGUF file, or ORG/NAME[@REVISION] of the hub where nothing here has that name. progress is
    the compiler's, called with (phase, done, total). Raises ModelPathError for anything else, and when a model has to
    be compiled but the compiler is not installed; HubError when it cannot be downloaded.
    """
    path = Path(path)
    if (given := given_artifact(path)) is not None:
        return given
    check_model(path)
    from llmc.compiler.config import no_progress
    from llmc.compiler.hub import locate
    from llmc.compiler.pipeline import compile_cached

    tell = progress or no_progress
    found = locate(path, lambda done, total: tell("download", done, total))
    return compile_cached(found.path, tell, found.source)


def given_artifact(path: Path) -> Path | None:
    """`path` if it is an artifact, else None. One in the cache is then left by `llmc cache gc` until this process ends.

    Raises ModelPathError if it is collected just now.
    """
    from llmc.held_artifact import hold_if_cached

    if not (path / "graphs.bin").is_file():
        return None
    if not hold_if_cached(path):
        raise ModelPathError(f"{path} was removed just now by `llmc cache gc`: give its model, to compile it again")
    return path


def check_model(path: Path) -> None:
    """Raises ModelPathError if it is not a model, or the compiler is not installed; downloads nothing."""
    from llmc.hub_id import hub_id
    from llmc.model_path import is_model

    if hub_id(path) is not None:
        return require_compiler(f"{path} is not here, and a model of the hub must be compiled first")
    if not is_model(path):
        from llmc.mistaken_path import meant

        raise ModelPathError(meant(path))
    require_compiler(f"{path} is a model and must be compiled first")


def require_compiler(why: str) -> None:
    """Raises ModelPathError, one sentence that starts with `why`, when the compiler is not installed."""
    from importlib.util import find_spec

    from llmc.distribution import install_compiler

    missing = [name for name in ("llmc.compiler", "torch", "tvm") if find_spec(name) is None]
    if missing:
        raise ModelPathError(f"{why}, but {missing[0]} is not installed: {install_compiler()}")
