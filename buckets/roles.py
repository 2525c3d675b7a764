"""Ladders of servers that share the work: prefill servers compute long prompts, decode servers the rest.

A prefill server computes whole blocks of long prompts, and no output. A decode server computes short prompts whole, of
long ones what is left behind the last whole block, and all output.
"""

from __future__ import annotations

import enum
from dataclasses import replace

from .bucket import Bucket, BucketError, BucketLadder
from .demand import ServerModel
from .trace import Trace

FALLBACK_TOKENS = 512
"""Chunk in which a decode server computes a prompt whose blocks did not come."""


class Role(enum.StrEnum):
    """What a server does. both: prefill and decode, without hand-overs."""

    both = "both"
    prefill = "prefill"
    decode = "decode"


def prefill_trace(trace: Trace, block_size: int, least: int) -> Trace:
    """A prefill server's part of a trace: whole blocks of prompts with at least `least` tokens, and one output token.

    Raises BucketError if no prompt is that long.
    """
    rows = (trace.prompt_tokens >= least) & (trace.prompt_tokens > block_size)
    if not rows.any():
        raise BucketError(
            f"trace {trace.name} has no prompt of {max(least, block_size + 1)} tokens: lower --hand-over-tokens"
        )
    prompts = trace.prompt_tokens[rows]
    whole = (prompts - 1) // block_size * block_size
    # Prefix ids count blocks of whole prompts.
    return Trace(trace.name, trace.arrival_s[rows], whole, whole * 0 + 1)


def decode_server(server: ServerModel, block_size: int, least: int) -> ServerModel:
    """The server with prompts of at least `least` tokens handed over, and chunks of FALLBACK_TOKENS unless it has a
    limit of its own."""
    chunk = server.max_prefill_tokens or min(FALLBACK_TOKENS, server.max_model_len)
    return replace(server, max_prefill_tokens=max(chunk, min(block_size, server.max_model_len)),
                   handed_block=block_size, handed_from=least)  # fmt: skip


def prefill_ladder(planned: BucketLadder, server: ServerModel) -> BucketLadder:
    """The planned prefill buckets. A ladder needs a decode bucket; this one holds everything, since nothing decodes."""
    return BucketLadder(prefill=planned.prefill, decode=(Bucket("decode", server.max_num_seqs, server.max_model_len),))
