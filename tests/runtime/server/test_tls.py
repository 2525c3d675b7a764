"""Certificates and keys that cannot be used are refused in a sentence."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from llmc.runtime.server.tls import why_unusable


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    make = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -keyout {0}.key -out {0}.pem"
    lock = "openssl pkey -aes128 -passout pass:secret -in a.key -out locked.key"
    for command in (make.format("a"), make.format("b"), lock):
        if subprocess.run(command.split(), cwd=folder, capture_output=True, check=False).returncode != 0:
            pytest.skip("openssl cannot make a certificate here")
    (folder / "both.pem").write_bytes((folder / "a.key").read_bytes() + (folder / "a.pem").read_bytes())
    (folder / "cut.pem").write_bytes((folder / "a.pem").read_bytes()[:400])
    (folder / "note.txt").write_text("no PEM at all")
    os.mkfifo(folder / "pipe")
    return folder


@pytest.mark.parametrize(
    ("certificate", "key", "says"),
    [
        ("a.pem", "b.key", "b.key is not that of the certificate"),
        ("a.pem", "locked.key", "locked.key has a pass phrase"),
        ("a.pem", "a.pem", "a.pem holds no private key in PEM"),
        ("note.txt", "a.key", "note.txt holds no certificate in PEM"),
        ("a.key", "a.key", "a.key holds no certificate in PEM"),
        ("cut.pem", "a.key", "are both whole?"),
        ("none.pem", "a.key", "none.pem: No such file or directory"),
        ("a.pem", "pipe", "pipe: it is a pipe, not a regular file"),
    ],
)
def test_the_file_at_fault_is_named(files: Path, certificate: str, key: str, says: str) -> None:
    why = why_unusable(files / certificate, files / key)
    assert why is not None
    assert says in why


def test_a_pair_is_taken_apart_and_in_one_file(files: Path) -> None:
    assert why_unusable(files / "a.pem", files / "a.key") is None
    assert why_unusable(files / "both.pem", files / "both.pem") is None
