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
IMAGE = "invalid_image"
NO_IMAGES = "images_not_supported"
BEYOND_SCHEMA: Mapping[str, str] = {
    CONSTRAINT: "a JSON schema, regular expression, grammar or structural tag is not valid, or too complex",
    CONFLICT: "min_tokens is above max_tokens; best_of is below n; a parameter does not go with beam search or "
    "best_of; a tool's name occurs twice; the chosen tool does not exist; a call is required without tools; or the "
    "answer has two forms, or one that excludes tools",
    TEMPLATE: "the model's chat template does not take the conversation",
    CONTEXT: "prompt and answer do not fit the model's context",
    EMPTY: "the prompt has no tokens",
    CANCEL: "the answer is complete",
    PREVIOUS: "the answer to continue from is not stored",
    TASK: "the model's task is not that of the endpoint, or its vectors have fewer dimensions than requested",
    IMAGE: "an image is damaged, too large or of an unknown format, there are too many of them, or a text has what "
    "stands for an image",
    NO_IMAGES: "the server was started without --images",
    MEMORY: "the request may need more memory than one request may have",
}
