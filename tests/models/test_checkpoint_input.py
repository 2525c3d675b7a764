"""Checkpoints made to harm: refused in one sentence, before anything of the size they claim is made."""

from __future__ import annotations

import json
import os
import random
import shutil
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from llmc.buckets import BucketError
from llmc.compiler.config import CompileConfig, CompileError
from llmc.compiler.graph.tracer import Tracer
from llmc.compiler.resolve import resolve
from llmc.compiler.store.artifact import copied_files, copy_files
from llmc.models import ModelError, load_config, open_source
from llmc.models.loader import check_checkpoint
from llmc.models.rope import checked_frequencies
from llmc.models.sources.base import FolderFiles

from support.artifacts import TinyArtifact
from support.failing import edit_config, fails

WEIGHTS = "model.safetensors"
FUZZ_CASES = int(os.environ.get("LLMC_FUZZ_CASES", "400"))


@pytest.fixture
def model(tiny_artifact: TinyArtifact, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_artifact.model, tmp_path / "model")


@pytest.fixture(autouse=True)
def nothing_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tracer, "prepare", lambda *_: pytest.fail("an unchecked model was traced"))


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 988097824\n"


def check(model: Path) -> None:
    """All that a compilation does before it traces."""
    config = load_config(model)
    check_checkpoint(config, open_source(model).checkpoint())
    resolved = resolve(CompileConfig(model=model, output=model, target="x86-64-v3"))
    checked_frequencies(config.rope, resolved.max_model_len)
    copied_files(FolderFiles(model), "auto")


def replace_text(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def read_header(model: Path) -> tuple[dict[str, Any], bytes]:
    """Header and data of the weights."""
    data = (model / WEIGHTS).read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), data[end:]


def write_header(model: Path, header: bytes, data: bytes) -> None:
    (model / WEIGHTS).write_bytes(len(header).to_bytes(8, "little") + header + data)


def edit_header(model: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    header, data = read_header(model)
    edit(header)
    write_header(model, json.dumps(header).encode(), data)


def overlap(header: dict[str, Any]) -> None:
    header["model.norm.weight"]["data_offsets"] = header["model.layers.0.input_layernorm.weight"]["data_offsets"]


def add_odd_name(header: dict[str, Any]) -> None:
    header["\x1b[2J"] = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}


def name_twice(model: Path) -> None:
    header, data = read_header(model)
    text = json.dumps(header)
    entry = json.dumps(header["model.norm.weight"])
    write_header(model, f'{text[:-1]}, "model.norm.weight": {entry}}}'.encode(), data)


def move_out(path: Path) -> None:
    """A link stands where the file was."""
    moved = path.parent.parent / "elsewhere"
    path.rename(moved)
    path.symlink_to(moved)


def make(path: Path, how: Callable[[Path], object]) -> None:
    path.unlink(missing_ok=True)
    how(path)


def rope(**fields: object) -> Callable[[Path], object]:
    return lambda m: edit_config(m, rope_parameters={"rope_theta": 10000.0, **fields})


