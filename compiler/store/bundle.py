"""Bundles: an artifact without its weights, in one file, for one or several targets.

A zip file: bundle.json; variants/N/graphs.bin and variants/N/kernels.so for each target; costs/*.json. bundle.json
holds the architecture and its fingerprint. For each variant it has the manifest, the layout of weights, and the SHA-256
of its files. A bundle contains machine code: trust it like a program.
"""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmc.buckets.cost_table import (
    MAX_TABLE_BYTES,
    CostTable,
    CostTableError,
    artifact_key,
    find_tables,
    table_name,
)
from llmc.compiler.config import CompileError
from llmc.compiler.dtypes import BY_CODE
from llmc.compiler.resolved import Resolved
from llmc.compiler.store import bundle_schema as schema
from llmc.compiler.store import keys
from llmc.compiler.store.bundle_archive import Archive, ArchiveError, opened
from llmc.compiler.store.cache import key_of
from llmc.compiler.store.described import Described, described, read_described, weight_parts
from llmc.compiler.store.graphs_patch import GraphsPatch, GraphsPatchError
from llmc.compiler.store.graphs_writer import GraphsWriteError, pack_kv_layers, pack_model, pack_state_layers
from llmc.compiler.store.output import is_artifact
from llmc.compiler.store.weights import plan_weights
from llmc.compiler.weight_request import WeightRequest
from llmc.manifest import OWN_SUM, ManifestError, checked_manifest
from llmc.manifest_schema import complaint
from llmc.quantize import QuantizeError
from llmc.regular_file import JsonError, parse_json, read_regular
from llmc.replaced_file import write_replaced
from llmc.shown import shown

VERSION = 1
_MARK = "llmc_bundle"
_INDEX = "bundle.json"
_MAX_INDEX_BYTES = 1 << 24
_CODE = "kernels.so"
"""Name of the code file of any target in a bundle."""
_MOST_BYTES = {"graphs.bin": schema.MAX_TABLES_BYTES, _CODE: schema.MAX_CODE_BYTES}
_EPOCH = (1980, 1, 1, 0, 0, 0)  # zip's first day: equal bundles have equal bytes
# Components of graphs that are neither the target nor the tools.
_FINGERPRINT = ("architecture", "max_model_len", "act_dtype", "kv_dtype", "kv_scales", "block_size", "quantization")


class BundleError(CompileError):
    """A bundle cannot be made, read or applied; one sentence with the offending value."""


@dataclass(frozen=True)
class Variant:
    """The graphs and kernels for one target. requests: its weights, in file order."""

    index: int
    described: Described
    requests: tuple[WeightRequest, ...]
    sha256: Mapping[str, str]
    file_bytes: Mapping[str, int]

    @property
    def resolved(self) -> Resolved:
        return self.described.resolved


@dataclass(frozen=True)
class Bundle:
    """An opened bundle. Files are read on demand and checked against their hashes."""

    path: Path
    fingerprint: str
    architecture: Mapping[str, str]
    llmc_version: str
    variants: tuple[Variant, ...]
    costs: tuple[CostTable, ...]

    def read(self, variant: Variant, name: str) -> bytes:
        """graphs.bin or kernels.so (the code) of a variant. Raises BundleError if it is damaged."""
        member = f"variants/{variant.index}/{name}"
        try:
            with opened(self.path) as archive:
                data = archive.read(member, _MOST_BYTES[name], variant.file_bytes[name])
        except ArchiveError as error:
            raise BundleError(f"cannot read {member} of {self.path}: {error}; copy the bundle again") from None
        except OSError as error:
            raise BundleError(f"cannot read {self.path}: {error.strerror or error}") from None
        if hashlib.sha256(data).hexdigest() != variant.sha256[name]:
            raise BundleError(f"{member} of {self.path} is damaged: its SHA-256 differs; copy the bundle again")
        return data


def architecture_of(components: Mapping[str, str]) -> dict[str, str]:
    """The components of a fingerprint, from those of an artifact's graphs."""
    return {name: components[name] for name in _FINGERPRINT if name in components}


