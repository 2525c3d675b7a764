"""Answers of an artifact and of transformers to the same requests of lm-evaluation-harness, as JSON; a program.

harness_scores.py MODEL ARTIFACT
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from llmc.runtime.eval.harness import HarnessModel

TEXT = "It was a truth which nobody at Longbourn cared to deny, that a walk before dinner does no harm. "
PAIRS = [
    ("Longbourn", " cared"), ("Longbourn", " walked to town"), ("", "A walk"), ("spaces  ", "move"),
    # Cut on the left, where the model's context ends.
    (TEXT, "none"),
]  # fmt: skip
PROMPTS = [("A walk", {"until": ["e"], "max_gen_toks": 12}), (TEXT, {"until": [], "max_gen_toks": 5})]


def requests(kind: str, arguments: list[tuple[Any, ...]]) -> list[Instance]:
    return [Instance(kind, {}, one, index) for index, one in enumerate(arguments)]


def answers(model: Any) -> dict[str, Any]:
    return {
        "pairs": model.loglikelihood(requests("loglikelihood", PAIRS)),
        "rolling": model.loglikelihood_rolling(requests("loglikelihood_rolling", [(TEXT,), ("walk",)])),
        "texts": model.generate_until(requests("generate_until", PROMPTS)),
    }


if __name__ == "__main__":
    model, artifact = map(Path, sys.argv[1:])
    # Programs print what they like.
    with contextlib.redirect_stdout(sys.stderr):
        theirs = answers(HFLM(str(model), dtype="float32", device="cpu", batch_size=1, max_length=64))
        with contextlib.closing(HarnessModel(artifact, 1)) as opened:
            ours = answers(opened)
    print(json.dumps([theirs, ours]))
