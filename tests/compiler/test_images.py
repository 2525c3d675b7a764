"""Models that see images, compiled: rows of their towers and logits of their text models are those of transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from llmc.compiler.config import CompileConfig, CompileError
from llmc.compiler.images import compile_with_images
from llmc.compiler.pipeline import compile_model
from llmc.compiler.resolve import resolve
from llmc.compiler.store.described import read_described
from llmc.images.form import ImageForm
from llmc.images.read import read_image_form
from llmc.manifest import read_manifest
from llmc.models import ModelError
from llmc.quantize import QuantConfig
from llmc.runtime.binding import Artifact
from llmc.runtime.binding.encoder import Encoder

from support.gguf_models import write_gguf
from support.marks import rare
from support.opencl import needs_opencl
from support.seen_images import check_placed, check_rows
from support.tiny_models import make_tiny_model
from support.towers import SEEING, SIZES, make_seeing, patches_of, pixels_of

pytestmark = pytest.mark.native
LADDER = "prefill=[1,2]x[16],decode=[1,2]x[64],mixed=[2]x[16]"


def config_of(model: Path, cache: Path, **options: Any) -> CompileConfig:
    given = {"buckets": LADDER, "dtype": "f32", "block_size": 16, "tokenizer": "none", "jobs": 1, **options}
    return CompileConfig(model, model.parent / "m.llmc", cache_dir=cache, **given)


@pytest.fixture(scope="module", params=[*SEEING[:1], rare(SEEING[1]), *SEEING[2:]])
def seeing(
    request: pytest.FixtureRequest, kernel_cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path, Artifact, Artifact]:
    """(family, model, text model, tower)."""
    model = make_seeing(tmp_path_factory.mktemp("seeing") / "model", request.param)
    reports = compile_with_images(config_of(model, kernel_cache))
    assert [report.artifact.name for report in reports] == ["m.llmc", "m-images.llmc"]
    text, tower = (Artifact(report.artifact) for report in reports)
    return request.param, model, text, tower


def test_rows_of_an_image(seeing: tuple[str, Path, Artifact, Artifact]) -> None:
    family, model, _, tower = seeing
    check_rows(family, model, tower, 1e-5, num_threads=2)


@pytest.mark.parametrize(
    ("target", "dtype", "bound"),
    [
        ("reference", "f32", 1e-5),
        ("native", "bf16", 3e-2),
        rare("native", "f16", 3e-3),
        rare("x86-64-v3", "bf16", 3e-2),
        pytest.param("opencl", "bf16", 3e-2, marks=[needs_opencl, pytest.mark.slow]),
    ],
)
@pytest.mark.parametrize("family", ["smolvlm", "mistral3"])
def test_rows_on_targets_and_in_types(
    family: str, target: str, dtype: str, bound: float, kernel_cache: Path, tmp_path: Path
) -> None:
    model = make_seeing(tmp_path / "model", family)
    config = config_of(model, kernel_cache, target=target, dtype=dtype, buckets="prefill=1x16,decode=1x64")
    with Artifact(compile_with_images(config)[1].artifact) as tower:
        check_rows(family, model, tower, bound, num_threads=2)


@pytest.mark.parametrize("family", ["smolvlm", "mistral3"])
def test_rows_have_the_same_bits_in_any_bucket(family: str, kernel_cache: Path, tmp_path: Path) -> None:
    """On any number of threads, and behind any other image."""
    model, found = make_seeing(tmp_path / "model", family), list[NDArray[np.float32]]()
    images = [patches_of(model, pixels_of(SIZES[family][at], seed)) for at, seed in ((0, 1), (-1, 0))]
    count = len(images[1].rows)
    for sizes in ([count, 144], [144], [count + 12, 144]):
        options: dict[str, Any] = {"buckets": f"prefill=1x[{','.join(map(str, sizes))}]", "max_num_seqs": 1}
        config = replace(config_of(model, kernel_cache, **options), tower=True, max_model_len=144, overwrite=True)
        compile_model(config)
        for threads in (1, 2, 3):
            with Artifact(config.output) as tower, Encoder(tower, num_threads=threads) as encoder:
                _, rows = (encoder.encode(one.rows, one.places, one.first) for one in images)
                found.append(rows)
    assert all(np.array_equal(rows.view(np.int32), found[0].view(np.int32)) for rows in found)


def test_rows_take_the_place_of_tokens(seeing: tuple[str, Path, Artifact, Artifact]) -> None:
    check_placed(*seeing, num_threads=2)


def test_what_the_manifests_say(seeing: tuple[str, Path, Artifact, Artifact]) -> None:
    _, model, text, tower = seeing
    form = read_image_form(model)
    assert ImageForm.from_json(read_manifest(tower.path)["images"]) == form
    made = read_described(tower.path).resolved
    assert (made.images, made.max_num_seqs, made.max_model_len) == (form, 1, form.most_patches)
    assert [bucket.seq for bucket in made.ladder] == list(form.usual_patches)
    assert made.model.num_kv_layers == 1
    assert read_manifest(text.path).get("images") is None
    assert read_described(text.path).resolved.model.states == "placed"


def test_a_tower_keeps_its_weights_when_the_text_model_is_quantized(kernel_cache: Path, tmp_path: Path) -> None:
    model = make_seeing(tmp_path / "model", "smolvlm")
    config = config_of(model, kernel_cache, quant=QuantConfig("w8a16"), buckets="prefill=1x16,decode=1x64")
    text, tower = compile_with_images(config)
    assert any("rounded to w8a16" in note for note in text.notes)
    assert tower.notes == ("what makes rows of images keeps its weights as f32: schemes are for the text model",)
    with Artifact(tower.artifact) as artifact:
        check_rows("smolvlm", model, artifact, 1e-5, num_threads=1)


def test_what_does_not_go_together(kernel_cache: Path, tmp_path: Path) -> None:
    model = make_seeing(tmp_path / "model", "mistral3")
    config = config_of(model, kernel_cache)
    for options, says in (
        ({"tensor_parallel": 2}, "--images and --tensor-parallel do not go together yet"),
        ({"pipeline_parallel": 2}, "--images and --pipeline-parallel do not go together yet"),
        ({"mtp": True, "leave_states": True}, "--images and --mtp do not go together yet"),
        ({"head": model, "leave_states": True}, "--images and --eagle do not go together yet"),
    ):
        with pytest.raises(CompileError, match=says):
            resolve(replace(config, images=True, **options), config.open_source())
    llama = make_tiny_model(tmp_path / "llama", "llama")
    with pytest.raises(ModelError, match="llmc sees no images with llama models; leave out --images"):
        compile_with_images(config_of(llama, kernel_cache))
    with pytest.raises(CompileError, match="llmc sees no images with llama models; leave out --images"):
        resolve(replace(config_of(llama, kernel_cache), images=True))
    with pytest.raises(ModelError, match="images are not read with GGUF files yet; leave out --images"):
        compile_with_images(config_of(write_gguf(llama, tmp_path / "llama.gguf"), kernel_cache))
