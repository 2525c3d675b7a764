"""The engine on compiled tiny models: greedy ids of transformers, the same bits in any company, request semantics."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers
from compiled import compile_tiny
from tiny_models import make_tiny_model

from llmc.compiler.config import CompileConfig
from llmc.compiler.pipeline import resolve
from llmc.runtime.binding import Artifact, Engine, SamplingParams
from llmc.runtime.llm import LLM
from llmc.runtime.params import SamplingParams as LLMParams

STORIES = Path(__file__).resolve().parents[2] / "shared" / "models" / "stories260k"
LADDER = "prefill=[8]x[8],decode=[8]x[128]"  # one row tile, so few kernels
MIXED_LADDER = "prefill=[1,8]x[8],decode=[1,8]x[64,128]"
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-gqa1-llama3": ("llama", {"num_key_value_heads": 3, "rope_parameters": LLAMA3}),
    "llama-yarn": ("llama", {"rope_parameters": YARN}),
    "mistral-window": ("mistral", {"sliding_window": 7}),
    "qwen2-bias": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 24, "vocab_size": 517}),
}


@dataclass
class Output:
    """One continuation as its events told it."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    reason: str | None = None
    last_id: int = -1
    num_cached: int = 0


Request = tuple[list[int], SamplingParams]


def drive(
    engine: Engine, requests: list[Request], on_step: Callable[[int], None] = lambda step: None
) -> list[list[Output]]:
    """Runs requests to their ends, checking the engine's integrity after every step; outputs by request and index."""
    ids = [engine.submit(prompt, params) for prompt, params in requests]
    outputs = {i: [Output() for _ in range(params.n)] for i, (_, params) in zip(ids, requests, strict=True)}
    step = 0
    while True:
        progressed = engine.step()
        engine.check_integrity()
        events = engine.poll()
        for event in events:
            output = outputs[event.request_id][event.output_index]
            assert output.reason is None, "an event after the end"
            output.num_cached = event.num_cached_tokens
            if event.kind == "token":
                output.ids.append(event.token_id)
                output.logprobs.append(event.logprob)
                output.top.append(event.top_logprobs)
                assert event.num_output_tokens == len(output.ids)
            else:
                assert event.kind == "finished"
                output.reason, output.last_id = event.finish_reason, event.token_id
        if not progressed and not events:
            break
        on_step(step)
        step += 1
    assert all(o.reason for of in outputs.values() for o in of)
    return [outputs[i] for i in ids]


def random_ids(seed: int, count: int, vocab: int = 515) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(3, vocab, count)]


def greedy(max_tokens: int = 64, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **({"ignore_eos": True} | more))


def reference_logits(model: Path, tokens: list[int]) -> npt.NDArray[np.float32]:
    """float32 [T, V] of transformers."""
    found = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        logits: npt.NDArray[np.float32] = found(torch.tensor([tokens])).logits[0].numpy()
    return logits


def assert_greedy(model: Path, prompt: list[int], ids: list[int]) -> None:
    """Each id is the argmax of transformers after the ones before it: what its greedy loop would have produced."""
    expected = reference_logits(model, prompt + ids)[len(prompt) - 1 : -1].argmax(-1)
    assert ids == expected.tolist()


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One kernel cache for all models here: most of their kernels are the same."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> tuple[Path, Artifact]:
    """A model with blocks of 16 tokens and several graphs of each phase."""
    root = tmp_path_factory.mktemp("llama")
    model = make_tiny_model(root / "model", "llama")
    return model, compile_tiny(model, root / "artifact", cache, buckets=MIXED_LADDER, dtype="f32", block_size=16)


