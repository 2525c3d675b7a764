"""Models that see images, from a picture to tokens: the prompt's logits are those of transformers."""

from __future__ import annotations

import asyncio
import base64
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llmc.images.kinds.registry import kind_of
from llmc.images.read import read_image_form
from llmc.runtime.async_llm import AsyncLLM
from llmc.runtime.binding.handle import ERROR_NAMES, LlmcError
from llmc.runtime.images.image_error import ImageError, NoImages
from llmc.runtime.images.pixels import tiles_of
from llmc.runtime.images.placing import places_on_axes
from llmc.runtime.llm import LLM
from llmc.runtime.outputs import RequestOutput
from llmc.runtime.params import SamplingParams
from llmc.runtime.request_error import RequestError

from support.image_forms import encoded, picture
from support.seeing_chat import PLACEHOLDERS, Seeing, compile_seeing_chat
from support.tiny_models import reference_model
from support.towers import ON_AXES, PLACEHOLDER, logits_with_rows, rows_of_transformers

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, logprobs=0, ignore_eos=True)
QUESTION = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]}]


@pytest.fixture(scope="module", params=list(PLACEHOLDERS))
def seeing(request: pytest.FixtureRequest, kernel_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Seeing:
    return compile_seeing_chat(tmp_path_factory.mktemp("seeing"), request.param, kernel_cache)


@pytest.fixture(scope="module")
def llm(seeing: Seeing) -> Iterator[LLM]:
    with LLM(seeing.text, images=seeing.tower, num_threads=2) as opened:
        yield opened


def _asked(image: Any, text: str = "What is it?") -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": text}]}]


def _same(one: RequestOutput, other: RequestOutput) -> bool:
    mine, theirs = one.outputs[0], other.outputs[0]
    return (one.prompt_token_ids, mine.token_ids, mine.logprobs) == (
        other.prompt_token_ids, theirs.token_ids, theirs.logprobs,
    )  # fmt: skip


@torch.no_grad()
def _rows_of_transformers(seeing: Seeing, image: Any) -> np.ndarray[Any, Any]:
    """float32 [placeholders, D], of the tiles that are given to it."""
    form = read_image_form(seeing.model)
    tiling = kind_of(form).tiling(*image.size)
    if seeing.family in ON_AXES:
        (tile,) = tiles_of(image, tiling, form)
        return rows_of_transformers(seeing.model, torch.from_numpy(tile))
    tiles = [torch.from_numpy(tile) for tile in tiles_of(image, tiling, form)]
    whole = reference_model(seeing.model).model
    if hasattr(whole, "vision_tower"):
        sizes = torch.tensor([tile.shape[1:] for tile in tiles])
        found = whole.get_image_features(torch.stack(tiles), image_sizes=sizes).pooler_output[0]
    else:
        found = torch.cat(list(whole.get_image_features(torch.stack(tiles)[None]).pooler_output))
    rows: np.ndarray[Any, Any] = found.float().numpy()
    return rows


@pytest.mark.parametrize("size", [(40, 30), (150, 70), (20, 90)])
def test_answers_to_an_image_are_those_of_transformers(seeing: Seeing, llm: LLM, size: tuple[int, int]) -> None:
    image = picture(*size)
    (output,) = llm.chat(_asked(image), GREEDY)
    ids = list(output.prompt_token_ids)
    rows, answer = _rows_of_transformers(seeing, image), output.outputs[0]
    assert ids.count(PLACEHOLDER) == len(rows)
    logits = _logits(seeing, ids + list(answer.token_ids), rows, image.size)[len(ids) - 1 : -1].astype(np.float64)
    assert list(answer.token_ids) == logits.argmax(-1).tolist()
    expected = logits.max(-1) - np.log(np.exp(logits).sum(-1))
    assert answer.logprobs is not None
    np.testing.assert_allclose([one.logprob for one in answer.logprobs], expected, atol=2e-4)


@torch.no_grad()
def _logits(seeing: Seeing, ids: list[int], rows: np.ndarray[Any, Any], size: tuple[int, int]) -> np.ndarray[Any, Any]:
    """size: width and height of the image."""
    if seeing.family in ON_AXES:
        form = read_image_form(seeing.model)
        (tile,) = kind_of(form).tiling(*size).tiles
        return logits_with_rows(seeing.model, ids, rows, ids.index(PLACEHOLDER), *places_on_axes(tile, form))
    whole = reference_model(seeing.model)
    tokens = torch.tensor(ids)
    embedded = whole.get_input_embeddings()(tokens)
    embedded[tokens == PLACEHOLDER] = torch.from_numpy(rows)
    logits: np.ndarray[Any, Any] = whole(inputs_embeds=embedded[None], use_cache=False).logits[0].numpy()
    return logits


def test_all_forms_of_a_prompt_have_the_same_bits(seeing: Seeing, llm: LLM, tmp_path: Path) -> None:
    image = picture(150, 70)
    data = encoded(image)
    (tmp_path / "cat.png").write_bytes(data)
    url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    parts = [
        {"type": "image", "image": image}, {"type": "image", "path": tmp_path / "cat.png"},
        {"type": "image_url", "image_url": {"url": url}}, {"type": "input_image", "image_url": url},
    ]  # fmt: skip
    text = {"type": "text", "text": "What is it?"}
    chats = [[{"role": "user", "content": [part, text]}] for part in parts]
    outputs = llm.chat(chats, GREEDY)
    rendered = llm.tokenizer.apply_chat_template(QUESTION, seeing.placeholder)
    outputs += llm.generate([{"prompt": rendered, "images": [data]}], GREEDY)
    outputs += llm.generate({"messages": chats[0]}, GREEDY)
    assert len(outputs) == 6
    assert all(_same(outputs[0], output) for output in outputs)
    # Of two images equal rows are reused; of another one nothing is.
    (other,) = llm.chat(_asked(picture(150, 70, seed=1)), GREEDY)
    assert other.prompt_token_ids == outputs[0].prompt_token_ids
    assert not _same(other, outputs[0])


def test_several_images_and_turns(seeing: Seeing, llm: LLM) -> None:
    """Alone, together, and with the prefix cache: the same bits."""
    first, second = picture(50, 60, seed=3), picture(60, 50, seed=4)
    turn = _asked(first)
    more = [*turn, {"role": "assistant", "content": [{"type": "text", "text": "A cat."}]}, *_asked(second, "And it?")]
    swapped = [*_asked(second), *more[1:2], *_asked(first, "And it?")]
    alone = [llm.chat(one, GREEDY)[0] for one in (turn, more, swapped)]
    together = llm.chat([turn, more, swapped, more], GREEDY)
    assert all(_same(one, other) for one, other in zip(alone, together[:3], strict=True))
    assert _same(together[3], alone[1])
    assert not _same(alone[1], alone[2])
    assert together[3].usage.cached_tokens > 0
    with LLM(seeing.text, images=seeing.tower, num_threads=1, prefix_cache=False) as other:
        assert all(_same(other.chat(one, GREEDY)[0], here) for one, here in zip((turn, more), alone, strict=False))


@pytest.mark.parametrize("count", [1, 2])
def test_a_text_without_placeholders_has_its_images_in_front(seeing: Seeing, llm: LLM, count: int) -> None:
    images = [encoded(picture(50, 60, seed=seed)) for seed in range(count)]
    front = kind_of(read_image_form(seeing.model)).in_front()
    plain, placed = (
        llm.generate({"prompt": text, "images": images}, GREEDY)[0] for text in ("a cat", count * front + "a cat")
    )
    assert _same(plain, placed)


def test_images_side_by_side_are_seen_in_order(seeing: Seeing, llm: LLM) -> None:
    images = [encoded(picture(50, 60, seed=seed)) for seed in range(2)]
    one, other = (
        llm.generate({"prompt": f"{2 * seeing.placeholder}a cat", "images": given}, GREEDY)[0]
        for given in (images, images[::-1])
    )
    assert one.prompt_token_ids == other.prompt_token_ids
    assert not _same(one, other)


@pytest.mark.parametrize("name", ["placeholder", "messages", "plain", "render"])
def test_variables_of_templates_may_have_any_name(llm: LLM, name: str) -> None:
    image = picture(50, 60)
    (expected,) = llm.chat(_asked(image), GREEDY)
    assert _same(llm.chat(_asked(image), GREEDY, template_variables={name: "mine"})[0], expected)


def test_many_tasks_of_one_loop(seeing: Seeing, llm: LLM) -> None:
    image = picture(150, 70)
    (expected,) = llm.chat(_asked(image), GREEDY)

    async def ask() -> list[RequestOutput]:
        async with AsyncLLM(seeing.text, images=seeing.tower, num_threads=1) as opened:
            answers = await asyncio.gather(*(opened.generate([_asked(image)], GREEDY) for _ in range(3)))
            return [one for answer in answers for one in answer]

    assert all(_same(one, expected) for one in asyncio.run(ask()))


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (LlmcError(ERROR_NAMES.index("not_finite"), "A row of the image is NaN."), "not_finite"),
        (LlmcError(ERROR_NAMES.index("device_failed"), "The device failed."), "device_failed"),
        (MemoryError(), "out_of_memory"),
    ],
)
def test_an_image_that_fails_ends_no_other_request(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, error: Exception, code: str
) -> None:
    prompts = [_asked(picture(30, 20)), _asked(picture(31, 20)), _asked(picture(32, 20))]
    expected = llm.chat(prompts, GREEDY)
    assert llm.tower is not None
    rows = llm.tower.rows

    def failing(seen: Any) -> Any:
        if seen.picture.size == (31, 20):
            raise error
        return rows(seen)

    monkeypatch.setattr(llm.tower, "rows", failing)
    first, failed, last = llm.chat(prompts, GREEDY)
    assert failed.error is not None
    assert failed.error.code == code
    assert failed.error.message
    assert _same(first, expected[0])
    assert _same(last, expected[2])


