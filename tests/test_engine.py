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
from compiled import Pages, compile_tiny, replay
from tiny_models import make_tiny_model

from llmc.compiler.config import CompileConfig
from llmc.compiler.pipeline import resolve
from llmc.runtime.binding import Artifact, Engine, LlmcError, Replayer, SamplingParams
from llmc.runtime.llm import LLM
from llmc.runtime.params import RequestError
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
    model = make_tiny_model(tmp_path / "model", "qwen3", head_dim=24, dtype=torch.float16, max_shard_size="100KB")
    artifact = compile_tiny(model, tmp_path / "artifact", cache, buckets=LADDER)
    assert json.loads((tmp_path / "artifact" / "manifest.json").read_text())["act_dtype"] == "bf16"
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


# ---- what a request asks for -------------------------------------------------------------------------------------

PROMPT = random_ids(60, 21)


@pytest.fixture(scope="module")
def engine(llama: tuple[Path, Artifact]) -> Engine:
    return Engine(llama[1], num_threads=2, num_blocks=64)


def one(engine: Engine, prompt: list[int] = PROMPT, **params: Any) -> Output:
    ((output,),) = drive(engine, [(prompt, SamplingParams(**params))])
    return output


@pytest.fixture(scope="module")
def plain(engine: Engine) -> list[int]:
    """Greedy ids after PROMPT."""
    return one(engine, temperature=0.0, max_tokens=20, ignore_eos=True).ids


class OwnLogits:
    """Logits of the compiled model itself: the same bits as those that the engine samples from."""

    def __init__(self, artifact: Artifact) -> None:
        self.replayer = Replayer(artifact, num_threads=1, num_blocks=16)
        graphs = artifact.graphs()
        self.graph = max(range(len(graphs)), key=lambda i: graphs[i].max_tokens)
        self.block_size = artifact.info.block_size

    def after(self, tokens: list[int]) -> npt.NDArray[np.float32]:
        return replay(self.replayer, self.graph, Pages(16, self.block_size), [(0, tokens, 0)])[0]

    def greedy(
        self, count: int, adjust: Callable[[npt.NDArray[np.float32], list[int]], npt.NDArray[np.float32]]
    ) -> list[int]:
        """Greedy ids after PROMPT of adjust(logits, output so far)."""
        ids: list[int] = []
        while len(ids) < count:
            ids.append(int(adjust(self.after(PROMPT + ids).copy(), ids).argmax()))
        return ids


@pytest.fixture(scope="module")
def own(llama: tuple[Path, Artifact]) -> OwnLogits:
    return OwnLogits(llama[1])


def test_stop_token_ids(engine: Engine, plain: list[int]) -> None:
    stop = plain[7]
    output = one(engine, temperature=0.0, max_tokens=20, ignore_eos=True, stop_token_ids=(514, stop))
    assert (output.ids, output.reason, output.last_id) == (plain[: plain.index(stop)], "stop", stop)


def test_min_tokens_masks_stops(engine: Engine, plain: list[int], own: OwnLogits) -> None:
    stop = plain[2]

    def masked(logits: npt.NDArray[np.float32], ids: list[int]) -> npt.NDArray[np.float32]:
        if len(ids) < 9:
            logits[[2, stop]] = -np.inf
        return logits

    expected = own.greedy(20, masked)
    output = one(engine, temperature=0.0, max_tokens=20, min_tokens=9, stop_token_ids=(stop,))
    ends = [i for i, token in enumerate(expected) if i >= 9 and token in (2, stop)]
    assert output.ids == expected[: ends[0] if ends else 20]
    assert output.reason == ("stop" if ends else "length")
    assert stop not in output.ids


def test_eos(engine: Engine) -> None:
    eos: dict[str, Any] = {"temperature": 0.0, "max_tokens": 8, "logit_bias": {2: 1000.0}}
    output = one(engine, **eos)
    assert (output.ids, output.reason, output.last_id) == ([], "stop", 2)
    output = one(engine, ignore_eos=True, **eos)
    assert (output.ids, output.reason, output.last_id) == ([2] * 8, "length", -1)
    output = one(engine, min_tokens=5, **eos)
    assert (len(output.ids), 2 in output.ids, output.reason, output.last_id) == (5, False, "stop", 2)


