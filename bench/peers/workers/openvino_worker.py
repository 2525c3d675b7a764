"""OpenVINO GenAI's continuous batching pipeline with paged attention, which its LLMPipeline also uses on CPUs."""

from __future__ import annotations

from typing import Any

import numpy as np
import openvino
import openvino_genai
from worker import StepModel, serve


class OpenVino(StepModel):
    def __init__(self, settings: dict[str, Any]) -> None:
        self.version = openvino_genai.__version__
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = settings["kv_gib"]
        scheduler.max_num_batched_tokens = settings["max_len"]
        scheduler.max_num_seqs = settings["max_batch"]
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = False
        properties = {
            "INFERENCE_NUM_THREADS": settings["threads"],
            "INFERENCE_PRECISION_HINT": settings["precision"],
        }
        self.details = {"precision": settings["precision"], "max_num_batched_tokens": settings["max_len"]}
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(settings["model"], scheduler, "CPU", properties)
        self.handles: dict[int, Any] = {}
        self.next_id = 0

    def add(self, ids: list[int], max_tokens: int) -> int:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = max_tokens, True, False
        self.next_id += 1
        tensor = openvino.Tensor(np.asarray([ids], np.int64))
        self.handles[self.next_id] = self.pipeline.add_request(self.next_id, tensor, config)
        return self.next_id

    def step(self) -> dict[int, int]:
        self.pipeline.step()
        new: dict[int, int] = {}
        for request, handle in list(self.handles.items()):
            if handle.can_read():
                outputs = handle.read()
                new[request] = sum(len(output.generated_ids) for output in outputs.values())
            if handle.get_status() != openvino_genai.GenerationStatus.RUNNING and not handle.can_read():
                del self.handles[request]
        return new

    def drop(self, request: int) -> None:
        handle = self.handles.pop(request, None)
        if handle is not None:
            handle.cancel()

    def settle(self) -> None:
        while self.pipeline.has_non_finished_requests():
            self.pipeline.step()


if __name__ == "__main__":
    serve(OpenVino)
