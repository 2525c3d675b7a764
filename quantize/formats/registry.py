"""The weight formats by exact kind. To add a format, add its file and a line here."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from llmc.quantize.formats import affine, base, codes, fp8, integers, steps, tables
from llmc.quantize.formats.base import QuantizeError, WeightFormat
from llmc.quantize.formats.scheme import Scheme

_FORMATS: tuple[tuple[type[WeightFormat], tuple[Scheme, ...]], ...] = (
    (integers.Integers, integers.SCHEMES),
    (steps.Steps, steps.SCHEMES),
    (fp8.Fp8, fp8.SCHEMES),
    (codes.Codes, codes.SCHEMES),
    (affine.Affine, affine.SCHEMES),
)
"""Each format, with the schemes by which users request it."""
FORMATS = {format.kind: format for format, _ in _FORMATS}
SCHEMES = {scheme.name: scheme for _, schemes in _FORMATS for scheme in schemes}


def format_of(record: Mapping[str, Any]) -> WeightFormat:
    """The format with this `record`. Raises QuantizeError."""
    return _made(str(record["kind"]), record)


def format_of_kernel(params: Mapping[str, Any]) -> WeightFormat:
    """The format whose `kernel_params` are among `params`. Raises QuantizeError."""
    return _made(str(params["format"]), params)


def _made(kind: str, facts: Mapping[str, Any]) -> WeightFormat:
    if kind not in FORMATS:
        raise QuantizeError(f"weight format {kind!r} is unknown; known: {', '.join(FORMATS)}")
    format = FORMATS[kind]
    return format(**{field.name: facts[field.name] for field in fields(format) if field.name in facts})  # type: ignore[arg-type]


def format_sources(kind: object) -> tuple[Path, ...]:
    """The files that define a format's layout and kernel arithmetic, targets' files excluded; none without a kind."""
    if not isinstance(kind, str) or kind not in FORMATS:
        return ()
    return Path(base.__file__), Path(tables.__file__), Path(inspect.getfile(FORMATS[kind]))
