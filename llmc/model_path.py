"""Paths that count as a model: a directory in Hugging Face's format, a GGUF file, or an ONNX graph."""

from __future__ import annotations

from pathlib import Path

GGUF_SUFFIX, ONNX_SUFFIX = ".gguf", ".onnx"
_ONNX_NAMES = ("model.onnx", "onnx/model.onnx")
"""Paths of the graph in a directory from Optimum or the hub."""


def is_gguf(path: Path) -> bool:
    """Whether the name is that of a GGUF file and it is no directory. A pipe is refused when it is opened."""
    return path.suffix == GGUF_SUFFIX and path.exists() and not path.is_dir()


def is_onnx(path: Path) -> bool:
    """Whether the name is that of an ONNX graph and it is no directory."""
    return path.suffix == ONNX_SUFFIX and path.exists() and not path.is_dir()


def onnx_graph(path: Path) -> Path | None:
    """The ONNX graph of a path: the file itself, or the one in a directory without safetensors. None for other models
    or none."""
    if is_onnx(path):
        return path
    if not path.is_dir() or any(path.glob("*.safetensors*")):
        return None
    return next((path / name for name in _ONNX_NAMES if is_onnx(path / name)), None)


def is_model(path: Path) -> bool:
    """Whether there is a model to compile; reads no contents."""
    return is_gguf(path) or onnx_graph(path) is not None or (path / "config.json").is_file()
