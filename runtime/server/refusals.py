"""Reasons why a request that the OpenAPI document allows may still be refused, by error code: no schema can express
these rules."""

from __future__ import annotations

from collections.abc import Mapping

CONSTRAINT = "invalid_constraint"
CONFLICT = "conflicting_values"
TEMPLATE = "chat_template"
CONTEXT = "context_length_exceeded"
EMPTY = "empty_prompt"
CANCEL = "not_cancellable"
PREVIOUS = "previous_response_not_found"
MEMORY = "request_too_large"
TASK = "unsupported_task"
BEYOND_SCHEMA: Mapping[str, str] = {
    CONSTRAINT: "a JSON schema, regular expression, grammar or structural tag is not valid, or too complex",
    CONFLICT: "min_tokens is above max_tokens, best_of is below n, a parameter does not go with beam search or "
    "best_of, a tool's name comes twice or is chosen but no tool's, or the answer is given two forms, or one that "
    "tools do not go with",
    TEMPLATE: "the model's chat template does not take the conversation",
    CONTEXT: "prompt and answer do not fit the model's context",
    EMPTY: "the prompt has no tokens",
    CANCEL: "the answer is complete",
    PREVIOUS: "there is no such answer to go on from",
    TASK: "the model is for another task than this endpoint, or has not as many dimensions",
    MEMORY: "it may come to hold more memory than one request is given",
}
