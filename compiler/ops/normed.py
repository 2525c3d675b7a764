"""A norm and the linear layer that alone reads it, as one op, which `graph/norms.py` puts in their place.

One kernel computes both, on targets that have such kernels (`Target.joins_norm`): those of `linear`, with the prefix
`normed_` and the norm's `eps`. x is then float32, [rows, k]. No model calls these ops.
"""

from __future__ import annotations

from dataclasses import replace

from llmc.compiler.graph.commands import Site
from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.ops.definition import F32, Argument, GraphParams, KernelCall, OpDef
from llmc.compiler.ops.linear import (
    ACTIVATED_LINEAR,
    ACTIVATED_LINEAR_QUANT,
    GATED_LINEAR,
    GATED_LINEAR_QUANT,
    LINEAR,
    LINEAR_QUANT,
)

PREFIX = "normed_"
NORM = "norm"
"""The tensor of the norm's weight, [k]."""
_EPS = "eps"


def normed_spec(linear: KernelSpec, eps: float) -> KernelSpec:
    """The kernel of `linear` or `linear_quant` that norms x itself, as `rms_norm` does with this `eps`."""
    return KernelSpec.of(linear.family, PREFIX + linear.op, **linear.as_dict(), eps=eps)


def normed_site(norm: Site, linear: Site) -> Site:
    """The site of both. Its tensors are those of the linear layer, with the norm's x, and the norm's weight behind."""
    attributes = {**linear.attributes, _EPS: norm.attributes[_EPS]}
    return Site(PREFIX + linear.op, attributes, (*linear.tensors, NORM))


def _normed(op: OpDef) -> OpDef:
    """The op that norms x for `op`."""

    def plain(site: Site) -> Site:
        """The site of the linear layer alone."""
        return Site(op.name, site.attributes, tuple(name for name in site.tensors if name != NORM))

    def kernels(site: Site, graph: GraphParams) -> list[KernelCall]:
        first, *rest = op.kernels(plain(site), graph)
        spec = normed_spec(first.spec, float(site.attributes[_EPS]))
        # The norm's weight comes late: a command is named after the first weight that it reads.
        *inputs, out = first.buffers
        return [replace(first, spec=spec, buffers=(*inputs, NORM, out)), *rest]

    arguments = {**op.arguments, "x": Argument(2, F32), NORM: Argument(1, F32)}
    return replace(
        op,
        name=PREFIX + op.name,
        arguments=arguments,
        kernels=kernels,
        scratch_bytes=lambda site, graph: op.scratch_bytes(plain(site), graph),
        scratch_parts=lambda site, graph: op.scratch_parts(plain(site), graph),
        quantized=None,
        quantized_calls=(),
        reads_int8=False,
        traced=False,
        calls=tuple(PREFIX + name for name in op.kernel_names),
    )


NORMED = {
    op.name: _normed(op)
    for op in (LINEAR, LINEAR_QUANT, GATED_LINEAR, GATED_LINEAR_QUANT, ACTIVATED_LINEAR, ACTIVATED_LINEAR_QUANT)
}
"""By the op of the linear layer."""