def test_a_lost_device_ends_all_requests(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(seen: Any) -> Any:
        raise LlmcError(ERROR_NAMES.index("device_lost"), "The device is lost.")

    assert llm.tower is not None
    monkeypatch.setattr(llm.tower, "rows", lost)
    with pytest.raises(LlmcError, match="The device is lost"):
        llm.chat([_asked(picture(30, 20))], GREEDY)
    # The text model's device is another one.
    (output,) = llm.generate("a cat", GREEDY)
    assert output.error is None


def test_an_async_llm_closes_while_images_are_encoded(seeing: Seeing, monkeypatch: pytest.MonkeyPatch) -> None:
    """More requests than there are threads."""

    async def check() -> None:
        begun, go_on = threading.Event(), threading.Event()
        opened = AsyncLLM(seeing.text, images=seeing.tower, num_threads=1)
        assert opened.tower is not None
        encode = opened.tower._encoder.encode

        def held(*arguments: Any) -> Any:
            begun.set()
            assert go_on.wait(60)
            return encode(*arguments)

        monkeypatch.setattr(opened.tower._encoder, "encode", held)
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(3))
        asked = [asyncio.create_task(opened.generate([_asked(picture(20, 20 + i))], GREEDY)) for i in range(3)]
        while not begun.is_set():  # no thread is left to wait for it
            await asyncio.sleep(0.01)
        closing = asyncio.create_task(opened.close())
        while not opened.tower._stopping.is_set():
            await asyncio.sleep(0.01)
        go_on.set()
        await closing
        for task in asked:
            with pytest.raises(RequestError, match="this AsyncLLM is closed and takes no more requests"):
                await task

    asyncio.run(check())


