"""The most tokens of a request: the compiled limit, or less if the KV pool holds less."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llmc.runtime.binding.artifact import pool_sizes

if TYPE_CHECKING:
    from llmc.runtime.binding import ArtifactInfo, Engine

DEFAULT_KV_BYTES = 1 << 30
"""Default limit of an engine's KV pool, without kv_bytes or num_blocks; see llmc.h."""
_MOST_KV_BYTES = 1 << 50


def least_kv_bytes(facts: Mapping[str, int], *, max_num_seqs: int = 0, num_states: int = 0) -> int:
    """Bytes of the smallest KV pool that holds one sequence of max_model_len, and so does every larger one. facts:
    POOL_FACTS of an artifact. max_num_seqs, num_states: of the engine; 0 for its defaults. Raises LlmcError for a
    number of states that it would refuse."""
    blocks = -(-facts["max_model_len"] // facts["block_size"])
    # Plus the dummy block for padding.
    least = (blocks + 1) * facts["kv_block_bytes"]
    if not facts["state_bytes"]:
        return least

    def holds(size: int) -> bool:
        pools = pool_sizes(facts, kv_bytes=size, max_num_seqs=max_num_seqs, num_states=num_states)
        return pools.num_blocks >= min(blocks, facts["max_kv_blocks"] - 1)

    # A part of the pool is for states.
    sizes = range(least + (max(num_states, 1) + 1) * facts["state_bytes"], _MOST_KV_BYTES)
    return sizes[bisect_left(sizes, True, key=holds)]


@dataclass(frozen=True)
class ContextLimit:
    """The limit on prompt plus output. tokens: the limit. model_tokens: the artifact's max-model-len. kv_bytes: of the
    smallest KV pool for that; num_blocks: its blocks, if the engine's pool was given in blocks. least_output: tokens
    that a prompt must leave free."""

    tokens: int
    model_tokens: int
    kv_bytes: int = 0
    num_blocks: int = 0
    least_output: int = 1

    @classmethod
    def of_engine(cls, engine: Engine, info: ArtifactInfo, options: Mapping[str, Any]) -> ContextLimit:
        """The limit for an engine that runs the artifact `info` with these options."""
        chosen = {name: int(options.get(name) or 0) for name in ("max_num_seqs", "num_states")}
        return cls(
            engine.stats.max_request_tokens,
            info.max_model_len,
            least_kv_bytes(info.pool_facts, **chosen),
            num_blocks=-(-info.max_model_len // info.block_size) if options.get("num_blocks") else 0,
            least_output=0 if info.vector_width else 1,
        )

    @property
    def longest_prompt(self) -> int:
        """Most tokens of a prompt."""
        return self.tokens - self.least_output

    @property
    def by_pool(self) -> bool:
        """Whether the KV pool, not the model, sets the limit."""
        return self.tokens < self.model_tokens

    @property
    def warning(self) -> str | None:
        """One sentence if the pool is too small for the model's context; else None."""
        if not self.by_pool:
            return None
        return (
            f"a request may have {self.tokens} tokens, not the model's {self.model_tokens}, because the KV pool holds "
            f"no more: {self._raise} to {self.num_blocks or self.kv_bytes}"
        )

    @property
    def _raise(self) -> str:
        return "raise num_blocks" if self.num_blocks else "raise kv_bytes (--kv-bytes)"

    def refusal(self, num_prompt_tokens: int) -> str | None:
        """Why a prompt of this many tokens cannot run, as the end of a sentence; None if it can."""
        if num_prompt_tokens <= self.longest_prompt:
            return None
        shorten = f"shorten it to at most {self.longest_prompt}"
        if self.by_pool:
            return f"{num_prompt_tokens} tokens and the KV pool holds {self.tokens}: {shorten}, or {self._raise}"
        more = "or compile with a larger --max-model-len"
        return f"{num_prompt_tokens} tokens and max-model-len is {self.tokens}: {shorten}, {more}"

    def finish_detail(self, num_tokens: int) -> str | None:
        """The limit that ended a request of this many tokens, prompt and output; None if max_tokens did."""
        if num_tokens < self.tokens:
            return None
        if self.by_pool:
            return (
                f"prompt and output fill the {self.tokens} tokens that the KV pool holds, fewer than the model's "
                f"{self.model_tokens}: {self._raise} or shorten the prompt"
            )
        return f"prompt and output fill the model's context of {self.tokens} tokens: shorten the prompt"