# ---- against transformers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_ids_are_those_of_transformers(name: str, tmp_path: Path, cache: Path) -> None:
    family, overrides = FAMILIES[name]
    model = make_tiny_model(tmp_path / "model", family, **overrides)
    artifact = compile_tiny(model, tmp_path / "artifact", cache, buckets=LADDER, dtype="f32")
    prompts = [random_ids(seed, length) for seed, length in ((1, 5), (2, 33), (3, 1), (4, 64))]
    with Engine(artifact, num_threads=2) as engine:
        outputs = drive(engine, [(prompt, greedy()) for prompt in prompts])
    for prompt, (output,) in zip(prompts, outputs, strict=True):
        assert len(output.ids) == 64
        assert_greedy(model, prompt, output.ids)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_and_sharded_checkpoints(dtype: str, tmp_path: Path, cache: Path) -> None:
    model = make_tiny_model(tmp_path / "model", "llama", dtype=getattr(torch, dtype), max_shard_size="100KB")
    assert len(list(model.glob("*.safetensors"))) > 1
    assert resolve(CompileConfig(model=model, output=tmp_path)).act_dtype == "bf16"
    artifact = compile_tiny(model, tmp_path / "artifact", cache, buckets=LADDER, dtype="f32")
    prompt = random_ids(7, 20)
    with Engine(artifact, num_threads=2) as engine:
        ((output,),) = drive(engine, [(prompt, greedy())])
    # Half-precision weights are exact in float32.
    assert_greedy(model, prompt, output.ids)


def test_bf16_logprobs_are_close(tmp_path: Path, cache: Path) -> None:
    model = make_tiny_model(tmp_path / "model", "qwen3", head_dim=24)
    artifact = compile_tiny(model, tmp_path / "artifact", cache, buckets=LADDER, dtype="bf16")
    prompt = random_ids(8, 30)
    with Engine(artifact, num_threads=2) as engine:
        ((output,),) = drive(engine, [(prompt, greedy(num_logprobs=20))])
    logits = torch.tensor(reference_logits(model, prompt + output.ids)[len(prompt) - 1 : -1])
    expected = torch.log_softmax(logits, -1).numpy()
    errors = [abs(lp - expected[i, token]) for i, top in enumerate(output.top) for token, lp in top]
    # bf16 keeps 8 bits of mantissa, so weights and activations round by up to 2^-9 each in 3 layers: below 3 % of the
    # largest logit.
    assert max(errors) < 3e-2 * float(logits.abs().max())


@pytest.mark.skipif(not STORIES.is_dir(), reason=f"no checkpoint at {STORIES}")
def test_real_checkpoint(tmp_path: Path, cache: Path) -> None:
    compile_tiny(STORIES, tmp_path / "artifact", cache, buckets=LADDER, dtype="f32").close()
    golden = json.loads((STORIES / "golden_greedy.json").read_text())
    with LLM(tmp_path / "artifact", num_threads=2) as llm:
        params = LLMParams(temperature=0.0, max_tokens=64, logprobs=5)
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
        (stopped,) = llm.generate(golden[0]["prompt"], LLMParams(temperature=0.0, max_tokens=64, stop=("little",)))
        text = golden[0]["greedy_text"][len(golden[0]["prompt"]) :]
        assert stopped.outputs[0].text == text[: text.index("little")]
        assert (stopped.outputs[0].finish_reason, stopped.outputs[0].stop_reason) == ("stop", "little")


# ---- the same bits in any company --------------------------------------------------------------------------------


def mixed_requests() -> list[Request]:
    """Greedy and seeded sampling, n > 1, penalties; half of the prompts share a prefix of three blocks."""
    shared = random_ids(20, 50)
    requests = []
    for i in range(9):
        prompt = shared[: 48 + i % 3] + random_ids(30 + i, 3 + 4 * i) if i % 2 else random_ids(40 + i, 1 + 7 * i)
        common: dict[str, Any] = {"max_tokens": 12 + 3 * (i % 4), "ignore_eos": True, "num_logprobs": i % 4}
        if i % 3 == 0:
            params = SamplingParams(temperature=0.0, **common)
        elif i % 3 == 1:
            params = SamplingParams(temperature=0.9, seed=i, n=1 + i % 4, top_p=0.95, **common)
        else:
            params = SamplingParams(temperature=1.2, seed=i, top_k=40, repetition_penalty=1.2, **common)
        requests.append((prompt, params))
    return requests


def bits(output: Output) -> tuple[Any, ...]:
    # Logprobs are float32 values in Python floats: equal means the same bits.
    return output.ids, output.logprobs, output.top, output.reason


@pytest.fixture(scope="module")
def alone(llama: tuple[Path, Artifact]) -> list[list[tuple[Any, ...]]]:
    """Every request in an engine of its own, with one thread and no prefix cache."""
    outputs = []
    for request in mixed_requests():
        with Engine(llama[1], num_threads=1, num_blocks=64, prefix_cache=0) as engine:
            outputs.append([bits(o) for o in drive(engine, [request])[0]])
    assert len({tuple(o[0]) for of in outputs for o in of}) == sum(len(of) for of in outputs)
    return outputs


