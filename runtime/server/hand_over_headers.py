"""Headers in which a router tells a decode server where a prompt is computed; those of clients are dropped there.

INTERIM_HEADER asks for an interim answer of status HANDED_OVER: the hand-over has ended, and the router need not wait
for the answer. KEY_ENV: environment variable with the key, which no list of processes shows."""

from __future__ import annotations

URL_HEADER = "x-llmc-prefill-url"
KEY_HEADER = "x-llmc-hand-over-key"
INTERIM_HEADER = "x-llmc-interim"
HANDED_OVER = 102
KEY_ENV = "LLMC_HAND_OVER_KEY"
