"""Base of every worker: a process that holds one model and answers requests on stdin, one JSON object per line.

Runs in the environment of a peer: standard library only, and `from worker import …`, as a script's folder is on its
path. The first argument is settings as JSON: model (path), threads, max_batch, max_len, and options of the engine.
Answers go to the original stdout; output of libraries to stdout is sent to stderr.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import signal
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

PR_SET_PDEATHSIG = 1
FIRST_TOKENS = 16
"""Tokens of the prompt with which a fresh process's start is timed."""


def prompt(tokens: int, seed: int) -> list[int]:
    """Random ids, the same for every engine; above special tokens and inside every vocabulary."""
    draw = random.Random(seed)
    return [draw.randrange(300, 32000) for _ in range(tokens)]


class Model(ABC):
    """A loaded model. Times are in seconds; prompts are distinct, so that no prefix cache helps."""

    version: str
    details: Mapping[str, Any] = MappingProxyType({})
    """Facts about how it runs, such as {"kv cache": "u8"}."""

    @abstractmethod
    def prefill(self, tokens: int, seed: int) -> float:
        """Seconds of one prompt to its first token."""

    @abstractmethod
    def decode(self, batch: int, context: int, steps: int, seed: int) -> tuple[float, int]:
        """(seconds, tokens) of greedy decode steps of `batch` sequences behind prompts of `context` tokens."""

    def offline(self, requests: int, streams: int, input_len: int, output_len: int, seed: int) -> dict[str, Any]:
        """Runs requests, `streams` at a time; returns {"seconds": …, "output_tokens": …}."""
        raise NotImplementedError


class StepModel(Model):
    """A model behind an engine with continuous batching, driven step by step."""

    @abstractmethod
    def add(self, ids: list[int], max_tokens: int) -> int:
        """Queues a greedy request that ignores the end of sequence; returns its id."""

    @abstractmethod
    def step(self) -> dict[int, int]:
        """Runs one engine step; returns numbers of new tokens by request."""

    @abstractmethod
    def drop(self, request: int) -> None:
        """Cancels a running request."""

    def settle(self) -> None:
        """Steps until dropped requests are gone."""

    def prefill(self, tokens: int, seed: int) -> float:
        ids = prompt(tokens, seed)
        begin = time.perf_counter()
        self.add(ids, 1)
        while not self.step():
            pass
        return time.perf_counter() - begin

    def decode(self, batch: int, context: int, steps: int, seed: int) -> tuple[float, int]:
        # The first sequence may be far ahead when the last prompt is done.
        allowed = steps + 3 * batch + 8
        requests = {self.add(prompt(context, seed * 1000 + i), allowed): 0 for i in range(batch)}

        def advance() -> int:
            new = self.step()
            for request, count in new.items():
                requests[request] += count
            return sum(new.values())

        while min(requests.values()) == 0:
            advance()
        begin, tokens = time.perf_counter(), 0
        while tokens < steps * batch:
            tokens += advance()
        seconds = time.perf_counter() - begin
        for request, count in requests.items():
            if count < allowed:
                self.drop(request)
        self.settle()
        return seconds, tokens

    def offline(self, requests: int, streams: int, input_len: int, output_len: int, seed: int) -> dict[str, Any]:
        waiting = [prompt(input_len, seed * 1000 + i) for i in range(requests)]
        left: dict[int, int] = {}
        produced, begin = 0, time.perf_counter()
        while waiting or left:
            while waiting and len(left) < streams:
                left[self.add(waiting.pop(), output_len)] = output_len
            for request, count in self.step().items():
                produced += count
                left[request] -= count
                if left[request] == 0:
                    del left[request]
        return {"seconds": time.perf_counter() - begin, "output_tokens": produced}


def serve(load: Callable[[dict[str, Any]], Model]) -> None:
    """Loads the model and answers requests until stdin ends."""
    # A worker that is stopped when the runner is killed would otherwise stay for ever.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def answer(**fields: Any) -> None:
        answers.write(json.dumps(fields) + "\n")

    try:
        model = load(json.loads(sys.argv[1]))
    except Exception as error:
        answer(error=one_line(error))
        raise
    answer(ready=True, version=model.version, details=dict(model.details))
    for line in sys.stdin:
        request = json.loads(line)
        kind = request.pop("op")
        try:
            if kind == "first":
                model.prefill(FIRST_TOKENS, 0)
                answer(ok=True)
            elif kind == "prefill":
                answer(seconds=model.prefill(**request), tokens=request["tokens"])
            elif kind == "decode":
                seconds, tokens = model.decode(**request)
                answer(seconds=seconds, tokens=tokens)
            elif kind == "offline":
                answer(**model.offline(**request))
            else:
                answer(error=f"unknown request {kind!r}")
        except Exception as error:
            answer(error=one_line(error))
    answers.close()
    # Some engines hang or complain in their destructors; there is nothing left to lose.
    os._exit(0)


def one_line(error: BaseException) -> str:
    """Class and first line of an error's text."""
    lines = str(error).strip().splitlines() or ["no message"]
    return f"{type(error).__name__}: {lines[0]}"[:400]
