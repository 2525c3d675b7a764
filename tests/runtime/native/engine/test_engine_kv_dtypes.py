"""The engine's bits do not depend on company whatever the KV cache is made of: its scales go where its blocks go."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmc.runtime.binding import Artifact

from support.company import check_company
from support.compiled import compile_tiny
from support.engine_driver import MIXED_LADDER
from support.marks import rare

pytestmark = pytest.mark.native


@pytest.mark.parametrize("kv_dtype", ["f16", "int8", "fp8_e4m3", rare("fp8_e5m2")])
def test_bits_do_not_depend_on_company(
    kv_dtype: str, llama: tuple[Path, Artifact], tmp_path: Path, kernel_cache: Path
) -> None:
    ladder = f"{MIXED_LADDER},mixed=[8]x[24]"
    options = {"buckets": ladder, "dtype": "f32", "kv_dtype": kv_dtype, "block_size": 16}
    check_company(compile_tiny(llama[0], tmp_path / "artifact", kernel_cache, **options))
