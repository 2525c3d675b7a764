"""Fixtures of the tests of adapters."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.adapter_setting import Setting, make_setting


@pytest.fixture(scope="session")
def setting(tmp_path_factory: pytest.TempPathFactory, kernel_cache: Path) -> Setting:
    return make_setting(tmp_path_factory, kernel_cache)
