"""What kernels, weights and link made, looked at again before it is published: cheap, and from the bytes.

Of graphs the IR spec is checked (`graph.ir_spec`), and the loader checks every offset and size of the tables.
"""

from __future__ import annotations

from collections.abc import Iterable

from llmc.compiler.state import CompileState


class VerifyError(RuntimeError):
    """A phase that made something else than it should: a fault of the compiler, or of what it ran on."""


def kernels(state: CompileState) -> None:
    """One code for each spec, in their order."""
    made = [kernel.spec.symbol() for kernel in state.kernels]
    asked = [spec.symbol() for spec in state.specs]
    if made != asked:
        _refuse("kernels", f"{len(made)} kernels were built for {len(asked)} specs", set(made) ^ set(asked))
    if empty := [kernel.spec.symbol() for kernel in state.kernels if not kernel.code]:
        _refuse("kernels", "kernels have no code", empty)


def weights(state: CompileState) -> None:
    """The file has its header and its length, and every tensor a checksum."""
    layout, file = state.layout, state.staging / "weights.safetensors"
    size = file.stat().st_size
    if size != layout.total_bytes:
        _refuse("weights", f"weights.safetensors has {size} bytes, not {layout.total_bytes}")
    with file.open("rb") as stream:
        if stream.read(len(layout.header)) != layout.header:
            _refuse("weights", "the header of weights.safetensors is not that of its layout")
    if wrong := {weight.name for weight in layout.weights} ^ state.crcs.keys():
        _refuse("weights", "tensors and checksums differ", wrong)


def link(state: CompileState) -> None:
    """The code has every kernel that the manifest names."""
    assert state.code is not None
    found = state.resolved.target.kernels_of_code(state.code)
    if found is None:
        return
    if lacks := {kernel["symbol"] for kernel in state.manifest["kernels"]} - set(found):
        _refuse("link", f"{state.resolved.target.code_name} lacks kernels", lacks)


def _refuse(phase: str, what: str, names: Iterable[str] = ()) -> None:
    listed = sorted(names)
    of = f": {', '.join(listed[:4])}{', …' if len(listed) > 4 else ''}" if listed else ""
    raise VerifyError(f"{phase}: {what}{of}; compile again, and report it if it stays so")