def test_max_tokens_ends_at_max_model_len(engine: Engine) -> None:
    assert len(one(engine, temperature=0.0, max_tokens=1, ignore_eos=True).ids) == 1
    for length in (100, 127):
        output = one(engine, random_ids(5, length), temperature=0.0, max_tokens=1000, ignore_eos=True)
        assert (len(output.ids), output.reason) == (128 - length, "length")


def test_logprobs_are_those_of_transformers(engine: Engine, llama: tuple[Path, Artifact]) -> None:
    # Temperature, penalties and bias change what is drawn, not the logprobs, which are the model's own.
    output = one(engine, temperature=1.5, seed=4, max_tokens=16, num_logprobs=7, ignore_eos=True, presence_penalty=1.0)
    logits = torch.tensor(reference_logits(llama[0], PROMPT + output.ids)[len(PROMPT) - 1 : -1])
    expected = torch.log_softmax(logits.double(), -1).numpy()
    best = np.argsort(-expected, axis=-1)[:, :7]
    assert len(output.logprobs) == 16
    for i, token in enumerate(output.ids):
        assert output.logprobs[i] == pytest.approx(expected[i, token], abs=1e-3)
        assert [t for t, _ in output.top[i]] == best[i].tolist()
        np.testing.assert_allclose([lp for _, lp in output.top[i]], expected[i, best[i]], atol=1e-3)
    assert one(engine, max_tokens=2, num_logprobs=0).top == [(), ()]


def test_logit_bias(engine: Engine, own: OwnLogits) -> None:
    bias = {7: 2.5, 100: -4.0, 514: 3.0, **{t: -1000.0 for t in range(200, 400)}}

    def biased(logits: npt.NDArray[np.float32], ids: list[int]) -> npt.NDArray[np.float32]:
        for token, value in bias.items():
            logits[token] += np.float32(value)
        return logits

    output = one(engine, temperature=0.0, max_tokens=20, ignore_eos=True, logit_bias=bias)
    assert output.ids == own.greedy(20, biased)
    assert not any(200 <= t < 400 for t in output.ids)


@pytest.mark.parametrize(
    ("repetition", "presence", "frequency"),
    [(1.3, 0.0, 0.0), (0.8, 0.0, 0.0), (1.0, 1.5, 0.0), (1.0, 0.0, 0.7), (1.0, -1.0, -0.5), (1.2, 0.5, 0.3)],
)
def test_penalties(engine: Engine, own: OwnLogits, repetition: float, presence: float, frequency: float) -> None:
    def penalized(logits: npt.NDArray[np.float32], ids: list[int]) -> npt.NDArray[np.float32]:
        seen = sorted({*PROMPT, *ids})
        x, factor = logits[seen], np.float32(repetition)
        logits[seen] = np.where(x > 0, x / factor, x * factor)
        counts = np.bincount(np.array(ids, np.int64), minlength=len(logits)).astype(np.float32)
        return logits - np.float32(frequency) * counts - np.float32(presence) * (counts > 0)

    output = one(
        engine,
        temperature=0.0,
        max_tokens=20,
        ignore_eos=True,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
    )
    assert output.ids == own.greedy(20, penalized)


def test_seeds(engine: Engine) -> None:
    sampling: dict[str, Any] = {"max_tokens": 16, "temperature": 1.5, "ignore_eos": True}
    first = one(engine, seed=11, **sampling)
    assert bits(one(engine, seed=11, **sampling)) == bits(first)
    assert one(engine, seed=12, **sampling).ids != first.ids
    assert one(engine, **sampling).ids != one(engine, **sampling).ids
    ((a, b, c),) = drive(engine, [(PROMPT, SamplingParams(seed=11, n=3, **sampling))])
    assert a.ids == first.ids
    assert len({tuple(o.ids) for o in (a, b, c)}) == 3


