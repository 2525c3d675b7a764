"""Published traces, if they are there."""

from __future__ import annotations

import os
from pathlib import Path

from support.paths import SHARED

TRACES = Path(os.environ.get("LLMC_TEST_TRACES", SHARED / "traces"))
PUBLISHED = {
    "Azure": "azure-llm-2023/AzureLLMInferenceTrace_conv.csv",
    "Mooncake": "mooncake-fast25/conversation_trace.jsonl",
}
"""Files of TRACES."""