YARN: dict[str, object] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
HARM: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "wide": (lambda m: edit_config(m, hidden_size=1 << 30, head_dim=20), ("1073741824", "correct config.json")),
    "many words": (lambda m: edit_config(m, vocab_size=(1 << 31) - 1), ("2147483647", "implies")),
    "long heads": (lambda m: edit_config(m, head_dim=1 << 24), ("q_proj", "implies")),
    "many heads": (lambda m: edit_config(m, num_attention_heads=1 << 30), ("q_proj", "implies")),
    "many layers": (lambda m: edit_config(m, num_hidden_layers=10**9), ("1000000000", "at most 4096")),
    "some layers": (lambda m: edit_config(m, num_hidden_layers=4096), ("lacks the tensor model.layers.2.",)),
    "past int32": (lambda m: edit_config(m, intermediate_size=10**12), ("1000000000000", "at most 2147483647")),
    "context past int32": (lambda m: edit_config(m, max_position_embeddings=1 << 31), ("2147483648", "at most")),
    "window past int32": (
        lambda m: edit_config(m, model_type="mistral", sliding_window=1 << 40),
        ("'sliding_window'", "1099511627776"),
    ),
    "5000 digits": (
        lambda m: replace_text(m / "config.json", '"vocab_size": 515', '"vocab_size": ' + "9" * 5000),
        ("an integer has thousands of digits",),
    ),
    "401 digits": (lambda m: edit_config(m, rms_norm_eps=10**400), ("'rms_norm_eps'", "float32")),
    "1e400": (lambda m: replace_text(m / "config.json", "1e-06", "1e400"), ("1e400 is too large",)),
    "eps NaN": (lambda m: edit_config(m, rms_norm_eps=float("nan")), ("NaN is not a JSON number",)),
    "eps true": (lambda m: edit_config(m, rms_norm_eps=True), ("'rms_norm_eps' is True",)),
    "eps of zero in float32": (lambda m: edit_config(m, rms_norm_eps=1e-200), ("1e-200", "float32")),
    "size true": (lambda m: edit_config(m, hidden_size=True), ("'hidden_size' is True",)),
    "size float": (lambda m: edit_config(m, hidden_size=60.0), ("'hidden_size' is 60.0",)),
    "a long value": (lambda m: edit_config(m, hidden_act="x" * 10000), ("hidden_act", "...")),
    "escape sequence": (lambda m: edit_config(m, hidden_act="\x1b[2J"), (r"'\x1b[2J'",)),
    "deep": (
        lambda m: (m / "config.json").write_text('{"a":' * 100_000),
        ("config.json is not valid JSON (it is nested too deeply)",),
    ),
    "twice": (
        lambda m: replace_text(m / "config.json", "{", '{"vocab_size": 7,'),
        ("'vocab_size' is there twice", "download it again"),
    ),
    "huge config": (lambda m: (m / "config.json").write_bytes(b" " * (1 << 23)), ("8388608 bytes", "at most 4194304")),
    "base of yarn": (rope(rope_theta=1.0, **YARN), ("rope_theta 1.0", "finite")),
    "negative beta": (rope(beta_fast=-1.0, **YARN), ("beta_fast=-1.0", "finite")),
    "tiny factor": (rope(rope_type="linear", factor=1.2e-38), ("1.2e-38", "finite")),
    "large factor": (rope(rope_type="linear", factor=1e308), ("'factor'", "1e+308")),
    "pipe for config": (lambda m: make(m / "config.json", os.mkfifo), ("config.json", "not a regular file")),
    "directory for config": (lambda m: make(m / "config.json", os.mkdir), ("config.json", "not a regular file")),
    "pipe for weights": (lambda m: make(m / WEIGHTS, os.mkfifo), (WEIGHTS, "not a regular file")),
    "pipe for generation": (
        lambda m: make(m / "generation_config.json", os.mkfifo),
        ("generation_config.json", "not a regular file"),
    ),
    "linked config": (lambda m: move_out(m / "config.json"), ("config.json is a link to", "outside the checkpoint")),
    "linked weights": (lambda m: move_out(m / WEIGHTS), (f"{WEIGHTS} is a link to", "outside the checkpoint")),
    "dangling weights": (lambda m: make(m / WEIGHTS, lambda p: p.symlink_to("gone")), ("gone", "does not exist")),
    "circle": (lambda m: make(m / WEIGHTS, lambda p: p.symlink_to(WEIGHTS)), (WEIGHTS, "cannot be read")),
    "overlap": (lambda m: edit_header(m, overlap), ("begins at byte", "model.norm.weight", "download")),
    "offset past the end": (
        lambda m: edit_header(m, lambda h: h["model.norm.weight"].update(data_offsets=[1 << 40, (1 << 40) + 240])),
        ("model.norm.weight", "ends at byte"),
    ),
    "tensor twice": (name_twice, ("'model.norm.weight' is there twice",)),
    "shape of 5000 digits": (
        lambda m: write_header(m, b'{"x":{"shape":[' + b"9" * 5000 + b"]}}", b""),
        ("an integer has thousands of digits",),
    ),
    "shape of many": (
        lambda m: edit_header(m, lambda h: h["model.norm.weight"].update(shape=[1] * 9 + [60])),
        ("model.norm.weight is malformed",),
    ),
    "header of 17 MiB": (lambda m: write_header(m, b" " * (17 << 20), b""), ("17825792", "more than 16777216")),
    "integers": (
        lambda m: edit_header(m, lambda h: h["model.norm.weight"].update(dtype="I32")),
        ("model.norm.weight has dtype I32",),
    ),
    "name of a tensor": (lambda m: edit_header(m, add_odd_name), (r"'\x1b[2J'", "does not use")),
}  # fmt: skip


