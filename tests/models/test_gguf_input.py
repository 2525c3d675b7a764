"""GGUF files made to harm, or cut off: refused in one sentence, before anything of the size they claim is made."""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench.fuzz_gguf import read_gguf
from bench.gguf_bytes import ARRAY, BOOL, F32, STRING, U32, U64, Gguf, TensorInfo, Value, small_model, strings
from llmc.compiler.graph.tracer import Tracer
from llmc.models import ModelError, open_source

from support.failing import fails

EMBEDDING, NORM = 0, 1
LARGEST = (1 << 64) - 1


def text(value: str) -> Value:
    return Value(STRING, value.encode())


def nested(depth: int) -> Value:
    data: tuple[int, list[object]] = (U32, [1])
    for _ in range(depth - 1):
        data = (ARRAY, [data])
    return Value(ARRAY, data)


def with_scale(model: Gguf, value: float) -> Gguf:
    """In the second block of the third row."""
    data = bytearray(model.tensors[EMBEDDING].data)
    data[2 * 34 : 2 * 34 + 2] = np.array([value], np.float16).tobytes()
    return model.with_tensor(EMBEDDING, data=bytes(data))


def with_factors(model: Gguf, *factors: float) -> Gguf:
    """Without other scaling."""
    factor = TensorInfo(b"rope_freqs.weight", (len(factors),), 0, np.array(factors, np.float32).tobytes())
    return replace(model, tensors=(*model.tensors[:-1], factor)).with_pair(b"llama.rope.scaling.type", None)


