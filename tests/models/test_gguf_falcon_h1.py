"""GGUF files of Falcon-H1, whose matrices have its multipliers: logits are those of transformers, and what is no such
file is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmc.compiler.config import CompileConfig
from llmc.compiler.resolve import resolve
from llmc.models import ModelError, open_source
from llmc.models.eager import load_model

from support.falcon_h1_families import OF_FALCON_H1
from support.gguf_converter import write_converted
from support.marks import rare
from support.paged_reference import PagedRunner
from support.parity import reference_logits
from support.tiny_models import make_tiny_model


def make(path: Path, case: str, **changes: Any) -> tuple[Path, Path]:
    """A checkpoint, and its file."""
    family, fields = OF_FALCON_H1[case]
    model, file = make_tiny_model(path / "m", family, **{**fields, **changes}), path / "m.gguf"
    write_converted(model, file, open_source(model).config())
    return model, file


def check(model: Path, file: Path, times: float = 1.0) -> None:
    """times: the file's logits, over those of transformers."""
    tokens = [int(t) for t in np.random.default_rng(5).integers(3, 500, 40)]
    found, expected = PagedRunner(load_model(file)).step([tokens])[0].numpy(), reference_logits(model, tokens) * times
    assert np.abs(found - expected).max() <= 1e-4 * np.abs(expected).max()


# A file has the multiplier of attention's inputs in biases, too, and no biases of a mixer's first layer.
_BIASES = {"attention_in_multiplier": 1.0, "mamba_proj_bias": False, "tie_word_embeddings": False}


@pytest.mark.parametrize(
    ("case", "changes"),
    [
        ("falcon_h1", {"attention_in_multiplier": 1.7}),
        rare("falcon_h1-biases", _BIASES),
        rare("falcon_h1-norm", {"mamba_norm_before_gate": False, "time_step_limit": [0.0, float("inf")]}),
    ],
)
def test_logits_are_those_of_transformers(case: str, changes: dict[str, Any], tmp_path: Path) -> None:
    check(*make(tmp_path, case, **changes))


@pytest.mark.exhaustive
def test_a_tied_head_has_the_multiplier_of_the_embedding(tmp_path: Path) -> None:
    model, file = make(tmp_path, "falcon_h1", tie_word_embeddings=True)
    check(model, file, times=5.6 / 0.4)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make(tmp_path_factory.mktemp("falcon_h1"), "falcon_h1")


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({"ssm.has_mup": True}, r"falcon-h1\.ssm\.has_mup says that multipliers are not in the weights"),
        ({"ssm.has_mup": "no"}, "true or false"),
        ({"mlp_gate_multiplier": 0.5}, "mlp_gate_multiplier"),
        ({"ssm.time_step_rank": 7}, "a multiple of the 7 heads of ssm.time_step_rank"),
        ({"ssm.group_count": 4}, "mamba_n_groups 4 does not divide the 6 heads of mixers"),
        ({"ssm.inner_size": None}, "lacks the metadata falcon-h1.ssm.inner_size"),
        ({"attention.sliding_window": 8}, "where 0 was expected"),
    ],
)
def test_what_is_no_such_file_is_refused(
    metadata: dict[str, Any], said: str, made: tuple[Path, Path], tmp_path: Path
) -> None:
    write_converted(made[0], tmp_path / "m.gguf", open_source(made[0]).config(), metadata)
    with pytest.raises(ModelError, match=said):
        open_source(tmp_path / "m.gguf").config()


def test_adapters_are_refused(made: tuple[Path, Path], tmp_path: Path) -> None:
    """What they add to matrices lacks the multipliers."""
    with pytest.raises(ModelError, match="times factors that no adapter has; give the checkpoint that"):
        open_source(made[1], [tmp_path / "adapter"]).config()
    with pytest.raises(ModelError, match="times factors that no adapter has; give the checkpoint that"):
        resolve(CompileConfig(model=made[1], output=tmp_path / "out", lora_slots=1))
