"""vLLM's engine in this process, its CPU backend."""

from __future__ import annotations

from typing import Any

import vllm
from worker import StepModel, serve


class Vllm(StepModel):
    def __init__(self, settings: dict[str, Any]) -> None:
        self.version = vllm.__version__
        self.llm = vllm.LLM(
            settings["model"],
            dtype=settings["dtype"],
            skip_tokenizer_init=True,
            max_model_len=settings["max_len"],
            max_num_seqs=settings["max_batch"],
            max_num_batched_tokens=settings["max_len"],
            enable_prefix_caching=False,
        )
        self.engine = self.llm.llm_engine
        self.produced: dict[str, int] = {}
        self.next_id = 0

    def add(self, ids: list[int], max_tokens: int) -> int:
        self.next_id += 1
        params = vllm.SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        self.engine.add_request(str(self.next_id), {"prompt_token_ids": ids}, params)
        return self.next_id

    def step(self) -> dict[int, int]:
        new: dict[int, int] = {}
        for output in self.engine.step():
            total = len(output.outputs[0].token_ids)
            count = total - self.produced.get(output.request_id, 0)
            self.produced[output.request_id] = total
            if count:
                new[int(output.request_id)] = count
            if output.finished:
                del self.produced[output.request_id]
        return new

    def drop(self, request: int) -> None:
        self.engine.abort_request([str(request)])
        self.produced.pop(str(request), None)

    def settle(self) -> None:
        while self.engine.has_unfinished_requests():
            self.engine.step()


if __name__ == "__main__":
    serve(Vllm)
