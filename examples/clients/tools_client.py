"""Lets the model call a function, and gives it the result: python tools_client.py [URL] [KEY]"""

import json
import sys

from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
key = sys.argv[2] if len(sys.argv) > 2 else "none"
client = OpenAI(base_url=url, api_key=key)
model = client.models.list().data[0].id


def weather(city: str) -> str:
    return {"Bath": "rain", "London": "fog"}[city]


# `strict` holds the arguments to the schema, whatever the model.
tool: ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Bath", "London"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": "How is the weather in Bath?"}]
asked = client.chat.completions.create(
    model=model, messages=messages, tools=[tool], tool_choice="required", parallel_tool_calls=False, max_tokens=60
)
(call,) = asked.choices[0].message.tool_calls or []
if call.type != "function":
    sys.exit(f"the model called something else: {call}")
result = weather(**json.loads(call.function.arguments))
print("call:", call.function.name, call.function.arguments)
print("result:", result)

called = {"name": call.function.name, "arguments": call.function.arguments}
messages += [
    {"role": "assistant", "tool_calls": [{"id": call.id, "type": "function", "function": called}]},
    {"role": "tool", "tool_call_id": call.id, "content": result},
]
answer = client.chat.completions.create(model=model, messages=messages, max_tokens=24, seed=1)
print("answer:", answer.choices[0].message.content)
