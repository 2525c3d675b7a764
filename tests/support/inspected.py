"""What `llmc inspect` says of an artifact, for tests of what stands in it."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from llmc.cli.main import main


def inspected(artifact: Path) -> dict[str, Any]:
    """As data for tools."""
    found: dict[str, Any] = json.loads(inspected_text(artifact, "--json"))
    return found


def inspected_text(artifact: Path, *options: str) -> str:
    """As people read it."""
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    with redirect_stdout(out):
        assert main(["inspect", str(artifact), *options]) == 0
    return out.buffer.getvalue().decode()
