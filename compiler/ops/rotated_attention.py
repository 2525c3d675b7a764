"""rotated_attention: rope_kv_write and the paged_attention behind it as one op, by kernels of targets that have it.

`graph/rotations.py` puts it in place of both.
"""

from __future__ import annotations

from collections.abc import Mapping

from llmc.compiler.graph.commands import Site
from llmc.compiler.kernel_spec import KernelSpec, Param
from llmc.compiler.ops.attention import PAGED_ATTENTION
from llmc.compiler.ops.definition import GraphParams, KernelCall, OpDef
from llmc.compiler.ops.rope import ROPE_KV_WRITE

_QUERIES = "q"
_ROTATION = ("rotary_dim", "qk_norm", "norm_eps", "kv_scales", "norm_rotated")
"""Parameters of rope_kv_write that paged_attention lacks."""


def rotated_attention_site(rope: Site, attention: Site) -> Site:
    """The site that stands for both. attention: reads the queries of `rope`."""
    attributes = {"layer": attention.layer, "rope": _own(rope), "attention": _own(attention)}
    names = (*rope.tensors, *(name for name in attention.tensors if name != _QUERIES))
    return Site(ROTATED_ATTENTION.name, attributes, tuple(dict.fromkeys(names)))


def _own(site: Site) -> dict[str, object]:
    """Attributes but for the layer, in which sites of one kind differ."""
    return {name: value for name, value in site.attributes.items() if name != "layer"}


def _part(site: Site, op: OpDef, part: str) -> Site:
    attributes = {**site.attributes[part], "layer": site.layer}
    return Site(op.name, attributes, tuple(name for name in op.arguments if name in (*site.tensors, _QUERIES)))


def _rotated_attention(site: Site, graph: GraphParams) -> list[KernelCall]:
    (write,) = ROPE_KV_WRITE.kernels(_part(site, ROPE_KV_WRITE, "rope"), graph)
    attend, *merge = PAGED_ATTENTION.kernels(_part(site, PAGED_ATTENTION, "attention"), graph)
    buffers = (*write.buffers[:-1], *(name for name in attend.buffers if name != _QUERIES))
    spec = KernelSpec.of("attention", ROTATED_ATTENTION.name, **attend.spec.as_dict(), **_rotation(write.spec))
    return [KernelCall(spec, tuple(dict.fromkeys(buffers))), *merge]


def _rotation(spec: KernelSpec) -> Mapping[str, Param]:
    """What the joint spec has of rope_kv_write. reads_cache: another layer writes keys and values."""
    p = spec.as_dict()
    found = {name: p[name] for name in _ROTATION if name in p}
    return found if p["num_kv_heads"] else {**found, "reads_cache": True}


ROTATED_ATTENTION = OpDef(
    "rotated_attention",
    {
        **ROPE_KV_WRITE.arguments,
        **{name: argument for name, argument in PAGED_ATTENTION.arguments.items() if name != _QUERIES},
    },
    PAGED_ATTENTION.result,
    _rotated_attention,
    packed_result=True,
    scratch_bytes=lambda site, graph: PAGED_ATTENTION.scratch_bytes(_part(site, PAGED_ATTENTION, "attention"), graph),
    traced=False,
)
