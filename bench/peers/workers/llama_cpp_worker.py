"""llama.cpp through llama_decode, with its server's default batch sizes."""

from __future__ import annotations

import time
from typing import Any

import llama_cpp
import numpy as np
from worker import Model, prompt, serve


class LlamaCpp(Model):
    def __init__(self, settings: dict[str, Any]) -> None:
        self.version = f"llama-cpp-python {llama_cpp.__version__}"
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        self.model = llama_cpp.llama_model_load_from_file(settings["model"].encode(), params)
        if not self.model:
            raise RuntimeError(f"llama.cpp does not load {settings['model']}")
        options = llama_cpp.llama_context_default_params()
        options.n_seq_max = settings["max_batch"]
        # Sequences share the context: it holds one long prompt, or all sequences while they decode.
        options.n_ctx = max(settings["max_len"], settings["max_batch"] * settings["decode_len"])
        options.kv_unified = True
        options.n_batch, options.n_ubatch = 2048, 512
        options.n_threads = options.n_threads_batch = settings["threads"]
        self.context = llama_cpp.llama_init_from_model(self.model, options)
        if not self.context:
            raise RuntimeError(f"llama.cpp makes no context of {options.n_ctx} tokens")
        self.batch = llama_cpp.llama_batch_init(options.n_batch, 0, 1)
        self.capacity = options.n_batch
        self.vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.details = {
            "n_ubatch": options.n_ubatch,
            "system": llama_cpp.llama_print_system_info().decode(errors="replace").strip(),
        }

    def prefill(self, tokens: int, seed: int) -> float:
        ids = prompt(tokens, seed)
        self._clear()
        begin = time.perf_counter()
        self._run([(0, position, token, position == tokens - 1) for position, token in enumerate(ids)])
        return time.perf_counter() - begin

    def decode(self, batch: int, context: int, steps: int, seed: int) -> tuple[float, int]:
        self._clear()
        last = []
        for sequence in range(batch):
            ids = prompt(context, seed * 1000 + sequence)
            last += self._run([(sequence, p, token, p == context - 1) for p, token in enumerate(ids)])
        begin = time.perf_counter()
        for step in range(steps):
            last = self._run([(s, context + step, token, True) for s, token in enumerate(last)])
        return time.perf_counter() - begin, batch * steps

    def _clear(self) -> None:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)

    def _run(self, rows: list[tuple[int, int, int, bool]]) -> list[int]:
        """Decodes rows of (sequence, position, token, with logits). Returns greedy tokens of rows with logits."""
        found = []
        for start in range(0, len(rows), self.capacity):
            part = rows[start : start + self.capacity]
            for i, (sequence, position, token, with_logits) in enumerate(part):
                self.batch.token[i], self.batch.pos[i] = token, position
                self.batch.n_seq_id[i], self.batch.seq_id[i][0] = 1, sequence
                self.batch.logits[i] = with_logits
            self.batch.n_tokens = len(part)
            status = llama_cpp.llama_decode(self.context, self.batch)
            if status:
                raise RuntimeError(f"llama_decode failed with {status} for {len(part)} tokens")
            for i, (_, _, _, with_logits) in enumerate(part):
                if with_logits:
                    logits = llama_cpp.llama_get_logits_ith(self.context, i)
                    found.append(int(np.ctypeslib.as_array(logits, (self.vocab,)).argmax()))
        return found


if __name__ == "__main__":
    serve(LlamaCpp)
