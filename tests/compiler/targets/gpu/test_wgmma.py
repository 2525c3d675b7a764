"""Linear layers by Hopper's wgmma: on the host, as the PTX manual has it, and as nvcc and ptxas build them."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import numpy as np
import pytest

from llmc.compiler.targets.gpu.cuda import cuda_text
from llmc.compiler.targets.gpu.cuda_prelude import FULL, FULL_DEPENDENT
from llmc.compiler.targets.gpu.cuda_wgmma import WGMMA
from llmc.compiler.targets.gpu.nvcc import build_cubin, build_ptx, find_nvcc
from llmc.compiler.targets.gpu.tensor_cores import tensor_layer
from llmc.compiler.targets.gpu.wgmma import ALL, ARCHITECTURE, MANY, row_forms
from llmc.quantize.formats.codes import E8M0, Codes
from llmc.quantize.formats.integers import Integers

from support.cuda import host_library, pointers
from support.ptx_flow import early_operands
from support.sass import find_nvdisasm, instructions
from support.tensor_layers import (
    EXPERTS,
    ORDER,
    TOP_K,
    Layer,
    check_numbers,
    expert_spec,
    float_spec,
    index_of,
    quantized_spec,
    run_layer,
)

_ROWS = (1, 8, 9, 17, 64, 65, 140)
_SPECS = {
    "bf16": (float_spec("bf16", 160, 200, bias=True, residual=True), ALL),
    "w4a16-groups-zeros": (quantized_spec("bf16", 416, 2 * 72, Integers(4, 96, True), gated="f32"), ALL),
    "mxfp4-gated": (quantized_spec("f16", 32, 2 * 72, Codes("e2m1", 32, E8M0), gated="f16"), MANY),
    "w8a8": (quantized_spec("i8", 320, 136, Integers(8), residual=True), ALL),
}
_PLAIN = "bf16"
"""Also built without wgmma, with the same bits here: within one product, the host adds both in the order of K."""
_EXPERTS = expert_spec(float_spec("bf16", 96, 2 * 24, gated="bf16", bias=True))


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> tuple[ctypes.CDLL, ctypes.CDLL]:
    """Kernels with wgmma, and one of them without."""
    texts = [cuda_text(spec, way) for spec, way in (*_SPECS.values(), (_EXPERTS, MANY))]
    library = host_library([cuda_text(ORDER), *texts], tmp_path_factory.mktemp("kernels"))
    plain = host_library([cuda_text(_SPECS[_PLAIN][0])], tmp_path_factory.mktemp("plain"))
    return ctypes.CDLL(str(library)), ctypes.CDLL(str(plain))


@pytest.mark.parametrize("name", list(_SPECS))
def test_layers_are_those_of_torch_with_the_same_bits_for_every_number_of_rows(
    name: str, libraries: tuple[ctypes.CDLL, ctypes.CDLL]
) -> None:
    """And those of mma.sync: products have the same elements of K, at the same places."""
    (spec, _), (library, plain) = _SPECS[name], libraries
    most = max(_ROWS)
    layer = Layer(spec, most)
    whole = run_layer(library, spec, layer, most, groups=3)
    check_numbers(spec, whole, layer.expected)
    if name == _PLAIN:
        assert np.array_equal(whole, run_layer(plain, spec, layer, most, groups=2))
    for rows in _ROWS[:-1]:
        found = run_layer(library, spec, layer, rows, groups=2)
        assert np.array_equal(found.view(np.uint8), whole[:rows].view(np.uint8)), rows


def test_rows_of_experts_have_the_same_bits_in_any_company(libraries: tuple[ctypes.CDLL, ctypes.CDLL]) -> None:
    library, _ = libraries
    liking = np.random.default_rng(3).standard_normal((73, EXPERTS)) - 2.0 * np.arange(EXPERTS)
    ids = np.argsort(-liking, 1)[:, :TOP_K].astype(np.int32)
    layer = Layer(_EXPERTS, ids.size, ids.ravel())
    whole = run_layer(library, _EXPERTS, layer, ids.size, 3, index_of(library, ids, 3))
    check_numbers(_EXPERTS, whole, layer.expected)
    some = run_layer(library, _EXPERTS, layer, 20 * TOP_K, 5, index_of(library, ids[:20], 1))
    assert np.array_equal(some, whole[: 20 * TOP_K])


def test_every_number_of_rows_has_one_form() -> None:
    for spec, way in (*_SPECS.values(), (_EXPERTS, ALL), (_EXPERTS, MANY)):
        layer = tensor_layer(spec)
        assert layer is not None
        forms = row_forms(layer, way)
        spans = [(form.above, form.most) for form in forms.few] + [(form.above, form.most) for form in forms.many]
        spans = sorted([*spans, *((form.above, form.most) for form in forms.wgmma)])
        assert spans[0][0] == 0
        assert [most for _, most in spans[:-1]] == [above for above, _ in spans[1:]]
        # Floats have one instruction for all rows, unless the target says otherwise. Sums of integers are exact.
        assert bool(forms.few) == (way == MANY or layer.dtype == "i8")
        assert all(form.stages(layer) >= 3 for form in forms.wgmma)


_WIDE = (4096, 4096)
_BUILT = {
    "bf16": (float_spec("bf16", *_WIDE, bias=True, residual=True), "HGMMA.64x128x16.F32.BF16"),
    "gated": (float_spec("f16", 4096, 28672, gated="f16"), "HGMMA.64x128x16.F32"),
    "w4a16": (quantized_spec("bf16", *_WIDE, Integers(4, 128, True)), "HGMMA.64x64x16.F32.BF16"),
    "w8a8": (quantized_spec("i8", *_WIDE, Integers(8)), "IGMMA.64x128x32.U8.S8"),
    "experts": (expert_spec(float_spec("bf16", 2048, 1536, gated="bf16")), "HGMMA.64x64x16.F32.BF16"),
}


@pytest.mark.skipif(find_nvcc() is None, reason="no nvcc here")
@pytest.mark.parametrize(
    ("way", "names"), [(MANY, ("bf16", "w4a16")), pytest.param(ALL, tuple(_BUILT), marks=pytest.mark.exhaustive)]
)
def test_code_has_products_that_run_beside_other_work(way: str, names: tuple[str, ...], tmp_path: Path) -> None:
    """Without spills, without waits of the assembler's own, and without writes to registers that a product reads."""
    wanted, early = [_BUILT[name] for name in names], way == ALL  # some begin while kernels before them end
    texts = [cuda_text(spec, way, dependent=early) for spec, _ in wanted]
    ptx = build_ptx("\n".join((FULL_DEPENDENT if early else FULL, WGMMA, *texts)), f"compute_{ARCHITECTURE[3:]}")
    _check_registers(ptx.decode())
    kernels = {one.split("(")[0]: one for one in ptx.decode().split(".visible .entry ")[1:]}
    for (spec, _), text in zip(wanted, texts, strict=True) if early else ():
        # Neither what other kernels write, nor an end without a wait.
        found = early_operands(kernels[spec.symbol()], [name for _, name, _ in pointers(text)])
        assert found <= {"weight", "scalars"}, spec.symbol()
    cubin, said = build_cubin(ptx, ARCHITECTURE)
    assert re.findall(r"(\d+) bytes spill", said) == ["0"] * (2 * len(texts))
    # The assembler says so where it runs products one by one, or waits for them by itself.
    assert not re.search(r"C75\d\d", said)
    if find_nvdisasm() is None:
        return
    machine_code = instructions(cubin, tmp_path)
    for spec, product in wanted:
        counts = machine_code[spec.symbol()]
        assert counts[product] >= 4, spec.symbol()
        assert counts["STSM.16.M88.4"] >= 2
        assert counts["LDGSTS.E.BYPASS.LTC128B.128"] >= 3
        assert not [name for name in counts if name.startswith(("LDL", "STL"))]


_WRITES = re.compile(r"\s+(?:@!?%p\d+ )?(?!st\.|stmatrix|cp\.|bra|bar|setp)[a-z][\w.]*\s+(\{[^}]*\}|%\w+)")


def _check_registers(ptx: str) -> None:
    """PTX leaves undefined what happens to operands and sums that change before products were waited for."""
    busy: set[str] = set()
    products = 0
    for line in ptx.splitlines():
        if "wgmma.mma_async" in line:
            products += 1
            busy |= set(re.findall(r"%[rf]\d+", line))
        elif "wgmma.wait_group" in line:
            busy.clear()
        elif busy and (written := _WRITES.match(line)):
            assert not busy & set(re.findall(r"%\w+", written[1])), line
    assert products >= 8