def test_cancel(llama: tuple[Path, Artifact], plain: list[int]) -> None:
    with Engine(llama[1], num_threads=1, num_blocks=40, max_num_seqs=2) as engine:
        kept = engine.submit(PROMPT, greedy(20))
        cancelled = engine.submit(PROMPT, SamplingParams(n=2, max_tokens=60, ignore_eos=True))
        queued = engine.submit(PROMPT, greedy(60))
        for _ in range(6):
            engine.step()
        engine.cancel(cancelled)
        engine.cancel(queued)
        events = engine.poll()
        while engine.step():
            engine.check_integrity()
            events += engine.poll()
        events += engine.poll()
        ends = {(e.request_id, e.output_index): e.finish_reason for e in events if e.kind == "finished"}
        cancels = {(cancelled, 0): "cancelled", (cancelled, 1): "cancelled", (queued, 0): "cancelled"}
        assert ends == {(kept, 0): "length", **cancels}
        assert [e.token_id for e in events if e.request_id == kept and e.kind == "token"] == plain
        assert 0 < sum(e.kind == "token" and e.request_id == cancelled for e in events) < 60
        stats = engine.stats
        assert (stats.num_free_blocks, stats.num_running, stats.num_waiting) == (stats.num_blocks, 0, 0)
        for request in (cancelled, kept, 12345):
            with pytest.raises(LlmcError, match="nothing to cancel") as caught:
                engine.cancel(request)
            assert caught.value.name == "not_found"


def test_full_queue(llama: tuple[Path, Artifact]) -> None:
    with Engine(llama[1], num_threads=1, num_blocks=40, max_waiting=2) as engine:
        for _ in range(2):
            engine.submit(PROMPT, greedy(3))
        with pytest.raises(LlmcError, match="2 requests are waiting") as caught:
            engine.submit(PROMPT, greedy(3))
        assert caught.value.name == "queue_full"
        while engine.step():
            engine.check_integrity()
        engine.submit(PROMPT, greedy(3))


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, "prompt is empty"),
        ([5] * 128, {}, "prompt has 128 tokens but at most 127"),
        ([5, 515], {}, r"prompt_token_ids\[1\] is 515"),
        ([-1], {}, r"prompt_token_ids\[0\] is -1"),
        ([5], {"max_tokens": 0}, "max_tokens is 0"),
        ([5], {"n": 65}, "n is 65"),
        ([5], {"min_tokens": 9, "max_tokens": 8}, "min_tokens is 9"),
        ([5], {"temperature": -1.0}, "temperature is -1"),
        ([5], {"temperature": float("nan")}, "temperature is"),
        ([5], {"top_p": 0.0}, "top_p is 0"),
        ([5], {"num_logprobs": 21}, "num_logprobs is 21"),
        ([5], {"stop_token_ids": (515,)}, r"stop_token_ids\[0\] is 515"),
        ([5], {"logit_bias": {515: 1.0}}, r"logit_bias\[0\].token_id is 515"),
    ],
)
def test_bad_requests(engine: Engine, prompt: list[int], params: dict[str, Any], message: str) -> None:
    with pytest.raises(LlmcError, match=message) as caught:
        engine.submit(prompt, **params)
    assert caught.value.name == "invalid_argument"
    assert engine.stats.num_waiting == 0


def test_prompt_longer_than_the_pool(llama: tuple[Path, Artifact]) -> None:
    with (
        Engine(llama[1], num_threads=1, num_blocks=2) as engine,
        pytest.raises(LlmcError, match="at most 31 fit the KV pool"),
    ):
        engine.submit([5] * 32)


def test_llm_runs_token_ids(llama: tuple[Path, Artifact], tmp_path: Path, cache: Path, plain: list[int]) -> None:
    model, _ = llama
    compile_tiny(model, tmp_path / "artifact", cache, buckets=MIXED_LADDER, dtype="f32", block_size=16).close()
    with LLM(tmp_path / "artifact", num_threads=1, num_blocks=40) as llm:
        prompts = [random_ids(70, 30), PROMPT, random_ids(71, 3)]
        params = LLMParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=2)
        outputs = llm.generate(prompts, params)
        assert [o.index for o in outputs] == [0, 1, 2]
        assert list(outputs[1].outputs[0].token_ids) == plain
        logprobs = outputs[1].outputs[0].logprobs
        assert logprobs is not None
        assert all(max(entry.top, key=lambda t: entry.top[t]) == entry.token_id for entry in logprobs)
        assert outputs[1].usage.completion_tokens == 20
        # The second time the whole blocks of a prompt come from the cache.
        assert [o.usage.cached_tokens for o in llm.generate(prompts, params)] == [16, 16, 0]
        with pytest.raises(RequestError, match="prompt 1 has 128 tokens and max-model-len is 128"):
            llm.generate([PROMPT, [5] * 128])
