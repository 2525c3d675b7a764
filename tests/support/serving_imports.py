"""What a process has loaded of the compiler's stack once it has served a request."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

_CODE = """
import asyncio, httpx, json, sys
from pathlib import Path
from llmc.cli.main import build_app
from llmc.runtime.server.app import create_app
from llmc.runtime.server.config import ServerConfig
from llmc.runtime.server.run import open_engine

build_app("serve")

async def answer():
    path, options = Path(sys.argv[1]), json.loads(sys.argv[2])
    config = ServerConfig(path, ("tiny",), num_threads=1, access_log=False, device_options=options)
    app = create_app(config, open_engine(config))
    async with app.router.lifespan_context(app):
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            while (await client.get("/ready")).status_code != 200:
                await asyncio.sleep(0.01)
            body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
            response = await client.post("/v1/chat/completions", json=body)
            assert response.status_code == 200, response.text

asyncio.run(answer())
mapped = Path("/proc/self/maps").read_text()
modules = {"torch", "tvm", "transformers", "safetensors", "llmc.compiler"} & set(sys.modules)
print(json.dumps([*modules, *(name for name in ("libtorch", "libtvm") if name in mapped)]))
"""


def loaded_by_serving(artifact: Path, **device_options: Any) -> set[str]:
    """Modules and libraries that only a compiler may load, of a new process that has answered a chat request."""
    command = [sys.executable, "-P", "-c", _CODE, str(artifact), json.dumps(device_options)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return set(json.loads(done.stdout.splitlines()[-1]))
