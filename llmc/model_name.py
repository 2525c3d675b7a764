"""What a model that is served is called."""

from __future__ import annotations

from pathlib import Path

from llmc.hub_id import hub_id
from llmc.model_path import is_gguf, is_onnx


def model_name(model: Path) -> str:
    """What clients call it: its directory's or its file's name, or its name on the hub."""
    found = hub_id(model)
    if is_gguf(model):
        return model.resolve().stem
    if is_onnx(model):
        # Most graphs are called model.onnx.
        return model.resolve().parent.name
    return model.resolve().name if found is None else found.repo
