"""Kernel templates by exact op name."""

from __future__ import annotations

import importlib
from types import ModuleType

from tvm import tirx

from llmc.compiler.kernel_spec import KernelSpec, KernelSpecError
from llmc.compiler.ops.registry import brought_template
from llmc.compiler.targets.cpu.kernels.linear.schedule import Schedule
from llmc.compiler.targets.cpu.kernels.sources import KIND, TEMPLATE_FILES, template_file
from llmc.compiler.targets.cpu.target import Target


def _template(op: str) -> ModuleType:
    return importlib.import_module(f"{__package__}.{template_file(op)}")


def build_kernel(spec: KernelSpec, target: Target, schedule: Schedule | None = None) -> tirx.PrimFunc:
    """Builds the TIR of a kernel; its global symbol is spec.symbol(). schedule: None for the default.

    Raises KernelSpecError.
    """
    brought = None if spec.op in TEMPLATE_FILES else brought_template(spec.op, KIND)
    build = brought or _template(spec.op).build
    try:
        func: tirx.PrimFunc = build(spec, target, *(() if schedule is None else (schedule,)))
    except KeyError as error:
        raise KernelSpecError(f"op {spec.op!r} needs the parameter {error}; given: {spec.as_dict()}") from error
    return func


def kernel_buffers(spec: KernelSpec) -> tuple[str, ...]:
    """Names of the buffers in operand order. The output is the last one, unless the template names it."""
    names: tuple[str, ...] = _template(spec.op).buffers(spec)
    return names


def default_schedule(spec: KernelSpec, target: Target) -> Schedule | None:
    """The schedule of a kernel unless tuning found another; None if there is no choice."""
    rule = getattr(_template(spec.op), "default_schedule", None)
    return None if rule is None else rule(spec, target)
