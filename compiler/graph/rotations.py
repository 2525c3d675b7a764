"""Puts each rope_kv_write into the attention that alone reads its queries, where the target computes both as one.

That depends on the bucket: in one of a single row, no other group needs what attention writes to the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from llmc.compiler.graph.commands import Site
from llmc.compiler.graph.line import Line, Step
from llmc.compiler.ops.attention import PAGED_ATTENTION
from llmc.compiler.ops.definition import GraphParams
from llmc.compiler.ops.registry import get_op
from llmc.compiler.ops.rope import ROPE_KV_WRITE
from llmc.compiler.ops.rotated_attention import rotated_attention_site
from llmc.graphs_format import MAX_BUFFERS


def join_rotations(line: Line, sites: Sequence[Site], graph: GraphParams) -> tuple[Line, tuple[Site, ...]]:
    """The line of one bucket, and the sites that its steps number: those given, and new ones of joined steps."""
    steps, found, kinds = list[Step](), list(sites), list(line.kinds)
    known: dict[tuple[int, int], int | None] = {}  # kinds of both sites → that of the joint one, if there is one
    uses = list(line.uses)
    for step in line.steps:
        before = steps[-1] if steps else None
        if before is None or not _passes(before, step, line, found):
            steps.append(step)
            continue
        assert before.site is not None
        assert step.site is not None
        site = rotated_attention_site(found[before.site], found[step.site])
        pair = line.kinds[before.site], line.kinds[step.site]
        if pair not in known:
            known[pair] = len(found) if _computes(site, graph) else None
        kind = known[pair]
        if kind is None:
            steps.append(step)
            continue
        read = dict(zip(found[before.site].tensors, before.reads, strict=True))
        read |= dict(zip(found[step.site].tensors, step.reads, strict=True))
        for number in (*before.reads, *step.reads):
            uses[number] -= 1
        reads = tuple(read[name] for name in site.tensors)
        for number in reads:
            uses[number] += 1
        steps[-1] = replace(step, reads=reads, site=len(found))
        kinds.append(kind)
        found.append(site)
    return replace(line, steps=tuple(steps), uses=tuple(uses), kinds=tuple(kinds)), tuple(found)


def _passes(before: Step, step: Step, line: Line, sites: Sequence[Site]) -> bool:
    """Whether `before` is a rope_kv_write whose queries only the paged_attention `step` reads, of the same tokens."""
    if before.site is None or step.site is None:
        return False
    rope, attention = sites[before.site], sites[step.site]
    if (rope.op, attention.op) != (ROPE_KV_WRITE.name, PAGED_ATTENTION.name) or rope.layer != attention.layer:
        return False
    turned = dict(zip(rope.tensors, before.reads, strict=True))
    read = dict(zip(attention.tensors, step.reads, strict=True))
    return read["q"] == before.out and line.uses[before.out] == 1 and read["positions"] == turned["positions"]


def _computes(site: Site, graph: GraphParams) -> bool:
    """Whether the target has a kernel for the joint site in this graph."""
    call = get_op(site.op).kernels(site, graph)[0]
    return len(call.buffers) <= MAX_BUFFERS and graph.target.rotates_in_attention(graph.shape, call.spec)
