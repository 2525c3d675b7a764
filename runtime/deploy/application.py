"""The deployment as a Ray Serve application. The only module here that imports Ray (extra `ray`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

from llmc.runtime.deploy.config import DeployConfig, parse_config
from llmc.runtime.deploy.endpoint import Endpoint
from llmc.runtime.deploy.registry import Place, Registry
from llmc.runtime.deploy.server import Server
from llmc.runtime.router.config import RouterConfig
from llmc.runtime.router.roles import has_roles

NAMESPACE = "llmc"
_REGISTRY = "llmc-replicas"
_HEAD = "node:__internal_head__"
"""Ray's resource name of the head node."""
_HEALTH_PERIOD_S, _HEALTH_TIMEOUT_S = 2.0, 10.0


def registry_of(name: str) -> Any:
    """The registry of the deployment `name`, on any node; started if it does not exist."""
    options = {"namespace": NAMESPACE, "lifetime": "detached", "get_if_exists": True, "num_cpus": 0}
    return ray.remote(Registry).options(name=f"{_REGISTRY}-{name}", max_restarts=-1, **options).remote()


class ServedArtifact:
    """A replica; Ray restarts it on some node when it ends. role: prefill, decode, or none."""

    def __init__(self, name: str, artifact: str, config: DeployConfig, role: str) -> None:
        self._registry = registry_of(name)
        self._stop_s = config.stop_s
        self._name = f"{Path(artifact).name}-{serve.get_replica_context().replica_id.unique_id}"
        host = ray.util.get_node_ip_address()
        hand_over_key = config.hand_over_key if role else None
        self._server = Server(artifact, config.command_flags(role), host, config.replica_key, hand_over_key)

    async def reconfigure(self, _nothing: Any) -> None:
        """Ray waits for it: the replica is ready when this returns. When another replica is lost, Ray numbers the rest
        anew and calls this again."""
        await self._server.start(self._beat)

    async def check_health(self) -> None:
        self._server.check()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        return await self._server.load()

    async def __del__(self) -> None:
        await self._server.stop(self._beat, self._stop_s)
        await self._registry.leave.remote(self._name)

    async def _beat(self, url: str, leaving: bool) -> None:
        await self._registry.beat.remote(self._name, url, leaving)


def _endpoint(name: str, config: RouterConfig) -> Any:
    def build() -> Endpoint:
        registry = registry_of(name)

        async def ask() -> Mapping[str, Place]:
            places: Mapping[str, Place] = await registry.places.remote()
            return places

        return Endpoint(config, ask)

    return serve.ingress(build)


class _Routed:
    """The endpoint's actor. replicas: their handles, so that Ray deploys them too; requests bypass the handles."""

    def __init__(self, *replicas: Any) -> None:
        self.replicas = replicas


def _scaling(config: DeployConfig, role: str) -> dict[str, Any]:
    """Options of a deployment that decide its number of replicas."""
    if role == "prefill":
        return {"num_replicas": config.prefill_replicas}
    if config.max_replicas == config.min_replicas:
        return {"num_replicas": config.min_replicas}
    policy = AutoscalingPolicy(
        policy_function="llmc.runtime.deploy.scaling:Scaling",
        policy_kwargs={
            "target_load": config.target_load,
            "kv_high": config.kv_high,
            "down_delay_s": config.down_delay_s,
        },
    )
    return {
        "autoscaling_config": AutoscalingConfig(
            min_replicas=config.min_replicas,
            max_replicas=config.max_replicas,
            metrics_interval_s=1.0,
            look_back_period_s=5.0,
            # The policy waits by itself; versions differ in what else waits.
            upscale_delay_s=0.0,
            downscale_delay_s=0.0,
            policy=policy,
        )
    }


def application(name: str, config: DeployConfig) -> serve.Application:
    """Replicas of each artifact behind one endpoint. name: of the deployment in its cluster."""
    config = config.with_key()
    parts = []
    for index, artifact in enumerate(config.artifacts):
        apart = config.prefill_replicas > 0 and has_roles(Path(artifact))
        for role in ("decode", "prefill") if apart else ("",):
            deployment = serve.deployment(
                name=f"artifact-{index}-prefill" if role == "prefill" else f"artifact-{index}",
                user_config={},
                ray_actor_options={"num_cpus": config.replica_cpus, "num_gpus": config.gpus},
                health_check_period_s=_HEALTH_PERIOD_S,
                health_check_timeout_s=_HEALTH_TIMEOUT_S,
                graceful_shutdown_timeout_s=config.stop_s + 10,
                **_scaling(config, role),
            )(ServedArtifact)
            parts.append(deployment.bind(name, artifact, config, role))
    router = RouterConfig(
        max_inflight=config.max_inflight,
        patience_s=config.patience_s,
        retries=config.retries,
        replica_key=config.replica_key,
        hand_over_key=config.hand_over_key if config.prefill_replicas else None,
        hand_over_chars=config.hand_over_chars,
    )

    endpoint = serve.deployment(
        name="endpoint",
        num_replicas=config.endpoints,
        max_ongoing_requests=1 << 16,
        # On the HTTP proxy's node, so that a stream depends on one node.
        ray_actor_options={"num_cpus": 0, "resources": {_HEAD: 0.001}},
        graceful_shutdown_timeout_s=config.stop_s,
    )(_endpoint(name, router)(_Routed))
    return endpoint.bind(*parts)


def build(args: Mapping[str, Any]) -> serve.Application:
    """Entry point for a Serve config file: `import_path: llmc.runtime.deploy.application:build`, with DeployConfig as
    `args`, plus `name`. Raises DeployError."""
    given = dict(args)
    return application(str(given.pop("name", "llmc")), parse_config(given))
