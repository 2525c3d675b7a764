"""Bundles: a fine-tune of the architecture becomes the artifact that compiling it makes, and nothing compiles."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Unpack

import pytest

from llmc.buckets.bucket import Bucket
from llmc.buckets.cost_table import CostTable, ReplayCost, artifact_key, table_name
from llmc.cli.main import main
from llmc.compiler.bundle_apply import apply_bundle, choose_variant
from llmc.compiler.config import CompileConfig, CompileError
from llmc.compiler.pipeline import compile_model
from llmc.compiler.store.bundle import BundleError, create_bundle, read_bundle
from llmc.compiler.store.bundle_archive import ArchiveError, opened
from llmc.compiler.store.graphs_patch import GraphsPatch, GraphsPatchError
from llmc.compiler.targets.registry import resolve_target
from llmc.manifest import write_manifest
from llmc.models.errors import ModelError
from llmc.quantize import QuantConfig
from llmc.runtime.binding import Artifact, Replayer

from support.artifacts import TINY_LADDER, TinyArtifact
from support.compiled import Pages, assert_same_bytes, random_tokens, replay
from support.tiny_models import ModelFields, make_tiny_model

pytestmark = pytest.mark.native
NO_COMPILER = """
import sys
class Refuse:
    def find_spec(self, name, *_):
        if name.partition(".")[0] in ("torch", "tvm", "transformers"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Refuse())
