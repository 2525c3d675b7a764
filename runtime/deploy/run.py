"""Deploys on a cluster, and shuts down its own deployments."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

import ray
from ray import serve
from ray.serve.context import _get_global_client

from llmc.runtime.deploy.application import NAMESPACE, application, registry_of
from llmc.runtime.deploy.config import DeployConfig, DeployError

_LOOK_S = 0.5


def deploy(
    name: str,
    config: DeployConfig,
    *,
    address: str | None,
    host: str,
    port: int,
    keep: bool,
    on_ready: Callable[[str], None],
) -> None:
    """Deploys on the cluster at `address`, or on a new local one (None), until a signal. keep: leave it running.

    on_ready: called with the URL once every artifact has its replicas. Raises DeployError.
    """
    try:
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, ignore_reinit_error=True)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise DeployError(f"there is no Ray cluster at {address or 'this machine'}: {error}") from None
    serve.start(http_options={"host": host, "port": port, "location": "HeadOnly"})
    _check_address(host, port)
    serve.run(application(name, config), name=name, route_prefix="/", blocking=False)
    on_ready(f"http://{host}:{port}")
    if keep:
        return
    try:
        while True:
            time.sleep(_LOOK_S)
    except KeyboardInterrupt:
        pass
    finally:
        serve.delete(name)
        with contextlib.suppress(ValueError):
            ray.kill(registry_of(name))
        if address is None:
            serve.shutdown()


def _check_address(host: str, port: int) -> None:
    """Raises DeployError where the cluster's Serve listens elsewhere: Ray ignores other options than the first."""
    found = _get_global_client().http_config
    if (found.host, found.port) != (host, port):
        raise DeployError(
            f"Ray Serve listens at {found.host}:{found.port} of that cluster already, not at {host}:{port}: "
            f"give --host {found.host} --port {found.port}, or end it with `serve shutdown`"
        )
