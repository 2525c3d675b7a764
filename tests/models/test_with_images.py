"""Decoders behind images: configs and checkpoints as their authors publish them and as transformers writes them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from transformers import CONFIG_MAPPING, MistralConfig

from llmc.models import ModelError, load_config, load_parameters, open_source
from llmc.models.convert import Array
from llmc.models.families.around_text import TEXTS

from support.families import CASES
from support.tiny_models import make_tiny_model
from support.verified import Limit, refuses

Tensors = dict[str, Array]


def renamed(**prefixes: str) -> Callable[[Tensors], Tensors]:
    """__ stands for a dot."""
    pairs = [(old.replace("__", "."), new) for old, new in prefixes.items()]

    def rename(tensors: Tensors) -> Tensors:
        found = {}
        for name, tensor in tensors.items():
            old, new = next(((old, new) for old, new in pairs if name.startswith(old)), ("", ""))
            found[new + name.removeprefix(old)] = tensor
        return found

    return rename


def turned(tensors: Tensors) -> Tensors:
    return {
        name: np.ascontiguousarray(tensor.swapaxes(1, 2)) if ".experts." in name else tensor
        for name, tensor in tensors.items()
    }


def one_by_one(tensors: Tensors) -> Tensors:
    """A matrix of each expert by itself."""
    found = {}
    for name, tensor in tensors.items():
        block, experts, part = name.partition(".experts.")
        for i, matrix in enumerate(tensor) if experts else ():
            parts = np.split(matrix, 2) if part == "gate_up_proj" else [matrix]
            names = ("gate_proj", "up_proj") if part == "gate_up_proj" else (part,)
            for one, rows in zip(names, parts, strict=True):
                found[f"{block}.experts.{i}.{one}.weight"] = np.ascontiguousarray(rows)
        found |= {} if experts else {name: tensor}
    return found


OTHERS: dict[str, tuple[str, Callable[[Tensors], Tensors]]] = {
    "kimi_k25-within": (
        "kimi_k25",
        renamed(
            language_model__model="model.language_model",
            language_model__="",
            vision_tower="model.vision_tower",
            mm_projector="model.mm_projector",
        ),
    ),
    "llava-within": (
        "llava",
        renamed(
            language_model__model="model.language_model",
            language_model__="",
            vision_tower="model.vision_tower",
            multi_modal_projector="model.multi_modal_projector",
        ),
    ),
    "qwen2_vl-within": ("qwen2_vl", renamed(model="model.language_model", visual="model.visual")),
    "qwen2_5_vl-within": ("qwen2_5_vl", renamed(model="model.language_model", visual="model.visual")),
    "qwen3_vl_moe-published": ("qwen3_vl_moe", turned),
    "qwen3_vl_moe-apart": ("qwen3_vl_moe", one_by_one),
}


def parameters(path: Path) -> Tensors:
    source = open_source(path)
    return {p.name: p.value() for p in load_parameters(source.config(), source.checkpoint(), "f32")}


@pytest.mark.parametrize("case", OTHERS)
def test_other_names_and_orders_of_the_same_tensors(case: str, tmp_path: Path) -> None:
    family, change = OTHERS[case]
    path = make_tiny_model(tmp_path / "m", family, **CASES[family][1])
    before, file = parameters(path), path / "model.safetensors"
    tensors = load_file(file)
    changed = change(tensors)
    assert {name: one.shape for name, one in changed.items()} != {name: one.shape for name, one in tensors.items()}
    save_file(changed, file)
    after = parameters(path)
    assert after.keys() == before.keys()
    assert all(after[name].tobytes() == value.tobytes() for name, value in before.items())


def test_the_authors_own_llava_has_the_decoder_in_its_midst(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "m", "llava", num_hidden_layers=1)
    nested, before, file = load_config(path), parameters(path), path / "model.safetensors"
    fields: dict[str, Any] = json.loads((path / "config.json").read_text())
    text = fields.pop("text_config")
    flat = {**text, "model_type": "llava", "mm_vision_tower": "clip", "mm_projector_type": "mlp2x_gelu"}
    (path / "config.json").write_text(json.dumps(flat))
    rename = renamed(language_model__="", vision_tower="model.vision_tower", multi_modal_projector="model.mm_projector")
    save_file(rename(load_file(file)), file)
    assert load_config(path) == nested
    assert all(value.tobytes() == before[name].tobytes() for name, value in parameters(path).items())


def llava(tmp_path: Path, **text: Any) -> Path:
    """A config.json as published: it omits what is usual."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "llava", "vision_config": {}, "text_config": text}))
    return tmp_path


def test_a_config_omits_what_is_usual_for_its_text_model(tmp_path: Path) -> None:
    config = load_config(llava(tmp_path, model_type="mistral", vocab_size=32064, sliding_window=None))
    usual = MistralConfig(vocab_size=32064, sliding_window=None)
    assert (config.vocab_size, config.intermediate_size, config.num_kv_heads) == (32064, 14336, 8)
    assert config.max_position_embeddings == usual.max_position_embeddings
    for name, (_, values) in TEXTS.items():
        theirs = CONFIG_MAPPING[name]().to_dict()
        assert {key: theirs[key] for key in values} == values, name


@refuses(lambda: [Limit("llava", "around other text models")])
def test_other_text_models_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="a llava model around 'phi3' is not supported; one around llama, mistral"):
        load_config(llava(tmp_path, model_type="phi3"))


def test_one_of_both_tables_ties_the_embedding(tmp_path: Path) -> None:
    path = llava(tmp_path, tie_word_embeddings=True)
    fields = {**json.loads((path / "config.json").read_text()), "tie_word_embeddings": False}
    (path / "config.json").write_text(json.dumps(fields))
    assert load_config(path).tie_word_embeddings


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
def test_a_published_config_has_the_decoder_in_its_midst(family: str, tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "m", family, **CASES[family][1], num_hidden_layers=1)
    nested = load_config(path)
    fields: dict[str, Any] = json.loads((path / "config.json").read_text())
    rope = fields["text_config"].pop("rope_parameters")
    flat = {**fields.pop("text_config"), **fields, "vision_token_id": 9, "rope_theta": rope["rope_theta"]}
    del flat["layer_types"]
    flat["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    (path / "config.json").write_text(json.dumps(flat))
    assert load_config(path) == nested


def test_weights_of_experts_are_normalised_whatever_a_config_says(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "m", "qwen3_vl_moe", **CASES["qwen3_vl_moe"][1], num_hidden_layers=1)
    experts = load_config(path).experts
    assert experts is not None
    assert experts.normalised
