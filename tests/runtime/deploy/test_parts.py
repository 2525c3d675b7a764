"""What a deployment is made of, without Ray: its arguments, who is where, when there are too few replicas."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import yaml

from llmc.runtime.deploy.config import DeployConfig, DeployError, parse_config
from llmc.runtime.deploy.endpoint import Endpoint
from llmc.runtime.deploy.registry import FORGET_S, Place, Registry
from llmc.runtime.deploy.scaling import Scaling, wanted_replicas
from llmc.runtime.deploy.server import Server, ServerDied
from llmc.runtime.router.config import RouterConfig

from support.paths import ROOT


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"artifacts": []}, "no artifact to deploy: give the path"),
        ({"artifacts": "a.llmc"}, "artifacts is 'a.llmc': give a list of texts"),
        ({"artifacts": ["a", "a"]}, "a is given twice"),
        ({"artifacts": ["a"], "min_replicas": 3}, "min_replicas 3 and max_replicas 1 are not a range"),
        (
            {"artifacts": ["a"], "replicas": 3},
            "args has 'replicas', which a deployment does not have: use artifacts, min_",
        ),
        ({"artifacts": ["a"], "target_load": 0}, "target_load 0 is out of range: give more than 0"),
        ({"artifacts": ["a"], "kv_high": 1.5}, r"kv_high 1.5 is out of range"),
        ({"artifacts": ["a"], "endpoints": 1.5}, r"endpoints is 1.5: give a whole number"),
        ({"artifacts": ["a"], "cpus": True}, r"cpus is True: give a number"),
        ({"artifacts": ["a"], "prefill_replicas": -1}, r"prefill_replicas -1 is out of range: give 0 or more"),
        ({"artifacts": ["a"], "hand_over_chars": 0}, r"hand_over_chars 0 is out of range"),
        ({"artifacts": ["a"], "hand_over_key": "short"}, r"hand_over_key has 5 characters: use 16 or more, ASCII"),
        ({"artifacts": ["a"], "hand_over_key": "k" * 20 + "\n"}, r"hand_over_key has 21 characters"),
        ({"artifacts": ["a"], "hand_over_key": 10**20}, r"hand_over_key is not a text: put it in quotes"),
    ],
)
def test_arguments_that_do_not_fit(given: dict[str, Any], says: str) -> None:
    with pytest.raises(DeployError, match=says):
        parse_config(given)


def test_replicas_that_hand_over_have_a_key() -> None:
    for given in ({}, {"hand_over_key": None}, {"hand_over_key": ""}):
        config = parse_config({"artifacts": ["a"], "prefill_replicas": 1, **given})
        made = {config.with_key().hand_over_key for _ in range(2)}
        assert [len(key or "") for key in made] == [64, 64]
    for config in (DeployConfig(("a",)), DeployConfig(("a",), prefill_replicas=1, hand_over_key="k" * 16)):
        assert config.with_key() == config


def test_a_replica_has_the_threads_that_ray_keeps_for_it() -> None:
    assert DeployConfig(("a",), cpus=3).command_flags() == ["--threads", "3"]
    assert DeployConfig(("a",)).command_flags() == ["--threads", "1"]
    assert DeployConfig(("a",)).command_flags("prefill") == ["--threads", "1", "--role", "prefill"]
    for flags in (("--threads", "4"), ("--threads=4",)):
        config = parse_config({"artifacts": ["a"], "serve_flags": list(flags)})
        assert (config.command_flags(), config.replica_cpus) == (list(flags), 4.0)


def test_the_registry_forgets_who_is_silent() -> None:
    now = 0.0
    registry = Registry(lambda: now)
    registry.beat("a", "http://h:1")
    now = FORGET_S - 1
    registry.beat("b", "http://h:2", leaving=True)
    assert registry.places() == {"a": Place("http://h:1"), "b": Place("http://h:2", True)}
    now = FORGET_S
    assert list(registry.places()) == ["b"]
    registry.leave("b")
    registry.leave("b")
    assert registry.places() == {}


def test_replicas_are_wanted_by_load_and_by_blocks() -> None:
    def wanted(*loads: float, use: float = 0.1) -> int:
        uses = dict.fromkeys(range(len(loads)), use)
        return wanted_replicas(dict(enumerate(loads)), uses, current=len(loads), target_load=8, kv_high=0.9)

    assert [wanted(), wanted(0), wanted(8), wanted(9), wanted(40, 0)] == [0, 0, 1, 2, 5]
    assert wanted(1, 1, use=0.95) == 3
    assert wanted(60, use=0.95) == 8


def test_fewer_only_after_a_while() -> None:
    scaling = Scaling(8, 0.9, 60)
    state: dict[str, Any] = {}

    def ask(load: float, now: float, running: int = 3) -> int:
        nonlocal state
        wanted, state = scaling(
            SimpleNamespace(
                aggregated_metrics={"load": {"a": load}, "kv_use": {"a": 0.0}}, current_num_replicas=running,
                target_num_replicas=running, capacity_adjusted_min_replicas=1, capacity_adjusted_max_replicas=4,
                current_time=now, policy_state=state,
            )
        )  # fmt: skip
        return wanted

    assert ask(100, 0) == 4  # no more than may be
    assert [ask(8, 10), ask(8, 69)] == [3, 3]
    assert ask(24, 69.5) == 3  # enough for three: the time begins anew
    assert [ask(8, 70), ask(8, 129), ask(0, 130)] == [3, 3, 1]
    assert [ask(8, 200), ask(16, 210), ask(0, 260)] == [3, 3, 2]  # to the most that was wanted meanwhile


def test_an_endpoint_follows_the_registry() -> None:
    async def run() -> None:
        async def ask() -> dict[str, Place]:
            raise ConnectionError("no registry")

        endpoint, said = Endpoint(RouterConfig(health_interval_s=60), ask), []
        arrived: asyncio.Queue[dict[str, str]] = asyncio.Queue()
        arrived.put_nowait({"type": "lifespan.startup"})

        async def send(message: Any) -> None:
            said.append(message["type"])

        life = asyncio.create_task(endpoint({"type": "lifespan"}, arrived.get, send))
        while not said:
            await asyncio.sleep(0)
        fleet = endpoint._fleet
        assert fleet is not None
        both = {"a": Place("http://127.0.0.1:9"), "b": Place("http://127.0.0.1:10")}
        await endpoint.follow(both, 0)
        assert list(fleet.replicas) == ["a", "b"]
        # Started anew elsewhere, and one that leaves.
        await endpoint.follow({"a": Place("http://127.0.0.1:11"), "b": Place("http://127.0.0.1:10", True)}, 1)
        upstream = fleet.replicas["a"].upstream
        assert upstream is not None
        assert (upstream.name, fleet.replicas["a"].draining, fleet.replicas["b"].draining) == (
            "127.0.0.1:11",
            False,
            True,
        )
        # One that runs a request stays until it has ended; a registry that has forgotten all loses nobody at once.
        fleet.replicas["b"].begin()
        await endpoint.follow({}, 2)
        assert list(fleet.replicas) == ["a", "b"]
        await endpoint.follow({}, 2 + FORGET_S)
        assert list(fleet.replicas) == ["b"]
        fleet.replicas["b"].end()
        await endpoint.follow({}, 3 + FORGET_S)
        assert not fleet.replicas
        arrived.put_nowait({"type": "lifespan.shutdown"})
        await life
        assert said == ["lifespan.startup.complete", "lifespan.shutdown.complete"]

    asyncio.run(run())


def test_a_server_from_start_to_end(english_artifact: Path) -> None:
    async def run() -> None:
        said: list[tuple[str, bool]] = []

        async def beat(url: str, leaving: bool) -> None:
            said.append((url, leaving))

        server = Server(str(english_artifact), ["--threads", "1"], "127.0.0.1", None)
        await asyncio.gather(server.start(beat), server.start(beat))
        pid = server.process.pid
        await server.start(beat)  # as Ray does when it numbers replicas anew
        assert server.process.pid == pid
        assert len(server._tasks) == 2
        server.check()
        assert await server.load() == {"load": 0.0, "kv_use": 0.0}
        body = {"prompt": "It is", "max_tokens": 400, "ignore_eos": True, "stream": True}
        async with httpx.AsyncClient(timeout=60) as client:
            for _ in range(20):  # on a busy machine, an answer may have ended before the question
                async with client.stream("POST", f"{server.url}/v1/completions", json=body) as answer:
                    await anext(answer.aiter_bytes())
                    busy = await server.load()
                if busy["load"]:
                    break
        assert busy["load"] == 1.0
        assert 0 < busy["kv_use"] < 1
        assert server.process.pid is not None
        os.kill(server.process.pid, signal.SIGKILL)
        await server._tasks[0]
        with pytest.raises(ServerDied, match="llmc serve: killed by signal 9"):
            server.check()
        assert await server.load() == {"load": 0.0, "kv_use": 0.0}
        await server.stop(beat, 5)
        assert said[0] == (server.url, False)
        assert said[-1] == (server.url, True)

        broken = Server("/no/artifact", [], "127.0.0.1", None)
        with pytest.raises(ServerDied, match=r"ended with exit code \d.*/no/artifact"):
            await broken.start(beat)

    asyncio.run(run())


def test_a_server_that_cannot_be_started_is_waited_for_by_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: Any, **__: Any) -> None:
        raise BlockingIOError(errno.EAGAIN, "no process is left")

    async def beat(url: str, leaving: bool) -> None:
        raise AssertionError(url)

    async def run() -> None:
        await check("--threads\0", "embedded null byte")
        monkeypatch.setattr(asyncio, "create_subprocess_exec", fail)
        await check("--threads=1", f"[Errno {errno.EAGAIN}] no process is left")

    async def check(flag: str, why: str) -> None:
        server = Server("/some/artifact", [flag], "127.0.0.1", None)
        found = await asyncio.gather(*(server.start(beat) for _ in range(3)), return_exceptions=True)
        message = f"llmc serve: could not be started: {why}"
        assert [(type(error), str(error)) for error in found] == [(ServerDied, message)] * 3
        await server.stop(beat, 5)

    asyncio.run(run())


def test_without_ray_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from llmc.cli.main import main

    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "llmc.runtime.deploy.run", raising=False)
    assert main(["deploy", "a.llmc"]) == 2
    assert "Ray Serve cannot be imported" in capsys.readouterr().err
    assert main(["deploy", "a.llmc", "--keep"]) == 2
    assert "give the --address of one that stays" in capsys.readouterr().err


def test_files_for_clusters_have_arguments_that_fit() -> None:
    folder = ROOT / "deploy" / "ray"
    files = [yaml.safe_load((folder / "serve.yaml").read_text())]
    kubernetes = yaml.safe_load((folder / "kuberay.yaml").read_text())
    files.append(yaml.safe_load(kubernetes["spec"]["serveConfigV2"]))
    for file in files:
        assert file["proxy_location"] == "HeadOnly"
        (application,) = file["applications"]
        module, _, function = application["import_path"].partition(":")
        source = (ROOT / module.removeprefix("llmc.").replace(".", "/")).with_suffix(".py").read_text()
        assert f"def {function}(args:" in source
        args = dict(application["args"])
        args.pop("name", None)
        assert parse_config(args).max_replicas == 4
    values = yaml.safe_load((folder / "values.yaml").read_text())
    groups = [
        kubernetes["spec"]["rayClusterConfig"]["headGroupSpec"],
        *kubernetes["spec"]["rayClusterConfig"]["workerGroupSpecs"],
    ]
    pods = [group["template"]["spec"] for group in groups]
    mounts = [(pod["volumes"], pod["containers"][0]["volumeMounts"]) for pod in pods]
    mounts += [(values[part]["volumes"], values[part]["volumeMounts"]) for part in ("head", "worker")]
    for volumes, mounted in mounts:
        assert {one["name"] for one in mounted} == {one["name"] for one in volumes}


def test_pods_for_kubernetes_are_found_and_found_ready() -> None:
    folder = ROOT / "deploy" / "ray"
    texts = {name: (folder / name).read_text() for name in ("kuberay.yaml", "values.yaml", "serve.yaml", "Dockerfile")}
    service, values = yaml.safe_load(texts["kuberay.yaml"])["spec"], yaml.safe_load(texts["values.yaml"])
    cluster = service["rayClusterConfig"]
    (application,) = yaml.safe_load(service["serveConfigV2"])["applications"]
    (workers,) = cluster["workerGroupSpecs"]
    (head,), (worker,) = (one["template"]["spec"]["containers"] for one in (cluster["headGroupSpec"], workers))
    # Serve's proxy runs on the head alone: KubeRay finds it by that name, and must not wait for one elsewhere.
    assert {"containerPort": 8000, "name": "serve"} in head["ports"]
    assert worker["readinessProbe"]["httpGet"] == {"path": "/api/local_raylet_healthz", "port": 52365}
    assert workers["maxReplicas"] >= application["args"]["max_replicas"]
    assert int(worker["resources"]["limits"]["cpu"]) >= application["args"]["cpus"]
    image = f"{values['image']['repository']}:{values['image']['tag']}"
    assert head["image"] == worker["image"] == image == "llmc-ray:latest"
    for group in (cluster["headGroupSpec"], values["head"]):
        assert group["rayStartParams"] == {"num-cpus": "0"}, "replicas would share the router's CPUs"
    steps = [line for line in texts["Dockerfile"].splitlines() if line and not line.startswith("#")]
    assert "-t llmc-ray " in texts["Dockerfile"]
    assert steps[0] == "FROM llmc"
    assert "wget" in " ".join(steps), "KubeRay's probes need it"
    assert "ENTRYPOINT []" in steps, "KubeRay starts nodes by a command of its own"
    assert [step for step in steps if step.startswith("USER")][-1] == "USER 10001:10001"


def test_flags_in_files_for_clusters_exist() -> None:
    folder = ROOT / "deploy" / "ray"
    serve_config = yaml.safe_load((folder / "serve.yaml").read_text())
    (command,) = re.findall(r"llmc deploy .*", (folder / "values.yaml").read_text())
    for name, words in (("serve", serve_config["applications"][0]["args"]["serve_flags"]), ("deploy", command.split())):
        run = [sys.executable, "-P", "-m", "llmc.cli.main", name, "--help"]
        text = subprocess.run(
            run, capture_output=True, text=True, check=True, env={"COLUMNS": "200", "PATH": ""}
        ).stdout
        used = {word for word in words if word.startswith("--")}
        assert used
        assert used <= set(re.findall(r"--[a-z][a-z0-9-]*", text)), name
