"""Published config.json files of models that no other test has: they resolve, and have the published sizes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmc.compiler.dry_run import describable, num_parameters

from support.published_configs import PUBLISHED


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_resolves(name: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(PUBLISHED[name].config))
    config = describable(file).config()
    assert config.model_type == PUBLISHED[name].config["model_type"]
    assert num_parameters(config) == PUBLISHED[name].parameters
