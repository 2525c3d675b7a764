"""What a model that is served is called."""

from __future__ import annotations

import os
from pathlib import Path

from llmc.hub_id import hub_id
from llmc.model_path import is_gguf, is_onnx


def model_name(model: Path) -> str:
    """What clients call it: its directory's or its file's name, or its name on the hub.

    A link has its own name, so that clients may go on when it leads elsewhere.
    """
    found = hub_id(model)
    path = Path(os.path.abspath(model))
    if is_gguf(model):
        return path.stem
    if is_onnx(model):
        # Most graphs are called model.onnx.
        return path.parent.name
    return path.name if found is None else found.repo
