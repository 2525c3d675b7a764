"""How finely a kernel's work may be divided. Imports no tvm."""

from __future__ import annotations

from llmc.compiler.kernel_spec import KernelSpec

_PANELS = 4  # panels of a weight per task: reading fewer streams at once is slower
_BY_TOKENS = 64  # work grows with the tokens of a step, unevenly


def max_tasks(spec: KernelSpec, panel_columns: int) -> int:
    """The largest number of tasks that is still efficient; 0 for one task per thread."""
    params = spec.as_dict()
    if "experts" in params:
        return _BY_TOKENS if spec.family == "linear" else 0
    if spec.family == "linear" and "n" in params:
        return int(params["n"]) // (_PANELS * panel_columns * weight_parts(spec))
    return _BY_TOKENS if spec.family == "attention" else 0


def weight_parts(spec: KernelSpec) -> int:
    """The number of equal parts of the weight that the kernel's tasks stream; 0 if they stream none."""
    if spec.family != "linear" or "experts" in spec.as_dict():
        return 0
    return 2 if spec.as_dict().get("gated") else 1
