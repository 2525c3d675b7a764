"""What SECURITY.md claims: templates, files, keys, logs, and what the code does not do."""

from __future__ import annotations

import ast
import json
import re
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.attacks import BODY, ask, check_refused, parse_raw
from support.live_server import LiveServer, serving
from support.paths import ROOT
from support.server_harness import running_server, until

KEY = "a-key-of-the-test"
SECRET = "secret-text-of-a-prompt"


pytestmark = pytest.mark.usefixtures("it_goes_on")


@pytest.fixture(scope="module")
def server(chat_artifact: Path) -> Iterator[LiveServer]:
    with serving(chat_artifact, "--served-model-name", "tiny") as server:
        yield server


# ---- templates ---------------------------------------------------------------------------------------------------

ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{% for x in range(10**9) %}{% endfor %}",
    "{% include '/etc/passwd' %}",
    "{{ messages.append(1) }}",
]


@pytest.mark.parametrize("text", ESCAPES)
def test_messages_are_text_not_templates(server: LiveServer, text: str) -> None:
    for message in ({"role": "user", "content": text}, {"role": text, "content": "a"}):
        answer = server.ask("POST", "/tokenize", {"messages": [message]})
        assert answer.status == 200, answer.content
        plain = server.ask("POST", "/detokenize", {"tokens": answer.json()["tokens"]}).json()["prompt"]
        assert text in plain, "it is in the prompt as it was written"


@pytest.mark.parametrize(
    "variables",
    [
        {"__class__": 1},
        {"self": {"__init__": 1}},
        {"loop": []},
        {"namespace": "x", "range": 3, "dict": [], "raise_exception": None, "strftime_now": {}},
        {"bos_token": {"__globals__": 1}, "eos_token": ["x"] * 10},
        {"tools": [1]},
        {"add_generation_prompt": False},
        {"messages": []},
        {"": 1, "a b": 2, "\x00": 3},
        {"x" * 10_000: "y"},
        {"__builtins__": {"eval": "x"}, "environment": "y", "caller": 1, "varargs": 2},
    ],
)
def test_template_variables_are_data(server: LiveServer, variables: dict[str, Any]) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, "chat_template_kwargs": variables}
    answer = server.ask("POST", "/v1/chat/completions", body)
    if answer.status != 200:
        check_refused(answer.status, answer.content)


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__ }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ lipsum.__globals__.os.popen('id') }}",
        "{% for x in range(10**9) %}{% endfor %}",
        "{% include '/etc/passwd' %}",
        "{% import '/etc/passwd' as x %}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ strftime_now.__code__ }}",
        "{{ namespace.__init__.__globals__ }}",
        "{% set n = namespace() %}{% set n.__class__ = 1 %}",
    ],
)
def test_a_models_template_cannot_reach_python(template: str) -> None:
    """A model directory is data that somebody else made."""
    from llmc.runtime.request_error import RequestError
    from llmc.runtime.text.chat_template import ChatTemplateError, ChatTemplates

    templates = ChatTemplates(Path("/nowhere"), {"chat_template": template})
    try:
        shown = templates.render([{"role": "user", "content": "Hi"}])
    except (RequestError, ChatTemplateError):
        return
    assert not shown.strip(), f"the template showed {shown[:200]!r}"


# ---- files -------------------------------------------------------------------------------------------------------

PATHS = [
    "../../../../etc/passwd",
    "/etc/passwd",
    "file:///etc/passwd",
    "..%2f..%2fetc%2fpasswd",
    "\x00",
    "C:\\",
    "~/.ssh",
]


@pytest.mark.parametrize("name", PATHS)
def test_model_names_are_no_paths(server: LiveServer, name: str) -> None:
    for path, field in (("/v1/completions", {"prompt": "Hi"}), ("/tokenize", {"prompt": "Hi"})):
        error = check_refused(*ask(server, path, {"model": name, **field}))
        assert error["code"] == "model_not_found"


