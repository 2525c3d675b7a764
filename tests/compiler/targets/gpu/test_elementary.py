"""Elementary functions of GPUs, in float32 alone, against torch in float64."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.targets.gpu.cuda import cuda_text
from llmc.compiler.targets.gpu.opencl import OpenClTarget
from llmc.tvm_import import import_tvm

from support.cuda import host_library
from support.tensor_layers import call_kernel

_COUNT = 400_000
_FUNCTIONS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], float, float]] = {
    "exp": (torch.exp, 3.0, 2.0**-149),
    "tanh": (torch.tanh, 8.0, 0.0),
    "erf": (torch.erf, 8.0, 0.0),
    "log": (torch.log, 2.0, 4e-8),
    "sigmoid": (torch.sigmoid, 4.0, 2.0**-126),
}
"""Most error, in units of the last place and beside them."""


def _spec(name: str) -> KernelSpec:
    load, x = ["load", 0, ["x", 0]], [_COUNT]
    program = {
        "inputs": [{"shape": x, "dtype": "f32", "row": True, "packed": False}],
        "stages": [{"shape": x, "extents": [], "reduce": None, "kind": "float", "expr": [name, load]}],
        "outputs": [{"shape": x, "dtype": "f32", "row": True, "packed": False, "stage": 0}],
    }
    return KernelSpec.of("other", "fused", program=json.dumps(program), rows=0)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    texts = [cuda_text(_spec(name)) for name in _FUNCTIONS]
    return ctypes.CDLL(str(host_library(texts, tmp_path_factory.mktemp("k"))))


@pytest.fixture(scope="module")
def numbers() -> np.ndarray:
    """All magnitudes, those where functions change most, and what is no number."""
    random = np.random.default_rng(3)
    bits = random.integers(0, 1 << 32, _COUNT // 2, dtype=np.uint32).view(np.float32)
    near = random.uniform(-20, 20, _COUNT - len(bits) - 200).astype(np.float32)
    around = np.linspace(0.70, 1.42, 190, dtype=np.float32)
    ends = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 88.8, -104.0, 1.0, 2.0**-126, 2.0**-149], np.float32)
    return np.concatenate([bits, near, around, ends])


@pytest.mark.parametrize("name", list(_FUNCTIONS))
def test_errors_are_a_few_units(name: str, library: ctypes.CDLL, numbers: np.ndarray) -> None:
    function, units, beside = _FUNCTIONS[name]
    found = np.zeros_like(numbers)
    call_kernel(library, _spec(name), [numbers.copy(), found], 1, groups=4)
    with np.errstate(all="ignore"):
        subnormal = (numbers > 0) & (numbers < 2.0**-126)
        given = np.where(subnormal, np.float32(0), numbers) if name == "log" else numbers
        wide = function(torch.from_numpy(given).double()).numpy()
        nearest = wide.astype(np.float32)
        ordinary = np.isfinite(nearest) & np.isfinite(found)
        assert (np.isnan(found) == np.isnan(nearest)).all()
        np.testing.assert_array_equal(found[np.isinf(nearest)], nearest[np.isinf(nearest)])
        allowed = units * np.spacing(np.abs(nearest[ordinary]).astype(np.float32)) + beside
        error = np.abs(found[ordinary] - wide[ordinary])
        assert (error <= allowed).all(), (numbers[ordinary][np.argmax(error / allowed)], (error / allowed).max())


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "quick_gelu", "relu2"])
def test_activations(activation: str, tmp_path: Path) -> None:
    import_tvm()
    spec = KernelSpec.of(
        "activation", "activate", dim=2000, act_dtype="f32", activation=activation, gated=False, rows=0
    )
    library = ctypes.CDLL(str(host_library([cuda_text(spec)], tmp_path)))
    x = np.random.default_rng(1).uniform(-12, 12, 2000).astype(np.float32)
    found = np.zeros_like(x)
    call_kernel(library, spec, [x.copy(), found], 1, groups=2)
    wide = torch.from_numpy(x).double()
    expected = {
        "silu": torch.nn.functional.silu(wide),
        "gelu": torch.nn.functional.gelu(wide),
        "gelu_tanh": torch.nn.functional.gelu(wide, approximate="tanh"),
        "quick_gelu": wide * torch.sigmoid(1.702 * wide),
        "relu2": torch.relu(wide) ** 2,
    }[activation]
    np.testing.assert_allclose(found, expected.numpy(), rtol=2e-6, atol=1e-6)
    assert "double" not in OpenClTarget().text(spec)
