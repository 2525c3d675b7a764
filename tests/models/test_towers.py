"""Towers of models that see images: transformers' rows, tensors under all published names, and what is refused."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

from llmc.models import ModelError, load_config
from llmc.models.eager import load_source
from llmc.models.loader import check_checkpoint, load_parameters
from llmc.models.reference import ReferenceCache, ReferenceStates, use_cache, use_states
from llmc.models.registry import get_family
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
    parts = ("vision", "multi", "visual")
    if any(name.startswith(tuple(f"model.{part}" for part in parts)) for name in tensors):
        other = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    else:
        other = {f"model.{name}" if name.startswith(parts) else name: t for name, t in tensors.items()}
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
    tensors |= {
        "vision_tower.ln_pre.weight": np.ones(48, np.float32),
        "vision_tower.ln_post.weight": np.ones(48, np.float32),
    }
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ModelError, match=r"has the tensor vision_tower\.ln_post\.weight .* does not use"):
        check_checkpoint(source.config(), tower(path).checkpoint())


def test_a_quantized_tower_is_refused(tmp_path: Path) -> None:
    path = make_seeing(tmp_path / "m", "smolvlm")
    tensors, name = load_file(path / "model.safetensors"), "model.connector.modality_projection.proj.weight"
    save_file({**tensors, name: tensors[name].astype(np.int8)}, path / "model.safetensors")
    with pytest.raises(ModelError, match=r"proj\.weight of .* is i8: llmc reads no quantized towers yet; give"):
        tower(path).checkpoint()


def changed(path: Path, **fields: Any) -> ModelSource:
    """The tower of a model with other fields; those of its own table begin with vision__."""
    config = json.loads((path / "config.json").read_text())
    for name, value in fields.items():
        table = config["vision_config"] if name.startswith("vision__") else config
        table[name.removeprefix("vision__")] = value
    (path / "config.json").write_text(json.dumps(config))
    return tower(path)


_TEXTS: dict[str, dict[str, Any]] = {
    "llama": {
        "model_type": "llama", "vocab_size": 512, "hidden_size": 576, "intermediate_size": 64, "num_hidden_layers": 1,
        "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
    },
    "mistral": {
        "model_type": "mistral", "vocab_size": 512, "hidden_size": 5120, "intermediate_size": 64, "head_dim": 128,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
    },
}  # fmt: skip
"""Few layers: only towers are looked at."""
_IDEFICS = {"image_token_id": 7, "text_config": _TEXTS["llama"], "torch_dtype": "bfloat16"}
PUBLISHED: dict[str, dict[str, Any]] = {
    "SmolVLM-256M": {
        **_IDEFICS, "model_type": "idefics3", "scale_factor": 4,
        "vision_config": {
            "hidden_size": 768, "image_size": 512, "max_image_size": {"longest_edge": 512}, "model_type": "idefics3",
            "num_attention_heads": 12, "patch_size": 16, "size": {"longest_edge": 2048}, "tie_word_embeddings": False,
            "use_base_siglip": True,
        },
    },
    "SmolVLM2-2.2B": {
        **_IDEFICS, "model_type": "smolvlm", "scale_factor": 3,
        "vision_config": {
            "hidden_size": 1152, "image_size": 384, "intermediate_size": 4304,
            "max_image_size": {"longest_edge": 384}, "model_type": "smolvlm_vision", "num_attention_heads": 16,
            "num_hidden_layers": 27, "patch_size": 14, "size": {"longest_edge": 1920}, "tie_word_embeddings": False,
            "use_base_siglip": False,
        },
    },
    "Idefics3-8B": {
        **_IDEFICS, "model_type": "idefics3", "scale_factor": 2,
        "vision_config": {
            "hidden_size": 1152, "image_size": 364, "intermediate_size": 4304, "model_type": "idefics3",
            "num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14, "tie_word_embeddings": False,
        },
    },
    "Mistral-Small-3.1": {
        "model_type": "mistral3", "image_token_index": 10, "multimodal_projector_bias": False,
        "projector_hidden_act": "gelu", "spatial_merge_size": 2, "text_config": _TEXTS["mistral"],
        "torch_dtype": "bfloat16", "vision_feature_layer": -1,
        "vision_config": {
            "attention_dropout": 0.0, "head_dim": 64, "hidden_act": "silu", "hidden_size": 1024, "image_size": 1540,
            "initializer_range": 0.02, "intermediate_size": 4096, "model_type": "pixtral", "num_attention_heads": 16,
            "num_channels": 3, "num_hidden_layers": 24, "patch_size": 14, "rope_theta": 10000.0,
        },
    },
}  # fmt: skip
"""As in config.json of published models, but for their text models."""
_PARTS = ("vision_model", "vision_tower", "connector", "multi_modal_projector")


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_towers_have_the_parameters_of_transformers(name: str, tmp_path: Path) -> None:
    fields = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(fields))
    source = open_source(tmp_path)
    config = source.tower_config()
    assert config is not None
    targets = get_family(config.model_type).weight_map(config).targets
    kind = CONFIG_MAPPING[fields["model_type"]]
    with torch.device("meta"):
        whole = AutoModelForImageTextToText.from_config(kind(**fields)).model
    parts = [getattr(whole, part) for part in _PARTS if hasattr(whole, part)]
    assert len(parts) == 2
    counts = [parameter.numel() for part in parts for parameter in part.parameters()]
    assert sum(prod(target.shape) for target in targets) == sum(counts)


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
        ModelError, match=r"cut to 3 channels, 1 frames, patches of 4 pixels, 4 for a row, and 16 numbers .* 1, 1, 4, 4"
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
