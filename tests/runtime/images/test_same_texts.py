"""The text that stands for an image is that of transformers' processors, and so are its token ids."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.pixtral import image_processing_pil_pixtral as pixtral
from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

from llmc.images.kinds.registry import kind_of
from llmc.runtime.images.image_error import ImageError
from llmc.runtime.images.image_prompt import text_prompt
from llmc.runtime.images.placing import expanded, placed_rows, runs_of
from llmc.runtime.images.tower import Tower

from support.image_forms import MISTRAL3, QWEN3_5, SMOLVLM, SumEncoder, form_of, picture, sizes

_SPECIAL = ("<image>", "<fake_token_around_image>", "<global-img>", "[IMG]", "[IMG_BREAK]", "[IMG_END]")
_QWENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>")


def _tokenizer() -> Tokenizer:
    """Bytes, and the special tokens; the id of each is at least 256."""
    alphabet = sorted(ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({text: number for number, text in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    names = (*_SPECIAL, *_QWENS, *(f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4)))
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    return tokenizer


TOKENIZER = _tokenizer()


def _pixtral_processor(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The class, whose module imports one that needs torchvision and serves another purpose."""
    monkeypatch.setitem(sys.modules, f"{pixtral.__package__}.image_processing_pixtral", pixtral)
    return importlib.import_module(f"{pixtral.__package__}.processing_pixtral").PixtralProcessor


def _files(files: Any, field: str, token: str) -> Any:
    return {**files, "config.json": {**files["config.json"], field: TOKENIZER.token_to_id(token)}}


QWEN = _files(QWEN3_5, "image_token_id", "<|image_pad|>")
IDEFICS3 = _files(SMOLVLM, "image_token_id", "<image>")
PIXTRAL = _files(MISTRAL3, "image_token_index", "[IMG]")


@pytest.mark.parametrize("splits", [True, False])
def test_texts_of_tiles(splits: bool, tmp_path: Path) -> None:
    told = {**IDEFICS3["preprocessor_config.json"], "do_image_splitting": splits}
    kind = kind_of(form_of(tmp_path, {**IDEFICS3, "preprocessor_config.json": told}))
    images = Idefics3ImageProcessorPil(**told)
    processor: Any = SimpleNamespace(
        fake_image_token="<fake_token_around_image>", global_image_tag="<global-img>", image_token="<image>",
        image_seq_len=16,
    )  # fmt: skip
    for width, height in sizes(40):
        found = images(picture(width, height), return_row_col_info=True, return_tensors="np")
        text = kind.text(kind.tiling(width, height))
        assert text == Idefics3Processor.replace_image_token(processor, found, 0)
        shape = found["rows"][0][0], found["cols"][0][0]
        assert text == get_image_prompt_string(*shape, 16, "<fake_token_around_image>", "<image>", "<global-img>")


def test_texts_of_whole_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace = _pixtral_processor(monkeypatch).replace_image_token
    kind = kind_of(form_of(tmp_path, PIXTRAL))
    images = pixtral.PixtralImageProcessorPil(size={"longest_edge": 336}, patch_size={"height": 28, "width": 28})
    processor: Any = SimpleNamespace(
        patch_size=14, spatial_merge_size=2, image_token="[IMG]", image_break_token="[IMG_BREAK]",
        image_end_token="[IMG_END]",
    )  # fmt: skip
    for width, height in sizes(40, most=300):
        found = images(picture(width, height), return_tensors="np")
        assert kind.text(kind.tiling(width, height)) == replace(processor, found, 0)


@pytest.mark.parametrize("files", [IDEFICS3, PIXTRAL])
def test_rows_are_at_the_placeholders(files: Any, tmp_path: Path) -> None:
    """Each image's rows are in its placeholders, in order, with a name of their own."""
    form = form_of(tmp_path, files)
    tower = Tower(form, SumEncoder(form, 3), "tower")
    seen = [tower.look(picture(width, height, seed=width)) for width, height in sizes(5, most=300, seed=3)]
    text = expanded("a" + "".join(f"{form.placeholder} and " for _ in seen) + "b", seen, form)
    ids = TOKENIZER.encode(text).ids
    rows = [tower.rows(one) for one in seen]
    placed = placed_rows(ids, seen, rows, form)
    covered = [at for one in placed for at in range(one.first, one.first + len(one.rows))]
    assert covered == [at for at, token in enumerate(ids) if token == form.placeholder_id]
    assert sum(len(one.rows) for one in placed) == sum(map(len, rows)) == sum(one.tiling.num_rows for one in seen)
    told = [row for one in placed for row in one.rows.tolist()]
    assert told == [row for one in rows for row in one.tolist()]
    assert len({one.identity for one in placed}) == len(placed)
    assert all(len(one.identity) == 32 for one in placed)


@pytest.mark.parametrize("files", [IDEFICS3, PIXTRAL, QWEN])
@pytest.mark.parametrize("between", [None, "", " and "])
def test_each_image_has_its_own_rows(files: Any, between: str | None, tmp_path: Path) -> None:
    """In front of a text, side by side, or apart: a run of placeholders that nothing parts may be of two images."""
    form = form_of(tmp_path, files)
    tower = Tower(form, SumEncoder(form, 3), "tower")
    images = [picture(70, 50, seed=1), picture(90, 120, seed=2)]
    text = "a cat" if between is None else between.join(2 * [form.placeholder])
    prompt = text_prompt(tower, text, images, lambda image, _: image)
    ids = TOKENIZER.encode(prompt.text).ids
    prompt.check(ids)
    placed = prompt.placed(ids)
    assert placed is not None
    covered = [at for one in placed for at in range(one.first, one.first + len(one.rows))]
    assert covered == [at for at, token in enumerate(ids) if token == form.placeholder_id]
    expected = np.concatenate([tower.rows(one) for one in prompt.pictures])
    np.testing.assert_array_equal(np.concatenate([one.rows for one in placed]), expected)
    around = [ids[at] for at in (placed[0].first - 1, placed[-1].first + len(placed[-1].rows)) if 0 <= at < len(ids)]
    if files is QWEN and between is None:
        assert around == [TOKENIZER.token_to_id(name) for name in _QWENS[:2]]


def test_a_gap_in_an_image_is_found(tmp_path: Path) -> None:
    form = form_of(tmp_path, QWEN)
    tower = Tower(form, SumEncoder(form, 3), "tower")
    seen = [tower.look(picture(70, 50, seed=seed)) for seed in range(2)]
    rows, mark = seen[0].tiling.num_rows, form.placeholder_id
    assert runs_of([1, *2 * rows * [mark]], seen, form) == [(1, rows), (1 + rows, rows)]
    for ids in ([*(rows - 1) * [mark], 1, *(rows + 1) * [mark]], 2 * rows * [mark, 1], (2 * rows + 1) * [mark]):
        with pytest.raises(ImageError, match=f"has {ids.count(mark)} placeholders of images where {2 * rows} are"):
            runs_of(ids, seen, form)


def test_counts_must_fit(tmp_path: Path) -> None:
    form = form_of(tmp_path, IDEFICS3)
    tower = Tower(form, SumEncoder(form, 3), "tower")
    seen = [tower.look(picture(20, 20))]
    with pytest.raises(ImageError, match="has 2 times <image> and 1 images"):
        expanded("<image> and <image>", seen, form)
    with pytest.raises(ImageError, match="the tokenizer must have <image> as one token"):
        runs_of([1, 2, 3], seen, form)
