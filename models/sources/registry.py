"""Opens the source of the model at a path."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llmc.mistaken_path import meant
from llmc.model_path import is_gguf, onnx_graph
from llmc.models.errors import ModelError
from llmc.models.fields import Fields
from llmc.models.sources.base import ModelSource
from llmc.models.sources.eagle import EagleSource
from llmc.models.sources.eagle3 import Eagle3Source, LeavingSource, is_eagle_3
from llmc.models.sources.few_tokens import FewTokensSource
from llmc.models.sources.folder import FolderSource
from llmc.models.sources.gguf.source import GgufSource
from llmc.models.sources.lora.source import MergedSource
from llmc.models.sources.mtp import MtpSource
from llmc.models.sources.onnx.source import OnnxSource
from llmc.models.sources.tower import TowerSource


def open_source(
    path: str | Path,
    adapters: Sequence[Path] = (),
    *,
    allow_unknown_config: bool = False,
    task: str = "auto",
    pooling: str = "auto",
    rank_prompt: str = "auto",
) -> ModelSource:
    """Opens a .gguf or .onnx file, or a directory in Hugging Face format. Raises ModelError for any other path.

    adapters: directories of LoRA adapters to merge into the weights, in this order. allow_unknown_config, task,
    pooling, rank_prompt: see `ModelSource`.
    """
    path = Path(path)
    source = _open(path, allow_unknown_config=allow_unknown_config, task=task, pooling=pooling, rank_prompt=rank_prompt)
    return MergedSource(source, adapters) if adapters else source


def open_head(path: Path | None, model: ModelSource, tokens: tuple[int, ...] = ()) -> ModelSource:
    """Opens a drafting head for `model`; without a path, the model's own layer for multi-token prediction.

    tokens: those that it may guess, ascending; empty for all. Raises ModelError for a path that is not a directory, and
    for tokens if the head has an output projection of its own.
    """
    if path is not None and _is_eagle_3(path):
        if tokens:
            raise ModelError(f"{path} is a head of EAGLE-3, which has a vocabulary of its own: leave out --draft-vocab")
        return Eagle3Source(path, model)
    head = MtpSource(model) if path is None else EagleSource(path, model)
    return FewTokensSource(head, tokens) if tokens else head


def open_tower(model: ModelSource) -> ModelSource:
    """Opens what makes rows of the images of `model`."""
    return TowerSource(model)


def leaving_states(model: ModelSource, head: Path) -> ModelSource:
    """The model with graphs that leave what the drafting head at `head` reads. Raises ModelError unless the path is a
    directory."""
    return LeavingSource(model, head) if _is_eagle_3(head) else model


def _is_eagle_3(path: Path) -> bool:
    if not path.is_dir():
        raise ModelError(f"{path} is not a directory; pass that of an EAGLE head, with config.json and safetensors")
    return is_eagle_3(Fields.read(path / "config.json"))


def _open(path: Path, **asked: Any) -> ModelSource:
    if is_gguf(path):
        return GgufSource(path, **asked)
    if (graph := onnx_graph(path)) is not None:
        return OnnxSource(graph, **asked)
    if path.is_dir() and os.path.lexists(path / "config.json"):
        return FolderSource(path, **asked)
    raise ModelError(meant(path))
