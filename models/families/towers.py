"""Shared by the families of towers, which make rows of images: no config.json names them.

`Family.tower` of a text model's family reads a tower's configuration, which is in a nested table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from llmc.models.config import ModelConfig
from llmc.models.errors import ModelError
from llmc.models.families.family import Family
from llmc.models.fields import Fields
from llmc.models.known_keys import HARMLESS, NEUTRAL, nested
from llmc.models.layout import Layout
from llmc.models.weight_map import WeightMap

if TYPE_CHECKING:
    from llmc.models.blocks.decoder import Decoder

VISION = "vision_config"
"""The table of config.json with a tower's fields."""
_OF_FORM = "model_type image_size patch_size size max_image_size vocab_size tie_word_embeddings"
"""Keys of all towers beside their sizes: what images are cut to, which the form of images has."""


def vision_fields(fields: Fields, usual: Mapping[str, Any], **values: Any) -> Fields:
    """The tower's fields in config.json. usual: values that published files omit. values: take the place of any."""
    found = fields.table(VISION)
    if found is None:
        raise ModelError(f"{fields.origin} lacks the field {VISION!r}, which says what its images are read with")
    dtype = fields.raw("dtype", fields.raw("torch_dtype", "float32"))
    if not found.has("dtype") and not found.has("torch_dtype"):
        usual = {**usual, "dtype": dtype}
    missing = {name: value for name, value in usual.items() if not found.has(name)}
    # No token begins or ends an image.
    return found.with_values(**missing, **values, bos_token_id=None, eos_token_id=None)


def _refuse(fields: Fields, generation: Fields) -> ModelConfig:
    raise ModelError(f"{fields.origin} has the model_type of a tower, which no checkpoint has; download it again")


def _build(config: ModelConfig, act_dtype: str, max_len: int) -> Decoder:
    # Imported here: reading configs and weights needs no torch.
    from llmc.models.blocks.tower import TowerEncoder

    return TowerEncoder(config, act_dtype, max_len)


def tower_family(
    model_type: str,
    layouts: tuple[Layout, ...],
    harmless: str,
    change: Callable[[ModelConfig, WeightMap], WeightMap] = lambda config, found: found,
) -> Family:
    """layouts: all ways to call a tower's tensors. harmless: keys of its table that have no effect, or that the form of
    images has. change: what the kind does to a layout's map."""

    def map_of(layout: Layout) -> Callable[[ModelConfig], WeightMap]:
        return lambda config: change(config, layout.weight_map(config))

    *others, usual = layouts
    return Family(
        model_type,
        _refuse,
        map_of(usual),
        _build,
        harmless=nested(VISION, HARMLESS | {*_OF_FORM.split(), *harmless.split()}),
        neutral={f"{VISION}.{name}": value for name, value in NEUTRAL.items()},
        other_maps=tuple(map(map_of, others)),
        generates=False,
    )


def behind_model(layout: Layout) -> Layout:
    """The layout of checkpoints that have all parts of a model within `model`."""
    found = layout.moved("", "model.")
    dense = tuple(f"model.{name}" for name in layout.dense)
    modules = tuple(f"model.{name}" for name in layout.other_modules)
    return replace(found, dense=dense, other_modules=(*layout.other_modules, *modules))