@pytest.mark.parametrize("trial", range(16))
def test_bits_do_not_depend_on_company(
    trial: int, llama: tuple[Path, Artifact], alone: list[list[tuple[Any, ...]]]
) -> None:
    rng = np.random.default_rng(100 + trial)
    tiny_pool = trial % 4 == 1
    options = {
        "num_threads": 1 + trial % 3,
        "max_tokens_per_step": int(rng.choice([3, 5, 16, 17, 40, 64])),
        "prefix_cache": int(trial % 4 != 2),
        "num_blocks": 10 if tiny_pool else int(rng.choice([30, 64, 100])),
        "max_num_seqs": 8 if tiny_pool else int(rng.choice([1, 2, 3, 5, 8])),
    }
    requests = mixed_requests()
    order = [int(i) for i in rng.permutation(len(requests))]
    with Engine(llama[1], **options) as engine:
        for _ in range(1 + trial % 2):  # the second round starts with a warm prefix cache
            found = drive(engine, [requests[i] for i in order])
            for i, outputs in zip(order, found, strict=True):
                assert [bits(o) for o in outputs] == alone[i], f"request {i}, {options}"
        stats = engine.stats
        use = engine.graph_use()
    assert (stats.num_running, stats.num_waiting, stats.num_bucket_misses) == (0, 0, 0)
    assert stats.num_free_blocks == stats.num_blocks == options["num_blocks"]
    assert stats.num_finished == len(requests) * (1 + trial % 2)
    assert stats.prompt_tokens == sum(len(p) for p, _ in requests) * (1 + trial % 2)
    assert stats.output_tokens == sum(len(o[0]) for of in alone for o in of) * (1 + trial % 2)
    assert stats.num_steps == stats.num_prefill_steps + stats.num_decode_steps == sum(r for r, _ in use)
    assert stats.scheduled_tokens == sum(t for _, t in use)
    capacity = sum(r * g.max_tokens for (r, _), g in zip(use, llama[1].graphs(), strict=True))
    assert stats.padded_tokens == capacity - stats.scheduled_tokens > 0
    assert stats.step_ns >= stats.replay_ns + stats.sample_ns > 0
    if options["prefix_cache"]:
        assert tiny_pool or stats.cached_tokens > 0
        assert stats.num_cached_blocks > 0
    else:
        assert stats.cached_tokens == stats.num_cached_blocks == 0
    if tiny_pool:
        assert stats.num_preemptions > 0


def test_bits_of_requests_that_arrive_late(llama: tuple[Path, Artifact], alone: list[list[tuple[Any, ...]]]) -> None:
    """Requests join while others decode, with priorities, and some that are cancelled come and go."""
    requests = mixed_requests()
    for trial in range(4):
        rng = np.random.default_rng(trial)
        with Engine(llama[1], num_threads=2, num_blocks=int(rng.choice([14, 40]))) as engine:
            found: dict[int, list[Output]] = {}
            which: dict[int, int] = {}
            doomed: list[int] = []
            left = [int(i) for i in rng.permutation(len(requests))]
            while True:
                if left and rng.random() < 0.4:
                    prompt, params = requests[left[-1]]
                    submitted = engine.submit(prompt, params, priority=int(rng.integers(-1, 2)))
                    which[submitted] = left.pop()
                    found[submitted] = [Output() for _ in range(params.n)]
                    doomed.append(engine.submit(prompt[:40], params, max_tokens=60))
                if doomed and rng.random() < 0.2:
                    engine.cancel(doomed.pop(0))
                progressed = engine.step()
                engine.check_integrity()
                events = engine.poll()
                for event in events:
                    if event.request_id not in found:
                        doomed = [d for d in doomed if d != event.request_id or event.kind == "token"]
                        continue
                    output = found[event.request_id][event.output_index]
                    if event.kind == "token":
                        output.ids.append(event.token_id)
                        output.logprobs.append(event.logprob)
                        output.top.append(event.top_logprobs)
                    else:
                        output.reason = event.finish_reason
                if not left and not progressed and not events:
                    break
            for submitted, outputs in found.items():
                assert [bits(o) for o in outputs] == alone[which[submitted]], f"trial {trial}"
            assert len(found) == len(requests)
            assert engine.stats.num_free_blocks == engine.stats.num_blocks
