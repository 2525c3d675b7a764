"""Published config.json files of models that no other test has: they resolve, and have the published sizes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from llmc.compiler.dry_run import describable, num_parameters
from llmc.models import ModelError

from support.published_configs import HYBRIDS, PUBLISHED


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_resolves(name: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(PUBLISHED[name].config))
    config = describable(file).config()
    assert config.model_type == PUBLISHED[name].config["model_type"]
    assert num_parameters(config) == PUBLISHED[name].parameters


@pytest.mark.parametrize("name", HYBRIDS)
def test_all_but_the_linear_layers_of_a_hybrid_is_known(name: str, tmp_path: Path) -> None:
    hybrid, file = HYBRIDS[name], tmp_path / "config.json"
    file.write_text(json.dumps(hybrid.config))
    with pytest.raises(ModelError, match=re.escape(hybrid.sentence)):
        describable(file).config()
    file.write_text(json.dumps({**hybrid.config, **hybrid.softmax}))
    config = describable(file).config()
    assert config.rope.dim == 64
    assert config.experts is not None
    assert len(config.experts.layers) == config.num_layers
