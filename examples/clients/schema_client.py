"""Gets an answer as an object of a class: python schema_client.py [URL] [KEY]"""

import sys

from openai import OpenAI
from pydantic import BaseModel, Field

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
key = sys.argv[2] if len(sys.argv) > 2 else "none"
client = OpenAI(base_url=url, api_key=key)
model = client.models.list().data[0].id


class Person(BaseModel):
    """Bounds keep a small model from writing on until max_tokens."""

    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=120)
    married: bool


answer = client.chat.completions.parse(
    model=model,
    messages=[{"role": "user", "content": "Describe the heroine."}],
    response_format=Person,
    max_tokens=80,
    seed=1,
)
person = answer.choices[0].message.parsed
if person is None:
    sys.exit(f"the answer was cut off: {answer.choices[0].finish_reason}")
print(f"{person.name}, {person.age}, {'married' if person.married else 'single'}")
