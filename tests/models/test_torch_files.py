"""pytorch_model.bin: the tensors that torch saved, read without running the pickle that lists them."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from llmc.models import ModelError, load_config, open_source
from llmc.models.convert import DTYPES
from llmc.models.loader import load_parameters
from llmc.models.sources.folder_checkpoint import FolderCheckpoint, weight_files
from llmc.models.sources.torch_file import TorchFile

from support.tiny_models import make_tiny_model

CASES = int(os.environ.get("LLMC_FUZZ_CASES", "400"))
SINGLE, INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"


def equal(file: TorchFile, name: str, expected: torch.Tensor) -> bool:
    """Whether a tensor, read a row at a time, has the bits that torch gives it."""
    bits = torch.int16 if expected.element_size() == 2 else torch.int32
    tensor = file.load(name)
    out = np.empty(tensor.shape, tensor.array.dtype)
    for row in range(len(out)):
        tensor.read(row, out[row : row + 1])
    word = np.int16 if expected.element_size() == 2 else np.int32
    return tensor.shape == tuple(expected.shape) and np.array_equal(
        out.view(word), expected.contiguous().view(bits).numpy()
    )


def test_every_tensor_is_what_torch_reads(tmp_path: Path) -> None:
    shared, module = torch.randn(7, 6), torch.nn.Linear(6, 5).to(torch.bfloat16)
    tensors = {
        "f32": torch.randn(3, 5), "f16": torch.randn(4, 2, 3).half(), "tied": shared, "tied too": shared,
        "turned": torch.randn(6, 4).T, "part": shared[2:5, 1:4], "every other": torch.randn(10, 4)[::2],
        "parameter": module.weight, "ä.weight": torch.randn(2), "none": torch.zeros(0, 3), "odd": torch.zeros(3)[:0],
        "one row": torch.randn(9, 9)[4:5], "integers": torch.arange(3), "mask": torch.ones(2, 2, dtype=torch.bool),
        "double": torch.zeros(2, dtype=torch.float64), "scalar": torch.tensor(2.5),
    }  # fmt: skip
    for kept in (tensors, {"epoch": 3, "loss": 0.5, "best": None, "state_dict": OrderedDict(tensors)}):
        torch.save(kept, tmp_path / SINGLE)
        file = TorchFile(tmp_path / SINGLE)
        expected = torch.load(tmp_path / SINGLE, weights_only=True)
        expected = expected.get("state_dict", expected)
        assert list(file.entries) == list(expected)
        assert {name: entry.shape for name, entry in file.entries.items()} == {
            name: tuple(tensor.shape) for name, tensor in expected.items()
        }
        others = {"integers": "I64", "mask": "BOOL", "double": "F64"}
        for name, dtype in others.items():
            with pytest.raises(ModelError, match=f"tensor {name} has dtype {dtype}"):
                file.load(name)
        assert file.load("scalar").array == 2.5
        assert all(equal(file, name, expected[name].data) for name in expected.keys() - others - {"scalar"})
        assert file.stored("integers").load().tolist() == [0, 1, 2]
        assert not file.load("f32").array.flags.writeable
        file.release()
        assert equal(file, "turned", tensors["turned"])
    # A module's own dictionary carries versions, and its parameters are objects of their own.
    torch.save(module.state_dict(), tmp_path / "module.bin")
    assert equal(TorchFile(tmp_path / "module.bin"), "weight", module.weight.data)


@pytest.mark.parametrize("shards", [1, 2])
def test_a_model_is_the_one_of_its_safetensors(shards: int, tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "m", "llama", num_hidden_layers=1, dtype=torch.bfloat16)
    config = load_config(model)

    def parameters() -> dict[str, np.ndarray[Any, Any]]:
        found = load_parameters(config, open_source(model).checkpoint(), "bf16")
        return {one.name: one.value().astype(np.float32) for one in found}

    expected, tensors = parameters(), load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    names = [SINGLE] if shards == 1 else [f"pytorch_model-0000{n}-of-00002.bin" for n in (1, 2)]
    parts = [{name: tensors[name] for name in sorted(tensors)[at::shards]} for at in range(shards)]
    for name, part in zip(names, parts, strict=True):
        torch.save(part, model / name)
    if shards > 1:
        places = {tensor: name for name, part in zip(names, parts, strict=True) for tensor in part}
        (model / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": places}))
    found = parameters()
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[name], expected[name]) for name in expected)
    assert [file.name for file in open_source(model).weight_files()] == names
    # Where both are there, safetensors are read.
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, model / "model.safetensors")
    assert not np.array_equal(parameters()["norm.weight"], expected["norm.weight"])
    assert [file.name for file in weight_files(model)] == ["model.safetensors"]


class Bomb:
    """Runs a function as it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.path),))


