"""What kernels, weights and link made is looked at again before it is published."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmc.compiler import verify
from llmc.compiler.build import BuiltKernel
from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.phases import Phase, PhaseClock, drive
from llmc.compiler.pipeline import PHASES
from llmc.compiler.targets.registry import resolve_target

SPECS = [KernelSpec.of("norm", "rms_norm", dim=dim) for dim in (8, 16)]
KERNELS = [BuiltKernel(spec, b"code", "", {}, cached=True) for spec in SPECS]


def made(**parts: Any) -> Any:
    return SimpleNamespace(**parts)


@pytest.mark.parametrize(
    ("kernels", "said"),
    [
        (KERNELS[:1], f"1 kernels were built for 2 specs: {SPECS[1].symbol()}"),
        (KERNELS[::-1], "2 kernels were built for 2 specs"),
        ([KERNELS[0], replace(KERNELS[1], code=b"")], f"kernels have no code: {SPECS[1].symbol()}"),
    ],
)
def test_each_spec_has_its_kernel(kernels: list[BuiltKernel], said: str) -> None:
    verify.kernels(made(kernels=KERNELS, specs=SPECS))
    with pytest.raises(verify.VerifyError, match=said):
        verify.kernels(made(kernels=kernels, specs=SPECS))


def test_weights_have_header_length_and_checksums(tmp_path: Path) -> None:
    file = tmp_path / "weights.safetensors"
    layout = made(header=b"header", total_bytes=10, weights=[made(name="a"), made(name="b")])
    state = made(layout=layout, staging=tmp_path, crcs={"a": 1, "b": 2})
    file.write_bytes(b"header" + bytes(4))
    verify.weights(state)
    with pytest.raises(verify.VerifyError, match="tensors and checksums differ: b;"):
        verify.weights(made(layout=layout, staging=tmp_path, crcs={"a": 1}))
    file.write_bytes(b"headed" + bytes(4))
    with pytest.raises(verify.VerifyError, match="the header of"):
        verify.weights(state)
    file.write_bytes(b"header" + bytes(3))
    with pytest.raises(verify.VerifyError, match="has 9 bytes, not 10"):
        verify.weights(state)


def test_the_code_has_every_kernel(tmp_path: Path) -> None:
    (tmp_path / "a.c").write_text("int one(void) { return 1; } static int two(void) { return one(); }")
    subprocess.run(["cc", "-shared", "-o", tmp_path / "a.so", tmp_path / "a.c"], check=True)
    resolved = made(target=resolve_target("reference"))
    code = (tmp_path / "a.so").read_bytes()
    verify.link(made(resolved=resolved, code=code, manifest={"kernels": [{"symbol": "one"}]}))
    with pytest.raises(verify.VerifyError, match=r"link: kernels.so lacks kernels: two; compile again"):
        verify.link(made(resolved=resolved, code=code, manifest={"kernels": [{"symbol": "one"}, {"symbol": "two"}]}))


def test_a_phase_that_is_refused_ends_the_compilation() -> None:
    ran: list[str] = []

    def refuse(_: object) -> None:
        raise verify.VerifyError("no")

    phases = [Phase("a", lambda *_: ran.append("a"), verify=refuse), Phase("b", lambda *_: ran.append("b"))]
    with pytest.raises(verify.VerifyError, match="no"):
        drive(phases, object(), PhaseClock(lambda *_: None))
    assert ran == ["a"]
    assert [phase.name for phase in PHASES if phase.verify is not None] == ["kernels", "weights", "link"]
