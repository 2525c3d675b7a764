"""Files with the scales of a KV cache: what vLLM wrote is read, anything else is one sentence."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest

from llmc.quantize.formats.base import QuantizeError
from llmc.quantize.kv_scales import kv_scales_of, read_kv_scales

LAYERS = 12


def content(**kv_cache: Any) -> dict[str, Any]:
    # As Python's json writes a dictionary by layer: "10" is before "2" where names are sorted.
    scales = {str(layer): 0.01 * (layer + 1) for layer in sorted(range(LAYERS), key=str)}
    return {
        "model_type": "llama",
        "kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": {"0": scales}, **kv_cache},
    }


def test_scales_are_in_the_order_of_layers(tmp_path: Path) -> None:
    path = tmp_path / "kv_cache_scales.json"
    path.write_text(json.dumps(content()))
    expected = tuple(0.01 * (layer + 1) for layer in range(LAYERS))
    assert read_kv_scales(path, LAYERS, "llama") == expected
    assert read_kv_scales(path, LAYERS) == expected
    assert kv_scales_of({**content(), "model_type": None}, "x", LAYERS, "qwen2") == expected


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ([], r"x\.json is \[\], which is not an object"),
        ({}, r"kv_cache is None, which is not an object"),
        ({**content(), "model_type": "opt"}, "has scales of a model of type 'opt', but this one is a llama"),
        ({**content(), "model_type": 3}, "model_type is 3, not a string"),
        (content(dtype="int8"), "scales for the dtype 'int8', but only those for float8_e4m3fn are read"),
        (content(scaling_factor=1), "scaling_factor is 1, which is not an object"),
        (content(scaling_factor={"0": {}, "1": {}}), r"has the ranks \['0', '1'\], not 0 alone"),
        (content(scaling_factor={"0": {"0": 1.0}}), "lacks layer 1, but the model has 12 layers"),
        (content(scaling_factor={"0": {str(i): 1.0 for i in range(13)}}), "has a layer '12', but the model has 12"),
        *(
            (content(scaling_factor={"0": {str(i): bad for i in range(12)}}), "layer 0 has the scale")
            for bad in (0, -1.0, True, "1", None, 1e300, 10**400, 1e-300)
        ),
    ],
)
def test_what_is_wrong_is_named(value: Any, sentence: str) -> None:
    with pytest.raises(QuantizeError, match=sentence) as error:
        kv_scales_of(value, "x.json", LAYERS, "llama")
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 300


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(QuantizeError, match="does not exist"):
        read_kv_scales(tmp_path / "gone.json", LAYERS)
    with pytest.raises(QuantizeError, match="cannot be read"):
        read_kv_scales(tmp_path, LAYERS)
    (tmp_path / "x.json").write_text('{"kv_cache": NaN}')
    with pytest.raises(QuantizeError, match="is not valid JSON"):
        read_kv_scales(tmp_path / "x.json", LAYERS)


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (object, name) in a tree of objects."""
    return [(value, name) for name in value] + [p for v in value.values() if isinstance(v, dict) for p in places(v)]


def test_fuzz(tmp_path: Path) -> None:
    """Whatever is changed, only QuantizeError comes out; bytes that are cut or flipped, too."""
    rng, path, taken, said = random.Random(7), tmp_path / "x.json", 0, list[str]()
    junk: list[Any] = [None, True, -1, 0.0, 10**400, 1e308, "", "\x1b[2J", "0" * 5000, [], [1], {}, {"0": {}}]
    for _ in range(600):
        value = copy.deepcopy(content())
        for _ in range(rng.randint(0, 2)):
            where, name = rng.choice(places(value))
            if rng.random() < 0.3:
                where[rng.choice(["0", "1", "-1", "٣", "1e3", "\n"])] = where.pop(name)
            else:
                where[name] = rng.choice(junk)
        data = bytearray(json.dumps(value).encode())
        if rng.random() < 0.3:
            data[rng.randrange(len(data))] = rng.randrange(256)
        path.write_bytes(data[: rng.randint(0, len(data))] if rng.random() < 0.2 else data)
        try:
            found = read_kv_scales(path, LAYERS)
        except QuantizeError as error:
            said.append(str(error))
        else:
            taken += 1
            assert len(found) == LAYERS
            assert all(scale > 0 for scale in found)
    assert taken > 50
    assert len(said) > 200
    assert all(text.isprintable() for text in said)