def archive(program: bytes, **records: bytes) -> bytes:
    """A file of torch with any pickle; records: more of them, by name."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as file:
        for name, data in {"data.pkl": program, **records}.items():
            file.writestr(f"archive/{name}", data)
    return out.getvalue()


def saved(value: Any, **options: Any) -> bytes:
    out = io.BytesIO()
    torch.save(value, out, **options)
    return out.getvalue()


def changed(**to: Any) -> bytes:
    """A pickle of one tensor of two numbers, some of its operands changed."""
    operands = {"kind": "storage", "key": "0", "count": 2, "offset": 0, "shape": (2,), "strides": (1,), **to}

    class Storage:
        pass

    class Tensor:
        def __reduce__(self) -> Any:
            more: tuple[Any, ...] = (operands["offset"], operands["shape"], operands["strides"], False, OrderedDict())
            return (torch._utils._rebuild_tensor_v2, (Storage(), *more))

    class Pickler(pickle.Pickler):
        def persistent_id(self, found: Any) -> Any:
            if not isinstance(found, Storage):
                return None
            return (operands["kind"], torch.FloatStorage, operands["key"], "cpu", operands["count"])

    out = io.BytesIO()
    Pickler(out, protocol=2).dump({"x": Tensor()})
    return archive(out.getvalue(), **{"data/0": bytes(8)})


def compressed(data: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    return out.getvalue()


SOUND = saved({"x": torch.ones(2, 3), "y": torch.ones(3).half()})
BAD: dict[str, tuple[Callable[[Path], bytes], str]] = {
    "code": (lambda ran: saved({"x": Bomb(ran)}), r"names posix.mkdir, .*llmc runs nothing.*save_pretrained"),
    "code, old": (lambda ran: pickle.dumps(Bomb(ran)), r"a mere pickle, as torch before 1.6 .*save_pretrained"),
    "code, new": (
        lambda ran: archive(pickle.dumps({"x": Bomb(ran)}, protocol=4)), r"names posix.mkdir",
    ),
    "a module": (lambda _: saved(torch.nn.ReLU()), r"names torch.nn.modules.activation.ReLU"),
    "a name that is none": (lambda _: archive(b"\x80\x02c\x1b[2J\nx\n."), r"names '\\x1b\[2J.x'"),
    "old": (
        lambda _: saved({"x": torch.ones(2)}, _use_new_zipfile_serialization=False), "as torch before 1.6 saved",
    ),
    "empty": (lambda _: b"", "is empty"),
    "cut": (lambda _: SOUND[: len(SOUND) // 2], "truncated or corrupt .*its directory.*download"),
    "text": (lambda _: b"version https://git-lfs", "does not begin as a zip archive"),
    "no pickle": (lambda _: SOUND.replace(b"data.pkl", b"data.pk_"), "it has 0 records named data.pkl"),
    "compressed": (lambda _: compressed(SOUND), "is compressed or encrypted"),
    "large": (lambda _: archive(bytes(5 << 20)), "a pickle of 5242880 bytes, more than 4194304"),
    "other order": (lambda _: SOUND.replace(b"little", b"large!"), "in another byte order than little-endian"),
    "no record": (lambda _: changed(key="1"), "the record 1 of tensor x is missing"),
    "a path": (lambda _: changed(key="../data/0"), "the record ../data/0 of tensor x is missing"),
    "a short record": (lambda _: changed(count=4), "the record of tensor x has 8 bytes, not 16"),
    "outside": (lambda _: changed(offset=1), r"a tensor of shape \[2\] is not inside its 2 numbers"),
    "repeated": (lambda _: changed(shape=(1 << 40,), strides=(0,)), r"shape \[1099511627776\] is not inside"),
    "beyond arrays": (lambda _: changed(shape=(0, 1 << 62), strides=(1, 1)), "a tensor is malformed"),
    "backwards": (lambda _: changed(strides=(-1,)), "a tensor is malformed"),
    "no size": (lambda _: changed(shape=("2",)), "a tensor is malformed"),
    "of many sizes": (lambda _: changed(shape=(1,) * 9, strides=(1,) * 9), "a tensor is malformed"),
    "no storage": (lambda _: changed(kind="module"), "a storage is malformed"),
    "no tensors": (lambda _: saved({}), "it has no dictionary of tensors"),
    "a list": (lambda _: saved([torch.ones(2)]), r"more than tensors by name \(EMPTY_LIST in its pickle\); convert it"),
    "a number": (lambda _: saved({"x": 3}), "x is not a tensor"),
    "numbers for names": (lambda _: saved({3: torch.ones(2)}), "a key is not a text"),
    "nothing to take": (lambda _: archive(b"\x80\x02R."), "an instruction lacks its operand"),
    "a mark too few": (lambda _: archive(b"\x80\x02}u."), "an instruction lacks its operand"),
    "nothing kept": (lambda _: archive(b"\x80\x02h\x07."), "an instruction lacks its operand"),
    "no end": (lambda _: archive(b"\x80\x02}"), "pickle exhausted before seeing STOP"),
    "nested": (lambda _: archive(b"\x80\x02)" + b"\x85" * 100_000 + b"."), "it has no dictionary of tensors"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_is_no_dictionary_of_tensors_is_refused(case: str, tmp_path: Path) -> None:
    data, said = BAD[case]
    (tmp_path / SINGLE).write_bytes(data(tmp_path / "ran"))
    with pytest.raises(ModelError, match=said) as raised:
        FolderCheckpoint(tmp_path)
    assert str(tmp_path / SINGLE) in str(raised.value)
    assert str(raised.value).isprintable()
    assert not (tmp_path / "ran").exists()


def test_without_numbers_any_strides_will_do(tmp_path: Path) -> None:
    (tmp_path / SINGLE).write_bytes(changed(shape=(0, 5), strides=(1, 1 << 62)))
    assert TorchFile(tmp_path / SINGLE).load("x").array.shape == (0, 5)


def test_an_index_names_files_of_torch_alone(tmp_path: Path) -> None:
    for name in ("../x.bin", "x.safetensors", "x.pt", ""):
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"x": name}}))
        with pytest.raises(ModelError, match=r"is not a plain file name that ends in \.bin"):
            FolderCheckpoint(tmp_path)


def damaged(data: bytes, rng: random.Random) -> bytes:
    out = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        # Most bytes are padding: the pickle is at the beginning, the directory at the end.
        at = rng.choice((rng.randrange(600), rng.randrange(len(out)), len(out) - 1 - rng.randrange(700))) % len(out)
        match rng.randrange(5):
            case 0:
                out[at] ^= 1 << rng.randrange(8)
            case 1:
                del out[at : at + rng.randint(1, 20)]
            case 2:
                out[at:at] = out[at : at + rng.randint(1, 20)]
            case 3:
                out[at : at + 8] = rng.choice((b"\xff" * 8, bytes(8), (1 << 62).to_bytes(8, "little")))
            case _:
                out[at] = rng.choice(b"\x80}q(X\x8aQRutb.0Jc\x93\x94h\x85\x86\x87)K")
    return bytes(out)


def test_damage_raises_the_declared_error_alone(tmp_path: Path) -> None:
    rng, path, refused = random.Random(CASES), tmp_path / SINGLE, 0
    for number in range(CASES):
        path.write_bytes(damaged(SOUND, rng))
        try:
            file = TorchFile(path)
            for name, entry in file.entries.items():
                assert file.stored(name).load().shape == entry.shape
                if entry.dtype.lower() in DTYPES:
                    file.load(name).array.astype(np.float32).sum()
        except ModelError as error:
            refused += 1
            text = str(error)
            assert text.isprintable(), (number, text)
            assert len(text) < 1500 + len(str(path)), (number, text)
    assert CASES // 4 < refused < CASES
