"""Puts an urgent request before a batch that fills the server: python priority_client.py [URL] [KEY]"""

import asyncio
import sys

from openai import AsyncOpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
key = sys.argv[2] if len(sys.argv) > 2 else "none"
NUM_BATCH = 12
finished: list[str] = []


async def ask(client: AsyncOpenAI, model: str, name: str, priority: int, max_tokens: int) -> str:
    answer = await client.completions.create(
        model=model,
        prompt="The evening passed",
        max_tokens=max_tokens,
        seed=1,
        extra_body={"priority": priority, "ignore_eos": True},  # lower values come first
    )
    finished.append(name)
    text: str = answer.choices[0].text
    return text


async def main() -> None:
    async with AsyncOpenAI(base_url=url, api_key=key) as client:
        model = (await client.models.list()).data[0].id
        batch = [asyncio.create_task(ask(client, model, f"batch {i}", 10, 200)) for i in range(NUM_BATCH)]
        await asyncio.sleep(0.02)  # the batch is there first
        urgent = await ask(client, model, "urgent", -1, 8)
        await asyncio.gather(*batch)
    print(f"urgent: {urgent!r}")
    print(f"place {finished.index('urgent') + 1} of {len(finished)}")


asyncio.run(main())
