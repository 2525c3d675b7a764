"""Starts the serving process: its socket, its engine and thread priorities."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from llmc.regular_file import read_text
from llmc.runtime.adapters.tensors import AdapterError
from llmc.runtime.binding import ArtifactInfo, GraphInfo
from llmc.runtime.binding.devices import is_other_rank
from llmc.runtime.images.image_limits import ImageLimits
from llmc.runtime.images.tower import Tower, open_tower, tower_options
from llmc.runtime.launched_graphs import launched_graphs
from llmc.runtime.misses.background import OnBucketNews
from llmc.runtime.misses.options import MissOptions
from llmc.runtime.warm_up.warm_up import OnWarmStep, WarmPlan

from .app import create_app
from .async_engine import AsyncEngine
from .config import ServerConfig
from .context import ServerContext
from .draining import OnStopping
from .file_limit import raise_file_limit
from .hand_over import no_hand_over
from .process import BACKLOG, ServerProcess
from .tls import why_unusable

log = logging.getLogger("llmc.server")
# Between two steps the engine's thread needs the interpreter's lock; by default Python lets others keep it for 5 ms.
SWITCH_INTERVAL_S = 0.0005
# By the device's statistic nccl_refusal, where nobody chose the host.
_NCCL_REFUSALS = {
    2: "a rank cannot load NCCL; install NCCL 2.14 or later, or name its library with LLMC_NCCL_LIBRARY",
    3: "two ranks have the same GPU, which NCCL refuses; name one for each with --device-number",
    4: "ranks have different versions of NCCL; install the same one everywhere",
}


class ServerError(RuntimeError):
    """The server cannot start; the message is one sentence."""


def open_engine(config: ServerConfig, on_bucket_news: OnBucketNews | None = None) -> AsyncEngine:
    """Opens the artifact with the engine options of `config`. Raises ServerError and the binding's errors, and
    SystemExit in a process that is another rank than 0, when its part is done."""
    template = None
    if config.chat_template is not None:
        try:
            template = read_text(config.chat_template, 1 << 24)
        except OSError as error:
            why = error.strerror or error
            raise ServerError(f"cannot read the chat template {config.chat_template}: {why}") from error
        except ValueError as error:
            raise ServerError(f"cannot read the chat template {config.chat_template}: {error}") from error
    options = {
        "num_threads": config.num_threads,
        "pin_threads": config.pin_threads,
        "idle_spin_us": config.idle_spin_us,
        "weight_memory": config.weight_memory,
        **config.device_options,
    }

    def open_images(path: Path, info: ArtifactInfo) -> Tower | None:
        if config.images is None:
            return None
        limits = ImageLimits(images=config.max_images, bytes=config.max_body_bytes)
        return open_tower(config.images, info, path, tower_options(options), limits)

    engine = AsyncEngine(
        config.artifact,
        chat_template=template,
        max_num_seqs=config.max_num_seqs,
        max_tokens_per_step=config.max_num_batched_tokens,
        max_waiting=config.max_queue,
        priority_patience=config.priority_patience,
        kv_bytes=config.kv_bytes,
        num_states=config.num_states,
        swap_bytes=config.swap_bytes,
        prefix_cache=config.prefix_cache,
        misses=MissOptions(config.miss_policy, config.record_misses, on_bucket_news),
        guided_threads=config.guided_threads,
        speculation=config.speculation,
        open_tower=open_images,
        **options,
    )
    try:
        for name, path in config.lora:
            engine.adapters.load(name, path)
    except AdapterError as error:
        engine.close()
        raise ServerError(f"--lora: {error}") from error
    if config.allow_runtime_lora and engine.adapters.slots == 0:
        engine.close()
        raise ServerError(
            f"{config.artifact} takes no adapters: compile it with --lora-slots, or leave out --allow-runtime-lora"
        )
    if config.hand_over_key is not None and (obstacle := no_hand_over(config, engine)) is not None:
        if config.role != "both":
            engine.close()
            raise ServerError(f"--role {config.role}: {obstacle}")
        log.warning("--hand-over-key is not used: %s", obstacle)
    if engine.limit.warning is not None:
        log.warning("%s", engine.limit.warning)
    device = engine.stats().device
    weight_bytes = device.get("weight_bytes", 0)
    mapped_bytes = weight_bytes - device.get("copied_weight_bytes", weight_bytes)
    if config.weight_memory == "copied" and mapped_bytes > 0:
        log.warning(
            "%.2f of %.2f GiB of weights stay mapped, and steps are slower: no memory for a copy beside the KV pool; "
            "lower --kv-bytes or free memory",
            mapped_bytes / 2**30,
            weight_bytes / 2**30,
        )
    eager = bool(config.device_options.get("eager"))
    if (warning := launched_graphs(engine.graphs, engine.graph_stats(), device, eager=eager)) is not None:
        log.warning("%s", warning)
    if (refusal := _NCCL_REFUSALS.get(device.get("nccl_refusal", 0))) is not None:
        log.warning("ranks exchange results by the host's memory, and steps are slower: %s", refusal)
    if device.get("spread_errno", 0) != 0:
        log.warning(
            "the CPUs belong to %d memory nodes, and not all memory is spread over them: mbind: %s; allow the system "
            "call (in containers --cap-add SYS_NICE) or give the server the CPUs of one node",
            device["memory_nodes"],
            os.strerror(device["spread_errno"]),
        )
    return engine


def serve(
    config: ServerConfig,
    *,
    on_warm_step: OnWarmStep | None = None,
    plan_warm_up: Callable[[Sequence[GraphInfo], int], WarmPlan] | None = None,
    on_ready: Callable[[str], None] | None = None,
    on_listening: Callable[[str], None] | None = None,
    on_stopping: OnStopping | None = None,
    on_bucket_news: OnBucketNews | None = None,
) -> str | None:
    """Serves until a signal or a failure of the engine. Returns why the engine failed, None for an orderly end.

    plan_warm_up: makes the plan from the artifact's graphs and the engine's thread count; None: all graphs, none
    measured. on_bucket_news: told the outcome for buckets that the miss policy `background` compiles. on_listening and
    on_ready are called with the server's URL, on_stopping with the reason for the end. Raises what `open_engine` does.
    """
    if is_other_rank(config.artifact):  # only rank 0 has an address
        open_engine(config, on_bucket_news)
    listener, stack = listen(config.host, config.port), contextlib.ExitStack()
    try:
        host, port = listener.getsockname()[:2]
        scheme = "https" if config.ssl_certfile is not None else "http"
        url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
        tls = _check_tls(config)
        engine = open_engine(config, on_bucket_news)
        stack.callback(engine.close)
        plan = None if plan_warm_up is None else plan_warm_up(engine.graphs, engine.stats().device.get("threads", 0))
        app = create_app(config, engine, on_warm_step, plan)
        server: ServerContext = app.state.server
        if on_listening is not None:
            on_listening(url)
        server.on_ready.append(_settle)
        if on_ready is not None:
            server.on_ready.append(lambda: on_ready(url))
        server.on_started.append(lambda: _yield_to_engine(config.nice))
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        raise_file_limit()
        process = ServerProcess(app, server, config, tls, on_stopping or (lambda _: None))
        server.on_failure.append(process.stop)
        process.run(sockets=[listener])
        return server.failure
    finally:
        stack.close()
        listener.close()


def _settle() -> None:
    """Freezes the objects that exist once the server is ready: a collection that walks them again would delay every
    step."""
    gc.collect()
    gc.freeze()


def listen(host: str, port: int) -> socket.socket:
    """A bound socket, made early: a used port is reported before the model loads, and early clients wait instead of
    being refused."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except (OSError, OverflowError) as error:
        # Python repeats host and port in its own text.
        code = getattr(error, "errno", None) or 0  # negative where a name is not resolved
        why = os.strerror(code) if code > 0 else getattr(error, "strerror", None) or str(error)
        raise ServerError(f"cannot listen on {host} port {port}: {why}; choose another --host or --port") from error


def _check_tls(config: ServerConfig) -> dict[str, str]:
    """TLS arguments of uvicorn. Raises ServerError."""
    if config.ssl_certfile is None:
        if config.ssl_keyfile is not None:
            raise ServerError("--ssl-keyfile needs --ssl-certfile: give both")
        return {}
    keyfile = config.ssl_keyfile or config.ssl_certfile
    if (why := why_unusable(config.ssl_certfile, keyfile)) is not None:
        raise ServerError(why)
    return {"certfile": str(config.ssl_certfile), "keyfile": str(keyfile)}


def _yield_to_engine(nice: int) -> None:
    """Lowers the priority of this thread, and of those it starts later, below the engine's threads, which run
    already."""
    if nice and hasattr(os, "setpriority"):
        with contextlib.suppress(OSError):
            thread = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, thread) + nice))
