"""Numbers in groups and blocks: rounding to nearest, and kernels that give the sums of what numbers stand for."""

from __future__ import annotations

import pytest

from llmc.quantize.formats.affine import Affine

from support.new_format import check_kernels, check_rounding

Q5_K, IQ4_XS = Affine(5), Affine(4, 32, offsets=False, table="iq4_nl")
Q6_K, Q4_AND_6 = (Affine(6, 16, offsets=offsets, scale_kind="f16") for offsets in (False, True))
KERNELS = (Affine(4, scale_kind="f16"), Q5_K, Q6_K, Q4_AND_6, IQ4_XS)
OTHERS = (
    Affine(8),
    Affine(5, 32, 32, False),
    Affine(4, 16),
    Affine(4, 16, offsets=False),
    Affine(4, block=32),
    Affine(8, 16, 16),
)


@pytest.mark.parametrize("format", [*KERNELS, *OTHERS], ids=str)
def test_numbers_are_the_nearest(format: Affine) -> None:
    check_rounding(format)


@pytest.mark.slow
@pytest.mark.native
@pytest.mark.parametrize("format", KERNELS, ids=str)
def test_kernels(format: Affine) -> None:
    check_kernels(format)