def create_bundle(artifacts: Sequence[Path], path: Path, cost_folder: Path | None = None) -> Bundle:
    """Bundles artifacts of one architecture, each for a different target, with their measured costs.

    Raises BundleError and leaves `path` unchanged.
    """
    if path.is_dir():
        raise BundleError(f"{path} is a directory: name a file to write")
    found = [(artifact, _read_artifact(artifact)) for artifact in artifacts]
    first, architecture = found[0][0], architecture_of(found[0][1].manifest["graph_components"])
    targets: dict[str, Path] = {}
    for artifact, one in found:
        if one.resolved.num_ranks > 1:
            raise BundleError(
                f"{artifact} is for {one.resolved.num_ranks} ranks, which a bundle does not hold yet: give an artifact "
                "that was compiled without --tensor-parallel and --pipeline-parallel"
            )
        _check_same(first, architecture, artifact, architecture_of(one.manifest["graph_components"]))
        other = targets.setdefault(one.resolved.target.name, artifact)
        if other != artifact:
            raise BundleError(
                f"{other} and {artifact} are both for {one.resolved.target.name}: give one of each target"
            )
    files: dict[str, bytes] = {}
    variants = []
    for index, (artifact, one) in enumerate(found):
        of = {_CODE: one.resolved.target.code_name}
        content = {name: _content(artifact / of.get(name, name), most) for name, most in _MOST_BYTES.items()}
        files.update({f"variants/{index}/{name}": data for name, data in content.items()})
        variants.append(
            {
                "manifest": {k: v for k, v in one.manifest.items() if not k.startswith("weights_") and k != OWN_SUM},
                "requests": [r.record() for r in _requests(artifact, one, content["graphs.bin"])],
                "sha256": {name: hashlib.sha256(data).hexdigest() for name, data in content.items()},
                "bytes": {name: len(data) for name, data in content.items()},
            }
        )
        for table in find_tables(cost_folder, artifact_key(one.manifest)) if cost_folder is not None else ():
            files[f"costs/{table_name(table.artifact, table.machine)}"] = table.to_json().encode()
    index_file = {
        _MARK: VERSION,
        "llmc_version": found[0][1].manifest["llmc_version"],
        "fingerprint": key_of(architecture),
        "architecture": architecture,
        "variants": variants,
        "costs": sorted(name for name in files if name.startswith("costs/")),
    }
    _write(path, {_INDEX: json.dumps(index_file, indent=1).encode(), **files})
    return read_bundle(path)


def read_bundle(path: Path) -> Bundle:
    """Reads a bundle's index. Raises BundleError for a file that is no bundle or has another version."""
    try:
        with opened(path) as archive:
            index = _index(archive)
            costs = [_cost_table(archive, name) for name in index["costs"]]
        variants = tuple(_variant(i, entry, index["architecture"]) for i, entry in enumerate(index["variants"]))
    except OSError as error:
        raise BundleError(f"cannot read {path}: {error.strerror or error}") from None
    except (ArchiveError, JsonError, ManifestError, CompileError) as error:
        raise BundleError(f"{path} is not a bundle that this llmc reads ({error}): create it again") from None
    tables = tuple(table for table in costs if table is not None)
    return Bundle(path, index["fingerprint"], index["architecture"], index["llmc_version"], variants, tables)


def _index(archive: Archive) -> dict[str, Any]:
    """The contents of bundle.json; checks that the archive holds exactly the files it names."""
    index = parse_json(archive.read(_INDEX, _MAX_INDEX_BYTES))
    version = index.get(_MARK) if isinstance(index, dict) else None
    if not isinstance(index, dict) or version != VERSION or isinstance(version, bool):
        raise BundleError(f"its version is {shown(version)}, not {VERSION}")
    if (why := complaint(schema.Index, index)) is not None:
        raise BundleError(why)
    if key_of(index["architecture"]) != index["fingerprint"]:
        raise BundleError("it is damaged: its fingerprint is not that of its architecture")
    facts = index["architecture"].get("architecture", "{}")
    if (why := complaint(schema.Architecture, parse_json(facts))) is not None:
        raise BundleError(f"the model of its architecture: {why}")
    expected = {f"variants/{i}/{name}" for i in range(len(index["variants"])) for name in _MOST_BYTES}
    differ = archive.names ^ {_INDEX, *expected, *index["costs"]}
    if differ:
        raise BundleError(f"its index and its members differ in {min(differ)[:80]!a}")
    return index


def _read_artifact(artifact: Path) -> Described:
    if not is_artifact(artifact):
        raise BundleError(f"{artifact} is not an artifact: give directories that llmc compile wrote")
    one = read_described(artifact)
    if not isinstance(one.manifest.get("graph_components"), dict):
        raise BundleError(f"{artifact} does not say what its graphs depend on: compile the model again")
    return one


def _content(path: Path, most: int) -> bytes:
    try:
        return read_regular(path, most)
    except OSError as error:
        raise BundleError(f"cannot read {path}: {error.strerror or error}; compile the model again") from None


def _check_same(first: Path, expected: Mapping[str, str], artifact: Path, found: Mapping[str, str]) -> None:
    differ = [name for name in _FINGERPRINT if expected.get(name) != found.get(name)]
    if differ:
        raise BundleError(
            f"{first} and {artifact} differ in {', '.join(differ)}: a bundle holds one architecture, compiled alike"
        )


