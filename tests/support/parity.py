"""What compiled graphs are held to: the logits of transformers, and their own bits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from llmc.runtime.binding import Artifact, Replayer

from support.compiled import Pages, replay
from support.tiny_models import ModelFields, reference_model

LADDER = "prefill=[1,2,3]x[16,32],decode=[1,2,3,5]x[64,96]"


FAMILIES: dict[str, tuple[str, ModelFields]] = {
    "llama-gqa3": ("llama", {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 20}),
    "mistral-window": ("mistral", {"sliding_window": 7}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3-gqa7": ("qwen3", {"num_attention_heads": 7, "num_key_value_heads": 1, "head_dim": 24}),
}


def reference_logits(model: Path, tokens: list[int], dtype: torch.dtype = torch.float32) -> np.ndarray:
    """float32 [T, V] of transformers."""
    with torch.no_grad():
        logits: torch.Tensor = reference_model(model, dtype)(torch.tensor([tokens])).logits
    return logits[0].float().numpy()


def check_bits(artifact: Artifact) -> None:
    """Prompts in any chunks, buckets, company and number of threads have the bits of a prompt in one piece."""
    rng = np.random.default_rng(5)
    vocab, graphs = artifact.info.vocab_size, artifact.graphs()
    texts = [[int(t) for t in rng.integers(3, vocab, 40)] for _ in range(3)]
    alone = {}
    for s, text in enumerate(texts):
        replayer = Replayer(artifact, num_threads=1, num_blocks=64)
        pages = Pages(64, artifact.info.block_size, seed=9)
        big = max(range(len(graphs)), key=lambda i: graphs[i].max_tokens if graphs[i].phase == "prefill" else 0)
        alone[s] = replay(replayer, big, pages, [(s, text, 0)])[0]
    for trial in range(12):
        replayer = Replayer(artifact, num_threads=1 + trial % 3, num_blocks=64)
        pages = Pages(64, artifact.info.block_size, seed=trial)
        done = [0, 0, 0]
        last: dict[int, np.ndarray] = {}
        while min(done) < 40:
            open_ = [s for s in range(3) if done[s] < 40]
            chosen = list(rng.permutation(open_))[: int(rng.integers(1, len(open_) + 1))]
            chunks = []
            for s in chosen:
                n = int(min(rng.choice([1, 1, 2, 5, 11]), 40 - done[s]))
                chunks.append((int(s), texts[s][done[s] : done[s] + n], done[s]))
            total = sum(len(c[1]) for c in chunks)
            fitting = [
                i
                for i, g in enumerate(graphs)
                # A decode graph checks guesses: it takes several tokens of a sequence.
                if g.batch >= len(chunks) and g.max_tokens >= total
            ]
            if not fitting:
                continue
            logits = replay(replayer, int(rng.choice(fitting)), pages, chunks)
            for row, (s, tokens, _) in zip(logits, chunks, strict=True):
                done[s] += len(tokens)
                last[s] = row
        for s in range(3):
            assert np.array_equal(last[s].view(np.int32), alone[s].view(np.int32)), f"trial {trial}, sequence {s}"
