"""Answers a file of prompts and writes JSON lines: python batch.py ARTIFACT PROMPTS OUTPUT"""

import json
import sys
from pathlib import Path

from llmc import LLM, RequestOutput, SamplingParams

artifact, prompts, output = sys.argv[1:4]
lines = Path(prompts).read_text(encoding="utf-8").splitlines()
params = SamplingParams(max_tokens=40, temperature=0.7, seed=1)

with LLM(artifact) as llm, open(output, "w", encoding="utf-8") as file:

    def write(done: RequestOutput) -> None:
        """Called for each prompt as it ends: long ones do not hold up the others."""
        error = done.error.message if done.error else None
        answer = {"index": done.index, "prompt": done.prompt, "text": done.outputs[0].text, "error": error}
        file.write(json.dumps(answer) + "\n")
        file.flush()

    outputs = llm.generate(lines, params, on_output=write)

print(f"{len(outputs)} prompts, {sum(o.usage.completion_tokens for o in outputs)} tokens: {output}")
