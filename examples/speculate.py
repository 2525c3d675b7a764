"""Guesses tokens from the text itself, and shows that no bit changes: python speculate.py ARTIFACT [PROMPT]"""

import sys

from llmc import LLM, SamplingParams

artifact = sys.argv[1]
# A text that repeats itself is guessed best.
prompt = sys.argv[2] if len(sys.argv) > 2 else "She was very much surprised. She was very much surprised. She was"
params = SamplingParams(max_tokens=60, temperature=0.0)

tokens, steps = {}, {}
for mode in ("off", "ngram:8"):
    with LLM(artifact, speculate=mode) as llm:
        (answer,) = llm.generate(prompt, params)
        tokens[mode] = answer.outputs[0].token_ids
        steps[mode] = sum(graph["replays"] for graph in llm.graph_use())
    print(f"{mode:8} {len(tokens[mode])} tokens in {steps[mode]} steps")

print("same tokens:", tokens["off"] == tokens["ngram:8"])
