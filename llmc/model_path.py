"""What is taken for a model: a directory in Hugging Face's format, a GGUF file, or an ONNX graph."""

from __future__ import annotations

from pathlib import Path

GGUF_SUFFIX, ONNX_SUFFIX = ".gguf", ".onnx"
_ONNX_NAMES = ("model.onnx", "onnx/model.onnx")
"""Where Optimum and the hub have the graph of a directory."""


def is_gguf(path: Path) -> bool:
    """Whether something that is no directory is called as a GGUF file is; a pipe is refused when it is opened."""
    return path.suffix == GGUF_SUFFIX and path.exists() and not path.is_dir()


def is_onnx(path: Path) -> bool:
    """Whether something that is no directory is called as an ONNX graph is."""
    return path.suffix == ONNX_SUFFIX and path.exists() and not path.is_dir()


def onnx_graph(path: Path) -> Path | None:
    """The ONNX graph that a path stands for: that file, or the one of a directory without safetensors; None for what
    has another model or none."""
    if is_onnx(path):
        return path
    if not path.is_dir() or any(path.glob("*.safetensors*")):
        return None
    return next((path / name for name in _ONNX_NAMES if is_onnx(path / name)), None)


def is_model(path: Path) -> bool:
    """Whether there is a model to compile; nothing in it is read."""
    return is_gguf(path) or onnx_graph(path) is not None or (path / "config.json").is_file()
