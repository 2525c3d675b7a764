"""Tokens that an OpenCL device draws are the host's, bit for bit, of a vocabulary of several pieces."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmc.runtime.binding import Artifact

from support.adapter_setting import Setting
from support.drawing import answers
from support.opencl import needs_opencl, opencl_setting, program_cache

pytestmark = needs_opencl


def test_the_device_draws_what_the_host_draws(tmp_path_factory: pytest.TempPathFactory, kernel_cache: Path) -> None:
    setting: Setting = opencl_setting(tmp_path_factory, kernel_cache)
    options = {"program_cache": str(program_cache(tmp_path_factory))}
    with Artifact(setting.artifact) as artifact:
        assert artifact.info.vocab_size > 2 * 4096
        expected, of_host = answers(artifact, device_sampling=False, **options)
        found, of_device = answers(artifact, **options)
    assert found == expected
    assert (of_host["drawn_on_device"], of_host["drawn_on_host"]) == (0, 0)
    # What the kernels have no room for: many candidates.
    assert 0 < of_device["drawn_on_host"] < of_device["drawn_on_device"]
