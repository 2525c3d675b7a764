"""Talks to `llmc serve` with LangChain: python langchain_client.py [URL] [KEY]"""

import sys

from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI
from pydantic import SecretStr

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
key = sys.argv[2] if len(sys.argv) > 2 else "none"
# No model named: the server answers with the one it has. LangChain wants a name all the same.
chat = ChatOpenAI(base_url=url, api_key=SecretStr(key), model="", max_completion_tokens=24, seed=1, temperature=0.7)

chain = ChatPromptTemplate.from_messages([("user", "{who} had never")]) | chat
print("answer:", chain.invoke({"who": "Mr. Darcy"}).content)
print("stream:", end=" ")
for chunk in chain.stream({"who": "Emma"}):
    print(chunk.content, end="", flush=True)
print()
for answer in chain.batch([{"who": "Elinor"}, {"who": "Mr. Knightley"}]):
    print("batch:", answer.content)
