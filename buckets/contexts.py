"""The quantity that the decode buckets of a ladder bound."""

from __future__ import annotations

import enum


class Contexts(enum.StrEnum):
    """The longest context of a step, the total of all contexts, or both in one ladder; auto: whichever suits a
    trace."""

    longest = "longest"
    total = "total"
    both = "both"
    auto = "auto"
