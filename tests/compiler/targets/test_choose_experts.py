"""choose_experts: the eager op against torch and transformers, the kernels of every target against the eager op."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

from llmc.compiler.graph.commands import Site
from llmc.compiler.ops.choose import CHOOSE_EXPERTS
from llmc.compiler.ops.definition import NUM_TOKENS, GraphParams
from llmc.compiler.targets.registry import resolve_target
from llmc.models.expert_ops import choose_experts

from support.kernel_harness import Guarded
from support.new_family import targets_here

pytestmark = pytest.mark.native
INF, NAN = float("inf"), float("nan")
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (5, {"top_k": 1}),
    "all": (4, {"top_k": 4, "normalised": True}),
    "scaled": (64, {"top_k": 8, "scale": 2.5}),
    "normalised": (60, {"top_k": 4, "normalised": True, "least_sum": 1e-12, "scale": 0.3}),
    "added": (40, {"top_k": 3, "normalised": True, "added_sum": 0.25, "scale": 1.5}),
    "of-experts": (24, {"top_k": 5, "normalised": True, "expert_scales": torch.linspace(0.5, 2.0, 24)}),
    "best-groups": (24, {"top_k": 3, "groups": 4, "top_groups": 2}),
    "best-two-of-groups": (32, {"top_k": 8, "groups": 8, "top_groups": 4, "best_of_group": 2, "normalised": True}),
}


def split(chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids, and weights."""
    ids, bits = chosen.chunk(2, dim=-1)
    return ids, bits.contiguous().view(torch.float32)


def test_of_equal_ones_the_first_is_chosen_first() -> None:
    choice = torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0], [0.0, -0.0, -1.0, 0.0, -INF], [NAN, 1.0, INF, NAN, 0.0]])
    ids, weights = split(choose_experts(choice, torch.arange(15.0).view(3, 5), 4))
    assert ids.tolist() == [[1, 2, 4, 3], [0, 1, 3, 2], [0, 3, 2, 1]]
    assert weights.tolist() == [[1, 2, 4, 3], [5, 6, 8, 7], [10, 13, 12, 11]]


def test_as_topk_where_no_two_are_equal() -> None:
    choice = torch.randn((200, 64), generator=torch.Generator().manual_seed(0))
    ids, weights = split(choose_experts(choice, choice.softmax(-1), 8))
    expected = choice.softmax(-1).topk(8)
    assert torch.equal(ids.long(), expected.indices)
    assert torch.equal(weights, expected.values)


@pytest.mark.parametrize(("groups", "top_groups"), [(1, 1), (8, 4)])
def test_as_the_router_of_transformers(groups: int, top_groups: int) -> None:
    config = DeepseekV3Config(
        hidden_size=24, n_routed_experts=32, num_experts_per_tok=6, n_group=groups, topk_group=top_groups
    )
    router, generator = DeepseekV3TopkRouter(config), torch.Generator().manual_seed(1)
    with torch.no_grad():
        router.weight.normal_(generator=generator)
        router.e_score_correction_bias.normal_(std=0.3, generator=generator)
        x = torch.randn((300, 24), generator=generator)
        logits, expected_weights, expected = router(x)
    scores = logits.sigmoid()
    ids, weights = split(
        choose_experts(
            scores + router.e_score_correction_bias,
            scores,
            6,
            groups=groups,
            top_groups=top_groups,
            best_of_group=2,
            normalised=True,
            least_sum=1e-20,
            scale=config.routed_scaling_factor,
        )
    )
    order, expected_order = ids.argsort(-1), expected.argsort(-1)
    assert torch.equal(ids.gather(1, order).long(), expected.gather(1, expected_order))
    torch.testing.assert_close(weights.gather(1, order), expected_weights.gather(1, expected_order))


@pytest.mark.parametrize("case", CASES)
def test_kernels(case: str, tmp_path: Path) -> None:
    experts, values = CASES[case]
    rng = np.random.default_rng(experts)
    # Few different numbers, so that many are equal.
    choice = rng.integers(-4, 4, (19, experts)).astype(np.float32) / 3
    choice[3], choice[4] = -0.0, -np.inf
    choice[5, ::2] = np.nan
    scores = rng.uniform(0.1, 1, choice.shape).astype(np.float32)
    defaults = {"groups": 1, "top_groups": 1, "best_of_group": 1, "normalised": False, "least_sum": 0.0, "scale": 1.0}
    defaults["added_sum"] = 0.0
    expected_ids, expected = split(choose_experts(torch.from_numpy(choice), torch.from_numpy(scores), **values))
    for target in targets_here():
        found, path = resolve_target(target), tmp_path / f"{target}.so"
        shape = found.graph_shape(len(choice), len(choice), 64, 64, 16)
        given = {"expert_scales": values["expert_scales"].numpy()} if "expert_scales" in values else {}
        attributes = {**defaults, **{name: value for name, value in values.items() if name not in given}}
        sizes = {"widths": {"choice": experts}, "on_samples": False}
        site = Site("choose_experts", {**attributes, **sizes}, tuple(given))
        (call,) = CHOOSE_EXPERTS.kernels(site, GraphParams(found, shape, 64, "f32", "f32", 16))
        found.link([found.compile(call.spec, None)], path)
        function = ctypes.CDLL(str(path))[call.spec.symbol()]
        function.restype = None
        for rows, num_tasks in ((19, 1), (19, 3), (7, 40)):
            arrays: dict[str, NDArray[Any]] = {
                "choice": choice,
                "scores": scores,
                **given,
                "out": np.full((19, 2 * values["top_k"]), -1, np.int32),
            }
            buffers = {name: Guarded(array) for name, array in arrays.items()}
            places = [ctypes.c_void_p(buffers[name].address) for name in call.buffers]
            scalars = (ctypes.c_int64 * 8)()
            scalars[NUM_TOKENS] = rows
            for task in reversed(range(num_tasks)):
                function(*places, scalars, ctypes.c_int32(task), ctypes.c_int32(num_tasks))
            for name, buffer in buffers.items():
                buffer.check(name)
                assert name == "out" or buffer.array.tobytes() == arrays[name].tobytes()
            ids, weights = split(torch.from_numpy(buffers["out"].array.copy()))
            # How good a group is whose experts are no finite numbers is not said; the choice is one all the same.
            said = [row for row in range(rows) if values.get("groups", 1) == 1 or row not in (4, 5)]
            assert torch.equal(ids[said], expected_ids[said])
            torch.testing.assert_close(weights[said], expected[said], rtol=1e-6, atol=0)
            assert all(len(set(row) & set(range(experts))) == values["top_k"] for row in ids[:rows].tolist())
            assert (buffers["out"].array[rows:] == -1).all()
