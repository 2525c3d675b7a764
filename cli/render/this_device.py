"""What a device of this machine lacks for an artifact, in sentences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from llmc.cuda_code import Image, all_run_on, listed_images
from llmc.graphs_records import Tables

_CUDA_TARGET = "cuda:"


def lacks(facts: Mapping[str, str]) -> Iterator[str]:
    """facts: of a device."""
    if facts.get("command_buffers") == "no":
        yield "without command buffers (cl_khr_command_buffer), each kernel of a step is launched by itself"


def code_for(facts: Mapping[str, str], tables: Tables, folder: Path) -> Iterator[str]:
    """Whether a GPU has code in an artifact of kind cuda, where it has none. facts: of the GPU."""
    if tables.target.kind != "cuda":
        return
    device = int(facts["compute_capability"].replace(".", ""))
    if all(images is None or all_run_on(images, device) for images in _code(tables, folder)):
        return
    target = facts["target"]
    known = target.startswith(_CUDA_TARGET)
    advice = f"compile it with --target {target}" if known else "no kernels are written for GPUs before sm_80"
    yield f"the artifact does not run here, for it has no code for this GPU, which is sm_{device}: {advice}"


def _code(tables: Tables, folder: Path) -> Iterator[list[Image] | None]:
    for code in tables.code:
        try:
            yield listed_images(folder / code.name)
        except OSError:  # those who open the artifact say so
            yield None
