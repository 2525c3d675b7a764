"""The reference target: models against transformers and against what their quantized weights stand for, its functions
against numpy, its promises, and that another architecture's code comes out of the same kernels."""

from __future__ import annotations

import ctypes
import json
import math
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llmc.buckets import Bucket
from llmc.compiler.config import CompileConfig, CompileError
from llmc.compiler.extend import add_buckets
from llmc.compiler.kernel_spec import KernelSpec, KernelSpecError
from llmc.compiler.ops.registry import OPS
from llmc.compiler.pipeline import compile_model
from llmc.compiler.targets.elf.codegen import compile_object
from llmc.compiler.targets.reference.backend import _MACHINES, named, names
from llmc.compiler.targets.reference.kernels import functions
from llmc.compiler.targets.reference.kernels.frame import Frame
from llmc.compiler.targets.reference.kernels.registry import KERNELS
from llmc.graphs_format import COLLECTIVES
from llmc.models import registry
from llmc.models.activations import activated
from llmc.models.convert import DTYPES
from llmc.runtime.binding import Artifact
from llmc.runtime.graphs_file import read_graphs

from support.compiled import check_every_bucket, compile_tiny, random_tokens
from support.marks import rare
from support.parity import FAMILIES, LADDER, check_bits, reference_logits
from support.quantized_model import LADDER as QUANT_LADDER
from support.quantized_model import REQUESTS, assert_company_changes_no_bit, logits_error, make_model
from support.quirky_model import LADDER as GENERIC_LADDER
from support.quirky_model import Quirky, checkpoint, eager_logits, family
from support.tiny_models import make_tiny_model
from support.verified import Claim, verifies

REFERENCE = named("reference")
HERE = REFERENCE.runs_here()
pytestmark = pytest.mark.skipif(not HERE, reason="the reference target's code is of another architecture")


@verifies(lambda name, dtype: [Claim(FAMILIES[name][0], dtype=dtype, target="reference")])
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        (pytest.param if dtype in ("f32", ("bf16", "f16")[place % 2]) else rare)(name, dtype)
        for place, name in enumerate(FAMILIES)
        for dtype in ("f32", "bf16", "f16")
    ],
)
def test_every_family_matches_transformers(name: str, dtype: str, tmp_path: Path, kernel_cache: Path) -> None:
    kind, overrides = FAMILIES[name]
    model = make_tiny_model(tmp_path / "model", kind, **overrides)
    artifact = compile_tiny(model, tmp_path / "out", kernel_cache, buckets=LADDER, dtype=dtype, target="reference")
    tokens = random_tokens(artifact.info.vocab_size, 48)
    expected = reference_logits(model, tokens)
    if dtype == "f32":
        check_every_bucket(artifact, tokens, expected)
    else:
        check_every_bucket(artifact, tokens, expected, {"bf16": 4e-2, "f16": 5e-3}[dtype])
    check_bits(artifact)


@verifies(lambda name, dtype: [Claim("qwen2", dtype=dtype, scheme=REQUESTS[name].scheme, target="reference")])
@pytest.mark.parametrize("name", list(REQUESTS))
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
def test_every_scheme_matches_the_dequantized_model(name: str, dtype: str, tmp_path: Path, kernel_cache: Path) -> None:
    model, config = make_model(tmp_path / "model", name), REQUESTS[name]
    artifact = compile_tiny(
        model, tmp_path / "out", kernel_cache, buckets=QUANT_LADDER, dtype=dtype, quant=config, target="reference"
    )
    # Int8 activations that lie between two numbers may round either way, and weights that are rounded beforehand, too;
    # bf16 keeps 8 bits of mantissa, float16 11.
    bounds = {"f32": 2e-2, "bf16": 4e-2, "f16": 4e-2} if "a8" in name else {"f32": 1e-4, "bf16": 4e-2, "f16": 5e-3}
    bound = bounds[dtype]
    assert logits_error(model, config, artifact) <= bound
    assert_company_changes_no_bit(artifact)


def test_generic_ops_match_eager(tmp_path: Path, quirky_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.FAMILIES, "quirky", family(Quirky))
    model = checkpoint(tmp_path / "model")
    artifact = compile_tiny(
        model, tmp_path / "out", quirky_cache, buckets=GENERIC_LADDER, dtype="f32", target="reference"
    )
    tokens = random_tokens(artifact.info.vocab_size)
    check_every_bucket(artifact, tokens, eager_logits(model, tokens, "f32"))


def test_every_op_has_a_plain_kernel() -> None:
    # One kernel computes a linear layer with and without an activation; `fused` is what generic ops become; the ops of
    # experts and of adapters have several kernels; what ranks do together is no kernel.
    own = {name for name, op in OPS.items() if "reference" not in op.templates and name not in COLLECTIVES}
    of_several = {name for name in KERNELS if name.startswith(("expert_", "adapter_"))}
    assert of_several
    of_linear = {"gated_linear", "gated_linear_quant", "activated_linear", "activated_linear_quant"}
    assert KERNELS.keys() - of_several - {"fused"} == own - of_linear - {"experts"}


