"""What a target says that it has is what its templates build, and what it lacks is refused in a sentence."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from llmc.cli import main as cli
from llmc.compiler.config import CompileError
from llmc.compiler.dtypes import FLOATS
from llmc.compiler.kernel_spec import KernelSpec, KernelSpecError
from llmc.compiler.ops.abilities import UNQUANTIZED, abilities, check_ops, check_schemes
from llmc.compiler.ops.definition import F32, Argument, OpDef
from llmc.compiler.ops.linear import LINEAR, linear_quant_spec, linear_spec
from llmc.compiler.ops.registry import OPS
from llmc.compiler.targets.base import Target
from llmc.compiler.targets.cpu.backend import CpuTarget
from llmc.compiler.targets.gpu.backend import GpuTarget
from llmc.compiler.targets.reference.backend import ReferenceTarget
from llmc.compiler.targets.registry import resolve_target
from llmc.quantize import SCHEMES, QuantConfig, Scheme
from llmc.quantize.formats.integers import Integers
from llmc.quantize.formats.registry import FORMATS
from llmc.tvm_import import import_tvm

from support.compiled import compile_tiny
from support.tiny_models import make_tiny_model

TARGETS = ("x86-64-v3", "znver4", "sapphirerapids", "reference", "opencl", "cuda:sm_90")


@dataclass(frozen=True)
class Unread(Integers):
    """A format that no target reads."""

    kind = "unread"


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> Scheme:
    monkeypatch.setitem(FORMATS, Unread.kind, Unread)
    return replace(SCHEMES["w8a16"], name="u8a16", weight=Unread(8))


def built(target: Target, spec: KernelSpec) -> Any:
    """The TIR of a kernel."""
    import_tvm()
    if isinstance(target, CpuTarget):
        from llmc.compiler.targets.cpu.kernels.registry import build_kernel

        return build_kernel(spec, target.cpu)
    assert isinstance(target, ReferenceTarget | GpuTarget)
    return target.kernel(spec)


def builds_linear(target: Target, dtype: str, scheme: Scheme | None) -> bool:
    layout = target.graph_shape(4, 4, 32, 32, 32).token_layout
    sizes = {"k": 256, "n": 96, **target.row_params(layout)}
    act = "i8" if scheme is not None and scheme.act_bits == 8 else dtype
    spec = linear_spec(dtype, **sizes) if scheme is None else linear_quant_spec(act, scheme.weight, **sizes)
    try:
        built(target, spec)
    except KernelSpecError:
        return False
    return True


@pytest.mark.parametrize("name", TARGETS)
def test_schemes_that_a_target_has_are_those_that_build(name: str, unread: Scheme) -> None:
    target = resolve_target(name)
    by_floats = replace(SCHEMES["w4a8"], name="w4 by floats", act_bits=16)
    asked = [(dtype, scheme) for dtype in FLOATS for scheme in (None, *SCHEMES.values(), unread, by_floats)]
    found = {(dtype, scheme) for dtype, scheme in asked if target.has(LINEAR, dtype, scheme)}
    assert found == {(dtype, scheme) for dtype, scheme in asked if builds_linear(target, dtype, scheme)}
    assert {(dtype, scheme) for dtype in FLOATS for scheme in (None, *SCHEMES.values())} <= found
    assert not target.has(LINEAR, "i8")


@pytest.mark.parametrize("name", TARGETS)
def test_kernels_that_a_target_has_are_those_that_it_finds(name: str) -> None:
    target = resolve_target(name)

    def is_found(kernel: str) -> bool:
        try:
            built(target, KernelSpec.of("other", kernel))
        except (KernelSpecError, KeyError) as error:  # it has no parameters, so no template can build it
            return not str(error).startswith("no kernel")
        return True

    asked = {*OPS, "conv", "merge_attention", *(kernel for op in OPS.values() for kernel in op.kernel_names)}
    assert {kernel for kernel in asked if target.has_kernel(kernel)} == {kernel for kernel in asked if is_found(kernel)}


def test_a_target_has_every_op_but_what_its_devices_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    internal = {op.quantized for op in OPS.values()}
    everything = {name for name in OPS if name not in internal}
    states = {"gather_rows_leaving", "beside_states", "read_states", "placed_rows", "spread_logits"}
    for name in TARGETS:
        found = abilities(resolve_target(name))
        assert found.keys() == everything
        for op in ("embedding", "linear", "gated_linear", "experts"):
            assert found[op] == {key: [UNQUANTIZED, *SCHEMES] for key in FLOATS}, (name, op)
        assert found["rms_norm"] == {key: [UNQUANTIZED] for key in FLOATS}
    target = resolve_target("opencl")
    monkeypatch.setattr(type(target), "keeps_states", False)
    assert abilities(target).keys() == everything - states


def test_what_is_lacking_is_named(monkeypatch: pytest.MonkeyPatch, unread: Scheme) -> None:
    says = (
        "target reference has no kernel of op linear for bf16 activations by weights in u8a16 \\(unread\\): choose "
        "another --quant, --dtype or --target"
    )
    with pytest.raises(CompileError, match=says):
        check_schemes(resolve_target("reference"), "bf16", [SCHEMES["w8a8"], unread])
    of_cpu = OpDef("scan", {"x": Argument(2, F32)}, lambda call: (call.shapes["x"], F32[0]), lambda site, graph: [],
                   templates={"cpu": lambda spec, target: None})  # fmt: skip
    monkeypatch.setitem(OPS, "scan", of_cpu)
    check_ops(resolve_target("znver4"), "f32", ["linear", "scan"])
    with pytest.raises(
        CompileError, match="target opencl has no kernel of op scan for f32 activations: choose another"
    ):
        check_ops(resolve_target("opencl"), "f32", ["linear", "scan"])


def test_a_model_is_refused_before_it_is_traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_tiny_model(tmp_path / "model", "llama")
    monkeypatch.setattr(CpuTarget, "multiplies", lambda self, act, format: False)
    monkeypatch.setattr("llmc.compiler.graph.tracer.Tracer._trace", lambda self: pytest.fail("traced"))
    with pytest.raises(CompileError, match="no kernel of op linear for bf16 activations by weights in w8a8 "):
        compile_tiny(
            model, tmp_path / "out", tmp_path / "cache", quant=QuantConfig("w8a8"), dtype="bf16", target="znver4"
        )


def test_the_command_lists_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["targets", "--json"]) == 0
    listed = {one["target"]: one for one in json.loads(capsys.readouterr().out)}
    assert {*TARGETS, "reference-aarch64"} <= listed.keys()
    assert listed["sapphirerapids"]["level"] == 5
    assert cli.main(["targets"]) == 0
    assert "x86-64-v3 " in capsys.readouterr().out
    assert cli.main(["targets", "reference", "--json"]) == 0
    one = json.loads(capsys.readouterr().out)
    assert one.pop("ops") == abilities(resolve_target("reference"))
    assert one == listed["reference"]
    assert cli.main(["targets", "reference"]) == 0
    text = capsys.readouterr().out
    assert re.search("^  paged_attention +f32, bf16, f16 +–$", text, re.MULTILINE)
    assert f"all: {', '.join(SCHEMES)}" in text
    assert cli.main(["targets", "abacus"]) == 2
    assert "unknown target 'abacus'; known targets: native, " in capsys.readouterr().err