import importlib.metadata
importlib.metadata.version = lambda name: 1 / 0
import subprocess
subprocess.run = subprocess.Popen = lambda *_, **__: 1 / 0
from llmc.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def fine_tune(folder: Path, seed: int = 0, **changes: Unpack[ModelFields]) -> Path:
    """A model of the tiny artifact's architecture with other weights."""
    fields: ModelFields = {"num_hidden_layers": 2, **changes}
    return make_tiny_model(folder, "llama", seed=seed, **fields)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Other weights, and another token that ends the text."""
    return fine_tune(tmp_path_factory.mktemp("tuned") / "model", seed=7, eos_token_id=5)


@pytest.fixture
def bundle(tiny_artifact: TinyArtifact, tmp_path: Path) -> Path:
    create_bundle([tiny_artifact.artifact], tmp_path / "tiny.bundle")
    return tmp_path / "tiny.bundle"


def test_parts_that_a_shape_does_not_tell(tmp_path: Path, kernel_cache: Path) -> None:
    """Gate and up of 188 rows fill as many panels of 16, 32 or 48 together as one by one, in another layout."""
    model = fine_tune(tmp_path / "model", intermediate_size=188)
    ladder = "prefill=[1]x[16],decode=[1]x[32]"
    compile_model(CompileConfig(model, tmp_path / "out", ladder, dtype="f32", cache_dir=kernel_cache))
    create_bundle([tmp_path / "out"], tmp_path / "bundle")
    apply_bundle(read_bundle(tmp_path / "bundle"), model, tmp_path / "applied")
    assert_same_bytes(tmp_path / "applied", tmp_path / "out")
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    write_manifest(tmp_path / "out" / "manifest.json", {k: v for k, v in manifest.items() if k != "weight_parts"})
    with pytest.raises(BundleError, match=r"made by an older llmc, .*: compile the model again"):
        create_bundle([tmp_path / "out"], tmp_path / "older")


def test_a_fine_tune_becomes_what_compiling_makes(tiny_artifact: TinyArtifact, tuned: Path, bundle: Path,
                                                  tmp_path: Path) -> None:  # fmt: skip
    report = apply_bundle(read_bundle(bundle), tuned, tmp_path / "applied")
    compiled = tmp_path / "compiled"
    compile_model(CompileConfig(tuned, compiled, TINY_LADDER, dtype="f32", cache_dir=tiny_artifact.cache))
    assert_same_bytes(tmp_path / "applied", compiled)
    assert (report.artifact, report.num_graphs) == (tmp_path / "applied", 6)
    assert (compiled / "weights.safetensors").read_bytes() != (
        tiny_artifact.artifact / "weights.safetensors"
    ).read_bytes()
    tokens = random_tokens(60, 12)
    with Artifact(tmp_path / "applied") as opened, Replayer(opened, num_blocks=8) as replayer:
        opened.verify()
        assert replay(replayer, 0, Pages(8, opened.info.block_size), [(0, tokens, 0)]).shape[0] == 1


@pytest.mark.parametrize("scheme", ["w8a8", "w4a16"])
def test_quantized(scheme: str, tiny_artifact: TinyArtifact, tuned: Path, kernel_cache: Path, tmp_path: Path) -> None:
    options = {"buckets": TINY_LADDER, "cache_dir": kernel_cache, "quant": QuantConfig(scheme), "dtype": "f32"}
    for model, name in ((tiny_artifact.model, "base"), (tuned, "compiled")):
        compile_model(CompileConfig(model, tmp_path / name, **options))  # type: ignore[arg-type]
    made = create_bundle([tmp_path / "base"], tmp_path / "b")
    apply_bundle(made, tuned, tmp_path / "applied")
    assert_same_bytes(tmp_path / "applied", tmp_path / "compiled")


def test_nothing_of_the_compiler_is_needed(tuned: Path, bundle: Path, tmp_path: Path) -> None:
    arguments: list[str | Path] = ["bundle", "apply", bundle, tuned, "-o", tmp_path / "out", "--json", "--no-tokenizer"]
    done = subprocess.run(
        [sys.executable, "-P", "-c", NO_COMPILER, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["num_graphs"] == 6
    with Artifact(tmp_path / "out") as opened:
        opened.verify()


def test_a_bundle_is_the_same_bytes(tiny_artifact: TinyArtifact, bundle: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(tiny_artifact.artifact, tmp_path / "copy", copy_function=shutil.copyfile)
    create_bundle([copy], tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == bundle.read_bytes()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["again", "copy", "tiny.bundle"]


def test_several_targets(tiny_artifact: TinyArtifact, tuned: Path, kernel_cache: Path, tmp_path: Path,
                         monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    other = tmp_path / "haswell"  # which no machine has as its best
    config = CompileConfig(
        tiny_artifact.model, other, TINY_LADDER, target="haswell", dtype="f32", cache_dir=kernel_cache
    )
    compile_model(config)
    made = create_bundle([other, tiny_artifact.artifact], tmp_path / "both")
    native = json.loads((tiny_artifact.artifact / "manifest.json").read_text())["target"]["name"]
    assert [v.resolved.target.name for v in made.variants] == ["haswell", native]
    assert choose_variant(made).resolved.target.name == native
    assert choose_variant(made, "haswell").index == 0
    apply_bundle(made, tuned, tmp_path / "applied", target="haswell")
    assert json.loads((tmp_path / "applied" / "manifest.json").read_text())["target"]["name"] == "haswell"
    with pytest.raises(BundleError, match=f"has no variant for znver9; it has haswell, {native}"):
        choose_variant(made, "znver9")
    monkeypatch.setenv("LLMC_NATIVE_TARGET", "haswell")
    assert choose_variant(made).index == 0


def test_the_best_of_a_bundle_that_the_machine_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def names(*targets: str) -> Any:
        variants = [SimpleNamespace(resolved=SimpleNamespace(target=resolve_target(name))) for name in targets]
        return SimpleNamespace(variants=variants, path=Path("b"))

    monkeypatch.setenv("LLMC_NATIVE_TARGET", "x86-64-v3")
    for several in (("haswell", "x86-64-v3"), ("x86-64-v3", "sapphirerapids"), ("znver4", "x86-64-v3")):
        assert choose_variant(names(*several)).resolved.target.name == "x86-64-v3"
    with pytest.raises(BundleError, match="is for sapphirerapids, x86-64-v4, and this machine is x86-64-v3"):
        choose_variant(names("sapphirerapids", "x86-64-v4"))


def test_costs_come_along(tiny_artifact: TinyArtifact, tuned: Path, tmp_path: Path) -> None:
    costs, here = tmp_path / "costs", tmp_path / "here"
    costs.mkdir()
    manifest = json.loads((tiny_artifact.artifact / "manifest.json").read_text())
    table = CostTable({"processor": "made up"}, artifact_key(manifest)).with_costs(
        [ReplayCost(Bucket("decode", 1, 64), 1, 1, 64, 0.5)]
    )
    name = table_name(table.artifact, table.machine)
    table.write(costs / name)
    made = create_bundle([tiny_artifact.artifact], tmp_path / "b", costs)
    assert [t.costs for t in made.costs] == [table.costs]
    assert apply_bundle(made, tuned, tmp_path / "one", cost_folder=here).costs == 1
    assert CostTable.read(here / name).costs == table.costs
    CostTable(table.machine, table.artifact).write(here / name)
    assert apply_bundle(made, tuned, tmp_path / "two", cost_folder=here).costs == 0
    assert CostTable.read(here / name).costs == ()


@pytest.mark.parametrize(
    ("changes", "why"),
    [({"num_hidden_layers": 3}, "num_layers 3 where it has 2"), ({"rms_norm_eps": 1e-3}, "norm_eps 0.001 where")],
)
def test_another_architecture(changes: dict[str, object], why: str, bundle: Path, tmp_path: Path) -> None:
    model = fine_tune(tmp_path / "other")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(BundleError, match=f"is not a model of the architecture of .*: .*{why}"):
        apply_bundle(read_bundle(bundle), model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_bundled(tiny_artifact: TinyArtifact, kernel_cache: Path, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="is not an artifact"):
        create_bundle([tiny_artifact.model], tmp_path / "b")
    copy = shutil.copytree(tiny_artifact.artifact, tmp_path / "copy")
    with pytest.raises(BundleError, match="give one of each target"):
        create_bundle([tiny_artifact.artifact, copy], tmp_path / "b")
    compile_model(
        CompileConfig(tiny_artifact.model, tmp_path / "bf16", TINY_LADDER, dtype="bf16", cache_dir=kernel_cache)
    )
    with pytest.raises(BundleError, match="differ in act_dtype, kv_dtype"):
        create_bundle([tiny_artifact.artifact, tmp_path / "bf16"], tmp_path / "b")
    with pytest.raises(BundleError, match="is a directory"):
        create_bundle([tiny_artifact.artifact], tmp_path)
    with pytest.raises(BundleError, match="cannot write"):
        create_bundle([tiny_artifact.artifact], tmp_path / "nowhere" / "b")
    assert not (tmp_path / "b").exists()


def rewrite(bundle: Path, **members: bytes) -> None:
    with zipfile.ZipFile(bundle) as archive:
        content = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(bundle, "w") as archive:
        for name, data in {**content, **members}.items():
            archive.writestr(name, data)


def changed_variant(index: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**index, "variants": [{**index["variants"][0], **changes}]}


def with_manifest(index: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return changed_variant(index, manifest={**index["variants"][0]["manifest"], **changes})


def with_request(index: dict[str, Any], **changes: Any) -> dict[str, Any]:
    first, *others = index["variants"][0]["requests"]
    return changed_variant(index, requests=[{**first, **changes}, *others])


def with_bytes(index: dict[str, Any], code: int) -> dict[str, Any]:
    return changed_variant(index, bytes={**index["variants"][0]["bytes"], "kernels.so": code})


def test_what_an_archive_unpacks_to_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "b.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("zeros", bytes(1 << 20))
    packed = bytearray(path.read_bytes())
    with opened(path) as found:
        assert found.read("zeros", 1 << 20) == bytes(1 << 20)
        with pytest.raises(ArchiveError, match="zeros is larger than 1048575 bytes"):
            found.read("zeros", (1 << 20) - 1)
    # An archive that says less than there is: no more than that is unpacked.
    for size in (5, (1 << 20) - 1, (1 << 20) + 1):
        path.write_bytes(packed.replace((1 << 20).to_bytes(4, "little"), size.to_bytes(4, "little")))
        with opened(path) as found, pytest.raises(ArchiveError):
            found.read("zeros", 1 << 30)


@pytest.mark.parametrize("method", [zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2])
def test_other_archives(method: int, tmp_path: Path) -> None:
    path = tmp_path / "b.zip"
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr("a", b"x" * 100)
    with pytest.raises(ArchiveError, match=f"is packed by method {method}"), opened(path):
        pass
    link = zipfile.ZipInfo("a")
    link.external_attr = 0o120777 << 16
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(link, b"/etc/passwd")
    with pytest.raises(BundleError, match="its member 'a' is not a file"):
        read_bundle(path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(BundleError, match="it is a pipe, not a regular file"):
        read_bundle(path)


def test_damage(tiny_artifact: TinyArtifact, tuned: Path, bundle: Path, tmp_path: Path) -> None:
    whole = bundle.read_bytes()
    index = json.loads(zipfile.ZipFile(bundle).read("bundle.json"))
    for data in (b"", b"PK", whole[:-30], b"x" * 1000):
        bundle.write_bytes(data)
        with pytest.raises(BundleError, match="is not a bundle"):
            read_bundle(bundle)
    for changed, why in (
        ({**index, "llmc_bundle": 9}, "its version is 9, not 1"),
        ({**index, "fingerprint": "0" * 64}, "its fingerprint is not that"),
        ({**index, "variants": []}, r"variants is \[\]: "),
        ({**index, "variants": [{}]}, r"variants\.0\.manifest is missing"),
        ({**index, "costs": ["../../precious.json"]}, r"costs\.0 is '\.\./\.\./precious\.json'"),
        ([], "its version is None"),
        (with_manifest(index, block_size=0), "block_size is 0"),
        (with_manifest(index, block_size=48), "the manifest of variant 0 has another block_size than the bundle"),
        (with_manifest(index, max_num_seqs=True), "max_num_seqs is True"),
        (with_request(index, shape=[1 << 60, 8]), r"requests\.0\.shape\.0 is 1152921504606846976"),
        (with_request(index, parts=0), r"requests\.0\.parts is 0"),
        (with_bytes(index, 1 << 40), r"bytes\.kernels\.so is 1099511627776"),
    ):
        bundle.write_bytes(whole)
        rewrite(bundle, **{"bundle.json": json.dumps(changed).encode()})
        with pytest.raises(BundleError, match=why):
            read_bundle(bundle)
    bundle.write_bytes(whole)
    code = bytearray((tiny_artifact.artifact / "kernels.so").read_bytes())
    code[500] ^= 1
    rewrite(bundle, **{"variants/0/kernels.so": bytes(code)})
    with pytest.raises(BundleError, match="SHA-256 differs"):
        apply_bundle(read_bundle(bundle), tuned, tmp_path / "out")
    rewrite(bundle, **{"variants/0/kernels.so": bytes(code) * 100})
    with pytest.raises(BundleError, match=rf"has {100 * len(code)} bytes, not the {len(code)} of the index"):
        apply_bundle(read_bundle(bundle), tuned, tmp_path / "out")
    for name in ("../precious", "variants/1/kernels.so", "/etc/passwd"):
        bundle.write_bytes(whole)
        rewrite(bundle, **{name: b"x"})
        with pytest.raises(BundleError, match=f"its index and its members differ in '{name}'"):
            read_bundle(bundle)
    bundle.write_bytes(whole)
    # Another model's tables, whatever the index says of them: its weights would lie elsewhere.
    rewrite(bundle, **{"bundle.json": json.dumps(with_manifest(index, max_num_seqs=3)).encode()})
    with pytest.raises(BundleError, match="is not of the model of its manifest"):
        apply_bundle(read_bundle(bundle), tuned, tmp_path / "out")
    rewrite(bundle, **{"bundle.json": json.dumps(with_request(index, name="stranger")).encode()})
    with pytest.raises(BundleError, match="lays weights out otherwise"):
        apply_bundle(read_bundle(bundle), tuned, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(BundleError, match="cannot read"):
        read_bundle(tmp_path / "nowhere")


def test_a_damaged_checkpoint_or_output(tuned: Path, bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "notes").write_text("x")
    with pytest.raises(CompileError, match="is not an llmc artifact"):
        apply_bundle(read_bundle(bundle), tuned, tmp_path / "theirs")
    model = shutil.copytree(tuned, tmp_path / "model")
    (model / "model.safetensors").write_bytes(b"123")
    with pytest.raises(ModelError, match="truncated or corrupt"):
        apply_bundle(read_bundle(bundle), model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_graphs_that_are_none(tiny_artifact: TinyArtifact) -> None:
    data = (tiny_artifact.artifact / "graphs.bin").read_bytes()
    assert GraphsPatch(data).weights[0].name
    for damaged in (b"", data[:70], data[:-1], data[:200] + b"\1" + data[201:]):
        with pytest.raises(GraphsPatchError):
            GraphsPatch(damaged)


def test_the_command(tiny_artifact: TinyArtifact, tuned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
                     monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.setenv("LLMC_CACHE_DIR", str(tmp_path / "cache"))
    path, out = tmp_path / "b", tmp_path / "out"
    assert main(["bundle", "create", str(tiny_artifact.artifact), "-o", str(path)]) == 0
    assert "llama, 2 layers" in capsys.readouterr().out
    assert main(["bundle", "inspect", str(path), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["fingerprint"] == read_bundle(path).fingerprint
    assert len(data["variants"][0]["buckets"]) == 6
    assert main(["bundle", "apply", str(path), str(tuned), "-o", str(out), "--no-tokenizer"]) == 0
    assert "6 graphs" in capsys.readouterr().out
    assert main(["bundle", "inspect", str(out)]) == 1
    assert "cannot read" in capsys.readouterr().err
    assert main(["bundle", "apply", str(path), str(tuned)]) == 2
