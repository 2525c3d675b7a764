"""Towers of models that see images: transformers' rows, tensors under all published names, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from llmc.models import ModelError, load_config
from llmc.models.eager import load_source
from llmc.models.loader import check_checkpoint, load_parameters
from llmc.models.reference import ReferenceCache, ReferenceStates, use_cache, use_states
from llmc.models.sources.base import ModelSource
from llmc.models.sources.registry import open_source, open_tower

from support.families import CASES
from support.tiny_models import make_tiny_model
from support.towers import SEEING, SIZES, Patches, make_seeing, patches_of, pixels_of, rows_of_transformers

_BLOCK = 16


def tower(path: Path, **options: Any) -> ModelSource:
    return open_tower(open_source(path, **options))


def eager_rows(source: ModelSource, patches: Patches) -> NDArray[np.float32]:
    """float32 [rows, D] of llmc's own modules."""
    config, count, states = source.config(), len(patches.rows), ReferenceStates()
    model, blocks = load_source(source, config, "f32"), -(-count // _BLOCK)
    states.rows = torch.from_numpy(patches.rows)
    span, zeros = torch.arange(count, dtype=torch.int32), torch.zeros(count, dtype=torch.int32)
    ends, table = torch.tensor([0, count], dtype=torch.int32), torch.arange(1, 1 + blocks, dtype=torch.int32)[None]
    places, first = torch.from_numpy(patches.places), torch.from_numpy(patches.first)
    with use_cache(ReferenceCache.of(config, 1 + blocks, _BLOCK)), use_states(states), torch.no_grad():
        rows: NDArray[np.float32] = model(places, span, span + _BLOCK, table, ends[1:], ends, first, zeros).numpy()
    return rows


@pytest.mark.parametrize("family", SEEING)
def test_rows_of_an_image_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    path = make_seeing(tmp_path / "m", family)
    for size in SIZES[family]:
        pixels = pixels_of(size)
        found, expected = eager_rows(tower(path), patches_of(path, pixels)), rows_of_transformers(path, pixels)
        np.testing.assert_allclose(found, expected, atol=2e-5, rtol=0)


def parameters(path: Path) -> dict[str, bytes]:
    source = tower(path)
    return {p.name: p.value().tobytes() for p in load_parameters(source.config(), source.checkpoint(), "f32")}


@pytest.mark.parametrize("family", SEEING)
def test_tensors_within_a_model_and_beside_it(family: str, tmp_path: Path) -> None:
    """As authors publish them, and as other versions of transformers write them."""
    path = make_seeing(tmp_path / "m", family)
    before, file = parameters(path), path / "model.safetensors"
    tensors = load_file(file)
    if any(name.startswith("model.vision") for name in tensors):
        other = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    else:
        other = {f"model.{name}" if name.startswith(("vision", "multi")) else name: t for name, t in tensors.items()}
    assert other.keys() != tensors.keys()
    save_file(other, file)
    assert parameters(path) == before


def test_parameters_are_those_of_the_module_in_order(tmp_path: Path) -> None:
    for family in SEEING:
        source = tower(make_seeing(tmp_path / family, family))
        weights = check_checkpoint(source.config(), source.checkpoint())
        module = load_source(source, source.config(), "f32")
        assert [target.name for target in weights.targets] == [name for name, _ in module.named_parameters()]


def test_a_tensor_that_a_tower_lacks_is_named(tmp_path: Path) -> None:
    path = make_seeing(tmp_path / "m", "mistral3")
    tensors = load_file(path / "model.safetensors")
    del tensors["vision_tower.ln_pre.weight"]
    save_file(tensors, path / "model.safetensors")
    source = tower(path)
    with pytest.raises(ModelError, match=r"lacks the tensor vision_tower\.ln_pre\.weight of shape \[48\]"):
        check_checkpoint(source.config(), source.checkpoint())
    tensors |= {"vision_tower.ln_pre.weight": np.ones(48, np.float32), "vision_tower.ln_post.weight": np.ones(48)}
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ModelError, match=r"has the tensor vision_tower\.ln_post\.weight .* does not use"):
        check_checkpoint(source.config(), tower(path).checkpoint())


def changed(path: Path, **fields: Any) -> ModelSource:
    """The tower of a model with other fields; those of its own table begin with vision__."""
    config = json.loads((path / "config.json").read_text())
    for name, value in fields.items():
        table = config["vision_config"] if name.startswith("vision__") else config
        table[name.removeprefix("vision__")] = value
    (path / "config.json").write_text(json.dumps(config))
    return tower(path)


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "other layer": ("mistral3", {"vision_feature_layer": -2}, "vision_feature_layer -2 is not supported; -1, the last"),
    "several layers": ("mistral3", {"vision_feature_layer": [-1, -2]}, r"vision_feature_layer \[-1, -2\] is not"),
    "other activation": ("mistral3", {"projector_hidden_act": "relu"}, "projector_hidden_act 'relu' is not supported"),
    "unknown field": ("smolvlm", {"vision__num_registers": 4}, "vision_config.num_registers is 4, which llmc does not"),
    "no whole row": ("idefics3", {"scale_factor": 3}, "have 8 patches of 8 pixels on a side, of which 3 at a time"),
    "no tower": ("smolvlm", {"vision_config": None}, "lacks the field 'vision_config'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_tower_that_llmc_does_not_know_is_refused(case: str, tmp_path: Path) -> None:
    family, fields, says = REFUSED[case]
    source = changed(make_seeing(tmp_path / "m", family), **fields)
    with pytest.raises(ModelError, match=says):
        source.config()


def test_an_unknown_field_can_be_ignored(tmp_path: Path) -> None:
    path = make_seeing(tmp_path / "m", "smolvlm")
    before = tower(path).config()
    changed(path, vision__num_registers=4)
    assert tower(path, allow_unknown_config=True).config() == before


def test_files_that_disagree_on_patches_are_refused(tmp_path: Path) -> None:
    source = changed(make_seeing(tmp_path / "m", "mistral3"), vision__num_channels=1)
    with pytest.raises(
        ModelError, match=r"cut to 3 channels, patches of 4 pixels, 4 for a row, and 16 numbers .* 1, 4, 4"
    ):
        source.config()


def test_a_model_without_images_has_no_tower(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "m", "llama", **CASES["llama"][1])
    with pytest.raises(ModelError, match="llmc sees no images with llama models; leave out --images"):
        tower(path).config()


def test_a_text_model_is_as_it_was(tmp_path: Path) -> None:
    """What it computes without --images does not depend on its tower."""
    path = make_seeing(tmp_path / "m", "mistral3")
    before = load_config(path)
    changed(path, vision_feature_layer=-2)
    assert load_config(path) == before
    assert (before.states, before.tower) == ("none", None)
