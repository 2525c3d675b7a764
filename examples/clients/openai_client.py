"""Talks to `llmc serve` with OpenAI's package: python openai_client.py [URL] [KEY]"""

import sys

from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
key = sys.argv[2] if len(sys.argv) > 2 else "none"
client = OpenAI(base_url=url, api_key=key)
model = client.models.list().data[0].id
messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Mr. Darcy had never"}]

answer = client.chat.completions.create(model=model, messages=messages, max_tokens=24, seed=1)
print("answer:", answer.choices[0].message.content)
if answer.usage is not None:
    print("tokens:", answer.usage.completion_tokens)

print("stream:", end=" ")
stream = client.chat.completions.create(model=model, messages=messages, max_tokens=24, seed=1, stream=True)
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
print()

# What OpenAI's API does not have goes into extra_body.
completion = client.completions.create(
    model=model, prompt="The evening passed", max_tokens=8, temperature=0, logprobs=2, extra_body={"top_k": 5}
)
scored = completion.choices[0].logprobs
if scored is not None:
    for token, logprob in zip(scored.tokens or [], scored.token_logprobs or [], strict=True):
        print(f"{logprob:8.3f} {token!r}")
