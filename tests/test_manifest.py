"""The manifest's schema and checksums: what was copied from the model is compared with it before it is used."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llmc import manifest_schema as schema
from llmc.cli.main import main
from llmc.manifest import ManifestError, check_listed, read_listed, read_manifest
from llmc.models.config import Experts, ModelConfig
from llmc.models.rotary import Rope, RopeScaling
from llmc.regular_file import JsonError, parse_json, read_regular, read_text
from llmc.runtime.text.tokenizer import Tokenizer, TokenizerError, artifact_tokenizer

from support.artifacts import TinyArtifact
from support.manifests import edit_manifest

COPIED = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


@pytest.fixture
def artifact(english_artifact: Path, tmp_path: Path) -> Path:
    """An artifact with a tokenizer, to be changed; the large files are links."""
    copy = tmp_path / "artifact"
    copy.mkdir()
    for file in english_artifact.iterdir():
        large = file.name in ("weights.safetensors", "kernels.so", "graphs.bin")
        (os.link if large else shutil.copyfile)(file, copy / file.name)
    return copy


def flip(file: Path, at: int, bit: int = 1) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= bit
    file.unlink()
    file.write_bytes(data)


@pytest.mark.parametrize("model", [(ModelConfig, schema.Model), (Rope, schema.Rope),
                                   (RopeScaling, schema.RopeScaling), (Experts, schema.Experts)])  # fmt: skip
def test_the_schema_has_the_fields_that_are_written(model: tuple[Any, Any]) -> None:
    written, read = model
    assert {field.name for field in dataclasses.fields(written)} == set(read.model_fields)


@pytest.mark.parametrize("name", COPIED)
def test_a_flipped_bit_of_a_copied_file_is_noticed(
    name: str, artifact: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert name in read_manifest(artifact)["files"]
    assert artifact_tokenizer(artifact) is not None
    file = artifact / name
    # In a text, so that the JSON stays what it is.
    flip(file, file.read_bytes().index(b'"') + 1)
    with pytest.raises(TokenizerError, match=rf"{file} is damaged: .*; compile the model again"):
        artifact_tokenizer(artifact)
    for command in (["inspect", str(artifact), "--verify"], ["run", str(artifact), "--prompt", "x", "--verify"],
                    ["run", str(artifact), "--prompt", "x"], ["serve", str(artifact), "--port", "0"]):  # fmt: skip
        assert main(command) == 1
        assert f"{file} is damaged" in capsys.readouterr().err


@pytest.mark.parametrize("name", COPIED)
def test_a_listed_file_that_is_gone(name: str, artifact: Path) -> None:
    (artifact / name).unlink()
    with pytest.raises(TokenizerError, match=rf"{artifact / name} is gone: compile the model again"):
        artifact_tokenizer(artifact)
    with pytest.raises(ManifestError, match="is gone"):
        check_listed(artifact)


def test_an_earlier_manifest_lists_names_alone(artifact: Path) -> None:
    path = artifact / "manifest.json"
    names = list(read_manifest(artifact)["files"])
    earlier = {**json.loads(path.read_text()), "files": names}
    del earlier["sha256"]
    path.write_text(json.dumps(earlier))
    assert artifact_tokenizer(artifact) is not None
    assert check_listed(artifact) == 0
    assert read_listed(artifact, "tokenizer.json") is not None
    # A file that nobody listed is the user's own.
    assert read_listed(artifact, "chat_template.jinja") is not None


def test_flipped_bits_of_the_manifest_are_noticed(artifact: Path) -> None:
    path = artifact / "manifest.json"
    whole, content, rng = path.read_bytes(), read_manifest(artifact), random.Random(1)
    said: list[str] = []
    for _ in range(400):
        data = bytearray(whole)
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        try:
            # White space may change.
            assert read_manifest(artifact) == content
        except ManifestError as error:
            said.append(str(error))
    assert len(said) > 300
    assert all(str(path) in text and "\n" not in text for text in said)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"block_size": 0}, r"block_size is 0: "),
        ({"block_size": 24}, r"block_size is 24: "),
        ({"max_model_len": True}, r"max_model_len is True: "),
        ({"max_num_seqs": 1.0}, r"max_num_seqs is 1\.0: "),
        ({"files": {"../tokenizer.json": {}}}, r"files.*\.\./tokenizer\.json"),
        ({"files": ["/etc/passwd"]}, r"files.*/etc/passwd"),
        ({"kernels": [{}]}, r"kernels\.0\.symbol is missing"),
        ({"weights_crc32": {"embed": 1 << 32}}, r"weights_crc32\.embed is 4294967296"),
        (
            {"weights_converted": {"embed": {"types": "f16", "error": -1.0}}},
            r"weights_converted\.embed\.error is -1\.0",
        ),
        ({"buckets": "decode:1x1"}, r"buckets is 'decode:1x1'"),
        ({"act_dtype": "\x1b[2J"}, r"act_dtype is '\\x1b\[2J'"),
    ],
)
def test_wrong_fields_are_named(changes: dict[str, object], why: str, tiny_artifact: TinyArtifact,
                                tmp_path: Path) -> None:  # fmt: skip
    shutil.copyfile(tiny_artifact.artifact / "manifest.json", tmp_path / "manifest.json")
    edit_manifest(tmp_path, **changes)
    with pytest.raises(ManifestError, match=rf"does not describe an artifact of this llmc \({why}"):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("NaN", "NaN is not a JSON number"),
        ("[-Infinity]", "Infinity"),
        ("1e400", "1e400 is too large"),
        ('{"a": 1, "a": 1}', "'a' is there twice"),
        ("[" * 100_000, "nested too deeply"),
        ("9" * 5000, "digits"),
        (b"\xff", "decode"),
        (r'{"a": "\uD800"}', "surrogates"),
        ("", "Expecting value"),
    ],
)
def test_what_is_no_json(text: str, why: str) -> None:
    with pytest.raises(JsonError, match=why):
        parse_json(text)


def odd_files(folder: Path) -> Iterator[tuple[Path, str]]:
    """Things that are no regular files, and what they are called."""
    pipe, directory, listening = folder / "pipe", folder / "directory", folder / "socket"
    os.mkfifo(pipe)
    directory.mkdir()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(listening))
        yield pipe, "a pipe"
        yield directory, "a directory"
        yield listening, "a socket"
        yield Path("/dev/zero"), "a device"


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    for path, kind in odd_files(tmp_path):
        with pytest.raises(OSError, match=f"it is {kind}, not a regular file"):
            read_regular(path, 100)
    large = tmp_path / "large"
    large.write_bytes(b"x" * 101)
    with pytest.raises(OSError, match="it has 101 bytes, at most 100 are read"):
        read_regular(large, 100)
    assert read_regular(large, 101) == b"x" * 101
    large.write_bytes(b"a\r\nb\rc\n")
    assert read_text(large, 101) == large.read_text()
    # A file of the system does not tell its size.
    assert read_regular(Path("/proc/self/status"), 1 << 20).startswith(b"Name:")
    with pytest.raises(OSError, match="at most 10 are read"):
        read_regular(Path("/proc/self/status"), 10)


@pytest.mark.parametrize("name", ["manifest.json", "graphs.bin", "kernels.so", "weights.safetensors", *COPIED])
def test_a_pipe_in_an_artifact_is_not_waited_for(name: str, artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (artifact / name).unlink()
    os.mkfifo(artifact / name)
    for command in (["inspect", str(artifact), "--verify"], ["run", str(artifact), "--prompt", "x", "--verify"],
                    ["serve", str(artifact), "--port", "0"]):  # fmt: skip
        assert main(command) in (1, 2)
        assert name in capsys.readouterr().err


def test_a_damaged_tokenizer_is_not_passed_over(artifact: Path) -> None:
    from llmc import LLM, SamplingParams

    flip(artifact / "tokenizer.json", 40)
    with LLM(artifact) as llm, pytest.raises(TokenizerError, match="is damaged"):
        llm.generate([[5, 6, 7]], SamplingParams(max_tokens=1))
    with pytest.raises(TokenizerError, match="is damaged"):
        Tokenizer(artifact)
