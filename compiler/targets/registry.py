"""The kinds of targets. Each is a module with `names`, `named` and `from_record`, and a line here."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from llmc.compiler.targets.base import Target, TargetError

NATIVE = "native"
DEFAULT_KIND = "cpu"
KINDS = {
    "cpu": "llmc.compiler.targets.cpu.backend",
    "reference": "llmc.compiler.targets.reference.backend",
    "opencl": "llmc.compiler.targets.gpu.opencl",
    "cuda": "llmc.compiler.targets.gpu.cuda",
}
"""The module of each kind."""


def _module(kind: str) -> ModuleType:
    return importlib.import_module(KINDS[kind])


def native_target() -> Target:
    """The best target of the default kind that this machine runs. Raises TargetError."""
    target: Target = _module(DEFAULT_KIND).native()
    return target


def resolve_target(name: str) -> Target:
    """The target called `name`; `native` means this machine's. Raises TargetError naming the known targets."""
    if name == NATIVE:
        return native_target()
    known: list[str] = []
    for kind in KINDS:
        names: tuple[str, ...] = _module(kind).names()
        if name in names:
            target: Target = _module(kind).named(name)
            return target
        known += names
    kind, _, several = name.partition(":")
    if several and kind in KINDS:
        listed: Target = _module(kind).named(name)
        return listed
    raise TargetError(f"unknown target {name!r}; known targets: {NATIVE}, {', '.join(sorted(known))}")


def all_targets() -> list[Target]:
    """Every target that has a name of its own, kind by kind."""
    return [_module(kind).named(name) for kind in KINDS for name in _module(kind).names()]


def target_of(record: Mapping[str, Any]) -> Target:
    """The target recorded in a manifest. Raises TargetError."""
    kind = str(record.get("kind", DEFAULT_KIND))
    if kind not in KINDS:
        raise TargetError(f"this llmc has no targets of kind {kind!r}; it has {', '.join(KINDS)}")
    try:
        target: Target = _module(kind).from_record(record)
    except KeyError as error:
        raise TargetError(f"a target of kind {kind!r} is not recorded so: {error}") from None
    return target
