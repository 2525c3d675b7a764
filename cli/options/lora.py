"""The option that loads LoRA adapters by name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import typer

LORA_METAVAR = "NAME=PATH"
LORA_HELP = "LoRA adapter, as PEFT saves it, that requests choose by NAME; repeatable."


def parse_adapters(given: Sequence[str], taken: Sequence[str] = ()) -> dict[str, Path]:
    """["med=adapters/med"] → {"med": Path}. taken: names of the model itself. Raises BadParameter."""
    found: dict[str, Path] = {}
    for option in given:
        name, equals, path = option.partition("=")
        if not (name and equals and path):
            raise typer.BadParameter(f"--lora {option!r} is not NAME=PATH, for example medical=adapters/medical")
        if name in taken:
            raise typer.BadParameter(f"--lora {name!r} is the name of the model: choose another one")
        if name in found:
            raise typer.BadParameter(f"--lora {name!r} is given twice: give each name once")
        found[name] = Path(path)
    return found
