"""Sends many requests at once; the server batches them: python async_client.py [URL] [KEY]"""

import asyncio
import sys

from openai import AsyncOpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
key = sys.argv[2] if len(sys.argv) > 2 else "none"
QUESTIONS = ["Who are you?", "Shall we walk?", "Will you dance?", "Are you happy?"]


async def ask(client: AsyncOpenAI, model: str, question: str) -> str:
    answer = await client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": question}], max_tokens=24, seed=1
    )
    return answer.choices[0].message.content or ""


async def main() -> None:
    async with AsyncOpenAI(base_url=url, api_key=key) as client:
        model = (await client.models.list()).data[0].id
        answers = await asyncio.gather(*(ask(client, model, question) for question in QUESTIONS))
    for question, answer in zip(QUESTIONS, answers, strict=True):
        print(f"{question} {answer!r}")


asyncio.run(main())
