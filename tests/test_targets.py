"""The same model on other instruction set levels than this machine's best."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from compiled import Pages, compile_tiny, replay
from tiny_models import make_tiny_model

from llmc.compiler.config import CompileConfig
from llmc.compiler.pipeline import compile_model
from llmc.compiler.targets.cpu import native_target
from llmc.runtime.binding import Artifact, Engine, LlmcError, Replayer

LADDER = "prefill=[4]x[12],decode=[4]x[64]"  # one row tile, so few kernels
AVX512_BF16_LEVEL = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), "qwen3", head_dim=24)


@pytest.fixture(scope="module")
def text() -> list[int]:
    return [int(t) for t in np.random.default_rng(2).integers(3, 515, 40)]


def disassembly(library: Path) -> str:
    tool = shutil.which("objdump") or shutil.which("llvm-objdump")
    if tool is None:
        pytest.skip("no objdump")
    return subprocess.run([tool, "-d", str(library)], check=True, capture_output=True, text=True).stdout


# float32 differs by rounding only. bf16 keeps 8 bits of mantissa: weights and activations round by up to 2^-9 each,
# through 3 layers.
@pytest.mark.parametrize(("dtype", "bound"), [("f32", 1e-4), ("bf16", 3e-2)])
def test_x86_64_v3(dtype: str, bound: float, model: Path, text: list[int], tmp_path: Path) -> None:
    artifact = compile_tiny(
        model, tmp_path / "out", tmp_path / "cache", buckets=LADDER, dtype=dtype, target="x86-64-v3"
    )
    assert artifact.info.isa_level == 1
    reference = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        expected = reference(torch.tensor([text])).logits[0].numpy()
    graphs = {graph.phase: index for index, graph in enumerate(artifact.graphs())}
    replayer = Replayer(artifact, num_threads=2, num_blocks=16)
    pages = Pages(16, artifact.info.block_size)
    # Two prompts ragged in one graph, then a token of each, then the rest of the first in one chunk.
    rows = list(replay(replayer, graphs["prefill"], pages, [(0, text[:17], 0), (1, text[:9], 0)]))
    rows += list(replay(replayer, graphs["decode"], pages, [(0, text[17:18], 17), (1, text[9:10], 9)]))
    rows += list(replay(replayer, graphs["prefill"], pages, [(0, text[18:], 18)]))
    wanted = expected[[16, 8, 17, 9, 39]]
    assert np.abs(np.array(rows) - wanted).max() / np.abs(wanted).max() < bound
    code = disassembly(tmp_path / "out" / "kernels.so")
    assert re.search(r"\bvfn?madd\d+ps\b", code)
    assert "%zmm" not in code
    assert "%k1" not in code
    if dtype == "f32":
        with Engine(artifact, num_threads=2) as engine:
            engine.submit(text[:9], temperature=0.0, max_tokens=40, ignore_eos=True)
            while engine.step():
                pass
            ids = [event.token_id for event in engine.poll() if event.kind == "token"]
        with torch.no_grad():
            best = reference(torch.tensor([text[:9] + ids])).logits[0].argmax(-1)
        assert ids == best[8:-1].tolist()


@pytest.mark.skipif(native_target().isa_level >= AVX512_BF16_LEVEL, reason="this CPU has it: other tests run it")
def test_avx512_bf16_is_compiled_and_refused(model: Path, tmp_path: Path) -> None:
    report = compile_model(
        CompileConfig(
            model=model,
            output=tmp_path / "out",
            cache_dir=tmp_path / "cache",
            buckets="prefill=[1]x[1],decode=[1]x[64]",
            dtype="bf16",
            target="znver4",
        )
    )
    assert report.target == "znver4"
    assert "vdpbf16ps" in disassembly(tmp_path / "out" / "kernels.so")
    with pytest.raises(LlmcError, match="this CPU has") as caught:
        Artifact(tmp_path / "out")
    assert caught.value.name == "unsupported_isa"
    assert "\n" not in str(caught.value)
