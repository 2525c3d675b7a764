"""A host that vanishes while it owes an answer: it ends no connection, and the system notices."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from support.two_hosts import ADDRESSES, HOSTS, TwoHosts

SERVER = """
import socket, sys
with socket.create_server((sys.argv[1], 8000)) as listener:
    print("listens", flush=True)
    connection, _ = listener.accept()
    connection.recv(65536)
    print("was asked", flush=True)
    sys.stdin.read()
"""
CLIENT = """
import asyncio, sys
from llmc.runtime.router.upstream import ReplicaLost, Upstream
async def ask():
    try:
        await Upstream(f"http://{sys.argv[1]}:8000").request("POST", b"/v1/completions", [], b"{}")
    except ReplicaLost as error:
        print(error, flush=True)
asyncio.run(ask())
"""
_HANGS_S = 120  # only a hang takes that long


@pytest.fixture
def hosts() -> Iterator[TwoHosts]:
    two = TwoHosts()
    try:
        two.__enter__()
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network namespaces can be made here: {error}")
    try:
        yield two
    finally:
        two.__exit__()


def start(host: str, program: str) -> subprocess.Popen[str]:
    command = ["ip", "netns", "exec", host, sys.executable, "-P", "-c", program, ADDRESSES[1]]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_who_waits_for_a_host_without_power_learns_of_it(hosts: TwoHosts) -> None:
    with start(HOSTS[1], SERVER) as server:
        try:
            assert server.stdout is not None
            assert server.stdout.readline() == "listens\n"
            with start(HOSTS[0], CLIENT) as client:
                try:
                    assert server.stdout.readline() == "was asked\n"
                    hosts.cut = True
                    said, _ = client.communicate(timeout=_HANGS_S)
                finally:
                    client.kill()
        finally:
            server.kill()
    assert said == f"{ADDRESSES[1]}:8000: nothing was heard of its host for 10 s\n"
