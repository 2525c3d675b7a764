"""What engines of several ranks generate, compared with other arrangements of the same model."""

from __future__ import annotations

import numpy as np

from llmc.runtime.llm import LLM
from llmc.runtime.outputs import RequestOutput
from llmc.runtime.params import SamplingParams

from support.processes import gone, until


def generated(llm: LLM, prompts: list[list[int]], max_tokens: int) -> list[RequestOutput]:
    return llm.generate(prompts, SamplingParams(max_tokens=max_tokens, temperature=0, logprobs=2, ignore_eos=True))


def bits(outputs: list[RequestOutput]) -> list[object]:
    """Equal for equal tokens and bits of logprobs."""
    return [(one.token_ids, repr(one.logprobs)) for output in outputs for one in output.outputs]


def check_close(found: list[RequestOutput], expected: list[RequestOutput]) -> None:
    """Greedy tokens are equal, and their logprobs within 1e-5."""
    assert [output.outputs[0].token_ids for output in found] == [output.outputs[0].token_ids for output in expected]
    np.testing.assert_allclose(_logprobs(found), _logprobs(expected), rtol=1e-5, atol=1e-5)


def await_end(pids: list[int]) -> None:
    """Waits until the processes of ranks have ended."""
    until(lambda: all(map(gone, pids)))


def _logprobs(outputs: list[RequestOutput]) -> np.ndarray:
    return np.array([[step.logprob for step in output.outputs[0].logprobs or []] for output in outputs])
