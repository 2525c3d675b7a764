"""What a model that returns vectors makes of its rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Pooling = Literal["first", "mean", "last", "merged"]


@dataclass(frozen=True)
class Dense:
    """A linear layer over a pooled row.

    size: rows of its matrix. activation: of its result; None for none. norm: whether a norm follows. token_ids: the
    rows of the output projection that form its matrix; empty if it has its own. source: its name in the checkpoint; ""
    for that of the family's layout.
    """

    size: int
    bias: bool = False
    activation: Literal["tanh", "gelu", "relu"] | None = None
    norm: bool = False
    token_ids: tuple[int, ...] = ()
    source: str = ""


@dataclass(frozen=True)
class Pooled:
    """The pooling of a model that returns a vector per text instead of logits.

    It takes the first or last row of the last layer, or the mean of all, then applies the layers of `dense`. "merged"
    is of towers: `Tower.merged` consecutive rows from each sampled one on, side by side.
    normalised: whether vectors are scaled to length 1. norm_eps: of the norm before pooling; None for that of all
    norms. norm_merged: the norm is of merged rows, in place of each one's own.
    """

    pooling: Pooling
    dense: tuple[Dense, ...] = ()
    normalised: bool = False
    norm_eps: float | None = None
    norm_merged: bool = False


@dataclass(frozen=True)
class Task:
    """The use of a pooled model's rows.

    activation: turns a row's numbers into scores; None if they are scores already. labels: names of the numbers, for
    "classify". template: for "rank", the text of a query and a document, with {instruction}, {query} and {document};
    None for the tokenizer's own pair. longest_text: tokens of a text that the model's authors read, if they say so.
    pad_token_id: of a model that takes the row of the last other token; None for the last row.
    """

    name: Literal["embed", "rank", "classify"]
    activation: Literal["sigmoid", "softmax"] | None = None
    labels: tuple[str, ...] = ()
    template: str | None = None
    longest_text: int | None = None
    pad_token_id: int | None = None
