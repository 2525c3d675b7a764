"""Distance of quantized checkpoints from their original model, on a text, in torch: nothing is compiled.

    python -m bench.quantize_quality MODEL TEXT CHECKPOINT… [--tokens N] [--window N]

KL: mean divergence of the next token's distribution from the original's, in nats. Activations are not quantized.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import numpy as np
import torch

from llmc.models.blocks.decoder import Decoder
from llmc.models.eager import load_model
from llmc.models.reference import ReferenceCache, use_cache
from llmc.runtime.eval.windows import windows
from llmc.runtime.text.tokenizer import Tokenizer

_BLOCK = 16


def log_probabilities(model: Decoder, tokens: list[int]) -> torch.Tensor:
    """Log-probabilities of one sequence, float64 [tokens, vocabulary]."""
    config, count = model.config, len(tokens)
    blocks = -(-count // _BLOCK)

    def ints(values: object) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    rows = torch.arange(count, dtype=torch.int32)
    table = torch.arange(blocks, dtype=torch.int32)[None]
    cache = ReferenceCache.of(config, blocks, _BLOCK)
    with use_cache(cache), torch.no_grad():
        logits = model(ints(tokens), rows, rows, table, ints([count]), ints([0, count]), rows, torch.zeros_like(rows))
    return torch.log_softmax(logits.double(), -1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("checkpoints", type=Path, nargs="+")
    parser.add_argument("--tokens", type=int, default=12_000)
    parser.add_argument("--window", type=int, default=256)
    given = parser.parse_args()
    tokenizer = Tokenizer(given.model)
    first = tokenizer.encode("")
    tokens = tokenizer.encode(given.text.read_text(encoding="utf-8"), add_special_tokens=False)
    parts = [first + part for part in windows(tokens, given.window - len(first), given.tokens)]
    reference = [log_probabilities(load_model(given.model), part) for part in parts]
    print(f"{'':40} {'perplexity':>10} {'KL':>9}")
    for path in (given.model, *given.checkpoints):
        model = load_model(path)
        losses, divergences = [], []
        for part, expected in zip(parts, reference, strict=True):
            found = log_probabilities(model, part)
            losses += [-float(found[i, token]) for i, token in enumerate(part[1:])]
            divergences += (expected.exp() * (expected - found)).sum(-1).tolist()
        print(f"{path!s:40} {math.exp(np.mean(losses)):10.3f} {np.mean(divergences):9.5f}")


if __name__ == "__main__":
    main()
