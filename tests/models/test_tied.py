"""Configs that tie the embedding and the output projection, of checkpoints that have a matrix for each."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from llmc.models import load_config, open_source

from support.paged_reference import check_equals_transformers
from support.tiny_models import make_tiny_model

Tensors = dict[str, torch.Tensor]


def tied_model(path: Path, change: Callable[[torch.Tensor], torch.Tensor], family: str = "llama") -> Path:
    """A tied model whose checkpoint has an output projection as well. change: what it is of the embedding."""
    make_tiny_model(path, family, tie_word_embeddings=True)
    file = path / "model.safetensors"
    tensors = load_file(file)
    embedding = next(name for name in tensors if name.endswith("embed_tokens.weight"))
    tensors[embedding.replace("model.embed_tokens", "lm_head")] = change(tensors[embedding])
    save_file(tensors, file, metadata={"format": "pt"})
    return path


def other_matrix(embedding: torch.Tensor) -> torch.Tensor:
    """Differs in its last number alone."""
    changed = embedding.clone()
    changed[-1, -1] += 8.0
    return changed


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_another_matrix_is_the_output_projection_as_in_transformers(family: str, tmp_path: Path) -> None:
    path = tied_model(tmp_path / "m", lambda embedding: 8.0 * embedding.flip(0), family)
    source = open_source(path)
    assert not source.config().tie_word_embeddings
    (said,) = source.ignored_config()
    assert re.search(r"tie_word_embeddings is true, but \S*lm_head.weight is another matrix than \S*embed_tokens", said)
    check_equals_transformers(path)


def test_all_numbers_are_compared(tmp_path: Path) -> None:
    assert not load_config(tied_model(tmp_path / "m", other_matrix)).tie_word_embeddings


@pytest.mark.parametrize(
    "change",
    [torch.clone, torch.Tensor.double, lambda embedding: embedding[1:].clone()],
    ids=["a copy", "an unread type", "another shape"],
)
def test_what_cannot_be_another_projection_stays_tied(
    change: Callable[[torch.Tensor], torch.Tensor], tmp_path: Path
) -> None:
    source = open_source(tied_model(tmp_path / "m", change))
    assert source.config().tie_word_embeddings
    assert source.ignored_config() == ()


def test_files_of_torch_have_one_matrix_by_two_names(tmp_path: Path) -> None:
    path = tied_model(tmp_path / "m", torch.clone)
    tensors = load_file(path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    torch.save(tensors, path / "pytorch_model.bin")
    (path / "model.safetensors").unlink()
    assert load_config(path).tie_word_embeddings


def test_damaged_weights_do_not_hinder_reading_the_config(tmp_path: Path) -> None:
    path = tied_model(tmp_path / "m", other_matrix)
    (path / "model.safetensors").write_bytes(b"damaged")
    assert load_config(path).tie_word_embeddings
