"""An artifact that takes adapters, and three adapters for it."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from llmc.runtime.binding import Engine, SamplingParams

from support.adapters import make_adapter
from support.artifacts import made_once
from support.compiled import compile_tiny
from support.engine_driver import MIXED_LADDER, Output, bits
from support.tiny_models import make_tiny_model

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SLOTS, RANK = 3, 12
LADDER = f"{MIXED_LADDER},mixed=[3,8]x[9,24]"


@dataclass(frozen=True)
class Setting:
    """A model, its artifact of SLOTS slots of RANK, and adapters a, b and c. Copy before changing."""

    model: Path
    artifact: Path
    adapters: dict[str, Path]


def with_tokenizer(setting: Setting, folder: Path, chat_artifact: Path) -> Setting:
    """A copy in `folder` that has the tokenizer of another artifact, so that all endpoints answer."""
    artifact = folder / "artifact"
    shutil.copytree(setting.artifact, artifact)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(chat_artifact / name, artifact / name)
    return Setting(setting.model, artifact, setting.adapters)


def make_setting(
    factory: pytest.TempPathFactory,
    kernel_cache: Path,
    target: str = "native",
    ladder: str = LADDER,
    **model_fields: Any,
) -> Setting:
    """Made once a run for each target."""

    def make(root: Path) -> None:
        model = make_tiny_model(root / "model", "llama", **model_fields)
        compile_tiny(
            model, root / "artifact", kernel_cache, buckets=ladder, dtype="f32", block_size=16, lora_slots=SLOTS,
            lora_rank=RANK, target=target,
        ).close()  # fmt: skip
        make_adapter(root / "a", model, ("q_proj",), rank=8, seed=1)
        make_adapter(root / "b", model, (*ALL, "lm_head", "embed_tokens"), rank=RANK, seed=2)
        make_adapter(root / "c", model, ("down_proj", "v_proj", "lm_head"), rank=3, seed=3)

    root = made_once(factory, f"adapters-{target}", make)
    return Setting(root / "model", root / "artifact", {name: root / name for name in "abc"})


def drive(engine: Engine, requests: list[tuple[list[int], SamplingParams, int]]) -> list[list[tuple[Any, ...]]]:
    """Runs requests with the numbers of adapters to their ends; the bits of each of their continuations."""
    ids = [engine.submit(prompt, params, adapter=adapter) for prompt, params, adapter in requests]
    outputs = {i: [Output() for _ in range(params.n)] for i, (_, params, _) in zip(ids, requests, strict=True)}
    while engine.step():
        engine.check_integrity()
        for event in engine.poll():
            output = outputs[event.request_id][event.output_index]
            if event.kind == "token":
                output.ids.append(event.token_id)
                output.logprobs.append(event.logprob)
                output.top.append(event.top_logprobs)
            else:
                assert event.kind == "finished", event.error_message
                output.reason = event.finish_reason
    return [[bits(output) for output in outputs[i]] for i in ids]