def _requests(artifact: Path, one: Described, graphs: bytes) -> list[WeightRequest]:
    """The packed weights, recovered from their tables: a packed matrix is stored in another shape."""
    resolved, parts = one.resolved, _weight_parts(one, artifact, "compile the model again")
    shapes = resolved.weight_shapes()
    schemes, permuted = resolved.recipe.schemes, resolved.recipe.permuted
    try:
        patch = GraphsPatch(graphs)
    except GraphsPatchError as error:
        raise BundleError(f"{artifact / 'graphs.bin'} cannot be read: {error}; compile the model again") from None
    requests = []
    for weight in patch.weights:
        name = weight.name
        if name in shapes:
            scheme = schemes.get(name)
            form = None if scheme is None else scheme.weight
            packed = form is not None or weight.shape != shapes[name]
            dtype = BY_CODE[weight.dtype].name
            columns = _orders(name, resolved) if name in permuted else 0
            requests.append(WeightRequest(name, shapes[name], dtype, packed, form, parts.get(name, 1), columns))
        elif name.rpartition(".")[0] not in schemes:
            raise BundleError(f"{artifact} has weight {name}, which its model has not: compile the model again")
    check_layout(requests, resolved, patch, artifact)
    return requests


def _orders(name: str, resolved: Resolved) -> int:
    """The number of column orders of an act-order weight: one, or one per expert."""
    experts = resolved.model.experts
    return experts.count if experts is not None and ".experts." in name else 1


def _weight_parts(one: Described, where: Path | str, remedy: str) -> Mapping[str, int]:
    """Reads `described.weight_parts` from a manifest. Raises BundleError for a manifest of an older llmc."""
    parts = one.manifest.get("weight_parts")
    if parts is None:
        raise BundleError(f"{where} was made by an older llmc, which did not say how it packs gated layers: {remedy}")
    found: Mapping[str, int] = parts
    return found


def check_layout(requests: Sequence[WeightRequest], resolved: Resolved, patch: GraphsPatch, origin: Path) -> None:
    """Raises BundleError if this llmc would lay weights out differently from graphs.bin."""
    layout = plan_weights(requests, resolved.target)
    if (layout.total_bytes, zlib.crc32(layout.header)) != patch.weights_sums:
        raise BundleError(f"{origin} was made by an llmc that lays weights out otherwise: compile the model again")


def tables_of(bundle: Bundle, variant: Variant) -> GraphsPatch:
    """graphs.bin of a variant, checked against its manifest's model and weights. Raises BundleError."""
    try:
        patch = GraphsPatch(bundle.read(variant, "graphs.bin"))
        resolved = variant.resolved
        same = patch.model == pack_model(resolved.model_record())
        same = same and patch.kv_layers == pack_kv_layers(resolved.kv_layer_records())
        same = same and patch.state_layers == pack_state_layers(resolved.state_layers())
    except (GraphsPatchError, GraphsWriteError) as error:
        raise BundleError(f"graphs.bin of {bundle.path} cannot be read: {error}; create the bundle again") from None
    if not same:
        raise BundleError(f"graphs.bin of {bundle.path} is not of the model of its manifest: create the bundle again")
    check_layout(variant.requests, variant.resolved, patch, bundle.path)
    return patch


def _variant(index: int, entry: Mapping[str, Any], architecture: Mapping[str, str]) -> Variant:
    where = f"the manifest of variant {index}"
    one = described(checked_manifest(entry["manifest"], where), where)
    resolved = one.resolved
    said = {
        "architecture": keys.architecture(resolved.model),
        "max_model_len": str(resolved.max_model_len),
        "act_dtype": resolved.act_dtype,
        "kv_dtype": resolved.kv_dtype,
        **({"kv_scales": resolved.kv_scales} if resolved.kv_scales else {}),
        "block_size": str(resolved.block_size),
        **({"quantization": resolved.recipe.describe()} if resolved.recipe.schemes else {}),
    }
    differ = [name for name in _FINGERPRINT if said.get(name) != architecture.get(name)]
    if differ:
        raise BundleError(f"{where} has another {differ[0]} than the bundle")
    try:
        requests = tuple(WeightRequest.of_record(request) for request in entry["requests"])
    except QuantizeError as error:
        raise BundleError(f"{where} is not of this llmc: {error}; create the bundle again") from None
    if weight_parts(requests) != _weight_parts(one, where, "create the bundle again"):
        raise BundleError(f"{where} has weights in other parts than its graphs: create the bundle again")
    return Variant(index, one, requests, entry["sha256"], entry["bytes"])


def _cost_table(archive: Archive, name: str) -> CostTable | None:
    """The cost table; None if another llmc version measured it, in which case a warm-up measures again."""
    with suppress(CostTableError):
        return CostTable.from_data(parse_json(archive.read(name, MAX_TABLE_BYTES)), name)
    return None


def _write(path: Path, files: Mapping[str, bytes]) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(zipfile.ZipInfo(name, _EPOCH), data, zipfile.ZIP_DEFLATED)
    try:
        write_replaced(path, buffer.getvalue())
    except OSError as error:
        raise BundleError(f"cannot write {path}: {error.strerror or error}") from None
