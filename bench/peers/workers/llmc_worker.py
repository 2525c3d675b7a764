"""llmc through the engine that `llmc serve` uses: scheduler, paged KV cache, sampler."""

from __future__ import annotations

from typing import Any

import numpy as np
from worker import StepModel, serve

from llmc.runtime.binding import Artifact, Engine, version


class Llmc(StepModel):
    def __init__(self, settings: dict[str, Any]) -> None:
        self.version = f"{version()} (compiler {settings['compiler']})"
        artifact = Artifact(settings["model"])
        info = artifact.info
        blocks = 1 + settings["max_batch"] * -(-settings["max_len"] // info.block_size)
        self.engine = Engine(
            artifact,
            num_threads=settings["threads"],
            max_num_seqs=settings["max_batch"],
            num_blocks=blocks,
            prefix_cache=False,
        )

    def add(self, ids: list[int], max_tokens: int) -> int:
        return self.engine.submit(np.asarray(ids, np.int32), max_tokens=max_tokens, temperature=0.0, ignore_eos=True)

    def step(self) -> dict[int, int]:
        self.engine.step()
        new: dict[int, int] = {}
        for event in self.engine.poll():
            if event.kind == "failed":
                raise RuntimeError(event.error_message)
            if event.kind == "token":
                new[event.request_id] = new.get(event.request_id, 0) + 1
        return new

    def drop(self, request: int) -> None:
        self.engine.cancel(request)

    def settle(self) -> None:
        while self.engine.step():
            self.engine.poll()
        self.engine.poll()


if __name__ == "__main__":
    serve(Llmc)
