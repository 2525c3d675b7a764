"""--miss-policy of `llmc run` and `llmc serve`: parsed and checked before anything is opened."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from llmc.hub_id import hub_id
from llmc.model_path import is_model as is_model_here
from llmc.runtime.misses.options import MISS_POLICIES, parse_policy
from llmc.runtime.request_error import RequestError

if TYPE_CHECKING:
    from llmc.runtime.misses.background import BucketNews
    from llmc.runtime.misses.options import MissPolicy

POLICY_HELP = "|".join(MISS_POLICIES)


def parse_miss_policy(policy: str, model: Path, ready_after: str = "all") -> MissPolicy:
    """Raises BadParameter for an unknown policy and for options that `strict` excludes, ModelPathError for `background`
    without the compiler."""
    try:
        found = parse_policy(policy, "--miss-policy")
    except RequestError as error:
        raise typer.BadParameter(str(error)) from error
    is_model = hub_id(model) is not None or is_model_here(model)
    if found == "error" and is_model and not (model / "graphs.bin").is_file():
        raise typer.BadParameter(
            f"--miss-policy error compiles nothing and {model} is not an artifact: compile it first, llmc compile "
            f"{model} -o OUT"
        )
    if found == "error" and ready_after != "all":
        raise typer.BadParameter(
            f"--ready-after {ready_after} takes requests while graphs are missing, but --miss-policy error fails them: "
            "use --ready-after all"
        )
    return found


def say_bucket_news(news: BucketNews) -> None:
    """Prints a line on stderr."""
    from llmc.cli.options.warm_up import say

    say(news.line())
