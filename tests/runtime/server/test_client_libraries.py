"""Libraries that applications use to talk to a server, as they install from the package index."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.client_tools import PATIENCE_S, installed, make_environment, run
from support.live_server import LiveServer, serving
from support.paths import ROOT

pytestmark = pytest.mark.slow

# What the libraries are asked for; none of them forbids other properties.
GOOD = "import json, pydantic, sys\nclass Verdict(pydantic.BaseModel): good: bool\n"


@pytest.fixture(scope="module")
def server(english_artifact: Path) -> Iterator[LiveServer]:
    flags = ["--served-model-name", "tiny", "--guided-additional-properties", "forbid"]
    template = ROOT / "examples" / "clients" / "story.jinja"
    with serving(english_artifact, *flags, "--chat-template", template) as server:
        yield server


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_environment(tmp_path_factory.mktemp("libraries"))


@pytest.mark.exhaustive
def test_litellm(server: LiveServer, environment: Path, tmp_path: Path) -> None:
    tools = installed("litellm", environment)
    code = (
        "import litellm, sys\n"
        "args = dict(model='text-completion-openai/tiny', api_base=sys.argv[1], api_key='x', temperature=0)\n"
        "answer = litellm.text_completion(prompt='She was', max_tokens=4, **args)\n"
        "assert answer.usage.completion_tokens == 4, answer\n"
        "parts = litellm.text_completion(prompt='She was', max_tokens=4, stream=True, **args)\n"
        "assert ''.join(p.choices[0].text or '' for p in parts) == answer.choices[0].text\n"
        "try: litellm.text_completion(prompt='word ' * 9999, max_tokens=4, **args)\n"
        "except litellm.ContextWindowExceededError: print('too long')\n"
    )
    (tmp_path / "ask.py").write_text(code)
    said = run(tools, ["python", "ask.py", f"{server.url}/v1"], tmp_path, LITELLM_LOCAL_MODEL_COST_MAP="True")
    assert said.strip().endswith("too long")


@pytest.mark.exhaustive
def test_dspy(server: LiveServer, environment: Path, tmp_path: Path) -> None:
    tools = installed("dspy", environment)
    (tmp_path / "ask.py").write_text(
        "import dspy, sys\n"
        "class Tiny(dspy.LM):\n"
        "    supports_response_schema = True\n"
        "    supported_params = frozenset({'response_format'})\n"
        "lm = Tiny('openai/tiny', api_base=sys.argv[1], api_key='x', max_tokens=60, cache=False)\n"
        "dspy.configure(lm=lm, adapter=dspy.JSONAdapter())\n"
        "assert isinstance(dspy.Predict('question -> good: bool')(question='Is it?').good, bool)\n"
    )
    run(tools, ["python", "ask.py", f"{server.url}/v1"], tmp_path, LITELLM_LOCAL_MODEL_COST_MAP="True")


@pytest.mark.exhaustive
def test_instructor(server: LiveServer, environment: Path, tmp_path: Path) -> None:
    tools = installed("instructor", environment)
    (tmp_path / "ask.py").write_text(
        f"{GOOD}import instructor, openai\n"
        "client = openai.OpenAI(base_url=sys.argv[1], api_key='x', max_retries=0)\n"
        "asked = dict(model='tiny', messages=[{'role': 'user', 'content': 'Is it?'}], response_model=Verdict)\n"
        "for mode, limit in (('TOOLS', 'max_tokens'), ('JSON_SCHEMA', 'max_tokens'),\n"
        "                    ('RESPONSES_TOOLS', 'max_output_tokens')):\n"
        "    ask = instructor.from_openai(client, mode=instructor.Mode[mode]).chat.completions.create\n"
        "    assert isinstance(ask(**asked, **{limit: 60}, max_retries=0), Verdict)\n"
    )
    run(tools, ["python", "ask.py", f"{server.url}/v1"], tmp_path)


def test_pydantic_ai(server: LiveServer, environment: Path, tmp_path: Path) -> None:
    tools = installed("pydantic-ai-slim[openai]", environment)
    (tmp_path / "ask.py").write_text(
        f"{GOOD}import asyncio\n"
        "from pydantic_ai import Agent\n"
        "from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel\n"
        "from pydantic_ai.providers.openai import OpenAIProvider\n"
        "async def told(agent):\n"
        "    async with agent.run_stream('She was') as answer: return await answer.get_output()\n"
        "for kind in (OpenAIChatModel, OpenAIResponsesModel):\n"
        "    model = kind('tiny', provider=OpenAIProvider(base_url=sys.argv[1], api_key='x'))\n"
        "    settings = {'max_tokens': 90, 'parallel_tool_calls': False}\n"
        "    found = Agent(model, output_type=Verdict, model_settings=settings, retries=0).run_sync('Is it?')\n"
        "    assert isinstance(found.output, Verdict)\n"
        "    assert asyncio.run(told(Agent(model, model_settings={'max_tokens': 8})))\n"
    )
    run(tools, ["python", "ask.py", f"{server.url}/v1"], tmp_path)


def test_openai_for_javascript(server: LiveServer, tmp_path: Path) -> None:
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    install = ["npm", "install", "--silent", "--no-audit", "--no-fund", "openai"]
    found = subprocess.run(install, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S)
    if found.returncode:
        pytest.skip(f"openai does not install here: {found.stderr[-300:]}")
    (tmp_path / "ask.mjs").write_text(
        "import assert from 'node:assert';\n"
        "import OpenAI from 'openai';\n"
        "const client = new OpenAI({baseURL: process.argv[2], apiKey: 'x', maxRetries: 0});\n"
        "const asked = {model: 'tiny', messages: [{role: 'user', content: 'She was'}], max_tokens: 8, seed: 1};\n"
        "const whole = await client.chat.completions.create(asked);\n"
        "let text = '';\n"
        "for await (const part of await client.chat.completions.create({...asked, stream: true}))\n"
        "  text += part.choices[0]?.delta?.content ?? '';\n"
        "assert.equal(text, whole.choices[0].message.content);\n"
        "const schema = {type: 'object', properties: {good: {type: 'boolean'}}, required: ['good']};\n"
        "const tools = [{type: 'function', function: {name: 'tell', parameters: schema}}];\n"
        "const one = {tools, tool_choice: 'required', parallel_tool_calls: false, max_tokens: 60};\n"
        "const called = await client.chat.completions.stream({...asked, ...one}).finalChatCompletion();\n"
        "const {arguments: given} = called.choices[0].message.tool_calls[0].function;\n"
        "assert.equal(typeof JSON.parse(given).good, 'boolean');\n"
        "const response = {model: 'tiny', input: 'She was', max_output_tokens: 8};\n"
        "let said = '', last;\n"
        "for await (const event of await client.responses.create({...response, stream: true})) {\n"
        "  if (event.type === 'response.output_text.delta') said += event.delta;\n"
        "  last = event;\n"
        "}\n"
        "assert.equal(said, last.response.output[0].content[0].text);\n"
        "const long = client.completions.create({model: 'tiny', prompt: 'a '.repeat(3000)});\n"
        "await assert.rejects(long, {status: 400, code: 'context_length_exceeded'});\n"
    )
    run(Path(shutil.which("node") or "node").parent, ["node", "ask.mjs", f"{server.url}/v1"], tmp_path)
