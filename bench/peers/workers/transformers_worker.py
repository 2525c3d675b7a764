"""transformers with default settings: eager, scaled dot product attention, a growing cache."""

from __future__ import annotations

import time
from typing import Any

import torch
import transformers
from worker import Model, prompt, serve


class Transformers(Model):
    def __init__(self, settings: dict[str, Any]) -> None:
        torch.set_num_threads(settings["threads"])
        self.version = transformers.__version__
        self.details = {"torch": torch.__version__, "dtype": settings["dtype"]}
        loaded = transformers.AutoModelForCausalLM.from_pretrained(
            settings["model"], dtype=getattr(torch, settings["dtype"]), local_files_only=True
        )
        self.model = loaded.eval()

    @torch.inference_mode()
    def prefill(self, tokens: int, seed: int) -> float:
        ids = torch.tensor([prompt(tokens, seed)])
        begin = time.perf_counter()
        self._next(ids, None)
        return time.perf_counter() - begin

    @torch.inference_mode()
    def decode(self, batch: int, context: int, steps: int, seed: int) -> tuple[float, int]:
        ids = torch.tensor([prompt(context, seed * 1000 + i) for i in range(batch)])
        ids, cache = self._next(ids, None)
        begin = time.perf_counter()
        for _ in range(steps):
            ids, cache = self._next(ids, cache)
        return time.perf_counter() - begin, batch * steps

    def _next(self, ids: torch.Tensor, cache: Any) -> tuple[torch.Tensor, Any]:
        """Runs one step; returns (greedy next ids [batch, 1], cache)."""
        out = self.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return out.logits[:, -1].argmax(-1, keepdim=True), out.past_key_values


if __name__ == "__main__":
    serve(Transformers)
