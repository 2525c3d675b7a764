"""Checkpoints of models with experts and with latent attention that `llmc quantize -o` writes, by rounding alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmc.compiler.calibration import driver
from llmc.compiler.calibration.request import CalibrationConfig
from llmc.compiler.config import CompileError
from llmc.models.eager import load_model
from llmc.models.loader import load_parameters
from llmc.models.sources.registry import open_source
from llmc.quantize import QuantConfig

from support.compiled import check_every_bucket, compile_tiny, random_tokens
from support.families import CASES
from support.marks import rare
from support.new_family import targets_here
from support.paged_reference import PagedRunner
from support.tiny_models import make_tiny_model

pytestmark = pytest.mark.native
LADDER = "prefill=[2]x[16,32],decode=[1,3]x[64]"


def written(case: str, folder: Path, scheme: str, **more: Any) -> tuple[Path, Path]:
    family, overrides = CASES[case]
    model = make_tiny_model(folder / "model", family, **overrides)
    config = CalibrationConfig(model, folder / "out", QuantConfig(scheme), jobs=1, **{"method": "rtn", **more})
    driver.quantize_checkpoint(config)
    return model, folder / "out"


@pytest.mark.parametrize(
    ("case", "scheme"),
    [
        pytest.param("deepseek_v3", "w8a16", marks=pytest.mark.slow),
        *(rare(case, "w8a16") for case in ("qwen2_moe", "qwen3_moe", "mixtral", "deepseek_v2-lite", "minicpm3")),
        rare("qwen2_moe", "w4a16"),
        rare("deepseek_v3", "fp8"),
    ],
)
def test_every_matrix_is_rounded_where_it_was(case: str, scheme: str, tmp_path: Path, kernel_cache: Path) -> None:
    """Orders of rows, experts one by one, and what stays as it is: routers, and what latent vectors become."""
    model, output = written(case, tmp_path, scheme)
    before, after = open_source(model), open_source(output)
    plain = {p.name: p for p in load_parameters(before.config(), before.checkpoint(), "f32")}
    steps = {"w8a16": 127, "w4a16": 7, "fp8": 16}[scheme]
    rounded = 0
    for parameter in load_parameters(after.config(), after.checkpoint(), "f32"):
        found, wanted = parameter.value(), plain[parameter.name].value()
        if parameter.stored is None:
            assert np.array_equal(found, wanted), parameter.name
            continue
        rounded += 1
        assert np.abs(found - wanted).max() <= 1.01 * np.abs(wanted).max() / steps, parameter.name
        assert not np.array_equal(found, wanted)
    assert rounded >= 4 * before.config().num_layers
    ignored = json.loads((output / "config.json").read_text())["quantization_config"]["ignore"]
    assert "lm_head" in ignored
    assert any("gate" in name or "kv_b_proj" in name for name in ignored)
    tokens = random_tokens(515, 48)
    expected = PagedRunner(load_model(output)).step([tokens])[0].numpy()
    target = targets_here()[0]
    with compile_tiny(
        output, tmp_path / "artifact", kernel_cache, buckets=LADDER, dtype="f32", target=target
    ) as artifact:
        check_every_bucket(artifact, tokens, expected)


def test_what_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match="has experts, which is not calibrated yet; give --method rtn"):
        written("qwen2_moe", tmp_path / "gptq", "w4a16", method="gptq", text="A text.")
    with pytest.raises(CompileError, match="has experts, which --format gptq does not hold; leave it out"):
        written("qwen2_moe", tmp_path / "format", "w4a16", layout="gptq")
    with pytest.raises(CompileError, match=r"has .*experts\.gate_up_proj in another shape than a linear layer's"):
        written("gpt_oss", tmp_path / "stacked", "w8a16")
