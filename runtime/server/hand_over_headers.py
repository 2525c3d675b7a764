"""Headers in which a router tells a decode server where a prompt is computed; those of clients are dropped there.

HANDED_OVER is the status of an interim answer: the hand-over has ended, and the router need not wait for the answer."""

from __future__ import annotations

URL_HEADER = "x-llmc-prefill-url"
KEY_HEADER = "x-llmc-hand-over-key"
HANDED_OVER = 102
