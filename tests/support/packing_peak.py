"""Packs weights of a checkpoint and prints how far memory grew meanwhile: `packing_peak.py MODEL OUT SCHEME [ADAPTER]`.

The bytes are those of the process, anonymous and mapped. SCHEME: of the matrices, or none. With an adapter, one small
matrix alone is packed: the rest would only take time.
"""

from __future__ import annotations

import sys
from pathlib import Path

from llmc.compiler.store.conversions import conversions, types_of
from llmc.compiler.store.reads import Reads
from llmc.compiler.store.weights import plan_weights, write_weights
from llmc.compiler.targets.cpu.backend import named
from llmc.compiler.weight_request import WeightRequest
from llmc.models.loader import check_checkpoint, load_parameters
from llmc.models.sources.registry import open_source
from llmc.quantize.scheme import get_scheme

_THREADS = 2


def _resident(kind: str) -> int:
    """VmRSS, or VmHWM: the most since `_forget_peak`. In bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{kind}:"))


def _forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def main(model: str, out: str, scheme: str, *adapters: str) -> None:
    target = named("x86-64-v3")
    _forget_peak()
    before = _resident("VmRSS")
    source = open_source(Path(model), [Path(adapter) for adapter in adapters])
    config, checkpoint = source.config(), source.checkpoint()
    parameters = list(load_parameters(config, checkpoint, "bf16"))
    format = None if scheme == "none" else get_scheme(scheme).weight
    requests = [
        WeightRequest(p.name, p.shape, p.dtype, packed=True)
        if format is None
        else WeightRequest(p.name, p.shape, "u8", packed=True, format=format)
        for p in parameters
        if len(p.shape) == 2 and (not adapters or p.name == "layers.0.attention.out.weight")
    ]
    reads = Reads(checkpoint.release)
    layout = plan_weights(requests, target)
    write_weights(layout, parameters, target, Path(out), lambda done, count: None, _THREADS, reads)
    conversions(requests, parameters, types_of(check_checkpoint(config, checkpoint), checkpoint), _THREADS, reads)
    print(_resident("VmHWM") - before)


if __name__ == "__main__":
    main(*sys.argv[1:])
