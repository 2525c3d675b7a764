"""The options that say how tokens are drawn; None: the model's default."""

from __future__ import annotations

from typing import Annotated

import typer

Temperature = Annotated[float | None, typer.Option(help="0: greedy.")]
TopP = Annotated[float | None, typer.Option(help="Keep the most likely tokens up to this probability.")]
TopK = Annotated[int | None, typer.Option(help="Keep this many tokens; 0: all.")]
MinP = Annotated[float | None, typer.Option(help="Drop tokens below this share of the likeliest.")]
RepetitionPenalty = Annotated[float | None, typer.Option(help="1: off.")]
Penalty = Annotated[float | None, typer.Option(help="0: off.")]
