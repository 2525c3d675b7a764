"""How finely the work of a kernel is worth cutting. Imports no tvm."""

from __future__ import annotations

from llmc.compiler.kernel_spec import KernelSpec

_PANELS = 4  # of a weight: fewer are read as fewer streams, which is slower
_BY_TOKENS = 64  # work that grows with the tokens of a step, unevenly


def max_tasks(spec: KernelSpec, panel_columns: int) -> int:
    """Most tasks that are still efficient; 0: no more than one a thread."""
    params = spec.as_dict()
    if "experts" in params:
        return _BY_TOKENS if spec.family == "linear" else 0
    if spec.family == "linear" and "n" in params:
        return int(params["n"]) // (_PANELS * panel_columns * weight_parts(spec))
    return _BY_TOKENS if spec.family == "attention" else 0


def weight_parts(spec: KernelSpec) -> int:
    """Into how many equal parts the weight is stored that a kernel's tasks stream; 0: it streams none."""
    if spec.family != "linear" or "experts" in spec.as_dict():
        return 0
    return 2 if spec.as_dict().get("gated") else 1
