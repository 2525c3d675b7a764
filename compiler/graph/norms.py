"""Puts each norm into the linear layer that alone reads it, where the target computes both by one kernel.

That depends on the bucket: a norm is a kernel of its own, but a layer that norms does so in each of its groups.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from llmc.compiler.graph.commands import Site
from llmc.compiler.graph.line import Line, Step
from llmc.compiler.ops.definition import GraphParams
from llmc.compiler.ops.norm import RMS_NORM
from llmc.compiler.ops.normed import NORMED, normed_site
from llmc.compiler.ops.registry import get_op


def join_norms(line: Line, sites: tuple[Site, ...], graph: GraphParams) -> tuple[Line, tuple[Site, ...]]:
    """The line of one bucket, and the sites that its steps number: those given, and new ones of joined steps."""
    made = list(sites)

    @cache
    def joined(norm: int, linear: int) -> int | None:
        """The site of both, by the kinds of their sites; None where they stay two."""
        specs = [get_op(sites[kind].op).kernels(sites[kind], graph)[0].spec for kind in (norm, linear)]
        if not graph.target.joins_norm(specs[0], specs[1], graph.shape):
            return None
        made.append(normed_site(sites[norm], sites[linear]))
        return len(made) - 1

    norms = {step.out: step for step in line.steps if step.site is not None and sites[step.site].op == RMS_NORM.name}
    steps: dict[int, Step] = {step.out: step for step in line.steps}
    uses = list(line.uses)
    for step in line.steps:
        if step.site is None or sites[step.site].op not in NORMED:
            continue
        tensors = dict(zip(sites[step.site].tensors, step.reads, strict=True))
        norm = norms.get(tensors["x"])
        # An adapter reads x, too.
        if norm is None or norm.site is None or line.uses[norm.out] != 1:
            continue
        site = joined(line.kinds[norm.site], line.kinds[step.site])
        if site is None:
            continue
        of_norm = dict(zip(sites[norm.site].tensors, norm.reads, strict=True))
        reads = {**tensors, "x": of_norm["x"]}
        steps[step.out] = Step((*reads.values(), of_norm["weight"]), step.out, site)
        del steps[norm.out]
        uses[norm.out] = 0
    kinds = (*line.kinds, *range(len(sites), len(made)))
    return replace(line, steps=tuple(steps.values()), uses=tuple(uses), kinds=kinds), tuple(made)
