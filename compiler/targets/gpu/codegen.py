"""From TIR with thread bindings to source text in a GPU language, by TVM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import s_tir, tirx

from llmc.compiler.targets.gpu.exact import exact
from llmc.compiler.targets.tir_steps import straight

_DEVICE_KERNEL = 2  # TVM's calling convention for launched kernels


@dataclass(frozen=True)
class Language:
    """A GPU language. target: TVM's target. head: the text before a kernel's name, with a placeholder for items per
    group."""

    target: Mapping[str, Any]
    head: str


def kernel_text(function: tirx.PrimFunc, language: Language, items: int) -> str:
    """The kernel text without a prelude; arguments in the order of the function's parameters. items: per group."""
    target = tvm.target.Target(dict(language.target))
    symbol = str(function.attrs["global_symbol"])
    function = function.with_attr({"target": target, "calling_conv": _DEVICE_KERNEL, "tirx.is_global_func": True})
    module = tvm.IRModule({symbol: function})
    for step in (
        s_tir.transform.StmtSimplify(),
        tirx.transform.FlattenBuffer(),
        tirx.transform.NarrowDataType(32),
        *straight(),
        tirx.transform.RemoveNoOp(),
        tirx.transform.LowerIntrin(),
    ):
        module = step(module)
    module = tvm.IRModule({var: exact(of) for var, of in module.functions.items()})
    built = tvm.get_global_func(f"target.build.{language.target['kind']}")(module, target)
    text = str(built.inspect_source())
    # Drop the pragmas and declarations before the kernel; the prelude has those that matter.
    name = text.rindex(f" {symbol}(")
    return f"{language.head.format(items=items)}{text[name:].rstrip()}\n"
