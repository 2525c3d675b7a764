"""Reasons why entries are not cached: differences from the nearest entries, each reason once with all entries it
concerns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from llmc.compiler.store.cache import Difference, GraphCache, Nearest
from llmc.compiler.store.differences import differing

Wanted = Sequence[tuple[str, Mapping[str, str]]]
# Components of a graph that depend on its target; the rows of a tile are also in its shape.
_OF_TARGET = frozenset({"layouts", "shape.token_layout", "shape.sample_layout", "shape.segments"})
_SHOWN_VALUES = 6
_LONG = 200


def why_data(wanted: Wanted, cache: GraphCache, target: str) -> list[dict[str, Any]]:
    """For each (name, components): its key and whether it is cached; if not, the nearest entry and the differences.

    target: name of the compilation target; a graph's components contain only its tiles.
    """
    entries = cache.entries()
    keys = {e.key for e in entries}
    answers = []
    for name, components in wanted:
        key = cache.key_of(components)
        answer: dict[str, Any] = {"name": name, "kind": components.get("kind"), "key": key, "cached": key in keys,
                                  "nearest": None, "differences": []}  # fmt: skip
        nearest = None if key in keys else cache.why(components, entries)
        if nearest is not None:
            answer["nearest"] = nearest.entry.key
            answer["differences"] = [asdict(d) for d in _named(nearest, target)]
        answers.append(answer)
    return answers


def _named(nearest: Nearest, target: str) -> list[Difference]:
    """The differences in terms of the command line: tiles are shown as a target."""
    tiles = next((d for d in nearest.differences if d.name == "layouts"), None)
    if tiles is None:
        return list(nearest.differences)
    before = nearest.entry.meta.get("target")
    of = f"{before}, tiles" if isinstance(before, str) else "one with tiles"
    named = Difference("target", f"{of} {tiles.old}", f"{target}, tiles {tiles.new}")
    return [named, *(d for d in nearest.differences if d.name not in _OF_TARGET)]


def missing_lines(answers: Iterable[Mapping[str, Any]]) -> list[str]:
    """Missing entries as text, grouped by reason."""
    groups: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for answer in answers:
        if not answer["cached"]:
            groups.setdefault(_reason(answer), []).append(answer)
    lines = []
    for members in groups.values():
        first, kind = members[0]["name"], members[0]["kind"]
        kinds = f"{kind}s" if kind else "entries"
        who = first if len(members) == 1 else f"{first} and {len(members) - 1} more {kinds}"
        if members[0]["nearest"] is None:
            lines.append(f"{who}: not cached, and the cache is empty")
            continue
        nearest = {member["nearest"][:16] for member in members}
        what = f"nearest is {nearest.pop()}, which" if len(nearest) == 1 else f"the nearest {len(nearest)} entries"
        lines.append(f"{who}: not cached; {what} {'differs' if what.startswith('nearest') else 'differ'} in")
        lines += _values(members)
    return lines


def _reason(answer: Mapping[str, Any]) -> tuple[str, ...]:
    """Key for grouping: equal for entries with the same differences, apart from rows of each graph's own shape."""
    names = [f"{d['name']} {d['old']} {d['new']}" for d in _parts(answer) if not d["name"].startswith("shape.")]
    shape = {"shape" for d in _parts(answer) if d["name"].startswith("shape.")}
    return (str(answer["kind"]), "" if answer["nearest"] is None else "nearest", *sorted(names), *shape)


def _parts(answer: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The differences; those of JSON objects member by member."""
    found: list[dict[str, Any]] = []
    for d in answer["differences"]:
        old, new = ({d["name"]: value} if value is not None else {} for value in (d["old"], d["new"]))
        found += [asdict(part) for part in differing(old, new)]
    return found


def _values(members: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line per differing component, with the values of several shapes side by side."""
    by_name: dict[str, dict[str, None]] = {}
    for member in members:
        for d in _parts(member):
            by_name.setdefault(d["name"], {})[" → ".join(shortened(d["old"], d["new"]))] = None
    lines = []
    for name, values in by_name.items():
        more = len(values) - _SHOWN_VALUES
        shown = ", ".join(list(values)[:_SHOWN_VALUES]) + (f" and {more} more" if more > 0 else "")
        lines.append(f"    {name}: {shown}")
    return lines


def shortened(old: str | None, new: str | None) -> tuple[str, str]:
    """Both values; long ones that are neither name nor number are cut to where they begin to differ."""
    if old and new and max(len(old), len(new)) > _LONG:
        same = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
        start = max(0, same - 20)
        if start:
            return f"…{_short(old[start:])}", f"…{_short(new[start:])}"
    return _short(old), _short(new)


def _short(value: str | None) -> str:
    if value is None:
        return "(absent)"
    return value if len(value) <= _LONG else f"{value[: _LONG - 1]}…"
