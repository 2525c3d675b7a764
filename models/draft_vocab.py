"""The tokens that a head may guess, where these are fewer than its model's."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from llmc.models.convert import Array
from llmc.models.weight_map import Rows, Source, Target, WeightMap

PLACES = "places"
"""For each token of the model its place in the head's vocabulary, or −1."""


def places_of(tokens: Rows, vocab: int) -> Array:
    """float32 [vocab], for a head whose token t is the model's token tokens[t]."""
    places = np.full(vocab, -1, np.float32)
    places[tokens] = np.arange(len(tokens))
    return places


def places_target(vocab: int) -> Target:
    return Target(PLACES, (Source(PLACES, (vocab,)),), "f32")


def with_few_tokens(weights: WeightMap, tokens: Rows) -> WeightMap:
    """The map with an output projection of the rows of these tokens alone, and their places.

    Without an output projection of its own, the map's is the embedding.
    """
    found = {target.name: target for target in weights.targets}
    whole = found.get("lm_head.weight", found["embed.weight"])
    rows = tokens if whole.rows is None else whole.rows[tokens]
    head = replace(whole, name="lm_head.weight", rows=rows, table=False)
    others = (target for target in weights.targets if target.name != "lm_head.weight")
    return replace(weights, targets=(*others, head, places_target(whole.shape[0])))
