"""Policies for a step that no graph of its phase holds, for `LLM`, `AsyncLLM` and the command line."""

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
    """Raises RequestError for an unknown policy, ModelPathError for `background` without the compiler.

    name: the option's name in errors.
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
    """record: file to which every miss is appended. on_bucket_news: callback for background compilations; None logs to
    `llmc.misses`.

    Raises as parse_policy does, and BucketError if the file is not a record, or not writable.
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
        """The policy of the engine itself; `background` is implemented by this process."""
        return "larger" if self.policy == "background" else self.policy
