"""Order of the measurements."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

PARTS = ("speed", "start", "memory", "serve")


@dataclass(frozen=True)
class Settings:
    """Settings common to all engines of a results file."""

    threads: int
    prefills: tuple[int, ...] = (128, 512, 2048)
    batches: tuple[int, ...] = (1, 4, 8, 16)
    context: int = 128
    """Tokens of each sequence before decode is timed."""
    steps: int = 32
    """Decode steps timed."""
    streams: int = 16
    requests: int = 48
    input_len: int = 256
    output_len: int = 128

    @property
    def max_batch(self) -> int:
        return max(*self.batches, self.streams)

    @property
    def max_len(self) -> int:
        """Most tokens of a sequence: the longest prompt and the tokens decoded behind it."""
        longest = max(*self.prefills, self.context + 4 * self.steps, self.input_len + self.output_len)
        return -(-(longest + 128) // 128) * 128

    @classmethod
    def from_dict(cls, stated: dict[str, Any]) -> Settings:
        """Settings from JSON, which has lists for tuples."""
        fields: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in stated.items()
        }
        return cls(**fields)


@dataclass(frozen=True)
class Key:
    """Names one measurement. figure: "prefill:512", "decode:8", "start", "start-native", "memory", "serve", …"""

    model: str
    engine: str
    variant: str
    figure: str
    round: int

    @property
    def kind(self) -> str:
        return self.figure.partition(":")[0]

    @property
    def size(self) -> int:
        """Prompt tokens, or sequences of a batch."""
        return int(self.figure.partition(":")[2])


@dataclass(frozen=True)
class Entrant:
    """An engine at one precision, ready to run. extras: figures beside prefill, decode, start and memory."""

    engine: str
    variant: str
    resident_bytes: int
    extras: tuple[str, ...] = ()


def groups(entrants: Sequence[Entrant], memory_bytes: int) -> list[list[Entrant]]:
    """Groups of entrants whose workers fit into memory together, by first fit; one too large for that is alone."""
    found: list[list[Entrant]] = []
    for entrant in entrants:
        for group in found:
            if sum(member.resident_bytes for member in group) + entrant.resident_bytes <= memory_bytes:
                group.append(entrant)
                break
        else:
            found.append([entrant])
    return found


def measurements(
    settings: Settings,
    models: Sequence[str],
    entrants: Callable[[str], Sequence[Entrant]],
    parts: Sequence[str],
    rounds: int,
    memory_bytes: int,
) -> Iterator[tuple[tuple[object, ...], Key]]:
    """(group, measurement) in order. Processes of a group are kept; those of the group before are ended.

    A round has every figure once. All engines of a group are measured on one figure before the next, so that they meet
    the same state of the machine; another engine is first in each round. Peak memory is measured in one round only.
    Entrants fill groups in the order given: those to be compared should be neighbours.
    """
    for number in range(rounds):
        for model in models:
            found = list(entrants(model))
            if "speed" in parts:
                figures = [f"prefill:{tokens}" for tokens in settings.prefills]
                figures += [f"decode:{batch}" for batch in settings.batches]
                for index, group in enumerate(groups(found, memory_bytes)):
                    for figure in figures:
                        for one in turned(group, number):
                            yield ("speed", number, model, index), Key(model, one.engine, one.variant, figure, number)
            for part in parts:
                for one in turned(found, number) if part != "speed" else ():
                    for figure in _figures_of(part, one, number):
                        key = Key(model, one.engine, one.variant, figure, number)
                        yield (key,), key


def turned(entrants: list[Entrant], by: int) -> list[Entrant]:
    """The list with `by` entrants moved from the front to the end."""
    first = by % max(len(entrants), 1)
    return entrants[first:] + entrants[:first]


def _figures_of(part: str, entrant: Entrant, number: int) -> list[str]:
    if part == "start":
        return ["start", *(["start-native"] if "start-native" in entrant.extras else [])]
    if part == "memory":
        return ["memory"] if number == 0 else []
    return [figure for figure in ("serve", "offline") if figure in entrant.extras]
