"""Adapters of experts that are one tensor, by name: what is refused, and how it is said."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llmc.runtime.adapters.adapters import Adapters
from llmc.runtime.adapters.tensors import AdapterError
from llmc.runtime.binding import Artifact, Engine

from support.adapters import make_adapter
from support.compiled import compile_tiny
from support.expert_adapters import add_experts
from support.families import CASES
from support.tiny_models import make_tiny_model

BOTH = ("experts.gate_up_proj", "experts.down_proj")


def tiny(path: Path, **fields: int) -> Path:
    family, overrides = CASES["qwen3_moe"]
    return make_tiny_model(path, family, **{**overrides, "num_hidden_layers": 1, **fields})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("experts") / "model")


def adapters_of(path: Path, model: Path, kernel_cache: Path, *, experts: bool) -> Iterator[Adapters]:
    options = {"lora_slots": 2, "lora_rank": 4, "lora_experts": experts, "buckets": "prefill=1x8,decode=1x64"}
    compile_tiny(model, path, kernel_cache, dtype="f32", target="reference", **options).close()
    with Artifact(path) as artifact, Engine(artifact) as engine:
        yield Adapters(path, artifact, engine)


@pytest.fixture(scope="module")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory, kernel_cache: Path) -> Iterator[Adapters]:
    yield from adapters_of(tmp_path_factory.mktemp("experts") / "a", model, kernel_cache, experts=True)


@pytest.fixture(scope="module")
def without(model: Path, tmp_path_factory: pytest.TempPathFactory, kernel_cache: Path) -> Iterator[Adapters]:
    yield from adapters_of(tmp_path_factory.mktemp("experts") / "b", model, kernel_cache, experts=False)


def of_model(path: Path, model: Path, modules: tuple[str, ...] = ("o_proj",), **config: Any) -> Path:
    return add_experts(make_adapter(path, model, modules), model, BOTH, **config)


def test_one_that_fits_is_loaded(adapters: Adapters, model: Path, tmp_path: Path) -> None:
    assert adapters.load("fits", of_model(tmp_path / "x", model)).rank == 4
    adapters.unload("fits")


def test_what_does_not_fit_is_one_sentence(adapters: Adapters, model: Path, tmp_path: Path) -> None:
    with pytest.raises(
        AdapterError, match=r"gate_up_proj' has rank 5, and the artifact takes up to 4; compile it with"
    ):
        adapters.load("high", of_model(tmp_path / "x", model, rank_pattern={"experts.gate_up_proj": 5}))
    other = tiny(tmp_path / "other", moe_intermediate_size=24)
    with pytest.raises(
        AdapterError, match=r"lora_B of \[48, 32\], which fit no experts of its layer; merge the adapter"
    ):
        adapters.load("other", of_model(tmp_path / "y", other))
    assert adapters.all() == []


def test_experts_are_changed_once(adapters: Adapters, model: Path, tmp_path: Path) -> None:
    """An adapter may not have a tensor of all experts and one of an expert besides."""
    with pytest.raises(AdapterError, match=r"changes 'model\.layers\.0\.mlp\.experts\.down_proj' twice"):
        adapters.load("twice", of_model(tmp_path / "x", model, modules=("experts.1.down_proj",)))


def test_an_artifact_that_takes_none_says_how(without: Adapters, model: Path, tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="compile the model with --lora-experts, or merge the adapter when you"):
        without.load("experts", of_model(tmp_path / "x", model))
