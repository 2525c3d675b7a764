"""Log-probabilities in the answers of /v1/completions and /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llmc.runtime.outputs import TokenLogprob

from .token_text import TokenTexts


def completion_logprobs(
    texts: TokenTexts, entries: Sequence[TokenLogprob | int], num_top: int, offsets: Sequence[int]
) -> dict[str, Any]:
    """The logprobs object of /v1/completions. A bare token id is a token without logprob, such as the prompt's first.

    offsets: of the tokens, in the text. top_logprobs includes the chosen token, as OpenAI's does.
    """
    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []
    for entry in entries:
        token_id = entry if isinstance(entry, int) else entry.token_id
        tokens.append(texts.label(token_id))
        if isinstance(entry, int):
            token_logprobs.append(None)
            top_logprobs.append(None)
        else:
            token_logprobs.append(entry.logprob)
            top = dict(list(entry.top.items())[:num_top]) | {entry.token_id: entry.logprob}
            top_logprobs.append({texts.label(token): value for token, value in top.items()})
    return {
        "tokens": tokens,
        "token_logprobs": token_logprobs,
        "top_logprobs": top_logprobs if num_top > 0 else None,
        "text_offset": list(offsets),
    }


def chat_logprobs(texts: TokenTexts, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
    """The logprobs object of a chat choice."""

    def told(token_id: int, logprob: float) -> dict[str, Any]:
        return {"token": texts.label(token_id), "logprob": logprob, "bytes": list(texts.bytes_of(token_id))}

    content = [
        {
            **told(entry.token_id, entry.logprob),
            "top_logprobs": [told(token_id, logprob) for token_id, logprob in entry.top.items()],
        }
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def prompt_logprobs_json(
    texts: TokenTexts, entries: Sequence[TokenLogprob], num_top: int
) -> list[dict[str, dict[str, Any]] | None]:
    """vLLM's prompt_logprobs: {token id: {logprob, rank, decoded_token}} per prompt token, null for the first one."""
    told: list[dict[str, dict[str, Any]] | None] = [None]
    for entry in entries:
        top = list(entry.top.items())[:num_top]
        ranks = {token_id: rank for rank, (token_id, _) in enumerate(top, 1)}
        values = dict(top) | {entry.token_id: entry.logprob}
        told.append(
            {
                str(token_id): {
                    "logprob": logprob,
                    "rank": entry.rank if token_id == entry.token_id else ranks[token_id],
                    "decoded_token": texts.label(token_id),
                }
                for token_id, logprob in values.items()
            }
        )
    return told
