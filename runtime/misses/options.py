"""What becomes of a step that no graph of its phase holds: the policies of `LLM`, `AsyncLLM` and the command line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from llmc.runtime.misses.record import prepare_record
from llmc.runtime.request_error import RequestError

if TYPE_CHECKING:
    from llmc.runtime.misses.background import OnBucketNews

MissPolicy = Literal["larger", "split", "background", "error"]
MISS_POLICIES: tuple[MissPolicy, ...] = get_args(MissPolicy)


def parse_policy(policy: str, name: str) -> MissPolicy:
    """Raises RequestError for an unknown one, ModelPathError for the background where the compiler is not installed.

    name: of the option, as its user knows it.
    """
    found = next((known for known in MISS_POLICIES if known == policy), None)
    if found is None:
        raise RequestError(f"{name} {policy!r} is unknown: use {', '.join(MISS_POLICIES)}")
    if found == "background":
        from llmc.model_artifact import require_compiler

        require_compiler(f"{name} background compiles what traffic lacks")
    return found


@dataclass(frozen=True)
class MissOptions:
    """record: a file that every miss is appended to. on_bucket_news: told what became of the buckets that the
    background compiles; None: the logger `llmc.misses` is.

    Raises as parse_policy does, and BucketError for a file that is no record or cannot be written.
    """

    policy: MissPolicy = "larger"
    record: Path | None = None
    on_bucket_news: OnBucketNews | None = None

    def __post_init__(self) -> None:
        parse_policy(self.policy, "miss_policy")
        if self.record is not None:
            prepare_record(self.record)

    @property
    def of_engine(self) -> str:
        """What the engine itself does; the background is this process's."""
        return "larger" if self.policy == "background" else self.policy