CASES: dict[str, tuple[Callable[[Gguf], Gguf], str]] = {
    "another format": (
        lambda g: replace(g, magic=b"GGJT"),
        r"is not a GGUF file: it begins with b'GGJT', not with b'GGUF'",
    ),
    "version 1": (lambda g: replace(g, version=1), "is GGUF of version 1; llmc reads versions 2 and 3"),
    "version of tomorrow": (lambda g: replace(g, version=9), "is GGUF of version 9"),
    "big endian": (lambda g: replace(g, version=3 << 24), "is a GGUF file for big-endian machines"),
    "endless tensors": (lambda g: replace(g, counts={"tensors": LARGEST}), f"the number of tensors is {LARGEST}"),
    "endless metadata": (lambda g: replace(g, counts={"pairs": 1 << 60}), f"the number of metadata is {1 << 60}, more"),
    "more tensors than there are": (lambda g: replace(g, counts={"tensors": 13}), "is truncated or corrupt"),
    "key twice": (
        lambda g: replace(g, pairs=(*g.pairs, g.pairs[1])),
        r"metadata general\.name is there twice",
    ),
    "key of bytes": (
        lambda g: g.with_pair(b"\xff\xfe", Value(U32, 1)),
        r"the name of metadata \d+ is b'\\xff\\xfe', which is not UTF-8",
    ),
    "key too long": (lambda g: g.with_pair(b"k" * 400, Value(U32, 1)), "is 400, more than 256"),
    "value of bytes": (
        lambda g: g.with_pair(b"general.name", Value(STRING, b"\xff")),
        r"the value of general\.name is b'\\xff', which is not UTF-8",
    ),
    "token of bytes": (
        lambda g: g.with_pair(b"tokenizer.ggml.tokens", Value(ARRAY, (STRING, [b"a"] * 7 + [b"\xc3"]))),
        r"element 7 of tokenizer\.ggml\.tokens is b'\\xc3', which is not UTF-8",
    ),
    "type of tomorrow": (lambda g: g.with_pair(b"x.y", Value(13, 0)), r"metadata 'x\.y' has type 13"),
    "array of a type of tomorrow": (lambda g: g.with_pair(b"x.y", Value(ARRAY, (14, []))), "is an array of type 14"),
    "arrays too deep": (lambda g: g.with_pair(b"x.y", nested(5)), r"the value of x\.y is nested deeper than 4 arrays"),
    "arrays very deep": (
        lambda g: g.with_pair(b"x.y", nested(200)),
        r"the value of x\.y is nested deeper than 4 arrays",
    ),
    "tensor twice": (
        lambda g: replace(g, tensors=(*g.tensors, g.tensors[NORM])),
        r"tensor blk\.0\.attn_norm\.weight is there twice",
    ),
    "tensor of no name": (
        lambda g: g.with_tensor(NORM, name=b"x\x1b[2J"),
        r"lacks the tensor blk\.0\.attn_norm\.weight",
    ),
    "tensor of bytes": (
        lambda g: g.with_tensor(NORM, name=b"\xff"),
        "the name of tensor 1 is b'\\\\xff', which is not UTF-8",
    ),
    "tensor of a long name": (
        lambda g: g.with_tensor(NORM, name=b"n" * 300),
        "the name of tensor 1 is 300, more than 255",
    ),
    "type of a tensor of tomorrow": (
        lambda g: g.with_tensor(NORM, type=77),
        r"tensor blk\.0\.attn_norm\.weight has type 77, which is not one of F32, F16, BF16, Q4_0, .*IQ4_XS",
    ),
    "type of a tensor that is only known": (lambda g: g.with_tensor(NORM, type=40), "has type NVFP4, which is not one"),
    "five dimensions": (lambda g: g.with_tensor(NORM, dimensions=(1,) * 5), "has 5 dimensions, not 1 to 4"),
    "no dimensions": (lambda g: g.with_tensor(NORM, dimensions=()), "has 0 dimensions, not 1 to 4"),
    "size 0": (
        lambda g: g.with_tensor(NORM, dimensions=(0,)),
        r"tensor blk\.0\.attn_norm\.weight has dimensions \[0\]",
    ),
    "sizes that overflow": (
        lambda g: g.with_tensor(NORM, dimensions=(1 << 62, 1 << 62)),
        rf"tensor blk\.0\.attn_norm\.weight of shape \[{1 << 62}, {1 << 62}\] ends at byte \d+ of",
    ),
    "half a block": (
        lambda g: g.with_tensor(EMBEDDING, dimensions=(33, 8)),
        r"tensor token_embd\.weight of type Q8_0 has rows of 33, no multiple of 32",
    ),
    "beyond the file": (
        lambda g: g.with_tensor(NORM, offset=1 << 40),
        r"tensor blk\.0\.attn_norm\.weight of .* ends at byte",
    ),
    "offset that overflows": (lambda g: g.with_tensor(NORM, offset=LARGEST - 31), "ends at byte"),
    "misaligned": (lambda g: g.with_tensor(NORM, offset=8), "begins at offset 8, which is not a multiple of 32"),
    "overlapping": (
        lambda g: g.with_tensor(NORM, offset=0),
        r"tensor (token_embd|blk\.0\.attn_norm)\.weight begins at byte \d+, before tensor .* ends at \d+",
    ),
    "odd alignment": (
        lambda g: g.with_pair(b"general.alignment", Value(U32, 24)),
        r"metadata general\.alignment is 24 where a power of two of at least 8 was expected",
    ),
    "alignment 0": (
        lambda g: g.with_pair(b"general.alignment", Value(U32, 0)),
        r"general\.alignment is 0 where an integer",
    ),
    "unknown architecture": (
        lambda g: g.with_pair(b"general.architecture", text("mamba")),
        "architecture 'mamba' is not supported; supported are llama, qwen2, qwen3",
    ),
    "no architecture": (
        lambda g: g.with_pair(b"general.architecture", None),
        r"lacks the metadata general\.architecture",
    ),
    "no length of a head": (
        lambda g: g.with_pair(b"llama.attention.head_count", None),
        r"lacks the metadata llama\.attention\.head_count",
    ),
    "heads of a wrong type": (
        lambda g: g.with_pair(b"llama.attention.head_count", text("2")),
        r"metadata llama\.attention\.head_count is '2' where an integer",
    ),
    "endless layers": (
        lambda g: g.with_pair(b"llama.block_count", Value(U32, (1 << 31) - 1)),
        "'num_hidden_layers' is 2147483647",
    ),
    "layers beyond int32": (
        lambda g: g.with_pair(b"llama.block_count", Value(U64, LARGEST)),
        f"block_count is {LARGEST} where",
    ),
    "a layer too many": (
        lambda g: g.with_pair(b"llama.block_count", Value(U32, 2)),
        r"lacks the tensor blk\.1\.attn_norm\.weight",
    ),
    "eps of nan": (
        lambda g: g.with_pair(b"llama.attention.layer_norm_rms_epsilon", Value(F32, float("nan"))),
        r"llama\.attention\.layer_norm_rms_epsilon is nan where a finite number",
    ),
    "experts": (
        lambda g: g.with_pair(b"llama.expert_count", Value(U32, 8)),
        r"lacks the metadata llama\.expert_used_count",
    ),
    "longrope": (
        lambda g: g.with_pair(b"llama.rope.scaling.type", text("longrope")),
        "lacks the tensor rope_factors_long.weight, which llama.rope.scaling.type longrope needs",
    ),
    "factors of nan": (lambda g: with_factors(g, *[1.0] * 7, float("nan")), r"rope_freqs\.weight has the factor nan"),
    "negative factors": (lambda g: with_factors(g, -2.0, *[1.0] * 7), r"rope_freqs\.weight has the factor -2\.0"),
    "factors of another head": (lambda g: with_factors(g, 2.0), r"rope_freqs\.weight has shape \[1\] where .* \[8\]"),
    "scale of nan": (
        lambda g: with_scale(g, float("nan")),
        r"tensor token_embd\.weight of type Q8_0 has a scale of nan in row 2",
    ),
    "scale of infinity": (lambda g: with_scale(g, float("-inf")), "has a scale of -inf in row 2"),
    "no vocabulary": (
        lambda g: g.with_pair(b"tokenizer.ggml.tokens", None),
        r"lacks the metadata tokenizer\.ggml\.tokens",
    ),
    "no tokenizer model": (
        lambda g: g.with_pair(b"tokenizer.ggml.model", None),
        r"lacks the metadata tokenizer\.ggml\.model",
    ),
    "no merges": (lambda g: g.with_pair(b"tokenizer.ggml.merges", None), r"lacks the metadata tokenizer\.ggml\.merges"),
    "tokens that are numbers": (
        lambda g: g.with_pair(b"tokenizer.ggml.tokens", Value(ARRAY, (U32, [1]))),
        r"tokenizer\.ggml\.tokens is an array of uint32 where strings were expected",
    ),
    "more tokens than rows": (
        lambda g: g.with_pair(b"tokenizer.ggml.tokens", strings([str(i) for i in range(9)])),
        r"tokenizer\.ggml\.tokens has 9 tokens where token_embd\.weight has 8 rows",
    ),
    "types of other tokens": (
        lambda g: g.with_pair(b"tokenizer.ggml.token_type", Value(ARRAY, (U32, [1]))),
        r"token_type is an array of 1 where a list of 8 types",
    ),
    "a type of no token": (
        lambda g: g.with_pair(b"tokenizer.ggml.token_type", Value(ARRAY, (U32, [7] * 8))),
        r"token_type has the type 7, which is not one of 0 to 6",
    ),
    "bos that is no number": (
        lambda g: g.with_pair(b"tokenizer.ggml.bos_token_id", Value(BOOL, 1)),
        r"bos_token_id is True",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_wrong_is_one_sentence(case: str, tmp_path: Path) -> None:
    change, message = CASES[case]
    path = tmp_path / "m.gguf"
    data = change(small_model()).encoded()
    path.write_bytes(data)
    tracemalloc.start()
    with pytest.raises(ModelError, match=message) as caught:
        read_gguf(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)
    assert str(caught.value).isprintable()
    # A tokenizer's library and its classes are a part of it.
    assert peak < 4 << 20


def test_a_sound_file_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    for tokenizer in ("gpt2", "llama"):
        path.write_bytes(small_model(tokenizer).encoded())
        read_gguf(path)
    negative = with_scale(small_model(), -0.5)
    path.write_bytes(negative.encoded())
    read_gguf(path)
    # Older files do not say how their alignment is, or what is without a type of its own.
    path.write_bytes(replace(small_model(), version=2).with_pair(b"tokenizer.ggml.token_type", None).encoded())
    read_gguf(path)


def test_every_cut_is_refused(tmp_path: Path) -> None:
    """Wherever a download has ended."""
    path, data = tmp_path / "m.gguf", small_model().encoded()
    for length in range(len(data)):
        if length < 600 or length % 97 == 0 or length > len(data) - 3:
            path.write_bytes(data[:length])
            with pytest.raises(ModelError, match=r"m\.gguf is (empty|truncated or corrupt|not a GGUF file)"):
                open_source(path).config()


def test_pieces_made_of_one_another_are_bounded(tmp_path: Path) -> None:
    """A file of some hundred KiB whose merges would take as many MiB."""
    pieces = ["<unk>", "<s>", "</s>", *(letter * count for letter in "abc" for count in range(1, 400))]
    kinds = [2, 3, 3, *[1] * (len(pieces) - 3)]
    rows = np.zeros((len(pieces), 34), np.uint8).tobytes()
    model = small_model("llama").with_tensor(EMBEDDING, dimensions=(32, len(pieces)), data=rows)
    model = model.with_pair(b"tokenizer.ggml.tokens", strings(pieces))
    model = model.with_pair(b"tokenizer.ggml.token_type", Value(ARRAY, (U32, kinds)))
    model = model.with_pair(b"tokenizer.ggml.scores", Value(ARRAY, (F32, [0.0] * len(pieces))))
    path = tmp_path / "m.gguf"
    path.write_bytes(model.encoded())
    with pytest.raises(ModelError, match="tokens are made of one another in more than"):
        read_gguf(path)


@pytest.mark.parametrize("kind", ["pipe", "directory"])
def test_what_is_no_file_is_refused(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "m.gguf"
    (os.mkfifo if kind == "pipe" else os.mkdir)(path)
    fails(capsys, 1, ["run", path, "--prompt", "a"], str(path))
    fails(capsys, 1, ["compile", path, "-o", tmp_path / "out"], str(path))


def test_a_shard_that_is_a_link_elsewhere_is_refused(tmp_path: Path) -> None:
    model = small_model()
    folder = tmp_path / "model"
    folder.mkdir()
    for number in (0, 1):
        part = replace(model, tensors=model.tensors[:6] if number == 0 else model.tensors[6:])
        for key, value in ((b"split.count", 2), (b"split.no", number), (b"split.tensors.count", len(model.tensors))):
            part = part.with_pair(key, Value(U32, value))
        (folder / f"m-{number + 1:05}-of-00002.gguf").write_bytes(part.encoded())
    first, second = sorted(folder.iterdir())
    read_gguf(first)
    # The file that a user names may be one.
    other = tmp_path / "other"
    other.mkdir()
    (other / first.name).symlink_to(first)
    (other / second.name).symlink_to(second)
    with pytest.raises(ModelError, match=r"is a link to .* outside the checkpoint"):
        read_gguf(other / first.name)


@pytest.mark.parametrize("command", ["compile", "quantize", "run"])
def test_commands_say_it_in_one_sentence(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Tracer, "prepare", lambda *_: pytest.fail("an unchecked model was traced"))
    path = tmp_path / "m.gguf"
    path.write_bytes(small_model().encoded()[:-40])
    options: dict[str, list[object]] = {"compile": ["-o", tmp_path / "out"], "quantize": [], "run": ["--prompt", "a"]}
    fails(capsys, 1, [command, path, *options[command]], f"{path} is truncated or corrupt", "ends at byte")
