"""Addresses of servers: what is read, and what is refused wherever one is given."""

from __future__ import annotations

import contextlib
import socket
import ssl
import subprocess
import threading
from pathlib import Path

import pytest

from llmc.cli.main import main
from llmc.runtime.address import Address, UrlError, why_not_connected

WRONG = (
    "ftp://host", "http://", "http://host:port", "http://host:99999", "http://h/?q=1", "http://h/#part", "http://[::1",
    "http://user:key@h", "http://two words", "http://h/two words", "http://h/\u00e9", "http://h\x07",
)  # fmt: skip


@pytest.mark.parametrize("url", WRONG)
def test_wrong_addresses(url: str) -> None:
    with pytest.raises(UrlError, match="not the address"):
        Address.parse(url)


def test_addresses() -> None:
    assert Address.parse("localhost:80") == Address("localhost", 80, False, "")
    assert Address.parse("https://h/api/v1/") == Address("h", 443, True, "/api")
    assert Address.parse("http://[::1]:8000").origin == "http://[::1]:8000"


@pytest.mark.parametrize(
    "command",
    [["chat"], ["bench", "serve", "--url"], ["buckets", "replan", "--url"], ["route", "--replica"]],
    ids=lambda words: words[0],
)
def test_a_command_refuses_what_is_none(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    for url in ("http://[::1", "http://two words", "http://h:port"):
        assert main([*command, url]) in (1, 2)
        said = capsys.readouterr().err
        assert f"{url!r} is not the address of a server: write http://HOST:PORT" in said, said


def test_a_replica_is_given_once_however_it_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["route", "--replica", "http://h:80/v1", "--replica", "h/"]) == 2
    assert "h:80 is given twice: give each replica once" in capsys.readouterr().err


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of localhost, with its key in the same file."""
    path = tmp_path_factory.mktemp("tls") / "both.pem"
    make = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=DNS:localhost"
    made = subprocess.run([*make.split(), "-keyout", "-", "-out", "-"], capture_output=True, check=False)
    if made.returncode:
        pytest.skip("openssl cannot make a certificate here")
    path.write_bytes(made.stdout)
    return path


@pytest.mark.parametrize(
    ("host", "trusted", "tls", "said"),
    [
        ("localhost", False, True, "its certificate is not trusted (self-signed certificate): set SSL_CERT_FILE to"),
        ("127.0.0.1", True, True, "its certificate has other names (IP address mismatch, certificate is not valid for"),
        ("localhost", True, False, "it does not speak TLS: write http:// in place of https://"),
        ("localhost", True, True, ""),
    ],
)
def test_why_there_is_no_connection(host: str, trusted: bool, tls: bool, said: str, certificate: Path) -> None:
    inside = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    inside.load_cert_chain(certificate)
    outside = ssl.create_default_context(cafile=certificate if trusted else None)

    def serve() -> None:
        with contextlib.suppress(OSError):
            connection, _ = listener.accept()
            with connection:
                if not tls:
                    connection.recv(1)
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                    return
                with inside.wrap_socket(connection, server_side=True):
                    pass

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        why = ""
        try:
            with (
                socket.create_connection(listener.getsockname()) as plain,
                outside.wrap_socket(plain, server_hostname=host),
            ):
                pass
        except OSError as error:
            why = why_not_connected(error)
        thread.join()
    assert why.startswith(said)
    assert bool(why) == bool(said), why
