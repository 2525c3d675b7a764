"""How the manifest of an artifact records a CPU target."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from llmc.manifest_schema import Closed, Text


class Record(Closed):
    """The fields of `target.Target`. There is no kind: CPUs are the default."""

    name: Text
    mcpu: Text
    instruction_sets: Annotated[list[Text], Field(min_length=1, max_length=256)]
    lanes: Annotated[int, Field(ge=1, le=1024)]
    row_tile: Annotated[int, Field(ge=1, le=1024)]
    panel_columns: Annotated[int, Field(ge=1, le=4096)]