def test_few_requests_with_images_are_in_the_engine(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their rows would fill the memory. Of requests without images, many wait there."""
    monkeypatch.setattr("llmc.runtime.engine_loop._MOST_ROW_BYTES", 1)
    submit, counts = llm.engine.submit, list[int]()

    def counted(*arguments: Any, **options: Any) -> Any:
        found = submit(*arguments, **options)
        counts.append(llm.engine.stats.num_running + llm.engine.stats.num_waiting)
        return found

    monkeypatch.setattr(llm.engine, "submit", counted)
    outputs = llm.chat(12 * [_asked(picture(20, 20))], GREEDY)
    assert len({output.outputs[0].token_ids for output in outputs}) == 1
    assert max(counts) == llm.max_num_seqs
    counts.clear()
    llm.generate(12 * ["a cat"], GREEDY)
    assert max(counts) == 12


def test_what_is_refused(seeing: Seeing, llm: LLM) -> None:
    image, mark = picture(20, 20), seeing.placeholder
    with pytest.raises(ImageError, match=r"messages.0.content.1.text has the text .*, which stands for an image"):
        llm.chat(_asked(image, f"What is {mark}?"))
    with pytest.raises(ImageError, match=r"the prompt has 2 times .* and 1 images"):
        llm.generate({"prompt": f"{mark} {mark}", "images": [image]})
    with pytest.raises(ImageError, match="an image is of no known format"):
        llm.chat(_asked(b"no image"))
    with pytest.raises(ImageError, match="is not fetched"):
        llm.chat(_asked("https://example.com/cat.png"))
    with pytest.raises(ImageError, match=r"has no image: give it as a data: URL"):
        llm.chat(QUESTION)
    with pytest.raises(ImageError, match=r"the request has 17 images: give at most 16"):
        llm.generate({"prompt": mark * 17, "images": 17 * [image]})
    with pytest.raises(RequestError, match="prompt 0 has 'images' beside messages: images go with a text"):
        llm.generate({"messages": QUESTION, "images": [image]})


def test_nothing_sees_without_a_tower(seeing: Seeing) -> None:
    with LLM(seeing.text, num_threads=1) as blind:
        (output,) = blind.generate("a cat", GREEDY)
        assert output.error is None
        with pytest.raises(NoImages, match="nothing here sees them: compile the model with --images"):
            blind.chat(_asked(picture(20, 20)))
    with pytest.raises(NoImages, match="encodes no images: give the artifact that `llmc compile --images` made"):
        LLM(seeing.text, images=seeing.text)
