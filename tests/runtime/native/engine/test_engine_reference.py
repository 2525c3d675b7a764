"""The engine against transformers: greedy ids and logprobs of every family, on random and real checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from llmc.compiler.config import CompileConfig
from llmc.compiler.resolve import resolve
from llmc.runtime.binding import Engine
from llmc.runtime.llm import LLM
from llmc.runtime.params import SamplingParams

from support.compiled import compile_tiny
from support.engine_driver import assert_greedy, drive, greedy, random_ids, reference_logits
from support.paths import SHARED
from support.tiny_models import ModelFields, make_tiny_model

STORIES = SHARED / "models" / "stories260k"
LADDER = "prefill=[8]x[8],decode=[8]x[128]"  # one row tile, so few kernels
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
FAMILIES: dict[str, tuple[str, ModelFields]] = {
    "llama-gqa1-llama3": ("llama", {"num_key_value_heads": 3, "rope_parameters": LLAMA3}),
    "llama-yarn": ("llama", {"rope_parameters": YARN}),
    "mistral-window": ("mistral", {"sliding_window": 7}),
    "mistral-window-1": ("mistral", {"sliding_window": 1}),
    "qwen2-bias": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 24, "vocab_size": 517}),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_ids_are_those_of_transformers(name: str, tmp_path: Path, kernel_cache: Path) -> None:
    family, overrides = FAMILIES[name]
    model = make_tiny_model(tmp_path / "model", family, **overrides)
    artifact = compile_tiny(model, tmp_path / "artifact", kernel_cache, buckets=LADDER, dtype="f32")
    prompts = [random_ids(seed, length) for seed, length in ((1, 5), (2, 33), (3, 1), (4, 64))]
    with Engine(artifact, num_threads=2) as engine:
        outputs = drive(engine, [(prompt, greedy()) for prompt in prompts])
    for prompt, (output,) in zip(prompts, outputs, strict=True):
        assert len(output.ids) == 64
        assert_greedy(model, prompt, output.ids)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_and_sharded_checkpoints(dtype: str, tmp_path: Path, kernel_cache: Path) -> None:
    model = make_tiny_model(tmp_path / "model", "llama", dtype=getattr(torch, dtype), max_shard_size="100KB")
    assert len(list(model.glob("*.safetensors"))) > 1
    assert resolve(CompileConfig(model=model, output=tmp_path)).act_dtype == "bf16"
    artifact = compile_tiny(model, tmp_path / "artifact", kernel_cache, buckets=LADDER, dtype="f32")
    prompt = random_ids(7, 20)
    with Engine(artifact, num_threads=2) as engine:
        ((output,),) = drive(engine, [(prompt, greedy())])
    # Half-precision weights are exact in float32.
    assert_greedy(model, prompt, output.ids)


# bf16 keeps 8 bits of mantissa, so weights and activations round by up to 2^-9 each in 3 layers: below 3 % of the
# largest logit. float16 keeps 3 bits more, and the weights are exact.
@pytest.mark.parametrize(("dtype", "found", "bound"), [("auto", "bf16", 3e-2), ("f16", "f16", 4e-3)])
def test_16_bit_logprobs_are_close(dtype: str, found: str, bound: float, tmp_path: Path, kernel_cache: Path) -> None:
    model = make_tiny_model(tmp_path / "model", "qwen3", head_dim=24, dtype=torch.float16, max_shard_size="100KB")
    artifact = compile_tiny(model, tmp_path / "artifact", kernel_cache, buckets=LADDER, dtype=dtype)
    assert json.loads((tmp_path / "artifact" / "manifest.json").read_text())["act_dtype"] == found
    prompt = random_ids(8, 30)
    with Engine(artifact, num_threads=2) as engine:
        ((output,),) = drive(engine, [(prompt, greedy(num_logprobs=20))])
    logits = torch.tensor(reference_logits(model, prompt + output.ids)[len(prompt) - 1 : -1])
    expected = torch.log_softmax(logits, -1).numpy()
    errors = [abs(lp - expected[i, token]) for i, top in enumerate(output.top) for token, lp in top]
    assert max(errors) < bound * float(logits.abs().max())


@pytest.mark.skipif(not STORIES.is_dir(), reason=f"no checkpoint at {STORIES}")
def test_real_checkpoint(tmp_path: Path, kernel_cache: Path) -> None:
    compile_tiny(STORIES, tmp_path / "artifact", kernel_cache, buckets=LADDER, dtype="f32").close()
    golden = json.loads((STORIES / "golden_greedy.json").read_text())
    with LLM(tmp_path / "artifact", num_threads=2) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=64, logprobs=5)
        outputs = llm.generate([g["prompt"] for g in golden], params)
        for found, expected in zip(outputs, golden, strict=True):
            (output,) = found.outputs
            assert list(found.prompt_token_ids) == expected["prompt_ids"]
            assert list(output.token_ids) == expected["greedy_ids"]
            assert expected["prompt"] + output.text == expected["greedy_text"]
            assert output.logprobs is not None
            top = output.logprobs[0].top
            best = expected["first_logits_top5"][0]
            for token, logit in expected["first_logits_top5"]:
                assert top[token] - top[best[0]] == pytest.approx(logit - best[1], abs=2e-3)
        (stopped,) = llm.generate(golden[0]["prompt"], SamplingParams(temperature=0.0, max_tokens=64, stop=("little",)))
        text = golden[0]["greedy_text"][len(golden[0]["prompt"]) :]
        assert stopped.outputs[0].text == text[: text.index("little")]
        assert (stopped.outputs[0].finish_reason, stopped.outputs[0].stop_reason) == ("stop", "little")
