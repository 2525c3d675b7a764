"""Passes masks to the engine, along guesses where the engine accepts some."""

from __future__ import annotations

from llmc.runtime.binding.engine import Engine
from llmc.runtime.guided.compiler import GuideError
from llmc.runtime.guided.shared_guides import SharedGuides


def set_masks(engine: Engine, request_id: int, output_index: int, guides: SharedGuides) -> None:
    """Answers a "needs_mask" event with the next token's mask, and those after guesses. Raises LlmcError, and guides'
    errors for the next token; guesses beyond their limits are dropped."""
    mask = guides.mask(output_index)
    if engine.speculate_tokens == 0:
        engine.set_token_mask(request_id, output_index, mask)
        return
    try:
        ahead = guides.ahead(output_index, engine.guesses(request_id, output_index), engine.speculate_tokens)
    except GuideError:
        engine.set_token_mask(request_id, output_index, mask)
        return
    engine.set_token_masks(request_id, output_index, ahead.masks, ahead.guesses)
