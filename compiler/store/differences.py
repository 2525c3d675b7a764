"""In which components two keys, or two records of a manifest, differ."""

from __future__ import annotations

import json
from collections.abc import Mapping

from llmc.compiler.store.cache import Difference


def differing(old: Mapping[str, str], new: Mapping[str, str]) -> list[Difference]:
    """The names whose values differ; JSON objects are compared member by member, as name.member."""
    found = []
    for name in sorted(old.keys() | new.keys()):
        before, after = old.get(name), new.get(name)
        if before == after:
            continue
        inner = [_object(before), _object(after)]
        if inner[0] is not None and inner[1] is not None:
            found += [Difference(f"{name}.{d.name}", d.old, d.new) for d in differing(inner[0], inner[1])]
        else:
            found.append(Difference(name, before, after))
    return found


def _object(text: str | None) -> dict[str, str] | None:
    """Members of a JSON object, or of a list of pairs, as a kernel's parameters are."""
    try:
        value = json.loads(text) if text is not None and text.startswith(("{", "[[")) else None
        if isinstance(value, list):
            value = dict(value)
    except (ValueError, TypeError):
        return None
    if not isinstance(value, dict):
        return None
    return {str(name): member if isinstance(member, str) else json.dumps(member) for name, member in value.items()}
