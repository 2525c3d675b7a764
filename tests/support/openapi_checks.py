"""For schemathesis, which reads this file: which refusals of requests that the OpenAPI document allows are right."""

from __future__ import annotations

from typing import Any

import schemathesis

from llmc.runtime.server.refusals import BEYOND_SCHEMA


@schemathesis.check
def accepted_unless_beyond_schema(ctx: Any, response: Any, case: Any) -> bool | None:
    """As positive_data_acceptance, but for refusals that say by their code why no schema can forbid the request."""
    if response.status_code in (400, 413) and response.json()["error"]["code"] in BEYOND_SCHEMA:
        return None
    accepted: bool | None = schemathesis.checks.positive_data_acceptance(ctx, response, case)
    return accepted
