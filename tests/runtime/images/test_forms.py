"""Forms of images: read from checkpoints with the defaults of transformers, and strictly from manifests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

from llmc.images.form import ImageForm, ImageFormError
from llmc.images.kinds.registry import kind_of
from llmc.images.read import read_image_form

from support.image_forms import MISTRAL3, SMOLVLM, form_of, write_checkpoint

_TOKENS = {"added_tokens": [{"id": 7, "content": "<image>"}, {"id": 9, "content": "[IMG]"}]}


def _changed(files: Any, name: str, **values: Any) -> Any:
    """The files with other values; None leaves one out."""
    merged = {**files.get(name, {}), **values}
    return {**files, name: {key: value for key, value in merged.items() if value is not None}}


@pytest.mark.parametrize("files", [SMOLVLM, MISTRAL3])
def test_a_manifest_says_it_whole(files: Any, tmp_path: Path) -> None:
    form = form_of(tmp_path, files)
    assert ImageForm.from_json(json.loads(json.dumps(form.as_json()))) == form
    assert form.usual_patches[-1] == form.most_patches
    assert all(count % form.patches_per_row == 0 for count in form.usual_patches)


@pytest.mark.parametrize(
    ("files", "processor"), [(SMOLVLM, Idefics3ImageProcessorPil), (MISTRAL3, PixtralImageProcessorPil)]
)
def test_what_files_omit_is_as_in_transformers(files: Any, processor: Any, tmp_path: Path) -> None:
    kept = {"max_image_size": {"longest_edge": 64}} if files is SMOLVLM else {}
    form = form_of(tmp_path, {**files, "preprocessor_config.json": kept})
    usual = processor()
    assert (list(form.mean), list(form.std)) == (list(usual.image_mean), list(usual.image_std))
    assert (form.rescale, form.resample) == (usual.rescale_factor, int(usual.resample))
    assert form.settings["longest_edge"] == usual.size["longest_edge"]
    assert form.settings.get("splits", True) == getattr(usual, "do_image_splitting", True)


def test_newer_files_have_a_table(tmp_path: Path) -> None:
    """As transformers 5 writes them; what stands beside it is then older."""
    told = {"image_processor": {"size": {"longest_edge": 128}, "max_image_size": {"longest_edge": 64}}}
    form = form_of(tmp_path, {**SMOLVLM, "processor_config.json": told})
    assert form.settings["longest_edge"] == 128


def test_the_placeholder_is_the_tokenizer_s(tmp_path: Path) -> None:
    plain = _changed(SMOLVLM, "config.json", image_token_id=None)
    with pytest.raises(ImageFormError, match="has no token '<image>', which stands for an image: add"):
        form_of(tmp_path / "none", plain)
    assert form_of(tmp_path / "found", {**plain, "tokenizer.json": _TOKENS}).placeholder_id == 7
    with pytest.raises(ImageFormError, match=r"has 10 as the token of images, but tokenizer.json has '\[IMG\]' as 9"):
        form_of(tmp_path / "other", {**MISTRAL3, "tokenizer.json": _TOKENS})


@pytest.mark.parametrize(
    ("files", "why"),
    [
        (
            _changed(SMOLVLM, "config.json", model_type="llava"),
            "is a 'llava' model: images of idefics3, mistral3, qwen2_vl",
        ),
        (_changed(SMOLVLM, "config.json", scale_factor=3), "tiles of 64 pixels have 8 patches on a side"),
        (_changed(SMOLVLM, "config.json", scale_factor="2"), "field 'scale_factor' is '2' where an integer"),
        (_changed(SMOLVLM, "preprocessor_config.json", max_image_size={"longest_edge": 48}), "both must fit"),
        (_changed(SMOLVLM, "preprocessor_config.json", do_resize=False), "does not resize its images, or crops them"),
        (_changed(SMOLVLM, "preprocessor_config.json", resample=9), "has the filter 9: the filters are 0 to 5"),
        (_changed(SMOLVLM, "preprocessor_config.json", image_mean=[1]), "a list of 3 numbers was expected"),
        (_changed(SMOLVLM, "preprocessor_config.json", image_std=[1, 0, 1]), "each must be positive"),
        (_changed(SMOLVLM, "preprocessor_config.json", size={"height": 9}), "has no longest_edge"),
        (_changed(SMOLVLM, "processor_config.json", image_seq_len=64), "does not say that a tile has 16 rows"),
        (_changed(MISTRAL3, "processor_config.json", patch_size=16), "has another patch_size than the model's 14"),
        (_changed(MISTRAL3, "preprocessor_config.json", size={"longest_edge": 1 << 20}), "more than 65536 patches"),
    ],
)
def test_checkpoints_that_are_not_read(files: Any, why: str, tmp_path: Path) -> None:
    with pytest.raises(ImageFormError, match=why):
        form_of(tmp_path, files)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ImageFormError, match=r"config.json does not exist: give the directory of a checkpoint"):
        read_image_form(tmp_path)
    write_checkpoint(tmp_path, SMOLVLM)
    (tmp_path / "preprocessor_config.json").write_text("{")
    with pytest.raises(ImageFormError, match=r"preprocessor_config.json is not valid JSON"):
        read_image_form(tmp_path)


WRONG: list[Any] = [None, True, -1, 1.5, "x" * 300, [], [1, "a"], {}, {"a": []}, 1 << 40, float("inf")]


@pytest.mark.parametrize("files", [SMOLVLM, MISTRAL3])
def test_a_manifest_is_read_strictly(files: Any, tmp_path: Path) -> None:
    """Whatever stands in a field, it is taken as it is, or one sentence names it."""
    told = form_of(tmp_path, files).as_json()
    for name in told:
        for value in WRONG:
            try:
                form = ImageForm.from_json({**told, name: value})
                kind_of(form)
            except ImageFormError:
                continue
            assert form.as_json()[name] == value
        if name != "rope_theta":
            with pytest.raises(ImageFormError, match=name):
                ImageForm.from_json({key: value for key, value in told.items() if key != name})
    with pytest.raises(ImageFormError, match="has the unknown field 'more'"):
        ImageForm.from_json({**told, "more": 1})
    with pytest.raises(ImageFormError, match="images of the kind 'other' are of a newer llmc"):
        kind_of(ImageForm.from_json({**told, "kind": "other"}))
    for name in told["settings"]:
        with pytest.raises(ImageFormError, match="compile the model's images again"):
            kind_of(ImageForm.from_json({**told, "settings": {**told["settings"], name: -1}}))
