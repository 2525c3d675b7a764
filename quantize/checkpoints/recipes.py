"""The settings of compressed-tensors: the schemes, and the modules that each applies to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from llmc.quantize.checkpoints.modules import EMBEDDING, last
from llmc.quantize.checkpoints.patterns import matches
from llmc.quantize.checkpoints.section import Section

_LINEAR, _EMBEDDING = "Linear", "Embedding"
"""Classes whose weights are read. Targets that name other classes match none of them."""
_STRATEGIES = ("tensor", "channel", "group", "block", "token", "tensor_group")
_MIXED, _NAIVE = "mixed-precision", "naive-quantized"
FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized",
           "mxfp8-quantized")  # fmt: skip
_GROUPED = ("group", "tensor_group")


@dataclass(frozen=True)
class Args:
    """How weights or activations are rounded. dynamic: scales are computed at run time, all or only group scales
    ("local")."""

    kind: Literal["int", "float"]
    bits: int
    symmetric: bool
    strategy: str
    group_size: int | None
    block: tuple[int, int] | None
    dynamic: bool | Literal["local"]
    ordered: bool

    @classmethod
    def read(cls, section: Section) -> Args:
        group_size = section.integer("group_size") if section.has("group_size") else None
        strategy = "tensor" if group_size is None else "channel" if group_size == -1 else "group"
        strategy = section.choice("strategy", _STRATEGIES, strategy)
        if strategy in _GROUPED and (group_size is None or group_size < 1):
            raise section.wrong("group_size", f"a positive integer, as strategy {strategy} needs")
        return cls(
            kind="int" if section.choice("type", ("int", "float"), "int") == "int" else "float",
            bits=section.one_of("num_bits", (2, 4, 8), 8),
            symmetric=section.flag("symmetric", True),
            strategy=strategy,
            group_size=group_size,
            block=_block(section) if strategy == "block" else None,
            dynamic="local" if section.values.get("dynamic") == "local" else section.flag("dynamic", False),
            ordered=_ordered(section),
        )


def _block(section: Section) -> tuple[int, int]:
    value: Any = section.values.get("block_structure")
    if isinstance(value, str) and len(value) < 20:
        rows, by, columns = value.partition("x")
        value = [int(size) if size.isascii() and size.isdigit() else 0 for size in (rows, columns)] if by else None
    if not isinstance(value, list) or len(value) != 2 or not all(type(size) is int and size > 0 for size in value):
        raise section.wrong("block_structure", "two positive integers")
    return value[0], value[1]


def _ordered(section: Section) -> bool:
    """Whether groups take columns from anywhere in the row, assigned by `weight_g_idx`."""
    if section.values.get("actorder") in (True, False):
        return bool(section.values["actorder"])
    return section.choice("actorder", ("group", "dynamic", "weight", "static", "none"), "none") in ("group", "dynamic")


@dataclass(frozen=True)
class Scheme:
    """targets: the modules it applies to. format: how their weights are stored, one of FORMATS."""

    origin: str
    targets: tuple[str, ...]
    format: str
    weights: Args
    inputs: Args | None


class Recipe:
    """The schemes of a checkpoint."""

    def __init__(self, section: Section) -> None:
        self._origin = section.origin
        self._ignore = section.texts("ignore")
        # Precedence: exact names, then regular expressions, then classes.
        self._exact: dict[str, Scheme] = {}
        self._patterns: dict[str, Scheme] = {}
        self._classes: dict[str, Scheme] = {}
        overall = section.text("format", _NAIVE)
        groups = section.table("config_groups")
        for name in groups.values:
            scheme = _scheme(groups.table(name), overall)
            if scheme is not None:
                self._add(scheme)
        self._patterns = dict(sorted(self._patterns.items()))

    def _add(self, scheme: Scheme) -> None:
        for target in scheme.targets:
            if target in (_LINEAR, _EMBEDDING):
                self._classes.setdefault(target, scheme)
            elif target.startswith("re:"):
                self._patterns.setdefault(target, scheme)
            else:
                self._exact.setdefault(target, scheme)

    def find(self, prefix: str) -> Scheme | None:
        """The scheme of a linear layer or the embedding; None if it is not quantized."""
        if any(matches(prefix, pattern, self._origin) for pattern in self._ignore):
            return None
        if prefix in self._exact:
            return self._exact[prefix]
        for pattern, scheme in self._patterns.items():
            if matches(prefix, pattern, self._origin):
                return scheme
        return self._classes.get(_EMBEDDING if last(prefix) == EMBEDDING else _LINEAR)


def _scheme(group: Section, overall: str) -> Scheme | None:
    """The scheme of a config group; None if the group does not round weights."""
    if not group.has("weights"):
        return None
    weights = Args.read(group.table("weights"))
    format = group.text("format", overall)
    if format in (_MIXED, _NAIVE):
        format = "int-quantized" if weights.kind == "int" else "float-quantized"
    if format not in FORMATS:
        section = group if group.has("format") else Section({"format": overall}, group.origin)
        raise section.wrong("format", f"one of {', '.join(FORMATS)}: save the model compressed in one of them")
    inputs = Args.read(group.table("input_activations")) if group.has("input_activations") else None
    return Scheme(group.origin, group.texts("targets"), format, weights, inputs)
