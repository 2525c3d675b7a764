"""The matrices that a layer gets of an adapter, as FORMAT.md has them."""

from __future__ import annotations

import numpy as np

from llmc.adapter_slot import padded
from llmc.runtime.adapters.peft import LowRank
from llmc.runtime.adapters.places import Place, of_layer, places_of

HEADS, PLAIN, VALUE, LATENT, RANK = 3, 12, 10, 20, 5


def latent_places() -> tuple[Place, ...]:
    """Of the matrix that makes keys and values of latent vectors."""
    of_heads = {"count": HEADS, "rows": PLAIN + VALUE}
    lora = {
        "linears": [
            {"weight": "q", "columns": 7, "parts": [{"module": "q_proj", "rows": 4}]},
            {"weight": "key_up", "columns": PLAIN, "heads": {**of_heads, "first": 0, "own": "a"},
             "parts": [{"module": "kv_b_proj", "rows": LATENT}]},
            {"weight": "value_up", "columns": LATENT, "heads": {**of_heads, "first": PLAIN, "own": "b"},
             "parts": [{"module": "kv_b_proj", "rows": VALUE}]},
        ],
        "orders": [],
    }  # fmt: skip
    return places_of(lora)["kv_b_proj"]


def test_a_module_that_is_split_by_head() -> None:
    """Both layers together are the module: a head's queries by its keys, and its values."""
    rng = np.random.default_rng(1)
    key, value = latent_places()
    assert (key.linear, value.linear) == (1, 2)
    assert key.module_shape == value.module_shape == (HEADS * (PLAIN + VALUE), LATENT)
    a, b = rng.standard_normal((RANK, LATENT)), rng.standard_normal((HEADS * (PLAIN + VALUE), RANK))
    change = LowRank(a.astype(np.float32), b.astype(np.float32), 0.5)
    product = (change.b.astype(np.float64) @ change.a).reshape(HEADS, PLAIN + VALUE, LATENT)
    queries, latents = rng.standard_normal((HEADS, PLAIN)), rng.standard_normal((HEADS, LATENT))
    of_keys, of_values = of_layer(key, change), of_layer(value, change)
    assert (of_keys.linear, of_keys.scale, of_values.linear, of_values.scale) == (1, 0.5, 2, 0.5)
    assert (of_keys.a.shape, of_keys.b.shape) == ((RANK, HEADS * padded(PLAIN)), (LATENT, RANK))
    assert (of_values.a.shape, of_values.b.shape) == ((RANK, LATENT), (HEADS * padded(VALUE), RANK))
    for head in range(HEADS):
        a_of_head = of_keys.a[:, head * padded(PLAIN) :][:, :PLAIN].astype(np.float64)
        expected = queries[head] @ product[head, :PLAIN]
        np.testing.assert_allclose(of_keys.b @ (a_of_head @ queries[head]), expected, rtol=1e-5)
        b_of_head = of_values.b[head * padded(VALUE) :][:VALUE].astype(np.float64)
        expected = product[head, PLAIN:] @ latents[head]
        np.testing.assert_allclose(b_of_head @ (of_values.a @ latents[head]), expected, rtol=1e-5)
    # What is between heads is zeros, which kernels read.
    lying = of_keys.a.reshape(RANK, HEADS, padded(PLAIN)), of_values.b.reshape(HEADS, padded(VALUE), RANK)
    assert not lying[0][..., PLAIN:].any()
    assert not lying[1][:, VALUE:].any()
