"""The lowered model: what remains of a trace, without torch; it can be kept and read again."""

from __future__ import annotations

import json
import zlib
from dataclasses import asdict, dataclass

import tvm
import tvm.script

from llmc.compiler.graph.commands import Site

SITE_PREFIX = "llmc_site_"


@dataclass(frozen=True)
class Lowered:
    """The Relax module with symbolic shapes. params: names of main's parameters in order, inputs first."""

    module: tvm.IRModule
    sites: tuple[Site, ...]
    params: tuple[str, ...]


def to_bytes(lowered: Lowered) -> bytes | None:
    """The cached form of a lowered model; None for one that TVM would not read back as it is."""
    # As text: this TVM's JSON of a module with types ends in a segmentation fault.
    text = lowered.module.script(show_meta=True)
    value = {"module": text, "sites": [asdict(site) for site in lowered.sites], "params": lowered.params}
    payload = zlib.compress(json.dumps(value, separators=(",", ":")).encode())
    try:
        tvm.ir.assert_structural_equal(from_bytes(payload).module, lowered.module)
    except Exception:
        # Whatever it is, the next compilation traces again.
        return None
    return payload


def from_bytes(payload: bytes) -> Lowered:
    """Reads `to_bytes`'s output; attributes that were tuples are lists."""
    value = json.loads(zlib.decompress(payload))
    sites = tuple(Site(s["op"], s["attributes"], tuple(s["tensors"])) for s in value["sites"])
    module = tvm.script.from_source(value["module"], check_well_formed=False)
    return Lowered(module, sites, tuple(value["params"]))
