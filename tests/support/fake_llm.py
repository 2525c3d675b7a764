"""An `LLM` whose engine is made of Python, for tests of what is around the engine."""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from llmc.buckets import Bucket
from llmc.runtime.binding import LlmcError
from llmc.runtime.llm import LLM
from llmc.runtime.params import SamplingParams


class FakeTokenizer:
    """A token is a character."""

    chat_template_text = "<think></think>"

    def encode_prompt(self, text: str) -> list[int]:
        return self.encode(text)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [ord(char) for char in text]

    def token_id(self, text: str) -> int | None:
        return 0x10FFFF if text == "</think>" else None

    def special_token_id(self, text: str) -> int | None:
        return None

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = True) -> str:
        return "".join(map(chr, token_ids))


class FakeEngine:
    """Answers each prompt with its tokens reversed and repeated, one token a step, at most `slots` at a time.

    interrupt_after: the step that raises KeyboardInterrupt. failing: first token of a prompt → the status code with
    which it fails after two tokens. refused: first token of prompts that submit refuses. max_request_tokens: of prompt
    and output, as a KV pool limits them.
    """

    def __init__(
        self,
        slots: int = 2,
        interrupt_after: int | None = None,
        failing: dict[int, int] | None = None,
        refused: int | None = None,
        max_request_tokens: int = 64,
    ) -> None:
        self.slots = slots
        self.interrupt_after = interrupt_after
        self.failing = failing or {}
        self.refused = refused
        self.max_request_tokens = max_request_tokens
        self.queue: deque[dict[str, Any]] = deque()
        self.events: list[SimpleNamespace] = []
        self.num_steps = 0
        self.last_id = 0
        self.cancelled: list[int] = []

    def submit(self, token_ids: list[int], params: SamplingParams) -> int:
        if token_ids[0] == self.refused:
            raise LlmcError(1, "prompt has 3 tokens but at most 2 fit the KV pool; raise num_blocks.")
        self.last_id += 1
        room = min(params.max_tokens, self.max_request_tokens - len(token_ids))
        answer = (token_ids[::-1] * params.max_tokens)[:room]
        code = self.failing.get(token_ids[0], 0)
        self.queue.append({"id": self.last_id, "answer": answer, "done": 0, "prompt": len(token_ids), "code": code})
        return self.last_id

    def cancel(self, request_id: int) -> None:
        self.cancelled.append(request_id)
        if all(request["id"] != request_id for request in self.queue):
            raise LlmcError(2, "Request is unknown or has finished; nothing to cancel.")
        self.queue = deque(request for request in self.queue if request["id"] != request_id)

    def step(self) -> bool:
        self.num_steps += 1
        if self.num_steps == self.interrupt_after:
            raise KeyboardInterrupt
        for request in list(self.queue)[: self.slots]:
            if request["code"] and request["done"] == 2:
                self.queue.remove(request)
                self._emit(request, kind="failed", token_id=-1, finish_reason="error")
                continue
            self._emit(request, kind="token", token_id=request["answer"][request["done"]])
            request["done"] += 1
            if request["done"] == len(request["answer"]):
                self.queue.remove(request)
                self._emit(request, kind="finished", token_id=-1, finish_reason="length")
        return bool(self.queue)

    def _emit(self, request: dict[str, Any], kind: str, token_id: int, finish_reason: str | None = None) -> None:
        self.events.append(
            SimpleNamespace(
                kind=kind,
                request_id=request["id"],
                output_index=0,
                token_id=token_id,
                finish_reason=finish_reason,
                num_prompt_tokens=request["prompt"],
                num_cached_tokens=0,
                num_output_tokens=request["done"],
                error_code=request["code"] if kind == "failed" else 0,
                error_message=f"Made to fail with status {request['code']}." if kind == "failed" else "",
                logprob=-0.5,
                rank=1,
                top_logprobs=((token_id, -0.5),),
                time_ns=time.monotonic_ns(),
            )
        )

    def poll(self) -> list[SimpleNamespace]:
        events, self.events = self.events, []
        return events

    @property
    def stats(self) -> SimpleNamespace:
        times = {f"{name}_ns": 0 for name in ("step", "schedule", "prepare", "replay", "sample", "kernel", "barrier")}
        decode = {"decode_step_ns": 1000, "decode_kernel_ns": 900, "decode_barrier_ns": 80}
        return SimpleNamespace(
            scheduled_tokens=6,
            padded_tokens=2,
            num_bucket_misses=0,
            num_preemptions=0,
            num_evictions=0,
            num_promotions=0,
            num_speculative_steps=0,
            max_request_tokens=self.max_request_tokens,
            device={},
            **times,
            **decode,
        )

    def graph_use(self) -> list[tuple[int, int]]:
        return [(0, 0), (3, 6)]

    def graph_stats(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(launched=0)] * 2

    def close(self) -> None:
        pass


class FakeLLM(LLM):
    def __init__(self, engine: FakeEngine, path: Path) -> None:
        self.engine = engine
        graphs = [
            SimpleNamespace(phase=phase, batch=1, seq=64, bucket=Bucket(phase, 1, 64))
            for phase in ("prefill", "decode")
        ]
        sizes = {"max_model_len": 64, "vocab_size": 0x110000, "max_num_seqs": 4}
        pools = {"block_size": 16, "kv_block_bytes": 1024, "max_kv_blocks": 1 << 20, "state_bytes": 0, "max_states": 0}
        info = SimpleNamespace(**sizes, **pools, pool_facts=sizes | pools, vector_width=0)
        self.artifact = SimpleNamespace(graphs=lambda: graphs, close=lambda: None, info=info)
        self.budget = None
        self._setup(path, info)
        self._tokenizer = FakeTokenizer()  # type: ignore[assignment]
