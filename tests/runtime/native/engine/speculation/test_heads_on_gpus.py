"""Heads on devices of GPUs: hidden states go from the model to the host, and from there to the head."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llmc.compiler.config import CompileConfig
from llmc.compiler.drafting_heads import compile_with_head
from llmc.runtime.binding import Artifact, Engine, Replayer

from support.compiled import Pages, compile_tiny, replay
from support.cuda import Stub, fake_nvcc, kernels_on_host, stub_library
from support.eagle3_heads import ReferenceEagle3, make_eagle3
from support.engine_driver import bits, drive, random_ids
from support.families import CASES
from support.head_runs import check_guesses, left_states, mixed_requests
from support.late_arrivals import fail_by_chance
from support.mtp_heads import ReferenceMtp, add_mtp
from support.opencl import needs_opencl, program_cache
from support.tiny_models import make_tiny_model

pytestmark = pytest.mark.native
OPTIONS: dict[str, Any] = {
    "dtype": "f32", "block_size": 16, "buckets": "prefill=[1]x[8,64],decode=[1,4,8]x[128],mixed=[4]x[24]",
}  # fmt: skip
READ = (0, 1, 3)


@dataclass(frozen=True)
class Pair:
    """A model, the artifact whose graphs leave states, and that of the head. width: numbers of a state."""

    model: Path
    leaving: Path
    head: Path
    definition: ReferenceEagle3 | ReferenceMtp
    width: int

    @property
    def liked(self) -> dict[int, float]:
        """A head of random weights is right now and then only where few tokens are likely."""
        found = self.definition
        if not isinstance(found, ReferenceEagle3):
            return {3: 9.0, 20: 9.0, 71: 9.0}
        tokens = torch.arange(200) + found.weights["d2t"]
        return {int(token): 9.0 for token in tokens[::60]}

    def states_of(self, tokens: list[int]) -> torch.Tensor:
        found = self.definition
        return found.joined(tokens) if isinstance(found, ReferenceEagle3) else found.of_model(tokens)


def compiled_pair(root: Path, kind: str, target: str, cache: Path, **fields: Any) -> Pair:
    """kind: "mtp", the layer of a model; or "eagle3", a head of other sizes and of few tokens."""
    family, own = CASES["mimo" if kind == "mtp" else "llama"]
    model = make_tiny_model(root / "model", family, **{**own, **fields})
    head = None
    if kind == "mtp":
        add_mtp(model)
    else:
        head = make_eagle3(root / "head", model, hidden=48, eagle_aux_hidden_state_layer_ids=READ)
    config = CompileConfig(
        model, root / "out.llmc", target=target, cache_dir=cache, jobs=1, tokenizer="none", **OPTIONS
    )
    _, report = compile_with_head(config, head)
    if head is None:
        return Pair(model, config.output, report.artifact, ReferenceMtp(model), 60)
    return Pair(model, config.output, report.artifact, ReferenceEagle3(head, model, READ), 48)


def check_numbers(pair: Pair, **options: Any) -> None:
    """Of two steps of the head, the first is given zeros as states, and the second what the first has left."""
    tokens, pages, states = random_ids(3, 8), Pages(8, 16), torch.zeros(8, pair.width)
    with Artifact(pair.head) as head, Replayer(head, num_blocks=8, **options) as replayer:
        first = replay(replayer, 0, pages, [(0, tokens[:4], 0)])
        second = replay(replayer, 0, pages, [(0, tokens[4:], 4)])
    states[4:] = pair.definition.states(tokens[:4], states[:4])
    expected = pair.definition.logits(pair.definition.states(tokens, states))
    np.testing.assert_allclose(first[0], expected[3], atol=1e-3, rtol=0)
    np.testing.assert_allclose(second[0], expected[7], atol=1e-3, rtol=0)
    with Artifact(pair.leaving) as leaving:
        found = left_states(leaving, 0, tokens, pair.width, **options)
    np.testing.assert_allclose(found, pair.states_of(tokens), atol=1e-3, rtol=0)


def check_bits(pair: Pair, plain: Artifact, count: int, **options: Any) -> None:
    """Guesses change none: the plain run is of a model that leaves no states."""
    requests, found = mixed_requests(pair.liked)[:count], []
    with Artifact(pair.leaving) as leaving, Artifact(pair.head) as head:
        guesses: dict[str, Any] = {"draft": head, "speculate_tokens": 3, "speculate_always": 1}
        for artifact, more in ((plain, {}), (leaving, guesses), (leaving, {**guesses, "eager": True})):
            with Engine(artifact, max_num_seqs=4, num_blocks=9, **options, **more) as engine:
                found.append([[bits(o) for o in of] for of in drive(engine, requests)])
                if more:
                    assert 0 < engine.stats.accepted_tokens < engine.stats.drafted_tokens
    assert found[0] == found[1] == found[2]


@pytest.fixture(scope="module", params=["eagle3", "mtp"])
def pair(request: pytest.FixtureRequest, kernel_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return compiled_pair(tmp_path_factory.mktemp("heads"), request.param, "opencl", kernel_cache)


@needs_opencl
def test_a_head_on_opencl(pair: Pair, kernel_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    options = {"num_threads": 0, "program_cache": program_cache(tmp_path_factory)}
    check_numbers(pair, **options)
    built = compile_tiny(pair.model, pair.model.parent / "plain", kernel_cache, target="opencl", **OPTIONS)
    with built as plain:
        check_bits(pair, plain, 6, **options)
    with Artifact(pair.leaving) as leaving, Artifact(pair.head) as head:
        check_guesses(leaving, head, pair.definition, pair.states_of, pair.liked, 515, **options)


@pytest.fixture(scope="module")
def on_cuda(kernel_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Pair, Artifact, Path]]:
    """A pair of one layer each, the model without states, and where the stub and the kernels are."""
    root = tmp_path_factory.mktemp("cuda")
    with fake_nvcc(tmp_path_factory.mktemp("nvcc")):
        pair = compiled_pair(root, "mtp", "cuda:sm_80", kernel_cache, num_hidden_layers=1)
        plain = compile_tiny(pair.model, root / "plain", kernel_cache, target="cuda:sm_80", **OPTIONS)
    stub_library(root)
    kernels_on_host(pair.leaving, root, pair.head, root / "plain")
    with plain:
        yield pair, plain, root


def test_a_head_on_cuda(on_cuda: tuple[Pair, Artifact, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call of the driver is checked. Some fail by chance: what was answered until then has its bits."""
    pair, plain, root = on_cuda
    monkeypatch.setenv("STUB_CUDA_KERNELS", str(root / "kernels.so"))
    monkeypatch.setenv("LLMC_CUDA_LIBRARY", str(root / "libstub_cuda.so"))
    stub = Stub(root / "libstub_cuda.so")
    check_numbers(pair)
    check_bits(pair, plain, 2)
    requests = [(prompt, params, 0) for prompt, params in mixed_requests(pair.liked)[:4]]
    with Engine(plain, num_blocks=20) as engine:
        alone = [[bits(o) for o in drive(engine, [(prompt, params)])[0]] for prompt, params, _ in requests]
    with (
        Artifact(pair.leaving) as leaving,
        Artifact(pair.head) as head,
        Engine(leaving, num_blocks=9, draft=head, speculate_tokens=3, speculate_always=1) as engine,
    ):
        reasons = fail_by_chance(engine, requests, alone, partial(monkeypatch.setenv, "STUB_CUDA"), one_in=150)
    assert {"error", "length"} <= set(reasons)
    assert stub.num_failed() > 3
    assert stub.report() == ""
    stub.recover()