@pytest.mark.parametrize(
    "target",
    ["/../../etc/passwd", "/page.css/../../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "//etc/passwd", "/v1/models/"]
    + [f"/v1/models/{name}" for name in ("../../../etc/passwd", "%2e%2e%2f%2e%2e%2fetc%2fpasswd", "%00", "\\etc")],
)
def test_paths_lead_to_no_file(server: LiveServer, target: str) -> None:
    status, content = parse_raw(
        server.send_raw(f"GET {target} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
    )
    assert b"root:" not in content
    if target == "/v1/models/":
        assert status == 200
    else:
        assert check_refused(status, content)["type"] == "not_found_error"


def test_requests_open_no_file(chat_artifact: Path) -> None:
    """Everything a process opens passes its audit hooks: nothing that a request says is among it."""
    program = (
        "import asyncio, json, sys\n"
        "from pathlib import Path\n"
        "import httpx\n"
        "from llmc.runtime.server.app import create_app\n"
        "from llmc.runtime.server.async_engine import AsyncEngine\n"
        "from llmc.runtime.server.config import ServerConfig\n"
        "config = ServerConfig(Path(sys.argv[1]), ('tiny',), access_log=False)\n"
        "app = create_app(config, AsyncEngine(config.artifact))\n"
        "seen, watching = [], False\n"
        "FAMILIES = ('open', 'os', 'subprocess', 'shutil', 'socket', 'pickle', 'exec', 'compile', 'ctypes', 'import')\n"
        "def hook(event, arguments):\n"
        "    if watching and event.split('.')[0] in FAMILIES:\n"
        "        seen.append((event, repr(arguments)))\n"
        "sys.addaudithook(hook)\n"
        "async def main():\n"
        "    global watching\n"
        "    async with app.router.lifespan_context(app):\n"
        "        transport = httpx.ASGITransport(app)\n"
        "        async with httpx.AsyncClient(transport=transport, base_url='http://localhost') as client:\n"
        "            while (await client.get('/ready')).status_code != 200: await asyncio.sleep(0.01)\n"
        "            statuses = []\n"
        # The first round imports what is imported at its first use.
        "            for round in range(2):\n"
        "                for path in ('/v1/completions', '/v1/chat/completions', '/tokenize'):\n"
        "                    for name in ('/marker/x', '../marker', 'tiny'):\n"
        "                        body = {'model': name, 'max_tokens': 1, 'user': '/marker'}\n"
        "                        message = {'role': 'user', 'content': '/marker/y', 'name': '/marker/z'}\n"
        "                        body |= {'messages': [message]} if 'chat' in path else {'prompt': '/marker/file'}\n"
        "                        watching = round == 1\n"
        "                        answer = await client.post(path, json=body)\n"
        "                        await client.get('/v1/models/' + name)\n"
        "                        watching = False\n"
        "                        statuses.append(answer.status_code)\n"
        "    print(json.dumps({'statuses': statuses, 'seen': seen}))\n"
        "asyncio.run(main())\n"
    )
    import subprocess

    pytest.importorskip("httpx", reason="httpx belongs to the extra dev")
    command = [sys.executable, "-P", "-c", program, str(chat_artifact)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout.splitlines()[-1])
    assert report["statuses"] == [404, 404, 200] * 6
    assert [event for event in report["seen"] if "marker" in event[1]] == []
    assert {event[0] for event in report["seen"]} <= {"ctypes.addressof", "ctypes.cdata", "ctypes.call_function"}


# ---- keys --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def guarded(chat_artifact: Path) -> Iterator[LiveServer]:
    with serving(chat_artifact, "--served-model-name", "tiny", "--api-key", KEY, "--api-key", "other") as server:
        yield server


@pytest.mark.parametrize(
    "value",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        "Bearer x",
        f"Bearer {KEY[:-1]}",
        f"Bearer {KEY}x",
        f"Basic {KEY}",
        KEY,
        "Bearer é",
    ],
)
def test_without_a_key_nothing_is_told(guarded: LiveServer, value: str | None) -> None:
    headers = {} if value is None else {"Authorization": value}
    for method, path in (
        ("GET", "/v1/models"),
        ("POST", "/v1/completions"),
        ("POST", "/v1/chat/completions"),
        ("POST", "/tokenize"),
        ("GET", "/metrics"),
        ("GET", "/v1/llmc/state"),
        ("GET", "/v1/llmc/requests"),
        ("GET", "/openapi.json"),
        ("GET", "/nowhere"),
    ):
        answer = guarded.ask(method, path, BODY if method == "POST" else None, headers)
        assert answer.status == 401, (path, answer.content)
        assert check_refused(answer.status, answer.content)["code"] == "invalid_api_key"


def test_each_key_opens(guarded: LiveServer) -> None:
    for key in (KEY, "other"):
        answer = guarded.ask("POST", "/v1/completions", BODY, {"Authorization": f"Bearer {key}"})
        assert answer.status == 200, answer.content
    assert guarded.ask("GET", "/health").status == 200
    assert not any(KEY in line for line in guarded.log), "a key is never logged"


def test_every_key_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    import hmac

    from llmc.runtime.server.api_keys import KnownKeys
    from llmc.runtime.server.config import ServerConfig

    compared: list[bytes] = []
    real = hmac.compare_digest

    def compare(given: bytes, key: bytes) -> bool:
        compared.append(key)
        return real(given, key)

    monkeypatch.setattr(hmac, "compare_digest", compare)
    keys = KnownKeys(["one", "two", "three"])
    assert keys.number([(b"authorization", b"Bearer one")]) == 0
    assert compared == [b"one", b"two", b"three"] * 2, "as a bearer's key, and as X-Api-Key's"
    assert KEY not in repr(ServerConfig(Path("x"), ("x",), api_keys=(KEY,)))


@pytest.mark.parametrize("key", ["schlüssel", "ключ", "voilà", "\N{KEY}", "naïve café\u00a0x"])
def test_keys_may_be_of_any_language(key: str) -> None:
    from llmc.runtime.server.api_keys import KnownKeys

    keys = KnownKeys(["other", key])

    def known(sent: bytes) -> bool:
        return keys.number([(b"authorization", b"Bearer " + sent)]) == 1

    assert known(key.encode())
    assert known(key.encode() + b" ")
    assert not known(key.encode()[:-1])
    assert not known(key.encode("ascii", "replace"))
    if all(ord(character) < 256 for character in key):
        assert known(key.encode("latin-1")), "as urllib and requests write headers"


def test_a_key_that_is_not_ascii_opens_a_server(chat_artifact: Path) -> None:
    with running_server(chat_artifact, api_keys=("voilà",)) as running:
        for sent, status in ((b"Bearer voil\xc3\xa0", 200), (b"Bearer voil\xe0", 200), (b"Bearer voil\xc3", 401)):
            answer = running.client.get("/v1/models", headers=[(b"authorization", sent)])
            assert answer.status_code == status


# ---- hosts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host", ["localhost", "LocalHost:1234", "127.0.0.1", "127.0.0.1:80", "[::1]:8000", "[::1]", ""]
)
def test_a_local_server_answers_to_this_machines_names(server: LiveServer, host: str) -> None:
    received = server.send_raw(f"GET /health HTTP/1.1\r\nHost: {host}\r\n\r\n".encode(), end=False)
    assert parse_raw(received)[0] == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "x", "[::2]", ":"]
)
@pytest.mark.parametrize("target", ["GET /health", "GET /", "POST /v1/completions", "OPTIONS /v1/models"])
def test_a_local_server_answers_to_no_other_name(server: LiveServer, host: str, target: str) -> None:
    """A web page may give its own name the address 127.0.0.1; the browser then sends that name."""
    received = server.send_raw(f"{target} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode(), end=False)
    status, content = parse_raw(received)
    assert status == 403
    error = check_refused(status, content)
    assert error["code"] == "host_not_allowed"
    assert repr(host) in error["message"]
    assert "--allowed-hosts" in error["message"]


def test_a_second_host_header_is_no_way_around(server: LiveServer) -> None:
    received = server.send_raw(b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n", end=False)
    assert 400 <= parse_raw(received)[0] < 500


def test_a_server_with_keys_answers_to_any_name(guarded: LiveServer) -> None:
    assert guarded.ask("GET", "/health", headers={"Host": "models.example"}).status == 200


@pytest.mark.parametrize(
    ("options", "allowed", "refused"),
    [
        ({}, ["localhost", "127.0.0.1:1", "[::1]"], ["a.example", "10.0.0.1"]),
        ({"host": "127.0.0.5"}, ["localhost", "127.0.0.5"], ["a.example"]),
        ({"host": "::1"}, ["localhost", "[::1]:9"], ["a.example"]),
        ({"host": "0.0.0.0"}, ["a.example"], []),
        ({"api_keys": ("k",)}, ["a.example"], []),
        ({"allowed_hosts": ("a.example",)}, ["a.example", "A.example.:80"], ["localhost", "b.a.example"]),
        ({"allowed_hosts": ("a.example",), "api_keys": ("k",)}, ["a.example"], ["localhost"]),
        ({"allowed_hosts": ("*.example", "::1")}, ["a.example", "b.a.example", "[::1]"], ["example", "aexample"]),
        ({"allowed_hosts": ("*",)}, ["a.example", "x"], []),
    ],
)
def test_which_hosts_a_configuration_allows(options: dict[str, Any], allowed: list[str], refused: list[str]) -> None:
    import asyncio

    from llmc.runtime.server.config import ServerConfig
    from llmc.runtime.server.hosts import AllowedHosts, hosts_of

    statuses: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    hosts = AllowedHosts(app, hosts_of(ServerConfig(Path("x"), ("x",), **options)))
    for host in (*allowed, *refused):
        scope = {"type": "http", "headers": [(b"host", host.encode())]}
        asyncio.run(hosts(scope, None, send))  # type: ignore[arg-type]
    assert statuses == [200] * len(allowed) + [403] * len(refused)


# ---- what goes out -----------------------------------------------------------------------------------------------


def logged(server: LiveServer) -> list[dict[str, Any]]:
    """The access log so far; another thread reads the lines as they come, so a last request marks the end."""
    marker = uuid.uuid4().hex
    server.ask("GET", "/nowhere", headers={"X-Request-Id": marker})
    until(lambda: any(marker in line for line in server.log))
    lines = [json.loads(line) for line in server.log if line.startswith("{")]
    return [line for line in lines if line["request_id"] != marker]


def test_prompts_are_not_logged(server: LiveServer) -> None:
    server.ask("POST", "/v1/completions", {"prompt": SECRET, "max_tokens": 1})
    server.ask("POST", "/v1/completions", {"prompt": SECRET, "max_tokens": -1})
    server.ask("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 1})
    assert [line["status"] for line in logged(server)][-3:] == [200, 400, 200]
    assert not any(SECRET in line for line in server.log)


def test_request_ids_cannot_forge_lines(server: LiveServer) -> None:
    given = ("a\tb", "x" * 1000, "é", '"}', "fine")
    for one in given:
        answer = server.ask("GET", "/v1/nothing", headers={"X-Request-Id": one.encode().decode("latin-1")})
        assert answer.status == 404
    ids = [line["request_id"] for line in logged(server) if line["path"] == "/v1/nothing"]
    assert len(ids) == len(given)
    assert ids[-2:] == ['"}', "fine"]
    assert all(re.fullmatch("[0-9a-f]{32}", one) for one in ids[:-2]), ids


def test_other_origins_get_no_permission(server: LiveServer) -> None:
    answer = server.ask("GET", "/v1/models", headers={"Origin": "https://evil.example"})
    assert not [name for name in answer.headers if name.lower().startswith("access-control")]


def test_errors_tell_nothing_of_the_machine(server: LiveServer, chat_artifact: Path) -> None:
    for body in (b"{", b'{"prompt": 3}', b'{"model": "x", "prompt": "Hi"}', b'{"prompt": "' + b"a" * 9999 + b'"}'):
        answer = server.ask("POST", "/v1/completions", body)
        assert str(chat_artifact.parent).encode() not in answer.content
        assert b"Traceback" not in answer.content


# ---- what the code does not do -----------------------------------------------------------------------------------

FORBIDDEN_MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "yaml", "importlib.util"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}


@pytest.mark.parametrize("path", sorted((ROOT / "runtime").rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_the_runtime_runs_no_code_from_data(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in FORBIDDEN_CALLS, f"{node.func.id} in line {node.lineno}"
        assert not FORBIDDEN_MODULES.intersection(names), ast.unparse(node)
        if isinstance(node, ast.keyword) and node.arg in ("allow_pickle", "trust_remote_code", "shell"):
            assert isinstance(node.value, ast.Constant), node.arg
            assert node.value.value is False, node.arg


@pytest.mark.parametrize("is_zipped", [False, True])
def test_a_pickle_in_a_checkpoint_is_not_run(is_zipped: bool, tmp_path: Path) -> None:
    """Weights in torch's own format are lists of instructions, which llmc reads and does not follow."""
    import pickle
    import subprocess
    import zipfile

    class Bomb:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "ran",))

    model = tmp_path / "model"
    model.mkdir()
    config = json.loads((ROOT / "examples" / "tiny-english" / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling.Model"}
    (model / "config.json").write_text(json.dumps(config))
    weights = model / "pytorch_model.bin"
    if is_zipped:
        with zipfile.ZipFile(weights, "w") as archive:
            archive.writestr("pytorch_model/data.pkl", pickle.dumps({"x": Bomb()}, protocol=2))
    else:
        weights.write_bytes(pickle.dumps(Bomb()))
    (model / "modeling.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    command = [sys.executable, "-P", "-m", "llmc.cli.main", "compile", str(model), "-o", str(tmp_path / "out")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 1
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "out").exists()
