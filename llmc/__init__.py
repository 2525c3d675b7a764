"""llmc: ahead-of-time compiler and bucketed graph runtime for large language models.

`LLM(path)` takes an artifact, a model directory, a GGUF file or ORG/NAME of the Hugging Face hub. A model is compiled
first, through the cache.
"""

from __future__ import annotations

from llmc.version import __version__

# As in `typing`, which takes longer to import than all that is needed here.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from llmc.model_artifact import ModelPathError, artifact_path
    from llmc.runtime.async_llm import AsyncLLM
    from llmc.runtime.beams import BeamSearchParams
    from llmc.runtime.guided.constraint import Guided
    from llmc.runtime.llm import LLM
    from llmc.runtime.outputs import RequestOutput, TokenDelta
    from llmc.runtime.params import SamplingParams
    from llmc.runtime.request_error import RequestError

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


def __getattr__(name: str) -> Any:
    # Resolved at first use: importing llmc stays free of the runtime library, numpy and the tokenizer, and the command
    # answers Ctrl-C early.
    if name == "LLM":
        from llmc.runtime.llm import LLM as _LLM

        value: Any = _that_compiles(_LLM)
    elif name == "AsyncLLM":
        from llmc.runtime.async_llm import AsyncLLM as _AsyncLLM

        value = _that_compiles(_AsyncLLM)
    elif name in ("ModelPathError", "artifact_path"):
        from llmc import model_artifact

        value = getattr(model_artifact, name)
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
    """Subclass of `base` with the same name: `base` takes an artifact, the subclass also a model directory."""
    from llmc.model_artifact import artifact_path

    members = {"__doc__": base.__doc__, "__module__": "llmc", "_artifact_path": staticmethod(artifact_path)}
    return type(base.__name__, (base,), members)
