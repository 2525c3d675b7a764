"""Reads a stream token by token with the standard library alone: python stream_client.py [URL] [KEY]"""

import json
import sys
import urllib.request

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
key = sys.argv[2] if len(sys.argv) > 2 else "none"
body = {
    "messages": [{"role": "user", "content": "Shall we take a walk?"}],
    "max_tokens": 40,
    "seed": 1,
    "stream": True,
    "stream_options": {"include_usage": True},
}
request = urllib.request.Request(
    f"{url}/chat/completions",
    json.dumps(body).encode(),
    {"Content-Type": "application/json", "Authorization": f"Bearer {key}"},
)
with urllib.request.urlopen(request) as response:
    # Server-sent events: a line "data: JSON" for each piece, and "data: [DONE]" at the end.
    for line in response:
        data = line.decode().removeprefix("data: ").strip()
        if not data or data == "[DONE]":
            continue
        chunk = json.loads(data)
        for choice in chunk["choices"]:
            print(choice["delta"].get("content") or "", end="", flush=True)
        if chunk.get("usage"):
            print(f"\n{chunk['usage']['completion_tokens']} tokens")
