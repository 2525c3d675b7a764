"""Runs several LoRA adapters in one batch: python adapters.py ARTIFACT NAME=PATH...

Compile the model with room for them: llmc compile MODEL -o ARTIFACT --lora-slots 4
"""

import sys

from llmc import LLM, SamplingParams

artifact, *named = sys.argv[1:]
adapters = dict(argument.split("=", 1) for argument in named)
params = SamplingParams(max_tokens=24, temperature=0.0)

with LLM(artifact, lora=adapters) as llm:
    # One request for the model alone, and one for each adapter. They share every step.
    names = [None, *adapters]
    outputs = llm.generate(["The evening passed"] * len(names), params, lora=names)
    for name, output in zip(names, outputs, strict=True):
        print(f"{name or 'no adapter'}: {output.outputs[0].text!r}")
