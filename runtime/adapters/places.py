"""Where an artifact has the modules that adapters change, and its matrices there of an adapter's (FORMAT.md)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from llmc.adapter_slot import padded
from llmc.peft_experts import ExpertsChange, Matrices
from llmc.peft_format import layer_of
from llmc.runtime.binding.adapter_matrices import AdapterMatrix

from .peft import LowRank

OUTPUT = "lm_head"
_DOWN = ".down.weight"
_OUTPUTS = ("lm_head.weight", "embed.weight")
"""Weights of the output projection, which may be the embedding's."""


@dataclass(frozen=True)
class Heads:
    """The heads of a layer of heads. count: their number. rows, first: a head has `rows` rows of the module, of which
    the layer computes those from `first` on. own: which matrix each head has of its own."""

    count: int
    rows: int
    first: int
    own: Literal["a", "b"]


@dataclass(frozen=True)
class Place:
    """A module in the artifact: layer and part in the engine's numbering, sizes, and its row order there. expert: its
    number, where the layer has `experts`. heads: where sizes are those of one head."""

    linear: int
    part: int
    rows: int
    columns: int
    order: tuple[int, ...] | None = None
    expert: int = 0
    experts: int = 0
    heads: Heads | None = None

    @property
    def module_shape(self) -> tuple[int, int]:
        """Outputs and inputs of the module."""
        if self.heads is None:
            return self.rows, self.columns
        return self.heads.count * self.heads.rows, self.rows if self.heads.own == "a" else self.columns


def places_of(lora: Mapping[str, Any]) -> dict[str, tuple[Place, ...]]:
    """The places of each module, from the manifest's record of adapters. A module may be in several layers."""
    found: dict[str, tuple[Place, ...]] = {}
    for module, place in _places(lora):
        found[module] = (*found.get(module, ()), place)
    for linear in filter(is_output, lora["linears"]):
        found.setdefault(OUTPUT, found[linear["parts"][0]["module"]])
    return found


def _places(lora: Mapping[str, Any]) -> Iterator[tuple[str, Place]]:
    orders = [tuple(order) for order in lora["orders"]]
    for number, linear in enumerate(lora["linears"]):
        experts = int(linear.get("experts") or 0)
        for module, place in _of_linear(number, linear, orders):
            for expert in range(experts or 1):
                # Not in the name of a layer without experts.
                name = module.replace("{}", str(expert)) if experts else module
                yield name, replace(place, expert=expert)


def _of_linear(
    number: int, linear: Mapping[str, Any], orders: Sequence[tuple[int, ...]]
) -> Iterator[tuple[str, Place]]:
    """(module, place) of each part, for expert 0."""
    experts, heads = int(linear.get("experts") or 0), linear.get("heads")
    for index, part in enumerate(linear["parts"]):
        order = None if part.get("order") is None else orders[part["order"]]
        of_heads = None if heads is None else Heads(**heads)
        rows, columns = int(part["rows"]), int(linear["columns"])
        yield part["module"], Place(number, index, rows, columns, order, 0, experts, of_heads)


def is_output(linear: Mapping[str, Any]) -> bool:
    """Whether it is the output projection. Newer versions of transformers call it lm_head, whatever checkpoints do."""
    return linear["weight"] in _OUTPUTS and not linear.get("table")


def of_layer(place: Place, change: LowRank) -> AdapterMatrix:
    """The matrices of a layer without experts."""
    if place.heads is not None:
        return _of_heads(place, place.heads, change)
    b = change.b if place.order is None else change.b[np.array(place.order)]
    return AdapterMatrix(place.linear, place.part, change.scale, change.a, np.ascontiguousarray(b))


def _of_heads(place: Place, heads: Heads, change: LowRank) -> AdapterMatrix:
    """The matrices of a layer of heads. Those that heads have of their own lie side by side, if A, or below each other.

    A layer whose heads have an A is transposed: it multiplies by the adapter's B of a head first, and then by its A.
    """
    rank, of_head = change.rank, change.b.reshape(heads.count, heads.rows, change.rank)
    if heads.own == "a":
        a = np.zeros((rank, heads.count, padded(place.columns)), np.float32)
        a[..., : place.columns] = of_head[:, heads.first :][:, : place.columns].transpose(2, 0, 1)
        return AdapterMatrix(place.linear, place.part, change.scale, a.reshape(rank, -1), change.a.T.copy())
    b = np.zeros((heads.count, padded(place.rows), rank), np.float32)
    b[:, : place.rows] = of_head[:, heads.first :][:, : place.rows]
    return AdapterMatrix(place.linear, place.part, change.scale, change.a, b.reshape(-1, rank))


def of_experts(changes: list[tuple[Place, LowRank]]) -> AdapterMatrix:
    """The matrices of a layer's experts as one: A side by side, B below each other.

    Ranks below the largest are filled with zeros. Where scales differ, B has them.
    """
    place, first = changes[0]
    rank, scale = max(change.rank for _, change in changes), first.scale
    if scale == 0 or any(change.scale != scale for _, change in changes):
        scale = 1.0
    columns, rows = padded(place.columns), padded(place.rows)
    a = np.zeros((rank, place.experts * columns), np.float32)
    b = np.zeros((place.experts * rows, rank), np.float32)
    for at, change in changes:
        a[: change.rank, at.expert * columns :][:, : place.columns] = change.a
        of_expert = change.b if at.order is None else change.b[np.array(at.order)]
        b[at.expert * rows :][: place.rows, : change.rank] = of_expert * np.float32(change.scale / scale)
    return AdapterMatrix(place.linear, place.part, scale, a, b)


def matrices_of_experts(lora: Mapping[str, Any]) -> dict[str, list[Matrices]]:
    """The matrices of experts of each layer, for `changes_of`, from the manifest's record of adapters."""
    found: dict[str, list[Matrices]] = {}
    for linear in lora["linears"]:
        if experts := int(linear.get("experts") or 0):
            rows = sum(int(part["rows"]) for part in linear["parts"])
            sizes = experts, rows, int(linear["columns"])
            one = Matrices(linear["weight"], *sizes, down=linear["weight"].endswith(_DOWN))
            found.setdefault(layer_of(linear["parts"][0]["module"]), []).append(one)
    return found


def parts_of_experts(lora: Mapping[str, Any]) -> dict[str, list[Place]]:
    """The places of expert 0's parts, by the weight of experts."""
    orders = [tuple(order) for order in lora["orders"]]
    return {
        linear["weight"]: [place for _, place in _of_linear(number, linear, orders)]
        for number, linear in enumerate(lora["linears"])
        if linear.get("experts")
    }


def of_all_experts(parts: list[Place], change: ExpertsChange, scale: float) -> Iterator[AdapterMatrix]:
    """The matrices of each part of a weight of experts. Rows of the trained matrices are the parts', in order."""
    first, one = 0, parts[0]
    shrunk = np.zeros((change.rank, one.experts, padded(one.columns)), np.float32)
    shrunk[..., : one.columns] = change.a.transpose(1, 0, 2)
    for place in parts:
        b = change.b[:, first : first + place.rows]
        if place.order is not None:
            b = b[:, np.array(place.order)]
        expanded = np.zeros((place.experts, padded(place.rows), change.rank), np.float32)
        expanded[:, : place.rows] = b
        a = shrunk.reshape(change.rank, -1)
        yield AdapterMatrix(place.linear, place.part, scale, a, expanded.reshape(-1, change.rank))
        first += place.rows
