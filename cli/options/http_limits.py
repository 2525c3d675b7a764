"""Flags of what a client may take of an HTTP server, and of its end: the same for `llmc serve` and `llmc route`."""

from __future__ import annotations

from llmc.cli.options.config_flags import Flag
from llmc.cli.options.numbers import finite

DRAIN_TIMEOUT = Flag(
    "Seconds that a shutdown leaves running requests to finish.",
    name="drain_timeout",
    given=float,
    read=float,
    min=0,
    metavar="S",
)
HTTP_LIMITS = {
    "max_body_bytes": Flag("Largest body of a request.", name="max_body_size", size=True, metavar="SIZE"),
    "client_timeout_s": Flag(
        "Seconds for a request to arrive, and for a client to continue reading; 0: no limit.",
        name="client_timeout",
        min=0,
        metavar="S",
        callback=finite,
    ),
}