def compiled_function(function: Callable[[Any], Any], folder: Path) -> Callable[[np.ndarray], np.ndarray]:
    """A function of functions.py, for float32 arrays."""
    with Frame("f", {"x": "f32", "out": "f32"}) as k, k.share(k.scalar(0)) as i:
        k.store("out", function(k.raw("x", i)), i)
    REFERENCE.link([compile_object(k.function(), "x86_64-unknown-linux-gnu", "x86-64")], folder / "f.so")
    call = ctypes.CDLL(str(folder / "f.so")).f

    def run(x: np.ndarray) -> np.ndarray:
        out = np.empty_like(x)
        scalars = np.full(8, len(x), np.int64)
        call(*(ctypes.c_void_p(array.ctypes.data) for array in (x, out, scalars)), 0, 1)
        return out

    return run


def converter(dtype: str, *, widens: bool, folder: Path) -> Callable[[np.ndarray], np.ndarray]:
    """What plain kernels do where a 16-bit float is read, or written."""
    kinds = {"x": dtype if widens else "f32", "out": "f32" if widens else dtype}
    with Frame("f", kinds) as k, k.share(k.scalar(0)) as i:
        k.store("out", k.load("x", i), i)
    for machine in ("x86_64", "aarch64") if shutil.which("aarch64-linux-gnu-gcc") else ("x86_64",):
        target = next(target for name in names() if (target := named(name)).machine == machine)
        # Refuses code that calls a library's conversion.
        target.link([compile_object(k.function(), *_MACHINES[machine])], folder / f"{machine}.so")
    call = ctypes.CDLL(str(folder / "x86_64.so")).f

    def run(x: np.ndarray) -> np.ndarray:
        out = np.empty(x.shape, np.float32 if widens else np.uint16)
        call(*(ctypes.c_void_p(a.ctypes.data) for a in (x, out, np.full(8, len(x), np.int64))), 0, 1)
        return out

    return run


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_16_bit_floats_are_converted_by_integers(dtype: str, tmp_path: Path) -> None:
    """Every one of them to float32 and back; between each two neighbours the tie, and what is beside it."""
    every = np.arange(1 << 16).astype(np.uint16)
    wide = converter(dtype, widens=True, folder=tmp_path)(every)
    expected = every.view(DTYPES[dtype]).astype(np.float32)
    nan = np.isnan(expected)
    assert (np.isnan(wide) == nan).all()
    assert (wide[~nan].view(np.uint32) == expected[~nan].view(np.uint32)).all()
    (tmp_path / "narrow").mkdir()
    narrow = converter(dtype, widens=False, folder=tmp_path / "narrow")
    finite = np.sort(expected[np.isfinite(expected)].astype(np.float64))
    ties = ((finite[:-1] + finite[1:]) / 2).astype(np.float32)
    largest = np.float32(finite[-1] + (finite[-1] - finite[-2]) / 2)
    x = np.concatenate(
        [wide[~nan], ties, [largest, -largest], np.array([3.4e38, -3.4e38, 1e-45, 0, np.inf], np.float32)]
    )
    x = np.concatenate([x, np.nextafter(x, np.float32(np.inf)), np.nextafter(x, np.float32(-np.inf))])
    with np.errstate(over="ignore"):
        assert (narrow(x) == x.astype(DTYPES[dtype]).view(np.uint16)).all()
    odd = np.array([0x7FC00000, 0x7F800001, 0xFFFFFFFF, 0x7F802000], np.uint32).view(np.float32)
    assert np.isnan(narrow(odd).view(DTYPES[dtype]).astype(np.float32)).all()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("exp", np.exp),
        ("log", np.log),
        ("tanh", np.tanh),
        ("sigmoid", lambda x: 1 / (1 + np.exp(-x))),
        ("erf", np.vectorize(math.erf)),
        ("nearest", np.rint),
        ("floor", np.floor),
        ("ceil", np.ceil),
    ],
)
def test_functions_are_exact_to_a_unit(name: str, expected: Callable[[Any], Any], tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    whole = [0.0, -0.0, 1.0, -1.0, 0.5, 1.5, 2.5, -2.5, 87.0, -87.0]
    special = [*whole, 1e-8, -1e-8, 1e30, -1e30, np.inf, -np.inf, np.nan]
    spread = rng.standard_normal(20_000) * 10.0 ** rng.integers(-6, 2, 20_000)
    x = np.concatenate([np.array(special), spread]).astype(np.float32)
    found = compiled_function(getattr(functions, name), tmp_path)(x)
    with np.errstate(all="ignore"):
        wanted = expected(x.astype(np.float64)).astype(np.float32)
        # Smaller than the smallest normal float32 is as good as nothing.
        error = np.abs(found.astype(np.float64) - wanted) / np.maximum(np.spacing(np.abs(wanted)), 1.2e-38)
    same = (found == wanted) | (np.isnan(found) & np.isnan(wanted))
    assert (same | (error <= 1)).all(), x[~(same | (error <= 1))][:5]


@pytest.mark.parametrize("name", sorted(functions.ACTIVATIONS))
def test_activations_equal_torch_in_float64(name: str, tmp_path: Path) -> None:
    x = np.concatenate([np.linspace(-12, 12, 4001), [-1e18, 1e18, 0.0, -0.0, 1e-8, np.nan]]).astype(np.float32)
    found = compiled_function(functions.ACTIVATIONS[name], tmp_path)(x)
    wanted = activated(torch.from_numpy(x).double(), name).numpy()
    # 1 + erf, and 1 + tanh of a float64, cancel near -1.
    np.testing.assert_allclose(found, wanted, rtol=2e-6, atol=4e-7 if name == "gelu" else 1e-14)


def test_an_artifact_says_what_it_is_for_and_grows(tmp_path: Path, kernel_cache: Path) -> None:
    model = make_tiny_model(tmp_path / "model", "llama")
    ladder = "prefill=[1]x[16],decode=[2]x[64]"
    compile_tiny(model, tmp_path / "out", kernel_cache, buckets=ladder, target="reference")
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["target"] == {"kind": "reference", "name": "reference", "machine": "x86_64"}
    assert read_graphs(tmp_path / "out").target.level == 0

    assert add_buckets(tmp_path / "out", [Bucket("decode", 1, 64)], cache_dir=kernel_cache).added == ("decode:1x64",)
    with Artifact(tmp_path / "out") as artifact:
        assert len(artifact.graphs()) == 3


def test_nothing_is_tuned(tmp_path: Path, kernel_cache: Path) -> None:
    model = make_tiny_model(tmp_path / "model", "llama")
    config = CompileConfig(model, tmp_path / "out", target="reference", cache_dir=kernel_cache, tune_for={"cpu": "x"})
    with pytest.raises(CompileError, match=r"one schedule.*leave out --tune"):
        compile_model(config)
    with pytest.raises(KernelSpecError, match="one schedule"):
        REFERENCE.compile(KernelSpec.of("gather", "gather_rows", dim=4), "{}")


# The first bytes of an ELF file: magic, then the machine at 18.
@pytest.mark.parametrize(("name", "machine"), [("reference", 62), ("reference-aarch64", 183)])
def test_the_same_kernels_are_code_for_another_architecture(name: str, machine: int) -> None:
    code = named(name).compile(KernelSpec.of("gather", "gather_rows", dim=7), None)
    assert code[:4] == b"\x7fELF"
    assert int.from_bytes(code[18:20], "little") == machine


_RUN = """
#include <stdint.h>
#include <stdio.h>
void KERNEL(void *x, void *weight, void *out, const int64_t *scalars, int32_t task, int32_t num_tasks);
int main(void) {
  float x[3 * 20], weight[20], out[3 * 20];
  int64_t scalars[8] = {3};
  for (int i = 0; i < 60; ++i) x[i] = (float)(i % 7) - 2.5f;
  for (int i = 0; i < 20; ++i) weight[i] = 1.0f + (float)i / 16;
  KERNEL(x, weight, out, scalars, 0, 1);
  for (int i = 0; i < 60; ++i) printf("%a\\n", out[i]);
}
"""


def test_code_for_another_architecture_runs_there(tmp_path: Path) -> None:
    compiler, emulator = shutil.which("aarch64-linux-gnu-gcc"), shutil.which("qemu-aarch64")
    if compiler is None or emulator is None:
        pytest.skip("needs aarch64-linux-gnu-gcc and qemu-aarch64")
    spec = KernelSpec.of("norm", "rms_norm", dim=20, eps=1e-6, act_dtype="f32", rows=0)
    found = []
    for name, cc, run in (("reference", "cc", []), ("reference-aarch64", compiler, [emulator])):
        (tmp_path / "k.o").write_bytes(named(name).compile(spec, None))
        (tmp_path / "main.c").write_text(_RUN.replace("KERNEL", spec.symbol()))
        subprocess.run([cc, "-static", "main.c", "k.o", "-o", "run"], cwd=tmp_path, check=True)
        printed = subprocess.run([*run, "./run"], cwd=tmp_path, check=True, capture_output=True, text=True).stdout
        found.append(np.array([float.fromhex(line) for line in printed.split()]))
    assert len(found[0]) == 60
    # Products may be contracted with sums on one of them.
    np.testing.assert_allclose(found[0], found[1], rtol=1e-6)
