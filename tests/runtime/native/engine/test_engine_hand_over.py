"""KV blocks that one engine computes and another one uses: the same bits, also from an artifact with other buckets."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmc.compiler.config import CompileConfig
from llmc.compiler.resolve import resolve
from llmc.compiler.store import described
from llmc.manifest import NAME as MANIFEST
from llmc.manifest import OWN_SUM, read_manifest, write_manifest
from llmc.quantize import QuantConfig
from llmc.runtime.binding import Artifact, Engine, LlmcError
from llmc.runtime.binding.hand_over import HEADER_BYTES, HandedBlocks, HandedText
from llmc.runtime.server.hand_over import kv_identity

from support.compiled import compile_tiny
from support.engine_driver import bits, drive, greedy, random_ids

PREFILL, DECODE = "prefill=[1]x[64],decode=[1]x[128]", "prefill=[1]x[16],decode=[1,4]x[128]"
OPTIONS: dict[str, Any] = {"dtype": "bf16", "block_size": 16, "max_num_seqs": 4, "max_model_len": 128}


@pytest.fixture(scope="module")
def artifacts(
    llama: tuple[Path, Artifact], tmp_path_factory: pytest.TempPathFactory, kernel_cache: Path
) -> tuple[Artifact, Artifact]:
    """For prefill, and for decode."""
    root = tmp_path_factory.mktemp("roles")
    first, second = (
        compile_tiny(llama[0], root / name, kernel_cache, buckets=buckets, **OPTIONS)
        for name, buckets in (("prefill", PREFILL), ("decode", DECODE))
    )
    return first, second


def sealed(text: HandedText, first_block: int, max_bytes: int = 2**62) -> HandedBlocks:
    part = text.export(first_block, max_bytes)
    text.seal(part)
    return part


def entered(text: HandedText, data: memoryview) -> int:
    text.check(data)
    return text.enter(data)


@pytest.mark.native
@pytest.mark.parametrize("threads", [1, 2])
def test_blocks_of_a_prefill_artifact_give_the_same_bits(artifacts: tuple[Artifact, Artifact], threads: int) -> None:
    of_prefill, of_decode = artifacts
    assert kv_identity(of_prefill.path) == kv_identity(of_decode.path)
    prompt = random_ids(5, 90)
    request = (prompt, greedy(12, num_logprobs=2))
    with (
        Engine(of_prefill, num_threads=1, num_blocks=32) as first,
        Engine(of_decode, num_threads=threads, num_blocks=32) as second,
        Engine(of_decode, num_threads=1, num_blocks=32, prefix_cache=0) as alone,
    ):
        drive(first, [(prompt[:80], greedy(1))])
        given, taken = HandedText(first, prompt), HandedText(second, prompt)
        assert given.num_cached() == 5
        least = HEADER_BYTES + first.handed_block_bytes
        parts = [sealed(given, block, max_bytes=2 * least) for block in (0, 2, 4)]
        assert [part.num_blocks for part in parts] == [2, 2, 1]
        assert [entered(taken, part.data) for part in parts] == [2, 4, 5]
        assert entered(taken, parts[0].data) == 2
        steps = second.stats.num_prefill_steps
        (found,), (wanted,) = drive(second, [request]), drive(alone, [request])
        assert found[0].num_cached == 80
        assert second.stats.num_prefill_steps - steps == 1
        assert [bits(one) for one in found] == [bits(one) for one in wanted]
        assert given.export(5).num_blocks == 0


@pytest.mark.parametrize(
    ("changes", "same"),
    [
        ({"buckets": DECODE}, True),
        ({"quant": QuantConfig("w8a16")}, False),
        ({"kv_dtype": "bf16"}, False),
        ({"block_size": 32}, False),
        ({"target": "opencl"}, False),
    ],
)
def test_artifacts_with_other_keys_have_another_identity(
    changes: dict[str, Any], same: bool, llama: tuple[Path, Artifact], tmp_path: Path
) -> None:
    """Also where the bytes of their weights are equal, as those of w8a8 and w8a16 in rows."""
    common = {"buckets": PREFILL, "quant": QuantConfig("w8a8"), "target": "reference", **OPTIONS, "dtype": "f32"}
    identities = []
    for name, given in (("one", common), ("other", {**common, **changes})):
        resolved = resolve(CompileConfig(llama[0], tmp_path / name, **given))
        (tmp_path / name).mkdir()
        write_manifest(tmp_path / name / MANIFEST, described.settings(resolved))
        identities.append(kv_identity(tmp_path / name))
    assert (identities[0] == identities[1]) == same


def test_artifacts_of_other_kernels_have_another_identity(artifacts: tuple[Artifact, Artifact], tmp_path: Path) -> None:
    """Made by the same version of llmc, as between two releases."""
    manifest = read_manifest(artifacts[0].path)
    manifest.pop(OWN_SUM)

    def identity(op: str, component: str) -> str:
        kernels = copy.deepcopy(manifest["kernels"])
        kernels.append({**copy.deepcopy(kernels[0]), "op": "merge_attention"})
        changed = [kernel["components"] for kernel in kernels if kernel["op"] == op]
        assert changed
        for components in changed:
            components[component] = "another"
        write_manifest(tmp_path / MANIFEST, {**manifest, "kernels": kernels})
        return kv_identity(tmp_path)

    own = kv_identity(artifacts[0].path)
    assert own not in {identity("linear", "template"), identity("rms_norm", "tvm"), identity("linear", "target")}
    # Shapes and schedules change no bit, and not every ladder has a graph that merges.
    assert own == identity("linear", "params") == identity("linear", "schedule")
    assert own == identity("merge_attention", "template")


@pytest.mark.native
def test_what_is_no_hand_over_changes_nothing(
    artifacts: tuple[Artifact, Artifact], llama: tuple[Path, Artifact]
) -> None:
    of_prefill, of_decode = artifacts
    prompt = random_ids(6, 40)
    rng = np.random.default_rng(3)
    with (
        Engine(of_prefill, num_threads=1, num_blocks=16) as first,
        Engine(of_decode, num_threads=1, num_blocks=16) as second,
        Engine(llama[1], num_threads=1, num_blocks=16) as other,
    ):
        drive(first, [(prompt, greedy(1))])
        data = bytes(sealed(HandedText(first, prompt), 0).data)
        for engine, text, given, word in (
            (other, prompt, data, "artifact"),
            (second, prompt[1:], data, "another text"),
            (second, prompt[:20], data, "reach token"),
            (second, prompt, data[:-1], "damaged"),
            (second, prompt, b"", "damaged"),
            (second, prompt, data.replace(b"LLMCKV02", b"LLMCKV01"), "version"),
        ):
            with pytest.raises(LlmcError, match=word):
                HandedText(engine, text).check(given)
            with pytest.raises(LlmcError, match=word):
                HandedText(engine, text).enter(given)
        taken = HandedText(second, prompt)
        for at in rng.integers(0, len(data), 50):
            damaged = bytearray(data)
            damaged[at] ^= 1 << int(rng.integers(8))
            with pytest.raises(LlmcError):
                taken.check(damaged)
        assert taken.num_cached() == 0
        second.check_integrity()
        with pytest.raises(LlmcError, match="prefix cache"), Engine(of_decode, prefix_cache=0, num_blocks=16) as none:
            HandedText(none, prompt)
        second.close()
        with pytest.raises(ValueError, match="closed"):
            taken.num_cached()
