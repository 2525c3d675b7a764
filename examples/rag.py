"""Finds the passage nearest to a question and has it in the prompt: python rag.py EMBEDDER MODEL PASSAGES QUESTION

EMBEDDER and MODEL are artifacts; PASSAGES is a text file, one passage a line.
"""

import sys
from pathlib import Path

import numpy as np

from llmc import LLM, SamplingParams

embedder, model, file, question = sys.argv[1:5]
passages = Path(file).read_text(encoding="utf-8").splitlines()

with LLM(embedder) as llm:
    vectors = np.stack([output.vector for output in llm.embed([*passages, question])])

# Cosine of the angle between the question and each passage.
vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
best = passages[int(np.argmax(vectors[:-1] @ vectors[-1]))]
print("passage:", best)

with LLM(model) as llm:
    messages = [{"role": "user", "content": f"Answer from this text.\n\n{best}\n\nQuestion: {question}"}]
    (answer,) = llm.chat(messages, SamplingParams(max_tokens=60, temperature=0.0))
    print("answer:", answer.outputs[0].text)
