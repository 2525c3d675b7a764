"""A request whose logits are not finite fails alone: neither its company nor a later request with its prefix does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from llmc.runtime.binding import Artifact, Engine

from support.compiled import compile_tiny
from support.engine_driver import greedy, random_ids
from support.tiny_models import make_tiny_model

NAN, INFINITE = 500, 501
Ended = tuple[list[int], str]  # output tokens, finish reason


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory, kernel_cache: Path) -> Artifact:
    """Two tokens have embeddings that are not finite; each query head has a kv head of its own."""
    root = tmp_path_factory.mktemp("not-finite")
    model = make_tiny_model(root / "model", "llama", num_attention_heads=6, num_key_value_heads=6, num_hidden_layers=2)
    weights = load_file(model / "model.safetensors")
    weights["model.embed_tokens.weight"][NAN] = torch.nan
    weights["model.embed_tokens.weight"][INFINITE, ::2] = torch.inf
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    ladder = "prefill=[1,4]x[32,128],decode=[1,4]x[128]"
    return compile_tiny(model, root / "artifact", kernel_cache, buckets=ladder, dtype="f32", block_size=16)


def serve(engine: Engine, prompts: list[list[int]]) -> list[Ended]:
    """All prompts at once, greedily."""
    ids = [engine.submit(prompt, greedy(8)) for prompt in prompts]
    tokens: dict[int, list[int]] = {i: [] for i in ids}
    ends: dict[int, str] = {}
    while len(ends) < len(ids):
        engine.step()
        engine.check_integrity()
        for event in engine.poll():
            if event.kind == "token":
                tokens[event.request_id].append(event.token_id)
            else:
                ends[event.request_id] = event.kind
    return [(tokens[i], ends[i]) for i in ids]


@pytest.mark.parametrize("bad", [NAN, INFINITE])
@pytest.mark.parametrize("at", [64, 67, 70])
def test_a_failed_prompt_leaves_its_prefix_usable(artifact: Artifact, bad: int, at: int) -> None:
    prefix = random_ids(5, at, NAN)
    good, other = [*prefix, 11], random_ids(6, 40, NAN)
    with Engine(artifact, num_threads=1, num_blocks=40, prefix_cache=0) as engine:
        want = serve(engine, [good]) + serve(engine, [other])
    assert [reason for _, reason in want] == ["finished", "finished"]
    with Engine(artifact, num_threads=2, num_blocks=40) as engine:
        # In company, twice: the second time with what the first has left in the prefix cache.
        for _ in range(2):
            failed, beside = serve(engine, [[*prefix, bad, 12, 13], other])
            assert failed == ([], "failed")
            assert beside == want[1]
        assert serve(engine, [good, other]) == want


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_what_float16_cannot_hold_fails_a_request_and_is_not_cut_off(
    dtype: str, tmp_path: Path, kernel_cache: Path
) -> None:
    """The activation between the halves of an MLP is too large for float16 after one token, and for nothing else."""
    model = make_tiny_model(tmp_path / "model", "llama", num_hidden_layers=2)
    weights = load_file(model / "model.safetensors")
    # The token's direction alone makes large sums.
    large = torch.zeros(60)
    large[7] = 1.0
    embedding = weights["model.embed_tokens.weight"]
    embedding[:, 7] = 0.0
    embedding[INFINITE] = 8.0 * large
    for part in ("gate", "up"):
        weights[f"model.layers.0.mlp.{part}_proj.weight"][:, 7] = 200.0
    weights["model.layers.0.self_attn.o_proj.weight"][7] = 0.0
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    ladder = "prefill=[1,4]x[32],decode=[1,4]x[64]"
    artifact = compile_tiny(model, tmp_path / "artifact", kernel_cache, buckets=ladder, dtype=dtype, block_size=16)
    good, bad = random_ids(6, 20, NAN), [*random_ids(5, 9, NAN), INFINITE]
    with Engine(artifact, num_threads=2, num_blocks=40) as engine:
        failed, beside = serve(engine, [bad, good])
    assert beside[1] == "finished"
    assert failed[1] == ("failed" if dtype == "f16" else "finished")
