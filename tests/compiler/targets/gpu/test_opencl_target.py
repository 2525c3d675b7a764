"""The opencl target on a driver of this machine: models against transformers, the reference target and themselves."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from llmc.compiler.ops.registry import OPS
from llmc.compiler.targets.gpu.kernels.registry import KERNELS
from llmc.compiler.targets.gpu.opencl import NEXT_PROGRAM, PRELUDE
from llmc.compiler.targets.gpu.sampling import STAGES
from llmc.compiler.targets.reference.kernels.registry import KERNELS as PLAIN
from llmc.runtime.binding import Artifact, Replayer
from llmc.runtime.debug.diff import diff_artifacts
from llmc.runtime.graphs_file import read_graphs

from support.compiled import Pages, check_every_bucket, compile_tiny, random_tokens, replay
from support.opencl import needs_opencl
from support.parity import FAMILIES, LADDER, check_bits, reference_logits
from support.quantized_model import LADDER as QUANT_LADDER
from support.quantized_model import REQUESTS, assert_company_changes_no_bit, logits_error, make_model
from support.tiny_models import ModelFields, make_tiny_model

_SMALL = "prefill=[1,2]x[32],decode=[1,3]x[64],mixed=[3]x[16]"


def check_against_reference(
    model: Path, opencl: Path, folder: Path, cache: Path, bound: float, **options: object
) -> None:
    """Tensor by tensor; in float32 the two differ in the last digits."""
    compile_tiny(model, folder / "reference", cache, target="reference", **options).close()
    with Artifact(opencl) as artifact:
        tokens = random_tokens(artifact.info.vocab_size, 20)
    for step in (0, 2):
        found = diff_artifacts(folder / "reference", opencl, tokens, step)
        assert len(found.tensors) > 8
        assert found.first(bound) is None
        assert not found.only_a
        assert not found.only_b


@needs_opencl
def test_a_model_matches_transformers_and_itself(tmp_path: Path, kernel_cache: Path) -> None:
    kind, overrides = FAMILIES["llama-gqa3"]
    model = make_tiny_model(tmp_path / "model", kind, **overrides)
    options = {"buckets": _SMALL, "dtype": "f32"}
    with compile_tiny(model, tmp_path / "out", kernel_cache, target="opencl", **options) as artifact:
        tokens = random_tokens(artifact.info.vocab_size, 48)
        check_every_bucket(artifact, tokens, reference_logits(model, tokens))
        check_bits(artifact)
    check_against_reference(model, tmp_path / "out", tmp_path, kernel_cache, 1e-5, **options)


@needs_opencl
def test_graphs_and_launches_give_the_same_bits(tmp_path: Path, kernel_cache: Path) -> None:
    model = make_tiny_model(tmp_path / "model", "qwen3")
    with compile_tiny(
        model, tmp_path / "out", kernel_cache, buckets="prefill=[1]x[32],decode=[1]x[64]", dtype="bf16", target="opencl"
    ) as artifact:
        tokens, found = random_tokens(artifact.info.vocab_size, 20), []
        for eager in (False, True):
            device, pages = Replayer(artifact, num_blocks=8, eager=eager), Pages(8, artifact.info.block_size)
            found.append(
                [replay(device, 0, pages, [(0, tokens[:19], 0)]), replay(device, 1, pages, [(0, tokens[19:], 19)])]
            )
    assert np.array_equal(np.array(found[0]).view(np.int32), np.array(found[1]).view(np.int32))


@needs_opencl
def test_split_contexts_have_the_bits_of_whole_ones(tmp_path: Path, kernel_cache: Path) -> None:
    """A prompt in one graph that does not split, against chunks and decode steps that do."""
    shape: ModelFields = {
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_hidden_layers": 1,
        "max_position_embeddings": 640,
    }
    model = make_tiny_model(tmp_path / "model", "llama", **shape)
    ladder = "prefill=[1]x[16,320],decode=[1,2]x[320,640],mixed=[2]x[24]"
    options = {"buckets": ladder, "dtype": "bf16", "kv_dtype": "int8", "max_model_len": 640}
    with compile_tiny(model, tmp_path / "out", kernel_cache, target="opencl", **options) as artifact:
        names = [str(graph.bucket) for graph in artifact.graphs()]
        tables = read_graphs(tmp_path / "out")
        merges = {i for i, kernel in enumerate(tables.kernels) if kernel.symbol.startswith("merge_attention")}
        of_graph = {g.name: merges & {command.kernel for command in tables.commands_of(g)} for g in tables.graphs}
        tokens = random_tokens(artifact.info.vocab_size, 300)
        device = Replayer(artifact, num_blocks=60)

        def run(graph: str, begin: int, end: int) -> np.ndarray:
            found: np.ndarray = replay(device, names.index(graph), pages, [(0, tokens[begin:end], begin)])[0]
            return found

        pages = Pages(60, artifact.info.block_size, seed=2)
        whole = run("prefill:1x320", 0, 300)
        run("prefill:1x320", 0, 280)
        run("prefill:1x16", 280, 290)
        run("mixed:2x24", 290, 299)
        found = [run(graph, 299, 300) for graph in names if graph != "prefill:1x320"]
    assert {name for name, used in of_graph.items() if used} == set(names) - {"prefill:1x320"}
    # Partitions of the bucket's longest context, and of the model's.
    assert of_graph["decode:1x320"] == of_graph["decode:2x320"] != of_graph["decode:1x640"] == of_graph["mixed:2x24"]
    assert len(merges) == 2
    for one in found:
        assert np.array_equal(one.view(np.int32), whole.view(np.int32))


@pytest.mark.exhaustive
@needs_opencl
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("name", list(FAMILIES))
def test_every_family_matches_transformers(name: str, dtype: str, tmp_path: Path, kernel_cache: Path) -> None:
    kind, overrides = FAMILIES[name]
    model = make_tiny_model(tmp_path / "model", kind, **overrides)
    options = {"buckets": LADDER, "dtype": dtype}
    bound = {"f32": 1e-4, "bf16": 4e-2, "f16": 5e-3}[dtype]
    with compile_tiny(model, tmp_path / "out", kernel_cache, target="opencl", **options) as artifact:
        tokens = random_tokens(artifact.info.vocab_size, 48)
        check_every_bucket(artifact, tokens, reference_logits(model, tokens), bound)
        check_bits(artifact)
    check_against_reference(model, tmp_path / "out", tmp_path, kernel_cache, bound, **options)


@pytest.mark.exhaustive
@needs_opencl
@pytest.mark.parametrize("name", list(REQUESTS))
def test_every_scheme_matches_the_dequantized_model(name: str, tmp_path: Path, kernel_cache: Path) -> None:
    model, config = make_model(tmp_path / "model", name), REQUESTS[name]
    artifact = compile_tiny(
        model, tmp_path / "out", kernel_cache, buckets=QUANT_LADDER, dtype="f32", quant=config, target="opencl"
    )
    # Int8 activations that lie between two numbers may round either way.
    assert logits_error(model, config, artifact) <= (2e-2 if "a8" in name else 1e-4)
    assert_company_changes_no_bit(artifact)


def test_an_artifact_is_text_that_says_what_it_is_for(tmp_path: Path, kernel_cache: Path) -> None:
    model = make_tiny_model(tmp_path / "model", "llama")
    for name in ("a", "b"):
        compile_tiny(
            model, tmp_path / name, kernel_cache, buckets="prefill=[1]x[16],decode=[1]x[32]", target="opencl"
        ).close()
    tables, text = read_graphs(tmp_path / "a"), (tmp_path / "a" / "kernels.cl").read_text()
    assert (tables.target.kind, tables.target.name, tables.target.level) == ("opencl", "opencl", 1)
    assert text.startswith(PRELUDE)
    assert text == (tmp_path / "b" / "kernels.cl").read_text()
    for kernel in tables.kernels:
        assert text.count(f"void {kernel.symbol}(") == 1
    # A kernel is a program, so that models share what drivers build; those that draw tokens are one.
    *programs, drawing = text.split(NEXT_PROGRAM)
    assert [part.count("__kernel ") for part in (*programs, drawing)] == [1] * len(programs) + [len(STAGES)]
    # No constant is cut to the digits that a decimal has.
    body = "".join(part.removeprefix(PRELUDE) for part in text.split(NEXT_PROGRAM))
    assert "e-" not in body
    assert "e+" not in body


def test_no_kernel_computes_an_op_that_there_is_not() -> None:
    own = KERNELS.keys() - set(STAGES) - {"merge_attention", "rank_sum", "rotated_attention"}
    assert own - PLAIN.keys() <= {op.name for op in OPS.values() if op.templates}
