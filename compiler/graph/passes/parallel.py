"""Tensor parallelism: collectives that sum partial results and embeddings, and gather logits across ranks.

The model was traced as one rank holds it (`partition.py`). A row-parallel linear (input columns divided) makes a
partial sum, and so do experts; bias and residual are added once, after the reduction. A rank adds the biases of its own
experts. It embeds the tokens of its part of the vocabulary; its rows of other tokens are −0.0, and so the sum has the
bits of the embedding.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from tvm import relax

from llmc.compiler.config import CompileError
from llmc.compiler.graph.commands import Site
from llmc.compiler.graph.lowered import Lowered
from llmc.compiler.graph.passes.rewrite import Rewriter, Step, steps_of
from llmc.compiler.ops.collective import ALL_GATHER, ALL_REDUCE, RANKS, WIDTH
from llmc.compiler.ops.embedding import EMBEDDING as EMBED
from llmc.compiler.ops.experts import EXPERTS
from llmc.compiler.ops.linear import LINEAR
from llmc.compiler.partition import EMBEDDING, FIRST_TOKEN, SUMMED, Partition
from llmc.quantize import layer_kind


def join_ranks(lowered: Lowered, partition: Partition) -> Lowered:
    """Inserts a collective after every linear, and every mixture of experts, with a partial result.

    Must run before quantization, so that quantization sees ordinary linears. Raises CompileError unless one
    layer, and nothing else, reads each such weight, and one embedding its own.
    """
    names = dict(zip(lowered.module["main"].params, lowered.params, strict=True))
    pass_over = _Joiner(lowered, names, partition)
    joined = pass_over.run(steps_of(lowered), {FIRST_TOKEN: pass_over.first})
    wanted = sorted([EMBEDDING, partition.head, *(name for name in lowered.params if layer_kind(name) in SUMMED)])
    if sorted(pass_over.joined) != wanted:
        missing = sorted(set(wanted) - set(pass_over.joined)) or wanted
        raise CompileError(
            f"{missing[0]} is not read by one linear layer, so {partition.model.model_type} cannot be divided among "
            "ranks: leave out --tensor-parallel"
        )
    return joined


_WEIGHTS = {LINEAR.name: "weight", EXPERTS.name: "down", EMBED.name: "weight"}
"""The weight of a layer that makes its result, by op."""


class _Joiner(Rewriter):
    def __init__(self, lowered: Lowered, names: Mapping[relax.Var, str], partition: Partition) -> None:
        super().__init__(lowered)
        self._names, self._partition = names, partition
        self.joined: list[str] = []
        self.first = relax.Var(FIRST_TOKEN, relax.TensorType((1,), "float32"))

    def rewrite(self, step: Step) -> relax.Expr:
        site = step.site
        weight = None if site is None else _WEIGHTS.get(site.op)
        name = "" if weight is None else self._names.get(step.tensors[weight], "")
        if site is None or (name not in (EMBEDDING, self._partition.head) and layer_kind(name) not in SUMMED):
            return self.replaced(step.value)
        self.joined.append(name)
        tensors = {tensor: self.replaced(value) for tensor, value in step.tensors.items()}
        if site.op == EMBED.name:
            return self._embedded(step, site, tensors)
        return (
            self._gathered(step, site, tensors) if name == self._partition.head else self._summed(step, site, tensors)
        )

    def _embedded(self, step: Step, site: Site, tensors: dict[str, relax.Expr]) -> relax.Expr:
        vocab, width = map(int, site.attributes["weight_shapes"]["weight"])
        attributes = {"weight_shapes": {"weight": (vocab // self._partition.ranks, width)}}
        part = self.builder.emit(self.call(site, site.op, attributes, {**tensors, "first": self.first}, step.var.ty))
        return self.call(self._site(site, width), ALL_REDUCE.name, {}, {"x": part}, step.var.ty)

    def _summed(self, step: Step, site: Site, tensors: dict[str, relax.Expr]) -> relax.Expr:
        added: dict[str, relax.Expr] = {n: tensors.pop(n) for n in ("bias", "residual") if n in tensors}
        part = self.builder.emit(self.call(site, site.op, _without(site, added), tensors, step.var.ty))
        rows = int(site.attributes["weight_shapes"][_WEIGHTS[site.op]][0])
        width = rows // int(site.attributes.get("num_experts", 1))
        return self.call(self._site(site, width), ALL_REDUCE.name, {}, {"x": part, **added}, step.var.ty)

    def _gathered(self, step: Step, site: Site, tensors: dict[str, relax.Expr]) -> relax.Expr:
        ranks, shapes = self._partition.ranks, dict(site.attributes["weight_shapes"])
        vocab, columns = map(int, shapes["weight"])
        shapes |= {"weight": (vocab // ranks, columns), **({"bias": (vocab // ranks,)} if "bias" in tensors else {})}
        kind = relax.TensorType((step.var.ty.shape[0], vocab // ranks), step.var.ty.dtype)
        attributes = {"weight_shapes": shapes, "widths": site.attributes["widths"]}
        part = self.builder.emit(self.call(site, site.op, attributes, tensors, kind))
        return self.call(self._site(site, vocab), ALL_GATHER.name, {}, {"x": part}, step.var.ty)

    def _site(self, part: Site, width: int) -> Site:
        """The site of the collective after an op that makes each rank's part."""
        attributes = {RANKS: self._partition.ranks, WIDTH: width, "on_samples": part.attributes["on_samples"]}
        return Site("", attributes, ())


def _without(site: Site, tensors: Collection[str]) -> dict[str, object]:
    """Attributes of a site that is called without these tensors."""
    return {
        facts: {name: value for name, value in site.attributes[facts].items() if name not in tensors}
        for facts in ("weight_shapes", "widths")
    }
