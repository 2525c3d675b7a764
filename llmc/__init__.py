"""llmc: ahead-of-time compiler and bucketed graph runtime for large language models.

`LLM(path)` takes an artifact, a model directory, a GGUF file or ORG/NAME of the Hugging Face hub; a model is compiled
on the way, through the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmc.runtime.async_llm import AsyncLLM
    from llmc.runtime.beams import BeamSearchParams
    from llmc.runtime.guided.constraint import Guided
    from llmc.runtime.llm import LLM
    from llmc.runtime.outputs import RequestOutput, TokenDelta
    from llmc.runtime.params import SamplingParams
    from llmc.runtime.request_error import RequestError

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchParams",
    "Guided",
    "ModelPathError",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "TokenDelta",
    "__version__",
    "artifact_path",
]


class ModelPathError(ValueError):
    """A path that is neither an artifact nor a model that can be compiled here; the message is one sentence."""


def artifact_path(path: str | Path, progress: Callable[[str, int, int], None] | None = None) -> Path:
    """`path` if it is an artifact; for a model, the artifact compiled from it with default settings.

    A model is a directory, a GGUF file, or ORG/NAME[@REVISION] of the hub where nothing here has that name. progress is
    the compiler's, called with (phase, done, total). Raises ModelPathError for anything else, and when a model has to
    be compiled but the compiler is not installed; HubError when it cannot be downloaded.
    """
    path = Path(path)
    if (path / "graphs.bin").is_file():
        return path
    check_model(path)
    from llmc.compiler.config import no_progress
    from llmc.compiler.hub import locate
    from llmc.compiler.pipeline import compile_cached

    tell = progress or no_progress
    found = locate(path, lambda done, total: tell("download", done, total))
    return compile_cached(found.path, tell, found.source)


def check_model(path: Path) -> None:
    """Raises ModelPathError for what is no model, and where the compiler is not installed; downloads nothing."""
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


def __getattr__(name: str) -> Any:
    # Resolved at first use: importing llmc stays free of the runtime library, numpy and the tokenizer.
    if name == "LLM":
        from llmc.runtime.llm import LLM as _LLM

        value: Any = _that_compiles(_LLM)
    elif name == "AsyncLLM":
        from llmc.runtime.async_llm import AsyncLLM as _AsyncLLM

        value = _that_compiles(_AsyncLLM)
    elif name == "RequestError":
        from llmc.runtime.request_error import RequestError as value
    elif name == "SamplingParams":
        from llmc.runtime.params import SamplingParams as value
    elif name == "BeamSearchParams":
        from llmc.runtime.beams import BeamSearchParams as value
    elif name == "Guided":
        from llmc.runtime.guided.constraint import Guided as value
    elif name in ("RequestOutput", "TokenDelta"):
        from llmc.runtime import outputs

        value = getattr(outputs, name)
    else:
        raise AttributeError(f"module 'llmc' has no attribute {name!r}")
    globals()[name] = value
    return value


def _that_compiles(base: type) -> type:
    """`base`, which takes an artifact, as a class of the same name that takes a model directory as well."""
    members = {"__doc__": base.__doc__, "__module__": "llmc", "_artifact_path": staticmethod(artifact_path)}
    return type(base.__name__, (base,), members)
