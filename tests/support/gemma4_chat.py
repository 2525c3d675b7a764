"""A chat template in Gemma 4's grammar, and a small tokenizer whose last tokens are the model's markers."""

from __future__ import annotations

import json

from support.guides import NUM_TOKENS, TOKENIZER

MARKERS = ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>')
IDS = {marker: NUM_TOKENS - len(MARKERS) + number for number, marker in enumerate(MARKERS)}
TEMPLATE = """\
{%- macro shown(value) -%}
  {%- if value is string -%}<|"|>{{ value }}<|"|>
  {%- elif value is boolean -%}{{ 'true' if value else 'false' }}
  {%- elif value is mapping -%}
    { {%- for key, item in value | dictsort -%}{{ key }}:{{ shown(item) }}{{ '' if loop.last else ',' }}{%- endfor -%} }
  {%- elif value is sequence -%}
    [{%- for item in value -%}{{ shown(item) }}{{ '' if loop.last else ',' }}{%- endfor -%}]
  {%- else -%}{{ value }}{%- endif -%}
{%- endmacro -%}
{%- for tool in tools or [] -%}<|tool>declaration:{{ tool.function.name }}<tool|>{%- endfor -%}
{%- for message in messages -%}
  {%- if message.role == 'tool' -%}
    {{- '<|tool_response>response:' + message.tool_call_id + '{value:' + shown(message.content) -}}
    {{- '}<tool_response|>' -}}
  {%- else -%}
    {{- '<|turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' -}}
    {%- if message.reasoning_content and message.tool_calls -%}
      {{- '<|channel>thought\\n' + message.reasoning_content + '\\n<channel|>' -}}
    {%- endif -%}
    {%- for call in message.tool_calls or [] -%}
      {{- '<|tool_call>call:' + call.function.name + shown(call.function.arguments) + '<tool_call|>' -}}
    {%- endfor -%}
    {{- message.content -}}
    {{- '' if message.tool_calls else '<turn|>\\n' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|turn>model\\n' -}}
  {{- '<|channel>thought\\n' if enable_thinking else '<|channel>thought\\n<channel|>' -}}
{%- endif -%}
"""


def with_markers() -> str:
    """The small tokenizer of the examples; its last merges make room for the markers."""
    data = json.loads(TOKENIZER)
    del data["model"]["merges"][-len(MARKERS) :]
    kept = {token: number for token, number in data["model"]["vocab"].items() if number < NUM_TOKENS - len(MARKERS)}
    data["model"]["vocab"] = {**kept, **IDS}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    data["added_tokens"] += [{"id": number, "content": text, "special": True, **flags} for text, number in IDS.items()]
    return json.dumps(data)
