"""Names of hosts and origins on the command line; tests of the server have wrong ones."""

from __future__ import annotations

from llmc.cli.options.web_names import allowed_hosts, allowed_origins


def test_names_that_browsers_send_are_taken() -> None:
    hosts = ["*", "*.example.com", "Example.com.", "127.0.0.1", "::1", "[::1]", "bücher.example"]
    assert allowed_hosts(hosts) == tuple(hosts)
    assert allowed_origins(["*", "null", "https://Example.com", "http://[::1]:8000"]) == (
        *("*", "null", "https://example.com", "http://[::1]:8000"),
    )
