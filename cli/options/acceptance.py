"""The odds of guesses from an option: a number, or a file that a server measured them in."""

from __future__ import annotations

from pathlib import Path

from llmc.buckets.bucket import BucketError
from llmc.buckets.recorded_use import read_acceptance
from llmc.shown import shown


def acceptance_odds(text: str) -> float:
    """The probability that a guess is right if those before it are: more than 0, less than 1. Raises BucketError."""
    try:
        odds = float(text)
    except ValueError:
        odds = read_acceptance(Path(text))
        if not 0 < odds < 1:
            raise BucketError(
                f"{text} tells of guesses that are right with odds {odds:g}: give --acceptance X"
            ) from None
        return odds
    if not 0 < odds < 1:
        raise BucketError(f"acceptance {shown(text)} is out of range: use more than 0 and less than 1")
    return odds
