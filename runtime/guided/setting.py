"""Hands masks to the engine, along guesses where it takes some."""

from __future__ import annotations

from llmc.runtime.binding.engine import Engine
from llmc.runtime.guided.compiler import GuideError
from llmc.runtime.guided.shared_guides import SharedGuides


def set_masks(engine: Engine, request_id: int, output_index: int, guides: SharedGuides) -> None:
    """Answers a "needs_mask" event: the mask of the next token, and those behind guesses of it. Raises LlmcError, and
    what guides raise for the next token; guesses beyond their limits are left out."""
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
