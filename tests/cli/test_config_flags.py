"""Flags that are fields of a config."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from llmc.cli.deploy import DEPLOYING
from llmc.cli.options.config_flags import ConfigFlags, Flag
from llmc.cli.options.group import takes_option_groups
from llmc.cli.options.serving import SERVING
from llmc.cli.route import ROUTING
from llmc.runtime.deploy.config import DeployConfig
from llmc.runtime.router.config import RouterConfig
from llmc.runtime.server.config import ServerConfig


@dataclass(frozen=True)
class Config:
    port: int = 80
    names: tuple[str, ...] = ("a",)
    limit_s: float | None = 2.5
    file: Path | None = None
    most_bytes: int = 4 << 20
    quiet: bool = False
    made: str = "x"


FLAGS = ConfigFlags(
    Config,
    port=Flag("Where.", min=1),
    names=Flag("Who.", "--name"),
    limit_s=Flag("How long; 0: no limit.", name="limit"),
    file=Flag("What."),
    most_bytes=Flag("How much.", name="most", size=True),
    quiet=Flag("How.", default=True),
)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], Config(quiet=True, made="here")),
        (["--port", "9", "--name", "b", "--name", "c"], Config(9, ("b", "c"), quiet=True, made="here")),
        (["--limit", "0", "--most", "1KiB", "--no-quiet"], Config(limit_s=None, most_bytes=1024, made="here")),
        (["--file", "f", "--limit", "1"], Config(limit_s=1, file=Path("f"), quiet=True, made="here")),
        (["--port", "0"], None),
        (["--most", "much"], None),
    ],
)
def test_flags_make_the_config(arguments: list[str], expected: Config | None) -> None:
    found: list[Config] = []

    @takes_option_groups
    def command(*, given: Annotated[dict[str, Any], FLAGS]) -> None:
        found.append(Config(made="here", **given))

    app = typer.Typer()
    app.command()(command)
    result = CliRunner().invoke(app, arguments)
    assert (result.exit_code, found) == ((2, []) if expected is None else (0, [expected]))
    assert not arguments or expected is not None or "--" in result.output


@pytest.mark.parametrize(
    ("flags", "config", "others"),
    [
        (
            SERVING,
            ServerConfig,
            "artifact served_model_names api_keys device_options speculation miss_policy replan kv_bytes swap_bytes "
            "lora",
        ),
        (ROUTING, RouterConfig, "replicas spawn uvicorn_log_level"),
        (DEPLOYING, DeployConfig, "artifacts max_replicas stop_s"),
    ],
)
def test_every_field_is_a_flag(flags: ConfigFlags, config: type, others: str) -> None:
    """But those that a command makes of several flags, or of none."""
    given = {parameter.name: parameter.default for parameter in flags.parameters()}
    assert {field.name for field in fields(config)} - flags.take(given).keys() == set(others.split())
    assert given == {}
