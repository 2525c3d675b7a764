"""The artifact of a draft model, which speculates for another one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from llmc.manifest import ManifestError, read_manifest

from .binding import Artifact
from .request_error import RequestError
from .warm_up.budget import graph_set_bytes
from .warm_up.draft_memory import DraftMemory

_TOKENIZER = "tokenizer.json"


def draft_memory(draft: Path | None) -> DraftMemory | None:
    """Memory that a draft takes; None without one. Raises the binding's errors."""
    if draft is None:
        return None
    with Artifact(draft) as artifact:
        info = artifact.info
        graphs = graph_set_bytes(artifact.graphs(), info.vocab_size, states_width=info.states_width)
        return DraftMemory.of(info, graphs)


@contextmanager
def opened_draft(draft: Path | None, model: Path) -> Iterator[Artifact | None]:
    """A draft's artifact, closed on exit; engines keep a reference. Raises RequestError if its tokens differ from those
    of the artifact `model`, and the binding's errors."""
    if draft is None:
        yield None
        return
    try:
        found = [read_manifest(path)["files"].get(_TOKENIZER) for path in (model, draft)]
    except ManifestError as error:
        raise RequestError(f"draft {draft}: {error}") from error
    if None not in found and found[0] != found[1]:
        raise RequestError(
            f"the draft {draft} has another {_TOKENIZER} than {model}: compile a draft of the same family of models"
        )
    with Artifact(draft) as artifact:
        yield artifact
