"""Artifacts beside a model's: of a drafting head, or of what makes rows of its images."""

from __future__ import annotations

from pathlib import Path

from llmc.compiler.config import CompileConfig
from llmc.compiler.resolve import resolve
from llmc.compiler.store.described import settings
from llmc.compiler.store.output import check_output, refuse_another
from llmc.models.loader import check_checkpoint

_SUFFIX = ".llmc"


def output_beside(output: Path, kind: str) -> Path:
    """Path of an artifact of this kind, beside the model's: `llama-eagle.llmc` beside `llama.llmc`."""
    name = output.name.removesuffix(_SUFFIX)
    return output.with_name(f"{name}-{kind}{output.name[len(name) :]}")


def check_early(config: CompileConfig) -> None:
    """Raises the errors of an artifact, and of its output, that can be known before the model beside it is compiled."""
    source = config.open_source()
    check_checkpoint(source.config(), source.checkpoint())
    there = check_output(config.output)
    if not config.overwrite:
        refuse_another(config.output, there, {"model": settings(resolve(config))["model"]})
