"""The quantity that the decode buckets of a ladder bound."""

from __future__ import annotations

import enum


class Contexts(enum.StrEnum):
    """The longest context of a step, or the total of all contexts; auto: whichever suits a trace."""

    longest = "longest"
    total = "total"
    auto = "auto"
