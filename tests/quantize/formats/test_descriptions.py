"""What a recipe says of its formats names each of them: graphs that are kept are found by it."""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import product
from typing import Any

from llmc.quantize import Recipe, get_scheme
from llmc.quantize.formats.base import QuantizeError, WeightFormat
from llmc.quantize.formats.codes import Codes
from llmc.quantize.formats.registry import FORMATS
from llmc.quantize.formats.tables import TABLES

VALUES: dict[str, tuple[Any, ...]] = {
    "bits": (4, 5, 6, 8), "group_size": (16, 32, 64, -1), "asymmetric": (False, True), "block": (64, 256),
    "offsets": (False, True), "table": ("", *TABLES), "scale_kind": ("f32", "f16", "e8m0"),
}  # fmt: skip


def formats() -> list[WeightFormat]:
    """Each format with all that its fields may be."""
    found = []
    for made in FORMATS.values():
        names = [field.name for field in fields(made)]  # type: ignore[arg-type]
        for values in product(*(VALUES[name] for name in names)):
            if made is not Codes and "e8m0" in values:
                continue
            try:
                found.append(made(**dict(zip(names, values, strict=True))))
            except (QuantizeError, ValueError, KeyError):
                continue
    return found


def test_no_two_formats_are_described_alike() -> None:
    scheme, seen = get_scheme("w4a16"), dict[str, WeightFormat]()
    for one in formats():
        text = Recipe({"layers.0.mlp.down.weight": replace(scheme, weight=one)}).describe()
        assert seen.setdefault(text, one) == one, text
    assert len(seen) > 100
