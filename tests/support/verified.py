"""What tests verify of model families, declared by the tests themselves: docs/models.md is written from it.

A test says with `verifies` what each of its cases verifies. Who checks an artifact says so with `checked`, which reads
the artifact's own manifest. A case that has not checked what it declares fails (tests/conftest.py).
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest


@dataclass(frozen=True, order=True)
class Claim:
    """A compiled model gave what transformers, or a definition in plain torch, gives on the same weights.

    family: its model_type. task: of `llmc compile --task`. dtype: of activations. scheme: of --quant, "" for none.
    target: the kind of target, "cpu" or "reference". what: "logits" of every bucket, or "ids": 48 greedy ids of the
    engine, and their logits, through graphs of every phase. stored: how the checkpoint's numbers were ("gguf", "gptq"
    …), "" for floats.
    """

    family: str
    task: str = "generate"
    dtype: str = "f32"
    scheme: str = ""
    target: str = "cpu"
    what: str = "logits"
    stored: str = ""


@dataclass(frozen=True, order=True)
class Limit:
    """A model of a family is refused by name. what: in words, as in "a reward model"."""

    family: str
    what: str


TARGETS = ("cpu", "reference")
_found: set[Claim] = set()


def verifies(make: Callable[..., Iterable[Claim]]) -> pytest.MarkDecorator:
    """Marks a test. make: from the parameters of a case that it names to what the case verifies."""
    mark: pytest.MarkDecorator = pytest.mark.verifies(make)
    return mark


def refuses(make: Callable[..., Iterable[Limit]]) -> pytest.MarkDecorator:
    """Marks a test of what is refused. make: as in `verifies`."""
    mark: pytest.MarkDecorator = pytest.mark.refuses(make)
    return mark


def on_targets(*claims: Claim) -> list[Claim]:
    """The same on every target."""
    return [Claim(**{**asdict(claim), "target": target}) for claim in claims for target in TARGETS]


def checked(artifact: Path, what: str = "logits") -> None:
    """The artifact's numbers were compared. what: as in `Claim`."""
    from llmc.quantize.recipe import ROUNDED

    manifest = json.loads((artifact / "manifest.json").read_text(encoding="utf-8"))
    model, target = manifest["model"], manifest["target"].get("kind", "cpu")
    task = (model.get("task") or {"name": "generate"})["name"]
    quantized = [weight for weight in manifest["weights"].values() if "scheme" in weight]
    rounded = {str(weight["scheme"]) for weight in quantized if weight["method"] == ROUNDED}
    found = {(scheme, "") for scheme in rounded}
    found |= {("", name) for name in _stored({weight["method"] for weight in quantized} - {ROUNDED})}
    for scheme, stored in found or {("", "")}:
        _found.add(Claim(model["model_type"], task, manifest["act_dtype"], scheme, target, what, stored))


def _stored(methods: set[str]) -> set[str]:
    """How a checkpoint's numbers were stored, by the methods in its manifest."""
    from llmc.models.sources.gguf.types import READ

    # A GGUF file has other types beside this one.
    if methods == {"mxfp4"}:
        return methods
    types = {type.name.lower() for type in READ.values()}
    return {"gguf" if types.issuperset(method.split(", ")) else method for method in methods}


def declared(item: pytest.Item, name: str = "verifies") -> list[Any]:
    """Of a collected case: its claims, or its limits where name is "refuses"."""
    marker = item.get_closest_marker(name)
    if marker is None:
        return []
    (make,) = marker.args
    values = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    return list(make(**{parameter: values[parameter] for parameter in inspect.signature(make).parameters}))


def missing(item: pytest.Item) -> list[Claim]:
    """What a case that has run declares and has not checked. Of targets that this machine does not run nothing is."""
    from llmc.compiler.targets.registry import resolve_target

    here = [name for name in TARGETS if name == "cpu" or resolve_target(name).runs_here()]
    return [claim for claim in declared(item) if claim.target in here and claim not in _found]


def forget() -> None:
    """Before a case runs."""
    _found.clear()


def record(items: Iterable[pytest.Item], file: Path) -> None:
    """Writes what collected cases declare, as JSON: {"verifies": {test: [claim, …]}, "refuses": …}."""
    said: dict[str, dict[str, list[dict[str, str]]]] = {"verifies": {}, "refuses": {}}
    for item in items:
        for kind, of in said.items():
            if found := declared(item, kind):
                of[item.nodeid] = [asdict(one) for one in found]
    file.write_text(json.dumps(said), encoding="utf-8")
