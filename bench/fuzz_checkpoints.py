"""Mutates quantization settings and headers of checkpoints, and reads each: only QuantizeError may come out.

    python -m bench.fuzz_checkpoints --rounds 100000 --seed 7
    python -m bench.fuzz_checkpoints gptq awq

Settings get values that no writer writes. Tensors are missing, doubled, of another shape or dtype, or hold other bytes.
Prints a count of outcomes for each method. Any other exception ends the run with exit code 1.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import traceback
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.fuzz_files import mutate_value
from llmc.quantize import QuantizeError
from llmc.quantize.checkpoints import StoredMatrix, StoredTensor, find_stored
from llmc.quantize.checkpoints.base import CARRIERS
from llmc.quantize.checkpoints.floats import TABLES

Q, DOWN, HEAD = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj", "lm_head"
N, K = 32, 128
_MOST_BYTES = 1 << 20
_LEAVES = ("weight", "qweight", "qzeros", "scales", "g_idx", "weight_scale", "weight_packed", "weight_zero_point",
           "SCB", "input_scale", "weight_scale_2", "weight_g_idx", "pre_quant_scale", "k_scale")  # fmt: skip


class TooLarge(Exception):
    """Raised when a tensor is read that is larger than any file here: its shape was mutated."""


@dataclass(frozen=True)
class Entry:
    """A tensor: safetensors' dtype, shape, and bytes, which are cut or repeated to fit the shape."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    def tensor(self) -> StoredTensor:
        return StoredTensor(self.dtype, self.shape, self._load)

    def _load(self) -> NDArray[Any]:
        dtype = CARRIERS[self.dtype]
        size = dtype.itemsize
        for length in self.shape:
            size *= length
        if size > _MOST_BYTES:
            raise TooLarge
        data = (self.data * (size // max(1, len(self.data)) + 1))[:size] if self.data else bytes(size)
        return np.frombuffer(data, dtype).reshape(self.shape)


@dataclass(frozen=True)
class Sample:
    """A checkpoint. config: settings. beside: whether they are in hf_quant_config.json. entries: tensors by name."""

    config: dict[str, Any]
    beside: bool
    entries: dict[str, Entry]


def entry(array: Any, dtype: str) -> Entry:
    found = np.asarray(array, CARRIERS[dtype])
    return Entry(dtype, found.shape, found.tobytes())


def plain(*shape: int) -> Entry:
    return entry(np.zeros(shape), "BF16")


def _leaves(prefix: str, **entries: Entry) -> dict[str, Entry]:
    return {f"{prefix}.{leaf}": value for leaf, value in entries.items()}


def _both(**entries: Entry) -> dict[str, Entry]:
    return _leaves(Q, **entries) | _leaves(DOWN, **entries) | {f"{HEAD}.weight": plain(64, K)}


def samples() -> dict[str, Sample]:
    """A small sound checkpoint of every method and layout."""
    half = np.float16(0.01).view(np.uint16)
    code, byte = np.full((N, K), 0x38), np.full((N, K // 2), 0x21)
    eighths = np.full((4, N), 0.125)
    one, upper = entry(np.float32(0.5), "F32"), 0x3C00
    gptq = _both(qweight=entry(np.full((K // 8, N), 0x12345678), "I32"), scales=entry(eighths, "F16"),
                 qzeros=entry(np.full((4, N // 8), 0x77777777), "I32"),
                 g_idx=entry(np.arange(K) % 4, "I32"))  # fmt: skip
    awq = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "modules_to_not_convert": ["gate"]}
    packed = _both(weight_packed=entry(np.full((N, K // 8), 0x12345678), "I32"), weight_shape=entry([N, K], "I64"),
                   weight_scale=entry(np.full((N, 4), upper), "BF16"), weight_g_idx=entry(np.arange(K) % 4, "I32"),
                   weight_zero_point=entry(np.full((N // 8, 4), 0x12345678), "I32"))  # fmt: skip
    int8 = _both(weight=entry(np.full((N, K), -5), "I8"), weight_scale=entry(np.full((N, 1), upper), "BF16"),
                 input_scale=one, input_zero_point=entry([3], "I8"))  # fmt: skip
    fp8 = _both(weight=entry(code, "F8_E4M3"), weight_scale=one, input_scale=one)
    state = {"quant_type": "nf4", "blocksize": 64, "shape": [N, K], "nested_blocksize": 256, "nested_offset": 0.25}
    nf4 = {
        "weight": entry(np.full((N * K // 2, 1), 0x21), "U8"), "weight.absmax": entry(np.full(N * K // 64, 7), "U8"),
        "weight.quant_map": entry(TABLES["nf4"], "F32"), "weight.nested_absmax": entry([0.5], "F32"),
        "weight.nested_quant_map": entry(np.linspace(0, 1, 256), "F32"),
        "weight.quant_state.bitsandbytes__nf4": entry(np.frombuffer(json.dumps(state).encode(), np.uint8), "U8"),
    }  # fmt: skip
    nvfp4 = dict(weight=entry(byte, "U8"), weight_scale=entry(np.full((N, K // 16), 0x38), "F8_E4M3"))
    mxfp4 = {"gate_up_proj_blocks": entry(np.full((2, N, 4, 16), 0x21), "U8"),
             "gate_up_proj_scales": entry(np.full((2, N, 4), 120), "U8")}  # fmt: skip
    modelopt = {"quantization": {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head", "*.attn.*"]}}
    mixed = {"quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": {
        Q: {"quant_algo": "FP8"}, DOWN: {"quant_algo": "W4A16_NVFP4", "group_size": 16}}}}  # fmt: skip
    blocks = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [16, 128]}
    return {
        "gptq": Sample({"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": True,
                        "lm_head": False, "checkpoint_format": "gptq",
                        "dynamic": {r"+:.*down_proj": {"bits": 4, "group_size": 32}, r"-:.*\.gate": {}}}, False, gptq),
        "auto-round": Sample({"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 4,
                              "group_size": 32, "sym": True, "data_type": "int",
                              "extra_config": {DOWN: {"group_size": 32}, ".*k_proj": {"bits": 16}}}, False, gptq),
        "awq": Sample(awq | {"version": "gemm"}, False, _both(
            qweight=entry(np.full((K, N // 8), 0x12345678), "I32"), scales=entry(eighths, "F16"),
            qzeros=entry(np.full((4, N // 8), 0x12345678), "I32"))),
        "awq-gemv": Sample(awq | {"version": "gemv"}, False, _both(
            qweight=entry(np.full((N, K // 8), 0x12345678), "I32"), scales=entry(np.full((N, 32), 0.125), "F16"),
            qzeros=entry(np.full((N, 4), 0x12345678), "I32"))),
        "awq-gemv-fast": Sample(awq | {"version": "gemv_fast"}, False, _both(
            qweight=entry(np.full((N // 4, K), 0x1234), "I16"), scales=entry(np.full((32, N), 0.125), "F16"),
            qzeros=entry(np.full((32, N), -0.5), "F16"))),
        "packed": Sample(_recipe("pack-quantized", {"num_bits": 4, "type": "int", "symmetric": False,
                                                    "strategy": "group", "group_size": 32, "actorder": "group"}),
                         False, packed),
        "int8": Sample(_recipe("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"},
                               {"num_bits": 8, "type": "int", "strategy": "tensor", "dynamic": False}), False, int8),
        "float": Sample(_recipe("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"},
                                {"num_bits": 8, "type": "float", "strategy": "tensor"}), False, fp8),
        "nvfp4": Sample(_recipe("nvfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "tensor_group",
                                                         "group_size": 16}), False, _both(
            weight_packed=nvfp4["weight"], weight_scale=nvfp4["weight_scale"], weight_global_scale=one)),
        "fp8": Sample(blocks | {"modules_to_not_convert": ["lm_head", "model.layers.*.mlp.gate"]}, False, _both(
            weight=entry(code, "F8_E4M3"), weight_scale_inv=entry(np.full((2, 1), 0.5), "F32"))),
        "fbgemm": Sample({"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["lm_head"]}, False, _both(
            weight=entry(code, "F8_E4M3"), weight_scale=entry(np.full((N, 1), 0.5), "F32"))),
        "modelopt": Sample(modelopt, True, _both(**nvfp4, weight_scale_2=one, input_scale=one)),
        "modelopt-mixed": Sample(mixed, True, _leaves(DOWN, **nvfp4, weight_scale_2=one) | _leaves(
            Q, weight=entry(code, "F8_E4M3"), weight_scale=one, input_scale=one)),
        "mxfp4": Sample({"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}, False,
                        _leaves("model.layers.0.mlp.experts", **mxfp4) | {f"{Q}.weight": plain(N, K)}),
        "nf4": Sample({"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False}, False,
                      _leaves(Q, **nf4) | {f"{HEAD}.weight": plain(64, K)}),
        "llm-int8": Sample({"quant_method": "bitsandbytes", "load_in_8bit": True}, False, _both(
            weight=entry(np.full((N, K), -5), "I8"), SCB=entry(np.full(N, half), "F32"),
            weight_format=entry(0, "U8"))),
    }  # fmt: skip


def _recipe(format: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    group = {"targets": ["Linear", "re:.*up_proj"], "weights": weights, "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "format": format, "quantization_status": "compressed",
            "config_groups": {"group_0": group}, "ignore": ["lm_head", "re:.*gate$"]}  # fmt: skip


def _mutate_entry(old: Entry, rng: random.Random) -> Entry:
    kind = rng.randrange(6)
    if kind == 0:
        return Entry(rng.choice((*CARRIERS, "F64", "F8_E5M2", "", "x" * 99)), old.shape, old.data)
    if kind == 1 and old.shape:
        at, shape = rng.randrange(len(old.shape)), list(old.shape)
        shape[at] = max(0, rng.choice((0, 1, 2, shape[at] - 1, shape[at] + 1, shape[at] * 2, shape[at] // 2, 1 << 40)))
        return Entry(old.dtype, tuple(shape), old.data)
    if kind == 2:
        others = [[], [1], [*old.shape, 1], [*old.shape[::-1]], [*old.shape[1:]], [2, *old.shape]]
        return Entry(old.dtype, tuple(rng.choice(others)), old.data)
    data = bytearray(old.data)
    for _ in range(rng.choice((1, 1, 3)) if data else 0):
        at = rng.randrange(len(data))
        token = rng.choice(
            (b"\xff", b"\x00\x00\xc0\x7f", b"\x00\x00\x80\x7f", b"\x00\x7e", b"\x80\x7f", rng.randbytes(4))
        )
        data[at : at + len(token)] = token[: len(data) - at]
    if kind == 5:
        data = bytearray(rng.randbytes(64))
    return Entry(old.dtype, old.shape, bytes(data))


def _mutate_entries(entries: dict[str, Entry], rng: random.Random) -> dict[str, Entry]:
    changed, name = dict(entries), rng.choice(list(entries))
    kind = rng.random()
    if kind < 0.12:
        del changed[name]
    elif kind < 0.2:
        changed[rng.choice((name + "x", "\x1b[2J." + name, name.upper(), f"{Q}.{rng.choice(_LEAVES)}"))] = changed.pop(
            name
        )
    elif kind < 0.3:
        changed[f"{rng.choice((Q, DOWN, HEAD, 'x', ''))}.{rng.choice(_LEAVES)}"] = changed[name]
    else:
        changed[name] = _mutate_entry(changed[name], rng)
    return changed


def _read(matrix: StoredMatrix) -> None:
    count = min(2, matrix.shape[0])
    rows = matrix.rows(0, count)
    assert rows.numbers.shape == (count, matrix.shape[1])
    assert rows.scale.shape == (count, matrix.format.groups(matrix.shape[1]))
    assert matrix.values(matrix.shape[0] - count, count).shape == (count, matrix.shape[1])
    _ = matrix.activation


def read(config: Any, beside: bool, entries: dict[str, Entry], linears: list[str] | None) -> None:
    """Reads everything that the compiler reads of a checkpoint."""
    tensors = {name: entry.tensor() for name, entry in entries.items()}
    given = ({}, config) if beside else ({"quantization_config": config}, None)
    found = find_stored(given[0], tensors, linears, given[1])
    if found is None:
        return
    found.shapes(tensors)
    for matrix in (*found.matrices.values(), *(matrix for stack in found.experts.values() for matrix in stack[:2])):
        _read(matrix)


def fuzz(name: str, sample: Sample, rounds: int, seed: int) -> Counter[str]:
    """Counts outcomes; "taken": no error. Raises AssertionError for any exception but QuantizeError."""
    rng, found = random.Random(f"{name} {seed}"), Counter[str]()
    for number in range(rounds):
        config, entries = sample.config, sample.entries
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            if rng.random() < 0.5:
                config = mutate_value(config, rng)
            else:
                entries = _mutate_entries(entries, rng) if entries else entries
        linears = rng.choice((None, [Q, DOWN, HEAD]))
        try:
            with np.errstate(all="ignore"):
                read(config, sample.beside, entries, linears)
            found["taken"] += 1
        except TooLarge:
            found["too large"] += 1
        except Exception as error:
            text = str(error)
            if type(error) is not QuantizeError or not text.isprintable() or not 0 < len(text) < 2000:
                shown = {name: (entry.dtype, entry.shape) for name, entry in entries.items()}
                raise AssertionError(
                    f"{name}, round {number}: {type(error).__name__}: {text[:500]!r} of "
                    f"{str(config)[:2000]} and {shown}"
                ) from error
            found[type(error).__name__] += 1
    return found


def main() -> int:
    known = samples()
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", choices=[*known, []], help="checkpoints to mutate, default all")
    parser.add_argument("--rounds", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_intermixed_args()
    failed = 0
    for name in given.names or known:
        try:
            found = fuzz(name, known[name], given.rounds, given.seed)
            print(f"{name}: {', '.join(f'{count} {what}' for what, count in found.most_common())}", flush=True)
        except AssertionError:
            traceback.print_exc()
            failed = 1
    return failed


if __name__ == "__main__":
    sys.exit(main())