@pytest.mark.parametrize("harm", list(HARM))
def test_harm_is_refused_before_it_is_traced(
    harm: str, model: Path, tiny_artifact: TinyArtifact, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    apply, fragments = HARM[harm]
    apply(model)
    argv = ["compile", model, "-o", tmp_path / "out", "--no-tokenizer", "--cache-dir", tiny_artifact.cache]
    tracemalloc.start()
    try:
        fails(capsys, 1, argv, *fragments)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 128 << 20
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("kind", ["link", "pipe", "directory", "dangling link"])
@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja"])
def test_only_own_regular_files_are_copied(
    name: str, kind: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("password")
    path = model / name
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to(secret if kind == "link" else model / "gone")
    fails(capsys, 1, ["compile", model, "-o", tmp_path / "out"], str(path))
    assert not list(tmp_path.glob("out*"))
    # Also where it takes the place of a file that was looked at.
    (tmp_path / "out").mkdir()
    with pytest.raises(ModelError, match=r"outside the checkpoint|not a regular file|does not exist"):
        copy_files(FolderFiles(model), tmp_path / "out", [name])
    assert not list((tmp_path / "out").iterdir())


def test_links_of_the_hubs_cache_are_followed_within_a_repository(model: Path, tmp_path: Path) -> None:
    repo = tmp_path / "hub" / "models--tiny--llama"
    snapshot, blobs = repo / "snapshots" / "c0ffee", repo / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(sorted(model.iterdir())):
        file.rename(blobs / str(number))
        (snapshot / file.name).symlink_to(Path("../../blobs") / str(number))
    check(snapshot)
    (blobs / "template").write_text("{{ messages }}")
    (snapshot / "chat_template.jinja").symlink_to("../../blobs/template")
    names = copied_files(FolderFiles(snapshot), "auto")
    assert "chat_template.jinja" in names
    (tmp_path / "out").mkdir()
    copy_files(FolderFiles(snapshot), tmp_path / "out", names)
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "{{ messages }}"
    # A checkpoint may be linked to as a whole, and its files to one another.
    linked = tmp_path / "linked"
    linked.symlink_to(snapshot)
    check(linked)
    # Another repository is outside.
    other = tmp_path / "hub" / "models--tiny--other" / "blobs"
    other.mkdir(parents=True)
    shutil.move(blobs / "template", other / "template")
    (snapshot / "chat_template.jinja").unlink()
    (snapshot / "chat_template.jinja").symlink_to(other / "template")
    with pytest.raises(ModelError, match="outside the checkpoint"):
        check(snapshot)


# ---- fuzz ------------------------------------------------------------------------------------------------------

ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 3, 7, 16, 20, 60, 100, 515, 1 << 16, (1 << 31) - 1, 1 << 31, 1 << 63, 10**20,
    10**99, 10**400, -(10**30), 0.0, -0.0, 0.5, 1e-45, 1e-300, 1e38, 1e308, float("nan"), float("inf"), -1.5, "",
    "60", "\x1b[2J", "\ud800", "a\0b", "x" * 5000, [], [1], [[]], [None], ["x"], [2**40] * 3, {}, {"a": 1},
    {"rope_type": "yarn"}, {"rope_type": "dynamic", "factor": 1e30}, {"quant_method": []}, "yarn", "llama3", "dynamic",
    "sliding_attention", "full_attention", ["full_attention", "sliding_attention"], "bfloat16", "qwen2", "qwen3",
    "mistral", "F32", "BF16", "I64",
)  # fmt: skip
ABSENT = (
    "sliding_window", "use_sliding_window", "max_window_layers", "layer_types", "rope_scaling", "rope_theta",
    "partial_rotary_factor", "quantization_config", "torch_dtype", "generation_config", "factor", "beta_fast",
    "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "truncate", "low_freq_factor", "high_freq_factor",
    "original_max_position_embeddings", "type",
)  # fmt: skip


def mutate(value: Any, rng: random.Random) -> Any:
    """Another value of the same JSON tree with one thing in it changed."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        table = dict(value)
        name = rng.choice([*table, *ABSENT]) if rng.random() < 0.5 else rng.choice(list(table))
        if rng.random() < 0.1:
            table.pop(name, None)
        else:
            table[name] = mutate(table.get(name), rng)
        return table
    if isinstance(value, list) and value and rng.random() < 0.7:
        items = list(value)
        items[rng.randrange(len(items))] = mutate(rng.choice(items), rng)
        return items
    if type(value) is int and rng.random() < 0.4:
        return value + rng.choice((-1, 1, 4, 1 << 32, -value, value))
    return rng.choice(ODD)


def damage(data: bytes, rng: random.Random) -> bytes:
    """A few bytes changed, removed or doubled."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(out))
        match rng.randrange(4):
            case 0:
                out[at] ^= 1 << rng.randrange(8)
            case 1:
                del out[at : at + rng.randint(1, 20)]
            case 2:
                out[at:at] = out[at : at + rng.randint(1, 20)]
            case _:
                out[at] = rng.choice(b'0123456789-.eE"{}[],:\\')
        if not out:
            return b"{"
    return bytes(out)


def encode(value: Any) -> bytes:
    return json.dumps(value).encode()


def mutations(model: Path, rng: random.Random) -> Iterator[None]:
    """Writes one bad checkpoint after another over `model`."""
    config = json.loads((model / "config.json").read_text())
    generation = json.loads((model / "generation_config.json").read_text())
    good = {file.name: file.read_bytes() for file in model.iterdir()}
    header, data = read_header(model)
    index = {"weight_map": dict.fromkeys((name for name in header if name != "__metadata__"), "a.safetensors")}
    while True:
        for name, text in good.items():
            (model / name).write_bytes(text)
        (model / "model.safetensors.index.json").unlink(missing_ok=True)
        raw = rng.random() < 0.3
        match rng.randrange(8):
            case 0 | 1 | 2 | 3:
                bad = config
                for _ in range(rng.randint(1, 3)):
                    bad = mutate(bad, rng)
                (model / "config.json").write_bytes(damage(good["config.json"], rng) if raw else encode(bad))
            case 4:
                old = good["generation_config.json"]
                new = damage(old, rng) if raw else encode(mutate(generation, rng))
                (model / "generation_config.json").write_bytes(new)
            case 5 | 6:
                write_header(model, damage(encode(header), rng) if raw else encode(mutate(header, rng)), data)
            case _:
                (model / WEIGHTS).rename(model / "a.safetensors")
                new = damage(encode(index), rng) if raw else encode(mutate(index, rng))
                (model / "model.safetensors.index.json").write_bytes(new)
        yield


def test_fuzzed_checkpoints_raise_the_declared_errors_alone(model: Path) -> None:
    rng = random.Random(FUZZ_CASES)
    refused = 0
    for _, number in zip(mutations(model, rng), range(FUZZ_CASES), strict=False):
        try:
            check(model)
        except (ModelError, CompileError, BucketError) as error:
            refused += 1
            text = str(error)
            assert text.isprintable(), (number, text)
            assert len(text) < 1500, (number, text)
        (model / "a.safetensors").unlink(missing_ok=True)
    assert refused > FUZZ_CASES // 4


@pytest.mark.parametrize("name", ["config.json", WEIGHTS, "tokenizer.json", "generation_config.json"])
def test_files_of_a_clone_without_git_lfs(name: str, model: Path) -> None:
    (model / name).write_text(POINTER)
    with pytest.raises(ModelError, match=rf"{name} is a pointer of Git LFS and not .*: run `git lfs pull` in"):
        check(model)


@pytest.mark.parametrize("name", ["model.onnx", "model.gguf"])
def test_single_files_of_a_clone_without_git_lfs(name: str, tmp_path: Path) -> None:
    (tmp_path / "blob").write_text(POINTER)
    (tmp_path / name).symlink_to("blob")
    with pytest.raises(ModelError, match=rf"{name} is a pointer of Git LFS"):
        open_source(tmp_path / name).config()
