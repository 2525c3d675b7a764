"""Guesses what the user meant with a path that is neither an artifact nor a model directory."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Sequence
from pathlib import Path

_ADDRESS = re.compile(r"(?:localhost|\[[0-9a-f:]+\]|[\w-]+(?:\.[\w-]+)*):\d{1,5}(?:/.*)?", re.IGNORECASE | re.ASCII)
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")
_MOST_LISTED = 5
_SINGLE = {"GGUF": ("*.gguf",), "ONNX": ("*.onnx", "onnx/*.onnx")}
_FOLDERS = (
    ("artifacts", "*/graphs.bin"),
    ("models", "*/config.json"),
    ("snapshots", "snapshots/*/config.json"),
    ("the hub's models", "models--*/snapshots/*/config.json"),
)
"""What folders hold, and the pattern of a file of each."""
_PARTS = ("graphs.bin", "manifest.json", "kernels.cl", "kernels.so", "weights.safetensors", "config.json")


def meant(path: Path) -> str:
    """One sentence about `path`, with advice."""
    text = str(path)
    if re.match(r"https?:/", text, re.IGNORECASE):
        # A Path has dropped one of the slashes.
        url = re.sub(r":/+", "://", text, count=1)
        return f"{url} is a server's address: talk to it with llmc chat {url}, or give an artifact or a model directory"
    if not path.exists():
        if _ADDRESS.fullmatch(text):
            return f"{text} does not exist; for a server, write llmc chat http://{text}"
        models = "a directory, a .gguf or .onnx file"
        return f"{path} does not exist: give an artifact, a model ({models}), or ORG/NAME of the hub"
    if path.is_dir():
        if (single := single_files(path)) is not None:
            return f"{path} has no config.json, but {single}"
        for kind, mark in _FOLDERS:
            if inside := sorted(file.parent for file in path.glob(mark)):
                return f"{path} is a folder of {kind}: give one of them, {_listed(inside)}"
        return f"{path} is neither an artifact (no graphs.bin) nor a model directory (no config.json)"
    if path.name in _PARTS:
        return f"{path} is a part of an artifact or model: give its directory, {path.resolve().parent}"
    if path.suffix in _WEIGHTS:
        return f"{path} is a file of weights: give the directory of its model, with config.json"
    if path.is_file() and zipfile.is_zipfile(path):
        return f"{path} is a bundle, without weights: make an artifact with llmc bundle apply {path} MODEL -o OUT"
    return f"{path} is a file, neither an artifact nor a model: give a directory with graphs.bin or config.json"


def single_files(folder: Path) -> str | None:
    """The rest of a sentence on a folder without a checkpoint that has files of whole models."""
    for kind, patterns in _SINGLE.items():
        if found := sorted(file for pattern in patterns for file in folder.glob(pattern)):
            return f"{kind} files: give one of them, such as {found[0]}"
    return None


def _listed(paths: Sequence[Path]) -> str:
    """As in "a, b or c", the first few."""
    shown = [str(path) for path in paths[:_MOST_LISTED]]
    if len(paths) > _MOST_LISTED:
        return f"{', '.join(shown)}, or one of {len(paths) - _MOST_LISTED} more"
    return " or ".join(filter(None, (", ".join(shown[:-1]), shown[-1])))
