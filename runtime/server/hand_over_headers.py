"""Headers in which a router tells a decode server where a prompt is computed; those of clients are dropped there."""

from __future__ import annotations

URL_HEADER = "x-llmc-prefill-url"
KEY_HEADER = "x-llmc-hand-over-key"
