"""bench/shapes.py: each shape is one that llmc reads, with the tensors that it expects."""

from __future__ import annotations

import pytest

from bench.make_model import config_of
from bench.shapes import SHAPES, named, of_layers
from llmc.models.fields import Fields
from llmc.models.known_keys import check_known
from llmc.models.registry import get_family

NOTHING = Fields({}, "generation_config.json")


@pytest.mark.parametrize("layers", [None, 2])
@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_is_a_model(name: str, layers: int | None) -> None:
    shape = SHAPES[name] if layers is None else of_layers(SHAPES[name], layers)
    fields, family = Fields(config_of(shape), "config.json"), get_family(str(shape["model_type"]))
    config = family.read_config(fields, NOTHING)
    assert check_known("config.json", fields.unread(), family, allow_unknown=False) == ()
    wanted = [
        {source.name: source.stored_shape for target in map_of(config).targets for source in target.sources}
        for map_of in (family.weight_map, *family.other_maps)
    ]
    assert dict(named(shape)) in wanted
