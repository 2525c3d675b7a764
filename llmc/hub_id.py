"""Names of models on the Hugging Face hub, as the command line and `LLM` take them."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from llmc.model_path import GGUF_SUFFIX

_ID = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})(@(?P<revision>[A-Za-z0-9][\w./-]{0,199}))?", re.A
)


@dataclass(frozen=True)
class HubId:
    """ORG/NAME[@REVISION]. revision: a branch, a tag or a commit; None for the main branch."""

    repo: str
    revision: str | None = None

    def __str__(self) -> str:
        return self.repo if self.revision is None else f"{self.repo}@{self.revision}"


def hub_id(model: str | Path) -> HubId | None:
    """The hub model that `model` names. None if it is no such name, or if a local file has that name.

    Local files come first: no download ever replaces them. A path that ends like a GGUF file is never a hub name.
    """
    text = str(model)
    found = _ID.fullmatch(text)
    if found is None or ".." in text or text.endswith(GGUF_SUFFIX) or os.path.lexists(text):
        return None
    return HubId(found["repo"], found["revision"])
