"""`llmc cache diff`: components of the keys in which two artifacts or two cache entries differ, with both values."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from llmc.compiler.store.cache import CacheError, GraphCache
from llmc.compiler.store.differences import differing
from llmc.manifest import read_manifest

_KERNEL_PARTS = ("template", "target", "tvm")
_SHOWN_WEIGHTS = 4
_PLAIN = ("act_dtype", "kv_dtype", "max_model_len", "max_num_seqs", "block_size", "format_version", "llmc_version")


def compare(a: str, b: str, cache: GraphCache) -> dict[str, Any]:
    """Differences between two artifact directories, or between two cache entries given by key. Raises CacheError."""
    sides = [Path(a), Path(b)]
    are_artifacts = [(side / "manifest.json").is_file() for side in sides]
    if all(are_artifacts):
        old, new = (read_manifest(side) for side in sides)
        return {"a": a, "b": b, "kind": "artifacts", **_of_artifacts(old, new)}
    if any(are_artifacts):
        other = b if are_artifacts[0] else a
        raise CacheError(
            f"{other} is not an artifact (manifest.json), the other one is: give two artifacts or two keys"
        )
    entries = []
    for side in (a, b):
        entry = cache.entry(cache.resolve(side))
        if entry is None:
            raise CacheError(f"cache entry {side} is damaged; `llmc cache verify` drops it")
        entries.append(entry)
    differences = differing(entries[0].components, entries[1].components)
    return {"a": entries[0].key, "b": entries[1].key, "kind": "entries", "components": list(map(asdict, differences))}


def _of_artifacts(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    plain = [{name: str(m.get(name)) for name in _PLAIN} for m in (old, new)]
    nested = [
        {name: json.dumps(m.get(name), sort_keys=True) for name in ("model", "target", "tools")} for m in (old, new)
    ]
    graphs = [_texts(m.get("graph_components")) for m in (old, new)]
    kernels = [_kernels(m) for m in (old, new)]
    # Checksums of the packed bytes: a checkpoint's path and date make no difference.
    weights = [_texts(m.get("weights_crc32")) for m in (old, new)]
    names = [[str(b) for b in m.get("buckets") or []] for m in (old, new)]
    both = sorted(kernels[0].keys() & kernels[1].keys())
    rebuilt: dict[tuple[tuple[str, str | None, str | None], ...], list[str]] = {}
    for name in both:
        parts = [{part: k[name].get(part, "") for part in _KERNEL_PARTS} for k in kernels]
        if parts[0] != parts[1]:
            why = tuple((d.name, d.old, d.new) for d in differing(parts[0], parts[1]))
            rebuilt.setdefault(why, []).append(name)
    return {
        "settings": [asdict(d) for d in [*differing(*plain), *differing(*nested)]],
        "graphs": [asdict(d) for d in differing(*graphs)],
        "weights": [asdict(d) for d in differing(*weights)],
        "buckets": {
            "only_a": [n for n in names[0] if n not in names[1]],
            "only_b": [n for n in names[1] if n not in names[0]],
            "common": len(set(names[0]) & set(names[1])),
        },
        "kernels": {
            "only_a": sorted(kernels[0].keys() - kernels[1].keys()),
            "only_b": sorted(kernels[1].keys() - kernels[0].keys()),
            "common": len(both) - sum(map(len, rebuilt.values())),
            "differ": [
                {"kernels": which, "components": [{"name": n, "old": o, "new": w} for n, o, w in why]}
                for why, which in rebuilt.items()
            ],
        },
    }


def _texts(value: object) -> dict[str, str]:
    return {str(name): str(member) for name, member in value.items()} if isinstance(value, dict) else {}


def _kernels(manifest: dict[str, Any]) -> dict[str, dict[str, str]]:
    """Key components of each kernel, by op and parameters."""
    found = {}
    for kernel in manifest.get("kernels") or []:
        components = kernel["components"]
        found[f"{components.get('op')} {_parameters(components.get('params', ''))}"] = components
    return found


def _parameters(text: str) -> str:
    try:
        return " ".join(f"{name}={value}" for name, value in json.loads(text))
    except (ValueError, TypeError):
        return text


def lines(data: dict[str, Any], short: Any) -> list[str]:
    """The comparison as lines of text. short: function that cuts both values to where they begin to differ."""

    def rows(differences: list[dict[str, Any]], indent: str = "  ") -> list[str]:
        return [f"{indent}{d['name']}: {' → '.join(short(d['old'], d['new']))}" for d in differences]

    if data["kind"] == "entries":
        found = rows(data["components"])
        return [f"{data['a'][:16]} and {data['b'][:16]} differ in", *found] if found else ["the entries are the same"]
    out: list[str] = []
    for part in ("settings", "graphs"):
        if data[part]:
            out += [part, *rows(data[part])]
    if data["weights"]:
        names = [d["name"] for d in data["weights"]]
        more = f" and {len(names) - _SHOWN_WEIGHTS} more" if len(names) > _SHOWN_WEIGHTS else ""
        out += [f"{len(names)} weights differ: {', '.join(names[:_SHOWN_WEIGHTS])}{more}"]
    buckets, kernels = data["buckets"], data["kernels"]
    for side, name in (("only_a", data["a"]), ("only_b", data["b"])):
        if buckets[side]:
            out += [f"buckets only in {name}: {', '.join(buckets[side])}"]
    for side, name in (("only_a", data["a"]), ("only_b", data["b"])):
        if kernels[side]:
            out += [f"kernels only in {name}:", *(f"  {kernel}" for kernel in kernels[side])]
    for group in kernels["differ"]:
        first = group["kernels"][0]
        more = f" and {len(group['kernels']) - 1} more kernels" if len(group["kernels"]) > 1 else ""
        out += [f"{first}{more} differ in", *rows(group["components"])]
    same = f"{buckets['common']} buckets and {kernels['common']} kernels are the same"
    return [*out, same] if out else [f"nothing differs: {same}"]
