"""Addresses of servers: what is read, and what is refused wherever one is given."""

from __future__ import annotations

import pytest

from llmc.cli.main import main
from llmc.runtime.address import Address, UrlError

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
