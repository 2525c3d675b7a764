"""Sampling options, shared by the commands that generate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer


@dataclass(frozen=True)
class SamplingOptions:
    """Values of the command line; each field is an option. None: the model's default."""

    temperature: Annotated[float | None, typer.Option(help="Sampling temperature; 0: greedy.")] = None
    top_p: Annotated[float | None, typer.Option(help="Keep the most likely tokens up to this probability.")] = None
    top_k: Annotated[int | None, typer.Option(help="Keep this many tokens; 0: all.")] = None
    min_p: Annotated[float | None, typer.Option(help="Drop tokens below this share of the likeliest.")] = None
    repetition_penalty: Annotated[float | None, typer.Option(help="Factor against repeated tokens; 1: off.")] = None
    presence_penalty: Annotated[float | None, typer.Option(help="Penalty for tokens in the output; 0: off.")] = None
    frequency_penalty: Annotated[float | None, typer.Option(help="Penalty per occurrence of a token; 0: off.")] = None
