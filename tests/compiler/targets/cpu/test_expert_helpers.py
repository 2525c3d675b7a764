"""Helpers of a kernel for experts: its parts lie in one module, where a name means one function."""

from __future__ import annotations

import re

import pytest

from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.targets.cpu.kernels import builder as b
from llmc.compiler.targets.cpu.kernels import expert_linear
from llmc.compiler.targets.cpu.target import TARGETS
from llmc.models.convert import DTYPES
from llmc.quantize.formats.registry import SCHEMES
from llmc.quantize.scheme import get_scheme

_DEFINED = re.compile(r"^define[^@]*@(\w+)\(.*?^}", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("name", ["x86-64-v3", "x86-64-v4", "icelake-server", "sapphirerapids"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_name_means_one_helper(name: str, scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = get_scheme(scheme)
    texts: list[str] = []
    init = b.Kernel.__init__

    def noted(self: b.Kernel, symbol: str, buffers: list[tuple[str, str]], helpers: str, **more: bool) -> None:
        texts.append(helpers)
        init(self, symbol, buffers, helpers, **more)

    monkeypatch.setattr(b.Kernel, "__init__", noted)
    for act in ("i8",) if found.act_bits == 8 else tuple(DTYPES):
        texts.clear()
        spec = KernelSpec.of(
            "linear", "expert_linear_quant", act_dtype=act, experts=4, k=128, n=64, gated="", bias=False,
            residual=False, rows=0, row_tile=4, **found.weight.kernel_params(),
        )  # fmt: skip
        expert_linear.build(spec, TARGETS[name])
        defined = {match[0]: match[1] for text in texts for match in _DEFINED.finditer(text)}
        assert len(texts) > 3
        assert len(defined) == len(set(defined.values())), act
